"""The ops in plain torch, on any device: what every other backend is held to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch.nn import functional

from sol.ops.batch import KVCache, RaggedBatch
from sol.ops.dequantize import dequantize, dequantize_rows
from sol.ops.program import AttentionInput, MlpInput, Moe, PagedAttention, Program
from sol.ops.weights import Dense, Linear, Norm, Packed, Stored, Weight

GATHER_TOKENS: Final = 32768
"""Of how many tokens one attention call copies keys and values out of the cache, unless one request alone has more.
Requests that share a prefix copy it once each, so that the size of the cache bounds nothing."""


@dataclass(frozen=True, slots=True)
class _AttentionGroup:
    """Requests whose attention is one call: they have the same number of query tokens."""

    rows: slice | torch.Tensor
    """Their rows of T, request by request"""
    num_requests: int
    query_len: int
    kv_len: int
    """Padded: keys past a request's own length are masked"""
    slots: slice | torch.Tensor
    """Slots of the cache to read: a slice if they lie side by side, else block ids [requests · blocks]"""
    mask: torch.Tensor | None
    """[requests, 1, query tokens or 1, kv_len] bool, True where a query sees a key; None if it sees all"""
    positions: torch.Tensor
    """[requests, query tokens]: each query token's place in its request, for windows"""
    padding: torch.Tensor | None = None
    """Rows of the gathered keys and values that belong to nobody: set to zero, since a mask does not stop a NaN"""


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotations: dict[int, tuple[torch.Tensor, torch.Tensor]]
    """Of each of the program's tables, by its id: cosines and sines of the step's positions, [T, 1, head_dim / 2]"""
    slot_mapping: torch.Tensor
    layers: list[tuple[torch.Tensor, torch.Tensor]]
    """Keys and values of each layer, [num_blocks, block_size, kv heads, head size]"""
    groups: list[_AttentionGroup]


class ReferenceOps:
    """Stateless; safe to share. Results do not depend on what lies in cache slots that a request does not own."""

    def prepare(self, program: Program, batch: RaggedBatch, kv_cache: KVCache) -> ReferencePlan:
        dtype = program.final_norm.weight.dtype
        tables = {id(op.rope): op.rope for op in program.body if isinstance(op, AttentionInput)}
        return ReferencePlan(
            num_heads=program.num_heads,
            num_kv_heads=program.num_kv_heads,
            head_dim=program.head_dim,
            rotations={
                key: (
                    rope.cos[batch.positions].to(dtype).unsqueeze(1),
                    rope.sin[batch.positions].to(dtype).unsqueeze(1),
                )
                for key, rope in tables.items()
            },
            slot_mapping=batch.slot_mapping,
            layers=[kv_cache.layer(index) for index in range(kv_cache.data.shape[0])],
            groups=_attention_groups(batch, kv_cache),
        )

    def embed(self, token_ids: torch.Tensor, embedding: Weight) -> torch.Tensor:
        if isinstance(embedding, Dense):
            return functional.embedding(token_ids, embedding.weight)
        return dequantize_rows(_readable(embedding), token_ids)

    def attention_input(self, residual: torch.Tensor, op: AttentionInput, plan: ReferencePlan) -> torch.Tensor:
        heads, kv_heads = plan.num_heads, plan.num_kv_heads
        qkv = _linear(_rms_norm(residual, op.norm), op.qkv).view(-1, heads + 2 * kv_heads, plan.head_dim)
        qk = qkv[:, : heads + kv_heads]
        if op.q_norm is not None and op.k_norm is not None:
            qk = torch.cat([_rms_norm(qk[:, :heads], op.q_norm), _rms_norm(qk[:, heads:], op.k_norm)], dim=1)
        qk = _rotate(qk, *plan.rotations[id(op.rope)])
        keys, values = plan.layers[op.layer]
        keys.flatten(0, 1).index_copy_(0, plan.slot_mapping, qk[:, heads:])
        values.flatten(0, 1).index_copy_(0, plan.slot_mapping, qkv[:, heads + kv_heads :])
        return qk[:, :heads]

    def paged_attention(self, q: torch.Tensor, op: PagedAttention, plan: ReferencePlan) -> torch.Tensor:
        keys, values = plan.layers[op.layer]
        if len(plan.groups) == 1:  # the usual decode step: no gathering of rows
            return _attend(q, keys, values, plan.groups[0], op)
        out = torch.empty(q.shape[0], plan.num_heads * plan.head_dim, dtype=q.dtype, device=q.device)
        for group in plan.groups:
            out[group.rows] = _attend(q[group.rows], keys, values, group, op)
        return out

    def project_residual(
        self, x: torch.Tensor, weight: Linear, residual: torch.Tensor, norm: Norm | None = None
    ) -> torch.Tensor:
        if norm is not None:
            return residual + _rms_norm(_linear(x, weight), norm)
        if weight.bias is not None:
            residual = residual + weight.bias
        if len(weight.segments) == 1:
            return torch.addmm(residual, x, _matrix(weight.segments[0], x).t())
        return residual + torch.cat([functional.linear(x, _matrix(s, x)) for s in weight.segments], dim=-1)

    def mlp_input(self, residual: torch.Tensor, op: MlpInput) -> torch.Tensor:
        gate, up = _linear(_rms_norm(residual, op.norm), op.gate_up).chunk(2, dim=-1)
        if op.activation == "gelu_tanh":
            return functional.gelu(gate, approximate="tanh").mul_(up)
        return functional.silu(gate).mul_(up)

    def moe(self, residual: torch.Tensor, op: Moe) -> torch.Tensor:
        x = _rms_norm(residual, op.norm)
        scores, chosen = _linear(x, op.router).float().softmax(dim=-1).topk(op.experts_per_token, dim=-1)
        if op.normalise:
            scores = scores / scores.sum(dim=-1, keepdim=True)
        mixed = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for index, (gate_up, down) in enumerate(zip(op.gate_up, op.down, strict=True)):
            tokens, place = torch.where(chosen == index)
            if tokens.numel() == 0:
                continue
            gate, up = _linear(x[tokens], gate_up).chunk(2, dim=-1)
            out = _linear(functional.silu(gate).mul_(up), down)
            mixed.index_add_(0, tokens, out.float() * scores[tokens, place].unsqueeze(1))
        return residual + mixed.to(residual.dtype)

    def logits(self, residual: torch.Tensor, norm: Norm, head: Linear, softcap: float | None = None) -> torch.Tensor:
        logits = _linear(_rms_norm(residual, norm), head).float()
        return logits if softcap is None else torch.tanh(logits / softcap).mul_(softcap)


