"""The ops on a GPU: which kernels a projection of so many tokens takes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from sol.ops.batch import KVCache, RaggedBatch
from sol.ops.gpu import elementwise, experts, linear
from sol.ops.gpu.attention import FEW, AttentionInputs, attend
from sol.ops.gpu.batch import DeviceBatch
from sol.ops.gpu.launch import Counters
from sol.ops.program import AttentionInput, MlpInput, Moe, PagedAttention, Program, ProjectResidual
from sol.ops.weights import Dense, Linear, Norm, Weight

BEGIN_NORMS_TOKENS: Final = 16
"""Measured: with 32 and 64 tokens what this adds to the projections costs more than the kernel that it saves."""


@dataclass(frozen=True, slots=True)
class GpuPlan:
    attention: AttentionInputs
    keys: list[torch.Tensor]
    """Of each layer, [num_blocks, block_size, kv heads, head size]"""
    values: list[torch.Tensor]
    heads: tuple[int, int, int]
    """Query heads, key/value heads, head size"""


class GpuOps:
    """Triton kernels, and cuBLAS where a step has many tokens. For one stream: it holds a workspace.

    Takes a `RaggedBatch` (eager) or a `DeviceBatch` (eager or under graph capture: no op waits for the device, and
    none reads on the host what lies on it).

    In a step of at most `BEGIN_NORMS_TOKENS` a projection into the residual also multiplies by the weight of the norm
    that follows and gathers Σx², and the next projection does the rest; otherwise a norm is a kernel.
    `max_fused_tokens`: cuBLAS computes the projections of larger steps; for benchmarks.
    """

    def __init__(self, device: torch.device, *, max_fused_tokens: int = linear.MAX_TOKENS) -> None:
        self._norm_after: dict[int, Norm] = {}
        self._program: Program | None = None
        self._begun: tuple[torch.Tensor, linear.Scaled] | None = None
        self._max_fused_tokens = min(max_fused_tokens, linear.MAX_TOKENS)
        self._counters = Counters(device)

    def prepare(self, program: Program, batch: RaggedBatch | DeviceBatch, kv_cache: KVCache) -> GpuPlan:
        if program is not self._program:
            self._norm_after = _norms_after(program)
            self._program = program
        self._begun = None
        heads = (program.num_heads, program.num_kv_heads, program.head_dim)
        if isinstance(batch, RaggedBatch):
            few = max((length for length in batch.query_lens if length <= FEW), default=0)
            many = any(length > FEW for length in batch.query_lens)
            batch = _on_device(batch)
        else:
            few, many = min(batch.max_query_len, FEW), batch.max_query_len > FEW
        layers = [kv_cache.layer(index) for index in range(kv_cache.data.shape[0])]
        return GpuPlan(
            attention=AttentionInputs(batch, *heads, few_tokens=few, many=many, counters=self._counters),
            keys=[keys for keys, _ in layers],
            values=[values for _, values in layers],
            heads=heads,
        )

    def embed(self, token_ids: torch.Tensor, embedding: Weight) -> torch.Tensor:
        return elementwise.embed(token_ids, _matrix(embedding))

    def attention_input(self, residual: torch.Tensor, op: AttentionInput, plan: GpuPlan) -> torch.Tensor:
        heads, _, size = plan.heads
        batch = plan.attention.batch
        tensors = {
            "positions": batch.positions,
            "slots": batch.slot_mapping,
            "cos": op.rope.cos,
            "sin": op.rope.sin,
            "keys": plan.keys[op.layer],
            "values": plan.values[op.layer],
        }
        tokens = residual.shape[0]
        q = torch.empty(tokens, heads, size, dtype=residual.dtype, device=residual.device)
        # Norms of heads stand between projection and rotation.
        weight = self._fused(tokens, op.qkv) if op.q_norm is None else None
        if weight is not None:
            bias = op.qkv.bias
            x = self._normed(residual, op.norm)
            linear.linear_rope(x, weight, q, self._counters, heads=plan.heads, rope=tensors, bias=bias)
        else:
            qkv = self._linear(elementwise.rms_norm(residual, op.norm), op.qkv)
            if op.q_norm is not None and op.k_norm is not None:
                elementwise.head_norms(qkv, plan.heads, op.q_norm, op.k_norm)
            elementwise.rope(qkv, q, plan.heads, tensors)
        return q

    def paged_attention(self, q: torch.Tensor, op: PagedAttention, plan: GpuPlan) -> torch.Tensor:
        return attend(
            q,
            plan.keys[op.layer],
            plan.values[op.layer],
            plan.attention,
            scale=op.scale,
            window=op.window,
            softcap=op.softcap,
        )

    def project_residual(
        self, x: torch.Tensor, weight: Linear, residual: torch.Tensor, norm: Norm | None = None
    ) -> torch.Tensor:
        """In place: `residual` is changed and returned."""
        if norm is not None:
            self._begun = None
            elementwise.add_normed(self._linear(x, weight), norm, residual)
            return residual
        tokens = x.shape[0]
        start = 0
        for segment in weight.segments:
            matrix = _matrix(segment)
            part = slice(start, start + matrix.shape[0])
            target = residual[:, part]
            bias = None if weight.bias is None else weight.bias[part]
            if tokens <= self._max_fused_tokens:
                # float16 has no room for x · weight before it is divided by the root mean square.
                begin = tokens <= BEGIN_NORMS_TOKENS and len(weight.segments) == 1 and x.dtype != torch.float16
                next_norm = self._norm_after.get(id(weight)) if begin else None
                begun = linear.linear_residual(x, matrix, target, self._counters, bias=bias, norm=next_norm)
                self._begun = None if begun is None else (residual, begun)
            else:
                if bias is not None:
                    target += bias
                target.addmm_(x, matrix.t())
            start += matrix.shape[0]
        return residual

    def mlp_input(self, residual: torch.Tensor, op: MlpInput) -> torch.Tensor:
        tokens = residual.shape[0]
        weight = self._fused(tokens, op.gate_up)
        if weight is not None:
            h = torch.empty(tokens, weight.shape[0] // 2, dtype=residual.dtype, device=residual.device)
            x = self._normed(residual, op.norm)
            bias = op.gate_up.bias
            linear.linear_gate_mul(x, weight, h, self._counters, bias=bias, activation=op.activation)
            return h
        return elementwise.gate_mul(self._linear(elementwise.rms_norm(residual, op.norm), op.gate_up), op.activation)

    def moe(self, residual: torch.Tensor, op: Moe) -> torch.Tensor:
        """In place: `residual` is changed and returned."""
        tokens = residual.shape[0]
        self._begun = None
        x = elementwise.rms_norm(residual, op.norm)
        scores, chosen = self._linear(x, op.router).float().softmax(dim=-1).topk(op.experts_per_token, dim=-1)
        if op.normalise:
            scores /= scores.sum(dim=-1, keepdim=True)
        groups = experts.group(chosen, len(op.gate_up), 16 if tokens <= experts.FEW_TOKENS else 64)
        h = experts.gate_up(x, _stacked(op.gate_up), groups, scores)
        out = experts.down(h, _stacked(op.down), groups, scores)
        residual += out.view(tokens, op.experts_per_token, -1).sum(1).to(residual.dtype)
        return residual

    def logits(self, residual: torch.Tensor, norm: Norm, head: Linear, softcap: float | None = None) -> torch.Tensor:
        if residual.shape[0] == 0:
            rows = sum(_matrix(segment).shape[0] for segment in head.segments)
            return torch.empty(0, rows, dtype=torch.float32, device=residual.device)
        logits = self._linear(elementwise.rms_norm(residual, norm), head, dtype=torch.float32)
        if softcap is not None:
            elementwise.softcap(logits, softcap)
        return logits

    def _fused(self, tokens: int, weight: Linear) -> torch.Tensor | None:
        """The matrix, if what follows this projection is computed with it: in steps of at most 64 tokens, and in those
        of 65 to 128 where that was measured to be faster than cuBLAS and a kernel of its own."""
        if len(weight.segments) != 1:
            return None
        matrix = _matrix(weight.segments[0])
        if tokens <= self._max_fused_tokens:
            return matrix
        worth = self._max_fused_tokens == linear.MAX_TOKENS and linear.is_measured(matrix, tokens)
        return matrix if worth else None

    def _normed(self, residual: torch.Tensor, norm: Norm) -> torch.Tensor | linear.Scaled:
        """As far as the projection that made `residual` has brought it, else normed."""
        if self._begun is not None and self._begun[0] is residual and self._begun[1].norm is norm:
            return self._begun[1]
        return elementwise.rms_norm(residual, norm)

    def _linear(self, x: torch.Tensor, weight: Linear, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """x · weightᵀ + bias, in x's type or `dtype`."""
        tokens = x.shape[0]
        matrices = [_matrix(segment) for segment in weight.segments]
        fused = tokens <= self._max_fused_tokens
        if not fused and len(matrices) == 1 and weight.bias is None:
            if x.is_cuda and dtype is not None and dtype != x.dtype:
                # Not rounded to 16 bits on the way, and written once.
                return torch.mm(x, matrices[0].t(), out_dtype=dtype)
            return (x @ matrices[0].t()).to(dtype or x.dtype)
        ends = list(itertools.accumulate(matrix.shape[0] for matrix in matrices))
        out = torch.empty(tokens, ends[-1], dtype=dtype if fused and dtype else x.dtype, device=x.device)
        for matrix, end in zip(matrices, ends, strict=True):
            part = slice(end - matrix.shape[0], end)
            bias = None if weight.bias is None else weight.bias[part]
            if fused:
                linear.linear(x, matrix, out[:, part], self._counters, bias=bias)
            elif bias is not None:
                torch.addmm(bias, x, matrix.t(), out=out[:, part])
            else:
                torch.mm(x, matrix.t(), out=out[:, part])
        return out if dtype is None else out.to(dtype)


