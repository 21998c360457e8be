"""A model as the list of ops it consists of.

A model emits its list once; everything that computes it walks that same list (`run` here, one op at a time). The
five ops of a decoder layer, in the order in which data goes through them:

    AttentionInput   residual → q          norm, q/k/v projection, norms of heads, RoPE, write of k and v to the cache
    PagedAttention   q → a
    ProjectResidual  a → residual          output projection, in Gemma a norm of it, added to the residual
    MlpInput         residual → h          norm, gate/up projection, SiLU(gate) · up, in Gemma GELU(gate) · up
    ProjectResidual  h → residual          down projection, as the output projection

In a mixture of experts, `Moe` stands in the place of the last two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from sol.ops.batch import KVCache, RaggedBatch
from sol.ops.weights import Linear, Norm, Packed, Rope, Weight, tensors_of

Activation = Literal["silu", "gelu_tanh"]
"""x / (1 + e^-x), and GELU (arXiv:1606.08415) with its approximation by tanh."""


@dataclass(frozen=True, slots=True)
class AttentionInput:
    layer: int
    norm: Norm
    qkv: Linear
    """Rows: all query heads, then all key heads, then all value heads."""
    rope: Rope
    """Of this layer; layers may share one or differ (Gemma 3: one of those with a window, one of the others)"""
    q_norm: Norm | None = None
    """Of each query head [head_dim], before it is rotated (Qwen3, Gemma 3)"""
    k_norm: Norm | None = None
    """The same of key heads"""


@dataclass(frozen=True, slots=True)
class PagedAttention:
    layer: int
    scale: float
    window: int | None = None
    """A token sees itself and the `window` - 1 tokens before it (Mistral, Gemma); None: all before it."""
    softcap: float | None = None
    """Scores become softcap · tanh(score / softcap) before the softmax (Gemma 2)."""


@dataclass(frozen=True, slots=True)
class ProjectResidual:
    weight: Linear
    norm: Norm | None = None
    """What the projection goes through before it is added (Gemma's post-norms)"""


@dataclass(frozen=True, slots=True)
class MlpInput:
    norm: Norm
    gate_up: Linear
    """Rows: gate, then up."""
    activation: Activation = "silu"
    """Of gate"""


@dataclass(frozen=True, slots=True)
class Moe:
    """A mixture of experts (arXiv:2401.04088) in place of an MLP, from the residual to the residual.

    Each token goes to the `experts_per_token` experts of the largest scores; what they give is added with the scores
    as weights. Scores are the softmax over all experts of the router's logits.
    """

    norm: Norm
    router: Linear
    """[experts, hidden_size]"""
    gate_up: tuple[Linear, ...]
    """Of each expert, rows: gate, then up. On a GPU they lie one after another in one tensor, as `down` does."""
    down: tuple[Linear, ...]
    experts_per_token: int
    normalise: bool
    """The chosen scores are divided by their sum."""


Op = AttentionInput | PagedAttention | ProjectResidual | MlpInput | Moe


@dataclass(frozen=True, slots=True)
class Program:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    embedding: Weight
    """[vocab_size, hidden_size]"""
    body: tuple[Op, ...]
    final_norm: Norm
    head: Linear
    """[vocab_size, hidden_size]; shares the embedding's storage where the two are tied."""
    embedding_scale: float = 1.0
    """What looked-up rows are multiplied by, rounded to the type they are computed in (Gemma)"""
    logits_softcap: float | None = None
    """Logits become softcap · tanh(logit / softcap) (Gemma 2)."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of distinct weight storage; a tied head counts once, RoPE tables do not."""
        sizes: dict[int, int] = {}

        def add(tensor: torch.Tensor | None) -> None:
            if tensor is not None:
                sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()

        def add_weight(weight: Weight) -> None:
            if isinstance(weight, Packed):
                sizes[weight.data.ctypes.data] = weight.data.nbytes
            for tensor in tensors_of(weight):
                add(tensor)

        add_weight(self.embedding)
        add(self.final_norm.weight)
        for op in self.body:
            if isinstance(op, (AttentionInput, MlpInput, ProjectResidual, Moe)) and op.norm is not None:
                add(op.norm.weight)
            if isinstance(op, AttentionInput):
                for norm in (op.q_norm, op.k_norm):
                    add(None if norm is None else norm.weight)
        for linear in self.linears():
            add(linear.bias)
            for segment in linear.segments:
                add_weight(segment)
        return sum(sizes.values())

    def linears(self) -> Iterator[Linear]:
        """Every projection in the order of the ops, the head last."""
        for op in self.body:
            match op:
                case AttentionInput(qkv=linear) | MlpInput(gate_up=linear) | ProjectResidual(weight=linear):
                    yield linear
                case Moe():
                    yield op.router
                    yield from op.gate_up
                    yield from op.down
                case PagedAttention():
                    pass
        yield self.head


class Ops(Protocol):
    """A backend. T tokens, R requests, D hidden size, H query heads, K key/value heads, E head size."""

    def prepare(self, program: Program, batch: RaggedBatch, kv_cache: KVCache) -> Any:
        """What a backend computes once a step for all layers; the two attention ops get it back."""
        ...

    def embed(self, token_ids: torch.Tensor, embedding: Weight) -> torch.Tensor:
        """[T] → [T, D]"""
        ...

    def attention_input(self, residual: torch.Tensor, op: AttentionInput, plan: Any) -> torch.Tensor:
        """[T, D] → q [T, H, E]; writes k and v to the cache."""
        ...

    def paged_attention(self, q: torch.Tensor, op: PagedAttention, plan: Any) -> torch.Tensor:
        """[T, H, E] → [T, H · E]; each token sees its request's tokens up to and including itself."""
        ...

    def project_residual(
        self, x: torch.Tensor, weight: Linear, residual: torch.Tensor, norm: Norm | None = None
    ) -> torch.Tensor:
        """[T, in] and [T, D] → [T, D]; may reuse `residual`'s storage."""
        ...

    def mlp_input(self, residual: torch.Tensor, op: MlpInput) -> torch.Tensor:
        """[T, D] → [T, intermediate_size]"""
        ...

    def moe(self, residual: torch.Tensor, op: Moe) -> torch.Tensor:
        """[T, D] → [T, D], added to `residual`, whose storage may be reused"""
        ...

    def logits(self, residual: torch.Tensor, norm: Norm, head: Linear, softcap: float | None = None) -> torch.Tensor:
        """[S, D] → [S, vocab_size] float32"""
        ...


class Executor(Protocol):
    """A program on a device with its KV cache: one forward pass a step, however the backend goes about it."""

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """Writes the step's keys and values, returns logits [S, vocab_size] float32 of `batch.logits_rows`."""
        ...


@dataclass(frozen=True, slots=True)
class EagerExecutor:
    """Walks the program's list one op at a time."""

    program: Program
    ops: Ops
    kv_cache: KVCache

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        return run(self.program, self.ops, batch, self.kv_cache)


def run(program: Program, ops: Ops, batch: RaggedBatch, kv_cache: KVCache) -> torch.Tensor:
    """One forward pass: writes the step's keys and values, returns logits [S, vocab_size] of `batch.logits_rows`."""
    plan = ops.prepare(program, batch, kv_cache)
    # An embedding that is kept as it is stored may have another type than the model computes in, which is its norms'.
    residual = ops.embed(batch.token_ids, program.embedding).to(program.final_norm.weight.dtype)
    if program.embedding_scale != 1.0:
        residual = residual * torch.tensor(program.embedding_scale, dtype=residual.dtype).item()
    x = residual
    for op in program.body:
        if isinstance(op, AttentionInput):
            x = ops.attention_input(residual, op, plan)
        elif isinstance(op, PagedAttention):
            x = ops.paged_attention(x, op, plan)
        elif isinstance(op, MlpInput):
            x = ops.mlp_input(residual, op)
        elif isinstance(op, Moe):
            residual = ops.moe(residual, op)
        else:
            residual = ops.project_residual(x, op.weight, residual, op.norm)
    return ops.logits(residual[batch.logits_rows], program.final_norm, program.head, program.logits_softcap)