def _linear(x: torch.Tensor, linear: Linear) -> torch.Tensor:
    if len(linear.segments) == 1:
        return functional.linear(x, _matrix(linear.segments[0], x), linear.bias)
    out = torch.cat([functional.linear(x, _matrix(s, x)) for s in linear.segments], dim=-1)
    return out if linear.bias is None else out + linear.bias


def _matrix(weight: Weight, x: torch.Tensor) -> torch.Tensor:
    """[rows, in_features] in the type of `x`: a quantised weight is the matrix that it stands for."""
    return dequantize(_readable(weight), x.dtype)


def _readable(weight: Weight) -> Stored:
    if isinstance(weight, Packed):
        raise TypeError("a packed weight is in the layout of the CPU kernels, which these ops do not read")
    return weight


def _rms_norm(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    if x.dtype == torch.float32 and norm.offset == 0.0:
        return functional.rms_norm(x, (x.shape[-1],), norm.weight, norm.eps)
    if norm.offset != 0.0:
        weight = norm.weight.float() + norm.offset
        return functional.rms_norm(x.float(), (x.shape[-1],), weight, norm.eps).to(x.dtype)
    # Hugging Face's order of roundings: normalise in float32, round, then multiply by the weight.
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
    return norm.weight * wide.to(x.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """[T, heads, E] → the same, each pair (i, i + E/2) turned by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out_first, out_second = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin)
    return out


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: _AttentionGroup, op: PagedAttention
) -> torch.Tensor:
    """[requests · query_len, H, E] → [requests · query_len, H · E]

    One query token: the query heads that share a key head stand where query tokens would, so keys are read once.
    Several: keys and values are expanded (not copied) over those heads.
    """
    requests, query_len, kv_len = group.num_requests, group.query_len, group.kv_len
    heads, size = q.shape[1:]
    kv_heads = keys.shape[2]
    if isinstance(group.slots, slice):
        k, v = keys.flatten(0, 1)[group.slots], values.flatten(0, 1)[group.slots]
    else:
        k, v = keys.index_select(0, group.slots), values.index_select(0, group.slots)
        if group.padding is not None:
            k.flatten(0, 1).index_fill_(0, group.padding, 0.0)
            v.flatten(0, 1).index_fill_(0, group.padding, 0.0)
    k = k.reshape(requests, -1, kv_heads, size)[:, :kv_len].transpose(1, 2)
    v = v.reshape(requests, -1, kv_heads, size)[:, :kv_len].transpose(1, 2)
    mask = group.mask if op.window is None else _within_window(group, op.window)
    if query_len == 1:
        q = q.reshape(requests, kv_heads, heads // kv_heads, size)
        out = _softmax_product(q, k, v, op, mask)
        return out.reshape(requests, heads * size)
    q = q.reshape(query_len, heads, size).transpose(0, 1).view(kv_heads, heads // kv_heads, query_len, size)
    shape = (kv_heads, heads // kv_heads, kv_len, size)
    k, v = k.transpose(0, 1).expand(shape), v.transpose(0, 1).expand(shape)
    if mask is None and op.softcap is not None:
        mask = torch.ones(query_len, kv_len, dtype=torch.bool, device=q.device).tril()
    out = _softmax_product(q, k, v, op, mask, causal=mask is None)
    return out.reshape(heads, query_len, size).transpose(0, 1).reshape(query_len, heads * size)


def _within_window(group: _AttentionGroup, window: int) -> torch.Tensor:
    """[requests, 1, query tokens, kv_len]: the group's mask, and no key `window` or more tokens before its query."""
    keys = torch.arange(group.kv_len, device=group.positions.device)
    queries = group.positions[:, None, :, None]
    return (keys <= queries) & (keys > queries - window)


def _softmax_product(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    op: PagedAttention,
    mask: torch.Tensor | None,
    *,
    causal: bool = False,
) -> torch.Tensor:
    """Attention proper: [..., query tokens, E] like `q`."""
    if op.softcap is None:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=op.scale)
    scores = torch.matmul(q, k.transpose(-1, -2)) * op.scale
    scores = torch.tanh(scores / op.softcap) * op.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return torch.matmul(scores.softmax(dim=-1, dtype=torch.float32).to(q.dtype), v)


def _attention_groups(batch: RaggedBatch, kv_cache: KVCache) -> list[_AttentionGroup]:
    """One group for each request with several query tokens, and one or more for each size class of decoding requests.

    Decoding requests share a call with others of at most twice their length (classes are powers of two in blocks),
    so padding at most doubles what is read, and with no more of them than `GATHER_TOKENS` allows.
    """
    device = batch.token_ids.device
    block_size = kv_cache.block_size
    decoding: dict[int, list[tuple[int, int]]] = {}
    groups = []
    start = 0
    for request, (query_len, seq_len) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
        blocks = -(-seq_len // block_size)
        if query_len == 1:
            decoding.setdefault((blocks - 1).bit_length(), []).append((request, start))
        else:
            mask = None
            if query_len < seq_len:
                keys = torch.arange(seq_len, device=device)
                queries = torch.arange(seq_len - query_len, seq_len, device=device)
                mask = (keys <= queries.unsqueeze(1))[None, None]
            groups.append(
                _AttentionGroup(
                    rows=slice(start, start + query_len),
                    num_requests=1,
                    query_len=query_len,
                    kv_len=seq_len,
                    slots=_side_by_side(batch.block_table[request, :blocks], block_size),
                    mask=mask,
                    positions=torch.arange(seq_len - query_len, seq_len, device=device).unsqueeze(0),
                )
            )
        start += query_len
    for members in _calls(decoding, block_size):
        requests = torch.tensor([request for request, _ in members], device=device)
        lengths = [batch.seq_lens[request] for request, _ in members]
        kv_len = max(lengths)
        table = batch.block_table[requests, : -(-kv_len // block_size)]
        mask = padding = None
        ends = torch.tensor(lengths, device=device)
        if min(lengths) < kv_len:
            seen = torch.arange(table.shape[1] * block_size, device=device) < ends.unsqueeze(1)
            padding = torch.nonzero(~seen.flatten()).flatten()
            mask = seen[:, None, None, :kv_len]
        groups.append(
            _AttentionGroup(
                rows=torch.tensor([row for _, row in members], device=device),
                num_requests=len(members),
                query_len=1,
                kv_len=kv_len,
                slots=_side_by_side(table[0], block_size) if len(members) == 1 else table.flatten(),
                mask=mask,
                positions=ends.unsqueeze(1) - 1,
                padding=padding,
            )
        )
    return groups


def _calls(decoding: dict[int, list[tuple[int, int]]], block_size: int) -> list[list[tuple[int, int]]]:
    """Size classes, by the logarithm of their most blocks, cut so that a call gathers at most `GATHER_TOKENS`."""
    calls = []
    for size_class, members in decoding.items():
        most = max(1, GATHER_TOKENS // (block_size << size_class))
        calls += [members[start : start + most] for start in range(0, len(members), most)]
    return calls


def _side_by_side(blocks: torch.Tensor, block_size: int) -> slice | torch.Tensor:
    """One request's blocks as a slice of slots where their ids are consecutive (no copy is made), else the ids."""
    first, count = int(blocks[0]), blocks.shape[0]
    if count == 1 or bool((blocks[1:] - blocks[:-1] == 1).all()):
        return slice(first * block_size, (first + count) * block_size)
    return blocks
