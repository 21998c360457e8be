"""Whole engines of families that are not Llama: greedy tokens of transformers, drafted or not, on both backends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import GGUFOptions, TinyLlama, write_gguf

from sol import LLM, SamplingParams

FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": {"family": "Gemma2", "sliding_window": 6},
    "gemma3": {"family": "Gemma3", "sliding_window": 6, "sliding_window_pattern": 2},
    "phi3": {"family": "Phi3", "sliding_window": 8},
    "phi3, long, rotated in part": {
        "family": "Phi3",
        "original_max_position_embeddings": 64,  # where transformers would change over in the middle of a text
        "rope_parameters": {
            "rope_type": "longrope",
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 2.0],
            "long_factor": [1.0, 1.2, 1.5, 2.0, 3.0, 5.0],
            "partial_rotary_factor": 0.75,
        },
    },
    "mixtral": {"family": "Mixtral", "num_local_experts": 4},
    "qwen3 moe": {"family": "Qwen3Moe", "num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 40},
}
PROMPTS = [[5 + 3 * i % 300 for i in range(count)] for count in (3, 21)]
NEW_TOKENS = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)


def transformers_tokens(tiny: TinyLlama, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            tokens.append(int(tiny.model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_with_and_without_drafters(
    tiny_llama: Callable[..., TinyLlama], family: str, kernels: str
) -> None:
    tiny = tiny_llama(num_hidden_layers=3, **FAMILIES[family])
    small = tiny_llama(num_hidden_layers=1, seed=3, **FAMILIES[family])
    expected = [transformers_tokens(tiny, prompt) for prompt in PROMPTS]
    drafters: list[dict[str, Any]] = [
        {},
        {"method": "early_exit", "num_exit_layers": 2},
        {"method": "draft_model", "model": str(tiny.directory)},
        {"method": "draft_model", "model": str(small.directory)},
    ]
    for drafter in drafters:
        speculation: dict[str, Any] = {"speculation": "off"}
        if drafter:
            config = {"controller": "fixed", "num_speculative_tokens": 3} | drafter
            speculation = {"speculative_config": config}
        llm = LLM(
            str(tiny.directory),
            cpu_kernels=kernels,
            max_model_len=64,
            kv_cache_memory_bytes=4 << 20,
            skip_tokenizer_init=True,
            **speculation,
        )
        answers = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], GREEDY, use_tqdm=False)
        assert [list(answer.outputs[0].token_ids) for answer in answers] == expected, drafter
        if drafter.get("model") == str(tiny.directory):
            counts = [answer.outputs[0].speculation for answer in answers]
            drafted = sum(c.drafters["draft_model"].num_draft_tokens for c in counts if c is not None)
            accepted = sum(c.drafters["draft_model"].num_accepted_tokens for c in counts if c is not None)
            assert drafted == accepted > 0


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3 moe", "phi3, long, rotated in part"])
def test_greedy_tokens_from_a_gguf_file(
    tiny_llama: Callable[..., TinyLlama], tmp_path: Path, family: str, kernels: str
) -> None:
    options = FAMILIES[family]
    if family == "qwen3 moe":  # as ggml computes it
        options = options | {"norm_topk_prob": True}
    tiny = tiny_llama(num_hidden_layers=2, **options)
    tensors: dict[str, Any] = {}
    if family.startswith("phi3"):
        rope = options["rope_parameters"]
        tensors = {f"rope_factors_{name}.weight": np.float32(rope[f"{name}_factor"]) for name in ("long", "short")}
    write_gguf(tmp_path / "tiny.gguf", tiny.model, GGUFOptions(tensors=tensors))
    llm = LLM(
        str(tmp_path / "tiny.gguf"),
        cpu_kernels=kernels,
        max_model_len=64,
        kv_cache_memory_bytes=4 << 20,
        skip_tokenizer_init=True,
        speculation="off",
    )
    answers = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], GREEDY, use_tqdm=False)
    assert [list(answer.outputs[0].token_ids) for answer in answers] == [
        transformers_tokens(tiny, prompt) for prompt in PROMPTS
    ]
