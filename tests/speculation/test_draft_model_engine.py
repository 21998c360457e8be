"""Engines whose drafts a model computes: the tokens of plain decoding, whatever the draft model is worth."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import GGUFOptions, TinyLlama, gguf_name, make_llama, save_llama, write_gguf

from sol import LLM, SamplingParams
from sol.assemble import plan
from sol.config import EngineConfig
from sol.errors import ConfigError, SolError
from sol.llm import PromptOutput

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from prune_layers import chosen, prune_layers

SHAPE: dict[str, Any] = {"num_hidden_layers": 4, "initializer_range": 0.08}
OPTIONS: dict[str, Any] = {"max_model_len": 128, "kv_cache_memory_bytes": 8 << 20, "skip_tokenizer_init": True}
PROMPTS = [{"prompt_token_ids": [5 + 3 * i % 300 for i in range(n)]} for n in (3, 21, 40)]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.7, top_p=0.95, seed=3, n=2, max_tokens=24, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0.9, seed=4, repetition_penalty=1.2, max_tokens=24, min_tokens=5),
]


@pytest.fixture(scope="module")
def target(tiny_llama: Callable[..., TinyLlama]) -> str:
    return str(tiny_llama(**SHAPE).directory)


@pytest.fixture(scope="module")
def drafts(
    target: str, tiny_llama: Callable[..., TinyLlama], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("drafts")
    return {
        "itself": target,
        "pruned": str(prune_layers(target, folder / "pruned", chosen("first:3", 4))),
        "random": str(save_llama(folder / "random", seed=9, hidden_size=32, num_hidden_layers=1).directory),
    }


@pytest.fixture(scope="module", params=["auto", "torch"])
def kernels(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def expected(target: str, kernels: str) -> list[list[PromptOutput]]:
    llm = LLM(target, cpu_kernels=kernels, speculation="off", **OPTIONS)
    return [generated(llm, params) for params in PARAMS]


def generated(llm: LLM, params: SamplingParams) -> list[PromptOutput]:
    return llm.generate(PROMPTS, dataclasses.replace(params, detokenize=False), use_tqdm=False)


def speculating(target: str, kernels: str = "auto", *, options: Any = None, **config: Any) -> LLM:
    config = {"controller": "fixed", "num_speculative_tokens": 4} | config
    return LLM(target, cpu_kernels=kernels, speculative_config=config, **(OPTIONS | (options or {})))


def same_tokens(found: list[PromptOutput], expected: list[PromptOutput]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all([o.token_ids for o in a.outputs] == [o.token_ids for o in b.outputs] for a, b in pairs)


def acceptance(outputs: list[PromptOutput], drafter: str) -> float:
    counts = [o.speculation.drafters[drafter] for r in outputs for o in r.outputs if o.speculation is not None]
    drafted = sum(count.num_draft_tokens for count in counts)
    assert drafted > 0
    return sum(count.num_accepted_tokens for count in counts) / drafted


@pytest.mark.parametrize("draft", ["itself", "pruned", "random"])
def test_a_draft_model_changes_nothing_but_the_steps(
    target: str, drafts: dict[str, str], kernels: str, draft: str, expected: list[list[PromptOutput]]
) -> None:
    llm = speculating(target, kernels, method="draft_model", model=drafts[draft])
    rates = []
    for params, answers in zip(PARAMS, expected, strict=True):
        found = generated(llm, params)
        assert same_tokens(found, answers)
        rates.append(acceptance(found, "draft_model"))
    if draft == "itself":
        assert rates == [1.0] * 3 if kernels == "auto" else min(rates) > 0.9  # torch rounds by the batch
    elif draft == "pruned":
        assert 0.05 < rates[0] < 1.0
    else:
        assert rates[0] < 0.2


def test_early_exit_changes_nothing_but_the_steps(
    target: str, kernels: str, expected: list[list[PromptOutput]]
) -> None:
    llm = speculating(target, kernels, method="early_exit", num_exit_layers=3)
    for params, answers in zip(PARAMS, expected, strict=True):
        found = generated(llm, params)
        assert same_tokens(found, answers)
        assert 0.05 < acceptance(found, "early_exit") < 1.0


@pytest.mark.parametrize("method", ["rejection", "block"])
@pytest.mark.parametrize("sample", ["independent", "greedy"])
def test_other_ways_to_verify(
    target: str, drafts: dict[str, str], kernels: str, method: str, sample: str, expected: list[list[PromptOutput]]
) -> None:
    llm = speculating(target, kernels, method="draft_model", model=drafts["itself"], verify_method=method,
                      draft_sample_method=sample)  # fmt: skip
    assert same_tokens(generated(llm, PARAMS[0]), expected[0])
    found = generated(llm, PARAMS[1])
    assert all(len(output.token_ids) == 24 for result in found for output in result.outputs)
    if sample == "independent":
        assert acceptance(found, "draft_model") > 0.9, "the laws are the same"


def test_preempted_requests_and_prefix_hits(
    target: str, drafts: dict[str, str], kernels: str, expected: list[list[PromptOutput]]
) -> None:
    """A KV cache that holds one request of full length: the others are preempted, and find their prompts again."""
    options = {"kv_cache_memory_bytes": 240 << 10, "max_num_batched_tokens": 48, "max_num_seqs": 8}
    method = "draft_model+early_exit+ngram"
    llm = speculating(target, kernels, method=method, model=drafts["pruned"], num_exit_layers=3, options=options)
    for _ in range(2):
        for params, answers in zip(PARAMS, expected, strict=True):
            assert same_tokens(generated(llm, params), answers)


def test_formats_may_differ(target: str, drafts: dict[str, str], tmp_path: Path) -> None:
    """A quantised GGUF file, asked for as such and without a tokenizer that Sol knows, and float weights that draft."""
    model = make_llama(**SHAPE)
    names = [gguf_name(name) for name, value in model.named_parameters() if ".mlp." in name and value.dim() == 2]
    write_gguf(tmp_path / "model.gguf", model, GGUFOptions(quantization=dict.fromkeys(names, "Q8_0")))
    quantised = str(tmp_path / "model.gguf")
    plain = generated(LLM(quantised, speculation="off", **OPTIONS), PARAMS[0])
    llm = speculating(quantised, method="draft_model", model=drafts["itself"], options={"load_format": "gguf"})
    found = generated(llm, PARAMS[0])
    assert same_tokens(found, plain)
    assert acceptance(found, "draft_model") > 0.7


def test_requests_outgrow_the_draft_models_context(
    target: str, tmp_path: Path, kernels: str, expected: list[list[PromptOutput]]
) -> None:
    short = prune_layers(target, tmp_path / "short", [0, 1, 2])
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32}))
    llm = speculating(target, kernels, method="draft_model", model=str(short))
    found = generated(llm, PARAMS[0])
    assert same_tokens(found, expected[0])
    drafted = [r.outputs[0].speculation.drafters.get("draft_model") for r in found]  # type: ignore[union-attr]
    assert [counts is not None for counts in drafted] == [True, True, False]


def test_what_the_drafters_take_is_in_the_plan(target: str, drafts: dict[str, str]) -> None:
    def memory(**speculative: Any) -> Any:
        options = {key: value for key, value in OPTIONS.items() if key != "kv_cache_memory_bytes"}
        config: Any = {"speculative_config": speculative} if speculative else {"speculation": "off"}
        return plan(EngineConfig(model=target, **options, **config), progress=False).memory

    off = memory()
    model = memory(method="draft_model", model=drafts["itself"])
    assert model.weights == 2 * off.weights
    assert model.kv_per_token == 2 * off.kv_per_token
    assert model.workspace > off.workspace
    early = memory(method="early_exit")
    assert (early.weights, early.kv_per_token) == (off.weights, off.kv_per_token)
    assert early.workspace > off.workspace
    independent = memory(method="early_exit", draft_sample_method="independent", verify_method="rejection")
    assert independent.workspace >= early.workspace + 128 * 16 * 320 * 4


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"method": "early_exit", "num_exit_layers": 4}, "num_exit_layers is 4, but the model has 4 layers"),
        ({"method": "draft_model", "model": "other"}, "the draft model has 333 tokens, the target 320"),
        ({"method": "draft_model", "model": "nowhere"}, "nowhere"),
    ],
)
def test_what_cannot_draft_is_said_at_start_up(
    target: str, tiny_llama: Callable[..., TinyLlama], config: dict[str, Any], message: str
) -> None:
    if config.get("model") == "other":
        config = config | {"model": str(tiny_llama(vocab_size=333).directory)}
    if config.get("model") == "nowhere":
        config = config | {"model": str(Path(target) / "nowhere")}
    with pytest.raises(SolError, match=message):
        speculating(target, **config)


def test_a_draft_model_whose_logits_are_not_finite_is_said(target: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    broken = prune_layers(target, tmp_path / "broken", [0])
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"][:] = torch.nan
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="draft_model: the logits are not finite"):
        speculating(target, method="draft_model", model=str(broken))
