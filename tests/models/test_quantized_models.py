"""Whole quantised models on the reference ops, dequantised at load and as they are stored, against transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_models import Tensors, awq, compressed, gptq, int_quantized, pack_quantized, save_quantized
from safetensors.torch import save_file
from test_llama import PagedRun, random_tokens
from tiny_models import GGUFOptions, TinyLlama, gguf_name, make_llama, random_blocks, write_gguf
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, Phi3Config, PreTrainedConfig

from sol import LLM, SamplingParams
from sol.models.checkpoint import open_checkpoint
from sol.models.config import load_model_config
from sol.models.registry import load_program
from sol.models.source import resolve
from sol.ops.program import AttentionInput
from sol.ops.weights import Dense, Int4Group, Int8Channel, Stored, tensors_of

TOKENS = random_tokens(24, seed=4)


class AsStored:
    """Packs nothing: the program's weights are what the checkpoint stores."""

    def pack(self, key: str, rows: int, in_features: int, load: Callable[[], Sequence[Stored]]) -> Any:
        stored = tuple(load())
        assert sum(tensors_of(part)[0].shape[0] for part in stored) == rows
        return stored


def transformers_logits(config: PreTrainedConfig, weights: Tensors) -> torch.Tensor:
    model = AutoModelForCausalLM.from_config(config).eval().float()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if config.tie_word_embeddings else set())
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([TOKENS])).logits[0]
    return logits


def assert_logits(directory: Path, expected: torch.Tensor, quantization: Any = None) -> list[Any]:
    """Both ways of loading give `expected`; returns the segments of the first layer's q, k and v as they are stored."""
    files = resolve(str(directory))
    config = load_model_config(files)
    first: list[Any] = []
    for packer in (None, AsStored()):
        checkpoint = open_checkpoint(files, quantization)
        program = load_program(
            config, checkpoint, dtype=torch.float32, max_positions=64, **({} if packer is None else {"packer": packer})
        )
        run = PagedRun(program, config, 1)
        found = torch.cat([run.step({0: TOKENS[:10]}), run.step({0: TOKENS[10:23]}), run.step({0: TOKENS[23:]})])
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-5)
        op = program.body[0]
        assert isinstance(op, AttentionInput)
        first = list(op.qkv.segments)
    return first


