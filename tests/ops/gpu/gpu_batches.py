"""Small programs and ragged batches for the kernels' tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sol.ops import Dense, KVCache, Linear, Norm, Program, RaggedBatch, Rope
from sol.ops.program import AttentionInput, MlpInput, Moe, Op, PagedAttention, ProjectResidual

BLOCK_SIZE = 4
MAX_POSITIONS = 8192


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    size: int
    hidden: int = 64
    intermediate: int = 48
    vocabulary: int = 40


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_program(
    shape: Shape,
    *,
    layers: int,
    dtype: torch.dtype = torch.float32,
    biased: bool = False,
    head_norms: bool = False,
    gemma: bool = False,
    num_experts: int = 0,
) -> Program:
    """`gemma`: norms with an offset, post-norms, GELU, scaled embeddings, soft-caps, two RoPE tables."""
    angles = torch.outer(torch.arange(MAX_POSITIONS).float(), 0.7 ** torch.arange(shape.size // 2).float())
    rope = Rope(cos=angles.cos(), sin=angles.sin())
    local = Rope(cos=(3 * angles).cos(), sin=(3 * angles).sin()) if gemma else rope

    def matrix(rows: int, columns: int, seed: int) -> Linear:
        bias = normal(rows, seed=seed + 1000).to(dtype) if biased else None
        return Linear((Dense((normal(rows, columns, seed=seed) * columns**-0.5).to(dtype)),), bias)

    def norm(seed: int, size: int = shape.hidden) -> Norm:
        weight = 0.2 * normal(size, seed=seed)
        return Norm((weight if gemma else 1 + weight).to(dtype), 1e-5, offset=1.0 if gemma else 0.0)

    def experts(count: int, rows: int, columns: int, seed: int) -> tuple[Linear, ...]:
        whole = (normal(count, rows, columns, seed=seed) * columns**-0.5).to(dtype)
        return tuple(Linear((Dense(weight),)) for weight in whole)

    body: list[Op] = []
    for layer in range(layers):
        seed = 10 * layer
        qkv_rows = (shape.heads + 2 * shape.kv_heads) * shape.size
        body += [
            AttentionInput(
                layer=layer,
                norm=norm(seed),
                qkv=matrix(qkv_rows, shape.hidden, seed + 1),
                rope=local if layer % 2 else rope,
                q_norm=norm(seed + 6, shape.size) if head_norms else None,
                k_norm=norm(seed + 7, shape.size) if head_norms else None,
            ),
            PagedAttention(
                layer=layer,
                scale=shape.size**-0.5,
                window=5 if gemma and layer % 2 else None,
                softcap=2.0 if gemma else None,
            ),
            ProjectResidual(
                matrix(shape.hidden, shape.heads * shape.size, seed + 2), norm=norm(seed + 8) if gemma else None
            ),
        ]
        if num_experts:
            body.append(
                Moe(
                    norm=norm(seed + 3),
                    router=matrix(num_experts, shape.hidden, seed + 4),
                    gate_up=experts(num_experts, 2 * shape.intermediate, shape.hidden, seed + 5),
                    down=experts(num_experts, shape.hidden, shape.intermediate, seed + 6),
                    experts_per_token=2,
                    normalise=layer % 2 == 0,
                )
            )
            continue
        body += [
            MlpInput(
                norm=norm(seed + 3),
                gate_up=matrix(2 * shape.intermediate, shape.hidden, seed + 4),
                activation="gelu_tanh" if gemma else "silu",
            ),
            ProjectResidual(matrix(shape.hidden, shape.intermediate, seed + 5), norm=norm(seed + 9) if gemma else None),
        ]
    return Program(
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.size,
        embedding=Dense(normal(shape.vocabulary, shape.hidden, seed=900).to(dtype)),
        body=tuple(body),
        final_norm=norm(901),
        head=matrix(shape.vocabulary, shape.hidden, 902),
        embedding_scale=8.3 if gemma else 1.0,
        logits_softcap=1.5 if gemma else None,
    )


def make_batch(
    shape: Shape,
    query_lens: list[int],
    seq_lens: list[int],
    *,
    layers: int = 1,
    dtype: torch.dtype = torch.float32,
) -> tuple[RaggedBatch, KVCache]:
    """Requests of these lengths whose blocks lie scattered over a cache full of random keys and values."""
    needed = [-(-length // BLOCK_SIZE) for length in seq_lens]
    order = torch.randperm(sum(needed) + 3, generator=torch.Generator().manual_seed(7))
    table = torch.zeros(len(needed), max(needed), dtype=torch.int64)
    positions, slots = [], []
    used = 0
    for row, (query_len, seq_len, blocks) in enumerate(zip(query_lens, seq_lens, needed, strict=True)):
        table[row, :blocks] = order[used : used + blocks]
        used += blocks
        position = torch.arange(seq_len - query_len, seq_len)
        positions.append(position)
        slots.append(table[row][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
    tokens = sum(query_lens)
    batch = RaggedBatch(
        token_ids=torch.randint(shape.vocabulary, (tokens,), generator=torch.Generator().manual_seed(8)),
        positions=torch.cat(positions),
        slot_mapping=torch.cat(slots),
        block_table=table,
        query_lens=query_lens,
        seq_lens=seq_lens,
        logits_rows=torch.tensor(query_lens).cumsum(0) - 1,
    )
    data = normal(layers, 2, len(order), BLOCK_SIZE, shape.kv_heads, shape.size, seed=9).to(dtype)
    return batch, KVCache(data)
