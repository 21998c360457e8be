"""The reference ops where whole models do not lead them: weights in several segments, many requests with one prefix."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from sol.ops import Dense, KVCache, Linear, Norm, RaggedBatch
from sol.ops import reference as reference_module
from sol.ops.program import MlpInput, PagedAttention
from sol.ops.reference import GATHER_TOKENS, ReferenceOps, ReferencePlan

OPS = ReferenceOps()
BLOCK_SIZE, KV_HEADS, HEADS, SIZE = 4, 2, 6, 8


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def segments(weight: torch.Tensor, *rows: int) -> tuple[Dense, ...]:
    return tuple(Dense(part) for part in weight.split(list(rows)))


@pytest.mark.parametrize("bias", [None, normal(12, seed=3)])
def test_a_weight_in_segments_is_the_weight_in_one(bias: torch.Tensor | None) -> None:
    x, residual, weight = normal(5, 8), normal(5, 12, seed=1), normal(12, 8, seed=2)
    several, one = Linear(segments(weight, 3, 9), bias), Linear((Dense(weight),), bias)
    expected = residual + functional.linear(x, weight, bias)
    for linear in (several, one):
        torch.testing.assert_close(OPS.project_residual(x, linear, residual.clone()), expected)
    norm = Norm(weight=torch.ones(8), eps=1e-5)
    torch.testing.assert_close(
        OPS.mlp_input(x, MlpInput(norm=norm, gate_up=several)), OPS.mlp_input(x, MlpInput(norm=norm, gate_up=one))
    )


def decoding(lengths: list[int]) -> tuple[RaggedBatch, KVCache]:
    """Requests of these lengths that share their prefix; block 0 is nobody's and holds NaN."""
    blocks = -(-max(lengths) // BLOCK_SIZE)
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(1)) + 1
    table = torch.zeros(len(lengths), blocks, dtype=torch.int64)
    for request, length in enumerate(lengths):
        held = -(-length // BLOCK_SIZE)
        table[request, :held] = order[:held]
    data = normal(1, 2, blocks + 1, BLOCK_SIZE, KV_HEADS, SIZE)
    data[:, :, 0] = float("nan")
    count = torch.arange(len(lengths))
    batch = RaggedBatch(
        token_ids=count,
        positions=torch.tensor(lengths) - 1,
        slot_mapping=count,
        block_table=table,
        query_lens=[1] * len(lengths),
        seq_lens=lengths,
        logits_rows=count,
    )
    return batch, KVCache(data)


def attend(q: torch.Tensor, batch: RaggedBatch, cache: KVCache) -> tuple[torch.Tensor, list[int]]:
    """Attention's output, and of how many tokens each of its calls gathers keys and values."""
    groups = reference_module._attention_groups(batch, cache)
    plan = ReferencePlan(HEADS, KV_HEADS, SIZE, {}, batch.slot_mapping, [cache.layer(0)], groups)
    out = OPS.paged_attention(q, PagedAttention(layer=0, scale=SIZE**-0.5), plan)
    return out, [group.num_requests * -(-group.kv_len // BLOCK_SIZE) * BLOCK_SIZE for group in groups]


def test_an_attention_call_gathers_a_bounded_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [50, 3, 64, 33, 64, 1, 60, 47, 128, 37, 64]
    batch, cache = decoding(lengths)
    q = normal(len(lengths), HEADS, SIZE, seed=5)
    whole, calls = attend(q, batch, cache)
    assert max(calls) > 128
    monkeypatch.setattr(reference_module, "GATHER_TOKENS", 128)
    cut, calls = attend(q, batch, cache)
    assert max(calls) == 128
    torch.testing.assert_close(cut, whole)
    monkeypatch.setattr(reference_module, "GATHER_TOKENS", 1)  # one request at a time is the least
    alone, calls = attend(q, batch, cache)
    assert len(calls) == len(lengths)
    torch.testing.assert_close(alone, whole)
    for request, length in enumerate(lengths):
        keys, values = (
            side.index_select(0, batch.block_table[request])
            .flatten(0, 1)[:length]
            .transpose(0, 1)
            .repeat_interleave(3, 0)
            for side in cache.layer(0)
        )
        expected = functional.scaled_dot_product_attention(q[request].unsqueeze(1), keys, values).flatten()
        torch.testing.assert_close(whole[request], expected)


def test_a_long_prefix_that_128_requests_share_is_not_copied_128_times_at_once() -> None:
    batch, cache = decoding([8000] * 128)
    groups = reference_module._attention_groups(batch, cache)
    assert sum(group.num_requests for group in groups) == 128
    assert all(group.num_requests * group.kv_len <= GATHER_TOKENS for group in groups)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, None), (None, 0.5), (3, 0.5), (1000, 50.0)])
def test_windows_and_soft_caps(window: int | None, softcap: float | None) -> None:
    """Three requests: decoding, a whole prompt, a chunk after 5 tokens; against one softmax a token, in float64."""
    query_lens, seq_lens = [1, 7, 4], [9, 7, 9]
    cache = KVCache(normal(1, 2, 9, BLOCK_SIZE, KV_HEADS, SIZE))
    table = torch.arange(9).reshape(3, 3)
    count = sum(query_lens)
    batch = RaggedBatch(
        token_ids=torch.zeros(count, dtype=torch.int64),
        positions=torch.zeros(count, dtype=torch.int64),
        slot_mapping=torch.zeros(count, dtype=torch.int64),
        block_table=table,
        query_lens=query_lens,
        seq_lens=seq_lens,
        logits_rows=torch.arange(3),
    )
    q = normal(count, HEADS, SIZE, seed=5)
    groups = reference_module._attention_groups(batch, cache)
    plan = ReferencePlan(HEADS, KV_HEADS, SIZE, {}, batch.slot_mapping, [cache.layer(0)], groups)
    op = PagedAttention(layer=0, scale=SIZE**-0.5, window=window, softcap=softcap)
    out = OPS.paged_attention(q, op, plan)
    row = 0
    for request, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        keys, values = (
            side.index_select(0, table[request]).flatten(0, 1).repeat_interleave(HEADS // KV_HEADS, 1).double()
            for side in cache.layer(0)
        )
        for position in range(seq_len - query_len, seq_len):
            first = 0 if window is None else max(0, position - window + 1)
            scores = torch.einsum("he,she->hs", q[row].double(), keys[first : position + 1]) * op.scale
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            expected = torch.einsum("hs,she->he", scores.softmax(-1), values[first : position + 1]).flatten()
            torch.testing.assert_close(out[row].double(), expected, rtol=1e-5, atol=1e-6)
            row += 1
