"""The offline API, and that a request's tokens depend on nothing but the request."""

from __future__ import annotations

import itertools
import json
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import TinyLlama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM

import sol
from sol import LLM, SamplingParams, SpeculationParams
from sol.assemble import build_core
from sol.config import EngineConfig
from sol.engine.core import EngineCore
from sol.engine.types import DraftCounts, EngineRequest, SchedulerOutput, StepOutput
from sol.errors import ConfigError, ContextLengthError, EngineDeadError, RequestError, SolError
from sol.llm import CompletionOutput
from sol.ops import RaggedBatch

VOCAB = 320
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)


@pytest.fixture(scope="module")
def model_path(tiny_llama: Callable[..., TinyLlama], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny random Llama with a word-level tokenizer: token i is the word w<i>."""
    import shutil

    folder = tmp_path_factory.mktemp("with_tokenizer") / "model"
    shutil.copytree(tiny_llama().directory, folder)
    words = {f"w{i}": i for i in range(VOCAB - 2)} | {"<bot>": VOCAB - 2, "<unk>": VOCAB - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "w2"}))
    return str(folder)


@pytest.fixture(scope="module")
def llm(model_path: str) -> LLM:
    return LLM(model=model_path, max_model_len=256, kv_cache_memory_bytes=16 << 20)


def test_text_prompts(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    one = llm.generate("w5 w6 w7", params, use_tqdm=False)
    several = llm.generate(["w5 w6 w7", {"prompt": "w9"}, {"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)
    assert [r.prompt for r in several] == ["w5 w6 w7", "w9", None]
    assert one[0].outputs[0].token_ids == several[0].outputs[0].token_ids == several[2].outputs[0].token_ids
    output = one[0].outputs[0]
    assert output.text.split() == [f"w{t}" for t in output.token_ids]
    assert output.finish_reason == "length"
    assert one[0].prompt_token_ids == llm.get_tokenizer().encode("w5 w6 w7") == [5, 6, 7]
    assert one[0].finished
    assert several[0].num_cached_tokens == 0  # three tokens fill no block


def test_parameters_of_each_prompt_and_choices(llm: LLM) -> None:
    results = llm.generate(
        ["w5", "w5"],
        [
            SamplingParams(n=3, seed=1, max_tokens=8, ignore_eos=True),
            SamplingParams(seed=1, max_tokens=8, ignore_eos=True),
        ],
        use_tqdm=False,
    )
    choices = [output.token_ids for output in results[0].outputs]
    assert [output.index for output in results[0].outputs] == [0, 1, 2]
    assert len({tuple(c) for c in choices}) == 3
    assert results[1].outputs[0].token_ids == choices[0]


def test_seeds_come_from_the_engines_seed(model_path: str) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True)

    def tokens(seed: int) -> list[list[int]]:
        llm = LLM(model=model_path, max_model_len=64, kv_cache_memory_bytes=4 << 20, seed=seed)
        return [llm.generate("w5", params, use_tqdm=False)[0].outputs[0].token_ids for _ in range(2)]

    first = tokens(0)
    assert first == tokens(0)
    assert first[0] != first[1]
    assert tokens(1) != first


def test_logprobs_of_a_prompt(llm: LLM, model_path: str) -> None:
    text = " ".join(f"w{5 + 7 * i % 80}" for i in range(40))
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=1, ignore_eos=True, n=2)
    results = llm.generate([text, text], params)
    entries = results[0].prompt_logprobs
    assert entries is not None
    # In the second run of the same prompt, too, whose KV cache was there by then.
    assert results[1].prompt_logprobs == entries
    assert results[1].num_cached_tokens == 0
    token_ids = results[0].prompt_token_ids
    assert entries[0] is None
    with torch.inference_mode():
        logits = LlamaForCausalLM.from_pretrained(model_path)(torch.tensor([token_ids])).logits[0]
    wanted = logits.log_softmax(-1)
    for place, (token_id, entry) in enumerate(zip(token_ids[1:], entries[1:], strict=True)):
        assert entry is not None
        assert next(iter(entry)) == token_id
        assert entry[token_id].logprob == pytest.approx(wanted[place, token_id].item(), abs=1e-4)
        assert entry[token_id].rank == int((wanted[place] > wanted[place, token_id]).sum()) + 1
        assert int(wanted[place].argmax()) in entry


def test_logprobs(llm: LLM) -> None:
    output = llm.generate("w5 w9", SamplingParams(temperature=0.0, max_tokens=3, logprobs=2, ignore_eos=True))[
        0
    ].outputs[0]
    assert output.logprobs is not None
    assert [next(iter(entry)) for entry in output.logprobs] == output.token_ids
    assert all(len(entry) == 2 for entry in output.logprobs)
    first = output.logprobs[0][output.token_ids[0]]
    assert first.rank == 1
    assert first.decoded_token == f"w{output.token_ids[0]}"
    assert output.cumulative_logprob == pytest.approx(
        sum(entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs, strict=True))
    )


def test_stops(llm: LLM) -> None:
    def generate(**options: Any) -> CompletionOutput:
        params = SamplingParams(seed=4, max_tokens=6, ignore_eos=True, **options)
        return llm.generate("w5", params, use_tqdm=False)[0].outputs[0]

    free = generate()
    third = free.token_ids[2]
    assert third not in free.token_ids[:2]
    by_token = generate(stop_token_ids=[third])
    assert by_token.token_ids == free.token_ids[:3]
    assert (by_token.finish_reason, by_token.stop_reason) == ("stop", third)
    by_text = generate(stop=f"w{third}")
    assert (by_text.finish_reason, by_text.stop_reason) == ("stop", f"w{third}")
    assert by_text.token_ids == free.token_ids[:3]
    assert f"w{third}" not in by_text.text


def test_the_models_end_tokens_count_beside_the_tokenizers(llm: LLM, model_path: str, tmp_path: Path) -> None:
    import shutil

    params = SamplingParams(seed=4, max_tokens=6)
    free = llm.generate("w5", params, use_tqdm=False)[0].outputs[0]
    assert free.finish_reason == "length"
    folder = tmp_path / "model"
    shutil.copytree(model_path, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, free.token_ids[2]]}))
    ended = LLM(model=str(folder), max_model_len=64, kv_cache_memory_bytes=4 << 20).generate(
        "w5", params, use_tqdm=False
    )
    output = ended[0].outputs[0]
    assert output.token_ids == free.token_ids[:3]
    assert (output.finish_reason, output.stop_reason) == ("stop", None)


def test_chat(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=2)
    conversation = [{"role": "user", "content": [{"type": "text", "text": "w7"}]}]
    single = llm.chat(conversation, params, use_tqdm=False)
    assert single[0].prompt == "<user> w7 <bot>"
    assert single[0].prompt_token_ids[-1] == VOCAB - 2
    both = llm.chat([conversation, conversation], params, use_tqdm=False)
    assert [r.outputs[0].token_ids for r in both] == [single[0].outputs[0].token_ids] * 2


def test_progress_is_shown_on_stderr_unless_it_is_not_wanted(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    params = SamplingParams(max_tokens=1)
    llm.generate(["w1", "w2"], params)
    assert "Generating: 2 of 2" in capsys.readouterr().err
    llm.generate(["w1", "w2"], params, use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_wrong_calls_say_what_is_wrong(llm: LLM, model_path: str) -> None:
    cases: list[tuple[Any, Any, str]] = [
        ([[1, 2]], None, "a prompt must be a text"),
        (5, None, "prompts must be"),
        ({"prompt_token_ids": []}, None, "at least one token"),
        ({"prompt_token_ids": [1.5]}, None, r"a list of integers, not \[1.5\]"),
        ({"prompt_token_ids": None}, None, "a list of integers, not None"),
        ({"prompt": "w1", "multi_modal_data": {}}, None, "not multi_modal_data"),
        ("w1", {"max_tokens": 3}, "sampling_params must be a SamplingParams"),
        ("w1", [{"max_tokens": 3}], "sampling_params must be a SamplingParams"),
        ({"prompt_token_ids": [VOCAB]}, None, "outside of the vocabulary"),
        ({"prompt_token_ids": [1] * 256}, None, "256 tokens, but prompt and output together may have 256"),
        (["w1", "w2"], [SamplingParams()], "2 prompts but 1 sampling_params"),
        ("w1", SamplingParams(logit_bias={VOCAB: 1.0}), "logit_bias: token id 320"),
    ]
    for prompts, params, message in cases:
        with pytest.raises(RequestError, match=message):
            llm.generate(prompts, params, use_tqdm=False)
    for options, message in (
        ({"quantization": "fp8"}, "quantization must be one of awq, gptq"),
        (
            {"speculation": "off", "speculative_config": {"method": "ngram"}},
            "speculation is off, but speculative_config",
        ),
        ({"speculative_config": {"method": "ngram", "k": 4}}, "speculative_config has no key 'k'"),
        ({"speculation": "ngram"}, "speculation must be one of auto, off, not 'ngram'"),
        ({"tensor_parallel_size": 2}, "no option tensor_parallel_size"),
        ({"max_model_len": 513}, "made for at most 512"),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, "at least max_num_seqs"),
    ):
        with pytest.raises(ConfigError, match=message):
            LLM(model=model_path, **options)  # type: ignore[arg-type]


def test_token_ids_of_any_integer_type(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3)
    plain = llm.generate({"prompt_token_ids": [5, 6]}, params, use_tqdm=False)[0]
    for ids in (np.array([5, 6], dtype=np.int32), torch.tensor([5, 6]), (5, 6)):
        result = llm.generate({"prompt_token_ids": ids, "prompt": "shown"}, params, use_tqdm=False)[0]
        assert result.outputs == plain.outputs
        assert result.prompt_token_ids == [5, 6]
        assert {type(token) for token in result.prompt_token_ids} == {int}
        assert result.prompt == "shown"
    with pytest.raises(ContextLengthError):
        llm.generate({"prompt_token_ids": [5] * 256}, use_tqdm=False)


def break_step(llm: LLM, monkeypatch: pytest.MonkeyPatch, number: int, action: Callable[[], Any]) -> EngineCore:
    """The `number`-th step from now begins with `action`."""
    core: EngineCore = llm._engine._client._core
    execute, steps = core._runner.execute, itertools.count(1)

    def broken(plan: SchedulerOutput) -> StepOutput:
        if next(steps) == number:
            action()
        return execute(plan)

    monkeypatch.setattr(core._runner, "execute", broken)
    return core


def test_ctrl_c_ends_the_call_and_not_the_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    expected = llm.generate("w5 w6", params, use_tqdm=False)[0].outputs
    core = break_step(llm, monkeypatch, 3, lambda: signal.raise_signal(signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are born deaf to it
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["w5 w6"] * 3, params, use_tqdm=False)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert not core.has_work
    assert llm.generate("w5 w6", params, use_tqdm=False)[0].outputs == expected


def test_a_handler_of_the_callers_is_left_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, _frame: noted.append(number))
    try:
        break_step(llm, monkeypatch, 2, lambda: signal.raise_signal(signal.SIGINT))
        result = llm.generate("w5", SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert noted == [signal.SIGINT]
    assert len(result[0].outputs[0].token_ids) == 4


def test_in_another_thread(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4)
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(llm.generate, "w5", params, use_tqdm=False).result()
    assert result[0].outputs == llm.generate("w5", params, use_tqdm=False)[0].outputs


def test_an_engine_that_fails_says_so_then_and_later(model_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(model=model_path, max_model_len=64, kv_cache_memory_bytes=4 << 20)

    def fail() -> None:
        raise RuntimeError("no memory")

    break_step(llm, monkeypatch, 2, fail)
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="RuntimeError: no memory"):
            llm.generate(["w5", "w6"], use_tqdm=False)


def test_logits_that_are_not_finite_end_the_call_and_not_the_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    core: EngineCore = llm._engine._client._core
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    expected = llm.generate("w5", params, use_tqdm=False)[0].outputs
    [poisoned] = llm.get_tokenizer().encode("w300")[-1:]
    forward = core._runner._executor.forward

    def fail(batch: RaggedBatch) -> torch.Tensor:
        logits = forward(batch)
        logits[batch.token_ids[batch.logits_rows] == poisoned] = float("nan")
        return logits

    with monkeypatch.context() as patch:
        patch.setattr(core._runner, "_executor", SimpleNamespace(forward=fail))
        with pytest.raises(SolError, match="not finite") as caught:
            llm.generate(["w5", "w300"], params, use_tqdm=False)
    assert caught.value.status == 500
    assert llm.generate("w5", params, use_tqdm=False)[0].outputs == expected
    core.check_integrity()


def test_without_a_tokenizer(model_path: str) -> None:
    llm = LLM(model=model_path, skip_tokenizer_init=True, load_format="dummy", max_model_len=64, max_num_seqs=4)
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=4, detokenize=False, logprobs=1)
    output = llm.generate([{"prompt_token_ids": [1, 2, 3]}], params, use_tqdm=False)[0].outputs[0]
    assert len(output.token_ids) == 4
    assert output.text == ""
    assert output.logprobs is not None
    assert all(entry.decoded_token is None for entry in output.logprobs[0].values())
    with pytest.raises(ConfigError, match="skip_tokenizer_init"):
        llm.generate("w1", params)
    with pytest.raises(ConfigError, match="detokenize=False"):
        llm.generate([{"prompt_token_ids": [1]}], SamplingParams())


def test_engine_matrix_runs_on_sol(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    """The script that drives vLLM drives Sol, unchanged but for sizes: a small shape, few cases."""
    import runpy
    import sys

    script = Path(__file__).parents[1] / "benchmarks" / "engine_matrix.py"
    config = json.loads((script.parent / "llama-3-8b" / "config.json").read_text())
    config |= {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config |= {"num_key_value_heads": 1, "head_dim": 16}
    (tmp_path / "llama-3-8b").mkdir()
    (tmp_path / "llama-3-8b" / "config.json").write_text(json.dumps(config))
    copy = tmp_path / "engine_matrix.py"
    source = script.read_text()
    smaller = {
        "BATCHES = {128: (1, 2, 4, 8, 16, 32, 64, 128, 256), 2048: (1, 8, 32)}": "BATCHES = {128: (1, 2)}",
        "(2048, 8000)": "(200,)",
        "512 * 256 / run(512, 512, 256)": "4 * 8 / run(4, 16, 8)",
        "gpu_memory_utilization=0.9": "gpu_memory_utilization=0.2",
    }
    for before, after in smaller.items():
        assert before in source
        source = source.replace(before, after)
    copy.write_text(source)
    monkeypatch.setattr(sys, "argv", [str(copy), "--engine", "sol"])
    runpy.run_path(str(copy), run_name="__main__")
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert rows["engine"] == "sol"
    assert rows["version"] == sol.__version__
    assert rows["itl_ms[in=128,batch=2]"] > 0


# ── a request's tokens depend on nothing but the request ─────────────────────────────────────────────────────────────

PROMPT = [(7 * i) % 300 + 10 for i in range(83)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=24, ignore_eos=True, presence_penalty=0.5)


def make_core(model_path: str, **options: Any) -> EngineCore:
    config = EngineConfig(**({"model": model_path, "max_model_len": 256, "kv_cache_memory_bytes": 8 << 20} | options))
    return build_core(config, progress=False)


def request(name: str, prompt: list[int], params: SamplingParams, seed: int = 11) -> EngineRequest:
    return EngineRequest(request_id=name, prompt_token_ids=prompt, params=params, seed=seed)


class Tally:
    """Runs a core dry and remembers tokens and counters."""

    def __init__(self, core: EngineCore) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}
        self.hits = self.preemptions = self.steps = 0
        while core.has_work:
            output = core.step()
            self.steps += 1
            core.check_integrity()
            self.hits += output.stats.prefix_cache_hits
            self.preemptions += output.stats.num_preemptions
            for item in output.outputs:
                self.tokens.setdefault(item.request_id, []).extend(item.new_token_ids)
                self.cached[item.request_id] = item.num_cached_tokens


@pytest.fixture(scope="module")
def solo(model_path: str) -> dict[str, list[int]]:
    """What the two requests give alone, cold, their prompts in one piece."""
    tokens = {}
    for name, params in (("greedy", GREEDY), ("seeded", SEEDED)):
        core = make_core(model_path)
        core.add([request(name, PROMPT, params)])
        tokens |= Tally(core).tokens
    assert len(set(tokens["greedy"])) > 4  # otherwise this proves little
    assert tokens["greedy"] != tokens["seeded"]
    return tokens


def neighbours(count: int) -> Iterator[EngineRequest]:
    for i in range(count):
        params = SamplingParams(max_tokens=5 + 3 * i, ignore_eos=True, temperature=(0.0, 0.8, 1.5)[i % 3])
        yield request(f"neighbour-{i}", [(i * 31 + j) % 300 + 5 for j in range(3 + 11 * i)], params, seed=i)


@pytest.mark.parametrize("chunk", [1, 7, 64, 4096])
def test_chunk_sizes(model_path: str, solo: dict[str, list[int]], chunk: int) -> None:
    core = make_core(model_path, max_num_batched_tokens=chunk, max_num_seqs=1)
    core.add([request("greedy", PROMPT, GREEDY), request("seeded", PROMPT, SEEDED)])
    tally = Tally(core)
    assert tally.tokens == solo
    # The second prompt finds the first one's full blocks.
    first = -(-len(PROMPT) // chunk)
    rest = -(-(len(PROMPT) - 80) // chunk)
    assert tally.steps == first + 23 + rest + 23
    assert tally.cached == {"greedy": 0, "seeded": 80}


def test_cold_and_warm_prefix_cache(model_path: str, solo: dict[str, list[int]]) -> None:
    core = make_core(model_path)
    for hits in (0, 80):
        for name, params in (("greedy", GREEDY), ("seeded", SEEDED)):
            core.add([request(name, PROMPT, params)])
            tally = Tally(core)
            assert tally.tokens[name] == solo[name]
            assert tally.hits == (80 if name == "seeded" else hits)
    without = make_core(model_path, enable_prefix_caching=False)
    for _ in range(2):
        without.add([request("greedy", PROMPT, GREEDY)])
        tally = Tally(without)
        assert tally.tokens["greedy"] == solo["greedy"]
        assert tally.hits == 0


@pytest.mark.parametrize("prefill", [1, 7, 64, 4096])
def test_among_neighbours(model_path: str, solo: dict[str, list[int]], prefill: int) -> None:
    core = make_core(model_path, max_num_prefill_tokens=prefill)
    others = list(neighbours(16))
    core.add(others[:8])
    for _ in range(3):
        core.step()
    core.add([request("greedy", PROMPT, GREEDY), request("seeded", PROMPT, SEEDED), *others[8:]])
    tally = Tally(core)
    assert {name: tally.tokens[name] for name in solo} == solo


def test_before_and_after_a_preemption(model_path: str, solo: dict[str, list[int]]) -> None:
    bytes_per_token = 2 * 2 * 2 * 16 * 4
    for caching in (True, False):
        core = make_core(
            model_path,
            max_model_len=112,
            kv_cache_memory_bytes=18 * 16 * bytes_per_token,
            enable_prefix_caching=caching,
        )
        others = [
            request(f"older-{i}", [20 + i] * 60, SamplingParams(max_tokens=45, ignore_eos=True)) for i in range(2)
        ]
        core.add([*others, request("greedy", PROMPT, GREEDY), request("seeded", PROMPT, SEEDED)])
        tally = Tally(core)
        assert tally.preemptions > 0
        assert {name: tally.tokens[name] for name in solo} == solo


def test_choices_that_arrive_together_share_their_prompt(model_path: str) -> None:
    core = make_core(model_path)
    core.add(
        [
            EngineRequest(request_id=f"c{i}", prompt_token_ids=PROMPT, params=SEEDED, seed=11, choice_index=i)
            for i in range(4)
        ]
    )
    tally = Tally(core)
    assert tally.hits == 3 * 80
    assert len({tuple(t) for t in tally.tokens.values()}) == 4
    alone = make_core(model_path)
    alone.add([EngineRequest(request_id="c2", prompt_token_ids=PROMPT, params=SEEDED, seed=11, choice_index=2)])
    assert Tally(alone).tokens["c2"] == tally.tokens["c2"]


PLAIN_PROMPTS: list[Any] = [{"prompt_token_ids": [5, 6, 7, 8] * 4}, {"prompt_token_ids": [9]}]
FEW_TOKENS = {11: 60.0, 12: 60.0, 2: 58.0}
"""A bias that leaves a random model three words, an end token among them: whoever looks text up is often right."""


@pytest.fixture(scope="module")
def drafting(model_path: str) -> LLM:
    """It drafts at every step, whatever that costs."""
    config = {"method": "ngram", "controller": "fixed", "num_speculative_tokens": 4}
    return LLM(model=model_path, max_model_len=256, kv_cache_memory_bytes=16 << 20, speculative_config=config)


@pytest.fixture(scope="module")
def plain(model_path: str) -> LLM:
    return LLM(model=model_path, max_model_len=256, kv_cache_memory_bytes=16 << 20, speculation="off")


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=3, n=3, max_tokens=37, logprobs=2, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=4, n=4, max_tokens=60),
        SamplingParams(temperature=1.0, seed=5, n=4, max_tokens=60, ignore_eos=True, stop=["w12 w11 w12"]),
        SamplingParams(temperature=1.0, seed=6, n=4, max_tokens=60, ignore_eos=True, stop_token_ids=[2], min_tokens=9),
    ],
    ids=["greedy", "sampled", "end token", "stop string", "stop token"],
)
def test_speculation_changes_nothing_but_the_figures(drafting: LLM, plain: LLM, params: SamplingParams) -> None:
    params.logit_bias = FEW_TOKENS
    wish = SpeculationParams(include_origins=True)
    found = drafting.generate(PLAIN_PROMPTS, params, speculation=wish, use_tqdm=False)
    assert [r.outputs for r in found] == [r.outputs for r in plain.generate(PLAIN_PROMPTS, params, use_tqdm=False)]
    accepted = 0
    for output in (output for result in found for output in result.outputs):
        usage, origins = output.speculation, output.origins
        assert usage is not None
        assert origins is not None
        assert len(origins) == len(output.token_ids)
        assert set(origins) <= {"ngram", "target"}
        counts = usage.drafters.get("ngram", DraftCounts())
        assert 0 <= counts.num_accepted_tokens <= counts.num_draft_tokens <= 4 * counts.num_drafts
        assert counts.num_drafts <= usage.num_steps
        assert origins.count("ngram") <= counts.num_accepted_tokens
        if not params.stop:
            assert origins.count("ngram") == counts.num_accepted_tokens
        accepted += counts.num_accepted_tokens
    assert accepted > 0


def test_each_prompt_has_its_wish(drafting: LLM, plain: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logit_bias=FEW_TOKENS)
    prompts = PLAIN_PROMPTS[:1] * 3
    wishes = [SpeculationParams(enabled=False), None, SpeculationParams(drafter="ngram", tenant="t")]
    outputs = [r.outputs[0] for r in drafting.generate(prompts, params, speculation=wishes, use_tqdm=False)]
    drafted = [bool(output.speculation and output.speculation.drafters) for output in outputs]
    assert drafted == [False, True, True]
    assert outputs[0].speculation is not None
    assert outputs[0].speculation.num_steps == 20
    assert all(output.origins is None for output in outputs)
    asked = SpeculationParams(include_origins=True)
    output = plain.generate(prompts[0], params, speculation=asked, use_tqdm=False)[0].outputs[0]
    assert output.speculation is None
    assert output.origins == ["target"] * 20


def test_wrong_wishes_say_what_is_wrong(drafting: LLM, plain: LLM) -> None:
    cases: list[tuple[LLM, Any, str]] = [
        (drafting, {"enabled": False}, "speculation must be a SpeculationParams, or a list"),
        (drafting, [SpeculationParams()] * 3, "2 prompts but 3 wishes"),
        (
            drafting,
            SpeculationParams(drafter="suffix"),
            r"speculation.drafter must be one of .* \(ngram\), not 'suffix'",
        ),
        (drafting, SpeculationParams(tenant=""), "speculation.tenant must be a string of 1 to 256 characters"),
        (plain, SpeculationParams(drafter="ngram"), "this engine does not speculate"),
    ]
    for llm, wish, message in cases:
        with pytest.raises(RequestError, match=message):
            llm.generate(["w1", "w2"], speculation=wish, use_tqdm=False)
        with pytest.raises(RequestError, match=message):
            llm.chat([[{"role": "user", "content": "w1"}]] * 2, speculation=wish, use_tqdm=False)
