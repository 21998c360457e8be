"""A model's shape with random weights on a device, and batches of equally long requests."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

import torch

from sol.ops import Dense, Linear, Norm, Program, Rope
from sol.ops.gpu import linear
from sol.ops.gpu.batch import DeviceBatch
from sol.ops.gpu.launch import Counters
from sol.ops.gpu.tuning import LinearConfig
from sol.ops.program import AttentionInput, MlpInput, Op, PagedAttention, ProjectResidual

BLOCK_SIZE: Final = 16


@dataclass(frozen=True, slots=True)
class Shape:
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    size: int
    vocabulary: int
    max_len: int

    def matrices(self) -> list[tuple[str, int, int]]:
        """(name, rows, columns)"""
        qkv = (self.heads + 2 * self.kv_heads) * self.size
        return [
            ("qkv", qkv, self.hidden),
            ("o", self.hidden, self.heads * self.size),
            ("gate_up", 2 * self.intermediate, self.hidden),
            ("down", self.hidden, self.intermediate),
            ("head", self.vocabulary, self.hidden),
        ]


LLAMA_3_8B: Final = Shape(32, 4096, 14336, 32, 8, 128, 128256, 8192)
SMALL: Final = Shape(1, 64, 128, 4, 2, 16, 96, 512)


@cache
def make_program(shape: Shape, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Program:
    if device.type == "cpu" and dtype == torch.bfloat16:
        dtype = torch.float16  # the interpreter has no bfloat16
    angles = torch.outer(
        torch.arange(shape.max_len).float(), 500000.0 ** (-torch.arange(0, shape.size, 2).float() / shape.size)
    )
    rope = Rope(cos=angles.cos().to(device), sin=angles.sin().to(device))

    def matrix(rows: int, columns: int) -> Linear:
        weight = torch.empty(rows, columns, dtype=dtype, device=device).normal_(std=columns**-0.5)
        return Linear((Dense(weight),))

    def norm() -> Norm:
        return Norm(torch.empty(shape.hidden, dtype=dtype, device=device).uniform_(0.5, 1.5), 1e-5)

    sizes = {name: (rows, columns) for name, rows, columns in shape.matrices()}
    body: list[Op] = []
    for layer in range(shape.layers):
        body += [
            AttentionInput(layer=layer, norm=norm(), qkv=matrix(*sizes["qkv"]), rope=rope),
            PagedAttention(layer=layer, scale=shape.size**-0.5),
            ProjectResidual(matrix(*sizes["o"])),
            MlpInput(norm=norm(), gate_up=matrix(*sizes["gate_up"])),
            ProjectResidual(matrix(*sizes["down"])),
        ]
    embedding = torch.empty(shape.vocabulary, shape.hidden, dtype=dtype, device=device).normal_()
    return Program(
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.size,
        embedding=Dense(embedding),
        body=tuple(body),
        final_norm=norm(),
        head=matrix(*sizes["head"]),
    )


class DecodeBatch:
    """`requests` of `context` tokens each, the last `query_len` of which are this step's; blocks lie scattered."""

    def __init__(
        self,
        shape: Shape,
        requests: int,
        context: int,
        query_len: int,
        device: torch.device,
        *,
        last_only: bool = False,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        if device.type == "cpu" and dtype == torch.bfloat16:
            dtype = torch.float16
        blocks = -(-context // BLOCK_SIZE)
        order = torch.randperm(requests * blocks, device=device)
        table = torch.zeros(requests, shape.max_len // BLOCK_SIZE, dtype=torch.int32, device=device)
        table[:, :blocks] = order.view(requests, blocks)
        position = torch.arange(context - query_len, context, device=device)
        slots = table[:, position // BLOCK_SIZE].long() * BLOCK_SIZE + position % BLOCK_SIZE
        tokens = requests * query_len
        self.cache = torch.empty(
            shape.layers, 2, requests * blocks, BLOCK_SIZE, shape.kv_heads, shape.size, dtype=dtype, device=device
        ).normal_()
        starts = torch.arange(requests + 1, dtype=torch.int32, device=device) * query_len
        self.batch = DeviceBatch(
            token_ids=torch.randint(shape.vocabulary, (tokens,), device=device),
            positions=position.repeat(requests),
            slot_mapping=slots.flatten(),
            block_table=table,
            query_start_loc=starts,
            seq_lens=torch.full((requests,), context, dtype=torch.int32, device=device),
            logits_rows=starts[1:].long() - 1 if last_only else slice(None),
            max_query_len=query_len,
            max_seq_len=shape.max_len,
        )


class Projection:
    """One of a shape's projections as the ops launch it, for `tokens` tokens of random input."""

    def __init__(self, shape: Shape, name: str, tokens: int, device: torch.device) -> None:
        self._name = name
        self._shape = shape
        self.rows, self.columns = next(m[1:] for m in shape.matrices() if m[0] == name)
        dtype = torch.float16 if device.type == "cpu" else torch.bfloat16
        self.x = torch.randn(tokens, self.columns, device=device, dtype=dtype)
        self._out = torch.zeros(tokens, self.rows, device=device, dtype=torch.float32 if name == "head" else dtype)
        self._counters = Counters(device)
        cache = torch.empty(2, tokens, BLOCK_SIZE, shape.kv_heads, shape.size, device=device, dtype=dtype)
        places = torch.arange(tokens, device=device)
        angles = torch.ones(tokens, shape.size // 2, device=device)
        self._rope = {
            "positions": places,
            "slots": places * BLOCK_SIZE,
            "cos": angles,
            "sin": angles,
            "keys": cache[0],
            "values": cache[1],
        }

    def __call__(self, weight: torch.Tensor, config: LinearConfig | None = None) -> None:
        x, out, counters = self.x, self._out, self._counters
        if self._name == "qkv":
            heads = (self._shape.heads, self._shape.kv_heads, self._shape.size)
            q = out.view(-1)[: x.shape[0] * heads[0] * heads[2]].view(x.shape[0], heads[0], heads[2])
            linear.linear_rope(x, weight, q, counters, heads=heads, rope=self._rope, config=config)
        elif self._name == "gate_up":
            linear.linear_gate_mul(x, weight, out[:, : self.rows // 2], counters, config=config)
        elif self._name == "head":
            linear.linear(x, weight, out, counters, config=config)
        else:
            linear.linear_residual(x, weight, out, counters, config=config)
