"""Tiny random programs that need no checkpoint, for tests of the ops alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Final

import torch
from tiny_cpu import native

from sol.ops import Dense, EagerExecutor, KVCache, Linear, Norm, Program, Rope
from sol.ops.cpu.native import Isa
from sol.ops.cpu.packing import Arena, pack
from sol.ops.program import AttentionInput, MlpInput, Op, PagedAttention, ProjectResidual
from sol.ops.reference import ReferenceOps
from sol.ops.weights import Int8Channel, Stored

VOCAB_SIZE: Final = 96


def random_program(
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    hidden: int = 64,
    intermediate: int = 96,
    layers: int = 2,
    window: int | None = None,
    softcap: float | None = None,
    bias: bool = False,
    head_norms: bool = False,
    gate_rows: tuple[int, ...] | None = None,
    max_positions: int = 2048,
    gemma: bool = False,
) -> Program:
    """Dense float32. `gate_rows`: the rows of each segment of gate and up together; one segment if None.

    `gemma`: norms with an offset, post-norms, GELU, scaled embeddings, capped logits, a RoPE table for odd layers.
    """
    generator = torch.Generator().manual_seed(heads * 1000 + head_dim)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def linear(rows: int, cols: int, segments: tuple[int, ...] | None = None) -> Linear:
        weight = normal(rows, cols) / math.sqrt(cols)
        parts = weight.split(list(segments or (rows,)))
        return Linear(tuple(Dense(part) for part in parts), normal(rows) * 0.2 if bias else None)

    def norm(size: int = hidden) -> Norm:
        offset = 1.0 if gemma else 0.0
        return Norm(weight=normal(size).mul_(0.2).add_(1.0 - offset), eps=1e-5, offset=offset)

    frequencies = 1.0 / (10000.0 ** (torch.arange(0, head_dim, 2) / head_dim))
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
    rope = Rope(cos=angles.cos(), sin=angles.sin())
    local = Rope(cos=(3 * angles).cos(), sin=(3 * angles).sin()) if gemma else rope
    body: list[Op] = []
    for layer in range(layers):
        body += [
            AttentionInput(
                layer=layer,
                norm=norm(),
                qkv=linear((heads + 2 * kv_heads) * head_dim, hidden),
                rope=local if layer % 2 else rope,
                q_norm=norm(head_dim) if head_norms else None,
                k_norm=norm(head_dim) if head_norms else None,
            ),
            # Larger than usual, so that attention is not nearly uniform.
            PagedAttention(layer=layer, scale=2.0 / math.sqrt(head_dim), window=window, softcap=softcap),
            ProjectResidual(linear(hidden, heads * head_dim), norm=norm() if gemma else None),
            MlpInput(
                norm=norm(),
                gate_up=linear(2 * intermediate, hidden, gate_rows),
                activation="gelu_tanh" if gemma else "silu",
            ),
            ProjectResidual(linear(hidden, intermediate), norm=norm() if gemma else None),
        ]
    return Program(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        embedding=Dense(normal(VOCAB_SIZE, hidden)),
        body=tuple(body),
        final_norm=norm(),
        head=linear(VOCAB_SIZE, hidden),
        embedding_scale=3.3 if gemma else 1.0,
        logits_softcap=2.0 if gemma else None,
    )


def map_weights(program: Program, change: Callable[[Any], Any]) -> Program:
    """The program with every matrix replaced."""

    def change_linear(linear: Linear) -> Linear:
        return dataclasses.replace(linear, segments=tuple(map(change, linear.segments)))

    def change_op(op: Op) -> Op:
        match op:
            case AttentionInput(qkv=linear):
                return dataclasses.replace(op, qkv=change_linear(linear))
            case MlpInput(gate_up=linear):
                return dataclasses.replace(op, gate_up=change_linear(linear))
            case ProjectResidual(weight=linear):
                return dataclasses.replace(op, weight=change_linear(linear))
            case _:
                return op

    return dataclasses.replace(
        program,
        embedding=change(program.embedding),
        body=tuple(map(change_op, program.body)),
        head=change_linear(program.head),
    )


def as_int8(weight: Dense) -> Int8Channel:
    scales = weight.weight.abs().amax(1) / 127
    return Int8Channel(codes=(weight.weight / scales[:, None]).round().to(torch.int8), scales=scales)


def packed(
    program: Program, *, isa: Isa | None = None, store: Callable[[Dense], Stored] = lambda weight: weight
) -> Program:
    """The program for `CpuExecutor`, its matrices stored as `store` says."""
    library, arena = native(), Arena()
    chosen = isa if isa is not None else library.best_isa()
    return map_weights(program, lambda weight: pack(library, chosen, store(weight), arena))


def reference(program: Program, *, num_blocks: int = 64, block_size: int = 16) -> EagerExecutor:
    layers = sum(isinstance(op, PagedAttention) for op in program.body)
    shape = (layers, 2, num_blocks, block_size, program.num_kv_heads, program.head_dim)
    return EagerExecutor(program, ReferenceOps(), KVCache(torch.full(shape, float("nan"))))
