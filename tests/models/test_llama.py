"""The programs of the Llama family on the reference ops, against transformers: float32, logits within 1e-4."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import TinyLlama
from transformers import LlamaForCausalLM

from sol.errors import CheckpointError
from sol.models.checkpoint import open_checkpoint
from sol.models.config import load_model_config
from sol.models.dummy_checkpoint import DummyCheckpoint, parameter_shapes
from sol.models.registry import load_program
from sol.models.source import resolve
from sol.ops import KVCache, Program, RaggedBatch, run
from sol.ops.reference import ReferenceOps

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.05 * index for index in range(8)],
    "long_factor": [1.0 + 0.4 * index for index in range(8)],
    "original_max_position_embeddings": 30,
    "rope_theta": 10000.0,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "untied": {"tie_word_embeddings": False},
    "tied": {"tie_word_embeddings": True},
    "llama3 rope": {"rope_parameters": LLAMA3},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    "one kv head": {"num_key_value_heads": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "no grouping": {"num_key_value_heads": 4},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "wide heads": {"head_dim": 32},
    "mistral": {"family": "Mistral", "sliding_window": 7},
    "mistral without window": {"family": "Mistral", "sliding_window": None},
    "qwen2": {"family": "Qwen2", "tie_word_embeddings": True},
    "qwen2, windows": {"family": "Qwen2", "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "qwen3": {"family": "Qwen3"},
    "qwen3, biases": {"family": "Qwen3", "attention_bias": True},
    "gemma2": {"family": "Gemma2", "num_hidden_layers": 3, "sliding_window": 6, "query_pre_attn_scalar": 20},
    "gemma2, caps that bite": {
        "family": "Gemma2",
        "sliding_window": 512,
        "query_pre_attn_scalar": 1,
        "attn_logit_softcapping": 0.5,
        "final_logit_softcapping": 2.0,
    },
    "gemma2 without caps": {
        "family": "Gemma2",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
    "gemma3": {"family": "Gemma3", "num_hidden_layers": 3, "sliding_window": 6, "sliding_window_pattern": 2},
    "gemma3, stretched": {
        "family": "Gemma3",
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 11,
        "final_logit_softcapping": 3.0,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    },
    "phi3": {"family": "Phi3"},
    "mixtral": {"family": "Mixtral", "num_local_experts": 4, "sliding_window": 9},
    "mixtral, one expert each": {"family": "Mixtral", "num_local_experts": 3, "num_experts_per_tok": 1},
    "qwen3 moe": {"family": "Qwen3Moe", "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40},
    "qwen3 moe, normalised": {
        "family": "Qwen3Moe",
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "phi3, rotated in part": {
        "family": "Phi3",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75},
    },
    "phi3, windows": {"family": "Phi3", "sliding_window": 8, "tie_word_embeddings": True},
}
BLOCK_SIZE = 4
TOLERANCE = 1e-4


class PagedRun:
    """Drives a program over a paged cache whose blocks are handed out in a scrambled order."""

    def __init__(self, program: Program, config: Any, num_requests: int, max_len: int = 64) -> None:
        self.program = program
        blocks = math.ceil(max_len / BLOCK_SIZE)
        order = torch.randperm(blocks * num_requests, generator=torch.Generator().manual_seed(1))
        self.tables = order.view(num_requests, blocks)
        shape = (config.num_hidden_layers, 2, blocks * num_requests, BLOCK_SIZE)
        # NaN wherever nothing was written: a read out of place shows.
        self.cache = KVCache(
            torch.full((*shape, config.num_key_value_heads, config.head_dim), float("nan"), dtype=torch.float32)
        )
        self.lengths = [0] * num_requests

    def step(self, chunks: dict[int, list[int]]) -> torch.Tensor:
        """Logits of every token of every chunk, request by request."""
        tokens, positions, slots = [], [], []
        for request, chunk in chunks.items():
            start = self.lengths[request]
            span = range(start, start + len(chunk))
            tokens += chunk
            positions += span
            slots += [int(self.tables[request, p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE for p in span]
            self.lengths[request] += len(chunk)
        batch = RaggedBatch(
            token_ids=torch.tensor(tokens),
            positions=torch.tensor(positions),
            slot_mapping=torch.tensor(slots),
            block_table=self.tables[list(chunks)],
            query_lens=[len(chunk) for chunk in chunks.values()],
            seq_lens=[self.lengths[request] for request in chunks],
            logits_rows=torch.arange(len(tokens)),
        )
        return run(self.program, ReferenceOps(), batch, self.cache)


def load(directory: Any, max_positions: int = 512) -> tuple[Program, Any]:
    files = resolve(str(directory), progress=False)
    config = load_model_config(files)
    checkpoint = open_checkpoint(files)
    return load_program(config, checkpoint, dtype=torch.float32, max_positions=max_positions), config


def expected_logits(model: LlamaForCausalLM, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits[0]


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest, tiny_llama: Callable[..., TinyLlama]) -> TinyLlama:
    return tiny_llama(**VARIANTS[request.param])


def random_tokens(count: int, seed: int) -> list[int]:
    return torch.randint(3, 320, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_prefill_chunks_and_decode_give_the_logits_of_transformers(variant: TinyLlama) -> None:
    program, config = load(variant.directory)
    tokens = random_tokens(45, seed=0)
    expected = expected_logits(variant.model, tokens)

    whole = PagedRun(program, config, 1).step({0: tokens})
    torch.testing.assert_close(whole, expected, atol=TOLERANCE, rtol=0)

    chunked = PagedRun(program, config, 1)
    parts = [chunked.step({0: tokens[a:b]}) for a, b in [(0, 1), (1, 8), (8, 11), (11, 32), (32, 40)]]
    parts += [chunked.step({0: [token]}) for token in tokens[40:]]
    torch.testing.assert_close(torch.cat(parts), expected, atol=TOLERANCE, rtol=0)


def longrope(share: float) -> dict[str, Any]:
    """Phi-3's with 128k tokens, or Phi-4-mini's, which rotates a part of each head."""
    pairs = int(16 * share) // 2
    factors = {key: LONGROPE[key][:pairs] for key in ("short_factor", "long_factor")}  # type: ignore[index]
    return {
        "family": "Phi3",
        "original_max_position_embeddings": 30,
        "rope_parameters": LONGROPE | factors | {"partial_rotary_factor": share},
    }


@pytest.mark.parametrize("max_model_len", [30, 64])
@pytest.mark.parametrize(
    "options",
    [longrope(1.0), longrope(0.75), {"rope_parameters": LONGROPE}, {"rope_parameters": LONGROPE | {"factor": 8.0}}],
)
def test_longrope(tiny_llama: Callable[..., TinyLlama], options: dict[str, Any], max_model_len: int) -> None:
    """Up to the original length transformers takes the short factors, beyond it the long ones, as Sol does for an
    engine whose longest request is of that length."""
    tiny = tiny_llama(**options)
    program, config = load(tiny.directory, max_positions=max_model_len)
    tokens = random_tokens(max_model_len, seed=0)
    expected = expected_logits(tiny.model, tokens)
    paged = PagedRun(program, config, 1)
    parts = [paged.step({0: tokens[a:b]}) for a, b in [(0, 1), (1, 8), (8, max_model_len)]]
    torch.testing.assert_close(torch.cat(parts), expected, atol=TOLERANCE, rtol=0)


def test_a_ragged_batch_gives_each_request_its_own_logits(variant: TinyLlama) -> None:
    program, config = load(variant.directory)
    prompts = [random_tokens(count, seed=count) for count in (1, 3, 4, 17, 40, 5)]
    expected = [expected_logits(variant.model, prompt) for prompt in prompts]
    paged = PagedRun(program, config, len(prompts))
    # First everything but the last token or two, in unequal chunks; then decodes of very different lengths together
    # with a two-token chunk and a request that starts only now.
    paged.step({r: p[: len(p) - 2] for r, p in enumerate(prompts) if len(p) > 2})
    logits = paged.step(
        {r: p[paged.lengths[r] : -1] for r, p in enumerate(prompts) if 2 < len(p) < 20} | {4: prompts[4][-2:]}
    )
    last = paged.step({r: p[-1:] for r, p in enumerate(prompts) if r != 4})
    rows = iter(last)
    for request in (0, 1, 2, 3, 5):
        torch.testing.assert_close(next(rows), expected[request][-1], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(logits[-2:], expected[4][-2:], atol=TOLERANCE, rtol=0)


def test_lower_precisions_stay_close(tiny_llama: Callable[..., TinyLlama]) -> None:
    tiny = tiny_llama()
    files = resolve(str(tiny.directory), progress=False)
    config = load_model_config(files)
    tokens = random_tokens(20, seed=3)
    expected = torch.softmax(expected_logits(tiny.model, tokens), -1)
    for dtype in (torch.bfloat16, torch.float16):
        program = load_program(config, open_checkpoint(files), dtype=dtype, max_positions=64)
        paged = PagedRun(program, config, 1)
        paged.cache = KVCache(paged.cache.data.to(dtype))
        first = paged.step({0: tokens[:-1]})
        last = paged.step({0: tokens[-1:]})
        assert last.dtype == torch.float32
        got = torch.softmax(torch.cat([first, last]), -1)
        assert (got - expected).abs().sum(-1).max() / 2 < 0.1


def test_every_weight_of_a_dummy_checkpoint_is_used(tiny_llama: Callable[..., TinyLlama]) -> None:
    for options in (
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"family": "Qwen2"},
        {"family": "Qwen3"},
        {"family": "Gemma2"},
        {"family": "Gemma3"},
        {"family": "Phi3"},
        {"family": "Mixtral", "num_local_experts": 4},
        {"family": "Qwen3Moe", "num_experts": 6, "num_experts_per_tok": 3},
    ):
        config = load_model_config(resolve(str(tiny_llama(**options).directory), progress=False))
        program = load_program(config, DummyCheckpoint(config), dtype=torch.bfloat16, max_positions=8)
        assert program.weight_bytes == 2 * sum(math.prod(shape) for shape in parameter_shapes(config).values())


def test_missing_misshapen_unexpected_and_contradicting_tensors_are_named(
    tiny_llama: Callable[..., TinyLlama], tmp_path: Any
) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    source = tiny_llama(tie_word_embeddings=True).directory

    def broken(name: str, change: Callable[[dict[str, torch.Tensor]], None]) -> Any:
        folder = tmp_path / name
        shutil.copytree(source, folder)
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors")
        return folder

    down = "model.layers.1.mlp.down_proj.weight"
    cases: dict[str, tuple[Callable[[dict[str, torch.Tensor]], None], str]] = {
        "missing": (lambda w: w.__delitem__(down), f"lacks the tensor {down}"),
        "misshapen": (lambda w: w.update({down: torch.zeros(64, 97)}), f"{down} has the shape \\[64, 97\\]"),
        "unexpected": (lambda w: w.update({"model.extra": torch.zeros(2)}), "does not know: model.extra"),
        "untied": (lambda w: w.update({"lm_head.weight": torch.zeros(320, 64)}), "lm_head.weight differs"),
    }
    for name, (change, message) in cases.items():
        with pytest.raises(CheckpointError, match=message):
            load(broken(name, change))
    copied = broken("copy", lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}))
    load(copied)