def _norms_after(program: Program) -> dict[int, Norm]:
    """By the id of a projection into the residual: the norm that its result goes through next, where it can begin it:
    not if it is itself normed first, nor if the norm's weights have an offset."""
    norms = {}
    for op, following in itertools.pairwise(program.body):
        if not isinstance(op, ProjectResidual) or op.norm is not None:
            continue
        if isinstance(following, (AttentionInput, MlpInput)) and following.norm.offset == 0.0:
            norms[id(op.weight)] = following.norm
    return norms


def _matrix(weight: Any) -> torch.Tensor:
    if not isinstance(weight, Dense):
        raise TypeError(f"a weight is {type(weight).__name__}; GPU kernels read Dense ones: dequantise it when loading")
    if weight.weight.stride(1) != 1:
        raise ValueError("a weight lies by columns; GPU kernels read rows: load it for the device it is used on")
    return weight.weight


def _stacked(linears: Sequence[Linear]) -> torch.Tensor:
    """[experts, rows, columns]: matrices that lie one after another, as one."""
    first, last = (_matrix(linear.segments[0]) for linear in (linears[0], linears[-1]))
    distance = (len(linears) - 1) * first.numel() * first.element_size()
    if last.data_ptr() - first.data_ptr() != distance or not first.is_contiguous():
        raise ValueError("experts lie apart; GPU kernels find one by its number: load them for the device")
    rows, columns = first.shape
    return first.as_strided((len(linears), rows, columns), (rows * columns, columns, 1))


def _on_device(batch: RaggedBatch) -> DeviceBatch:
    device = batch.token_ids.device
    starts = [0, *itertools.accumulate(batch.query_lens)]
    lengths = torch.tensor([*starts, *batch.seq_lens], dtype=torch.int32)
    if device.type == "cuda":
        lengths = lengths.pin_memory()
    lengths = lengths.to(device, non_blocking=True)
    return DeviceBatch(
        token_ids=batch.token_ids,
        positions=batch.positions,
        slot_mapping=batch.slot_mapping,
        block_table=batch.block_table.to(torch.int32),
        query_start_loc=lengths[: len(starts)],
        seq_lens=lengths[len(starts) :],
        logits_rows=batch.logits_rows,
        max_query_len=max(batch.query_lens),
        max_seq_len=max(batch.seq_lens),
    )