@pytest.mark.parametrize(
    ("pack", "config", "options", "segments"),
    [
        (awq, {"quant_method": "awq", "bits": 4, "group_size": 128}, {}, [Int4Group]),
        (
            awq,
            {"quant_method": "awq", "bits": 4, "group_size": 128},
            {"model": {"hidden_size": 1024}},
            [Int4Group],
        ),
        (
            gptq,
            {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": True, "sym": True},
            {"group_size": 64, "symmetric": True, "act_order": True},
            [Int4Group, Int4Group, Int4Group],  # each of q, k and v has an order of its own
        ),
        (
            pack_quantized,
            compressed({"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}),
            {"group_size": 32, "plain": ("k_proj",), "model": {"tie_word_embeddings": True}},
            [Int4Group, Dense, Int4Group],
        ),
        (
            int_quantized,
            compressed({"num_bits": 8, "strategy": "channel"}, "int-quantized"),
            {"bits": 8, "group_size": -1, "symmetric": True},
            [Int8Channel],
        ),
    ],
    ids=["awq", "awq-1024", "gptq", "pack-quantized", "int-quantized"],
)
def test_logits_of_quantised_safetensors(
    tmp_path: Path,
    pack: Callable[..., Tensors],
    config: dict[str, Any],
    options: dict[str, Any],
    segments: list[type],
) -> None:
    made = save_quantized(tmp_path, pack, config, **options)
    plain = LlamaConfig(**{key: value for key, value in made.config.items() if key != "quantization_config"})
    found = assert_logits(tmp_path, transformers_logits(plain, made.weights))
    assert [type(part) for part in found] == segments


@pytest.mark.parametrize(("family", "theirs"), [("Phi3", Phi3Config), ("Gemma2", Gemma2Config)])
def test_logits_of_awq_of_other_families(tmp_path: Path, family: str, theirs: type[PreTrainedConfig]) -> None:
    """Fused matrices and post-norms."""
    made = save_quantized(
        tmp_path, awq, {"quant_method": "awq", "bits": 4, "group_size": 128}, model={"family": family}
    )
    plain = theirs(**{key: value for key, value in made.config.items() if key != "quantization_config"})
    assert assert_logits(tmp_path, transformers_logits(plain, made.weights))


@pytest.mark.parametrize(
    ("hidden_size", "kinds"),
    [
        (512, ("Q4_K", "Q6_K")),
        (512, ("Q5_K", "Q5_1")),
        (512, ("Q2_K", "Q3_K")),
        (512, ("Q4_1", "Q5_0")),
        (1024, ("Q4_K", "Q6_K")),
    ],
)
def test_logits_of_gguf_files_that_mix_types(tmp_path: Path, hidden_size: int, kinds: tuple[str, str]) -> None:
    model = make_llama(hidden_size=hidden_size, intermediate_size=256, head_dim=128, tie_word_embeddings=True)
    scales = {"Q2_K": 4e-3, "Q3_K": 1e-3, "Q4_K": 2e-4, "Q5_K": 1e-4, "Q6_K": 4e-5}
    raw = {}
    for index, (name, weight) in enumerate(model.state_dict().items()):
        if weight.ndim == 2 and name != "lm_head.weight":
            kind = kinds["v_proj" in name or "down_proj" in name]
            scale = scales.get(kind, 4e-3)
            raw[gguf_name(name)] = random_blocks(kind, *weight.shape, index, scale=scale), kind
    path = tmp_path / "tiny.gguf"
    expected = write_gguf(path, model, GGUFOptions(raw=raw))
    found = assert_logits(path, transformers_logits(model.config, expected))
    assert [part.kind for part in found] == list(kinds)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("family", ["Llama", "Gemma3", "Phi3"])
def test_logits_of_what_is_quantised_at_load(
    tiny_llama: Callable[..., TinyLlama], family: str, quantization: Any
) -> None:
    tiny = tiny_llama(hidden_size=128, intermediate_size=160, family=family)
    checkpoint = open_checkpoint(resolve(str(tiny.directory)), quantization)
    weights = {name: checkpoint.load(name, torch.float32) for name in checkpoint.names()}
    found = assert_logits(tiny.directory, transformers_logits(tiny.model.config, weights), quantization)
    assert [type(part) for part in found] == [Int4Group if quantization == "int4" else Int8Channel]


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_logits_of_experts_quantised_at_load(
    tiny_llama: Callable[..., TinyLlama], tmp_path: Path, quantization: Any
) -> None:
    tiny = tiny_llama(hidden_size=128, intermediate_size=160, family="Mixtral", num_local_experts=4)
    checkpoint = open_checkpoint(resolve(str(tiny.directory)), quantization)
    router = checkpoint.stored("model.layers.0.block_sparse_moe.gate.weight")
    assert isinstance(router, Int8Channel), "who computes hangs on it"
    weights = {name: checkpoint.load(name, torch.float32) for name in checkpoint.names()}
    # transformers holds experts in other tensors than it saves.
    tiny.model.config.save_pretrained(tmp_path)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0]
    assert_logits(tiny.directory, expected, quantization)


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("quantization", ["awq", "int4"])
def test_llm(tmp_path: Path, tiny_llama: Callable[..., TinyLlama], quantization: Any, kernels: Any) -> None:
    """`sol.LLM` takes `quantization`; where torch computes, tokens are those of the dequantised model."""
    if quantization == "awq":
        made = save_quantized(tmp_path, awq, {"quant_method": "awq", "bits": 4, "group_size": 128})
        directory, weights = tmp_path, made.weights
        config = LlamaConfig(**{key: value for key, value in made.config.items() if key != "quantization_config"})
    else:
        tiny = tiny_llama(hidden_size=128, intermediate_size=160)
        directory, config = tiny.directory, tiny.model.config
        checkpoint = open_checkpoint(resolve(str(directory)), quantization)
        weights = {name: checkpoint.load(name, torch.float32) for name in checkpoint.names()}
    llm = LLM(
        str(directory),
        quantization=quantization,
        cpu_kernels=kernels,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=1 << 20,
    )
    prompt = {"prompt_token_ids": TOKENS}
    parameters = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    (output,) = llm.generate(prompt, parameters, use_tqdm=False)
    (token,) = output.outputs[0].token_ids
    logits = transformers_logits(config, weights)[-1]
    # Kernels round activations to eight bits: then the token is one of the likeliest.
    assert int((logits > logits[token]).sum()) < (1 if kernels == "torch" else 4)
