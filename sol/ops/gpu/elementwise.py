"""The small steps around cuBLAS's products, one pass over the data each."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sol.ops.gpu.launch import pdl_options
from sol.ops.gpu.linear import gated, write_rotated
from sol.ops.program import Activation
from sol.ops.weights import Norm


@triton.jit
def _embed_kernel(token_ids, embedding, out, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.load(token_ids + token).to(tl.int64)
    value = tl.load(embedding + row * stride + column, mask=column < SIZE)
    tl.store(out + token.to(tl.int64) * SIZE + column, value, mask=column < SIZE)


@triton.jit
def _weighted(value, weight, mask, like, OFFSET: tl.constexpr):
    """A normed float32 value times the norm's weight, float32; `like` is a pointer to the type that values have.

    Roundings are those of Hugging Face, and so of the reference: without an offset, the value is rounded before it is
    multiplied by the weight; with one (Gemma), it is not.
    """
    scale = tl.load(weight, mask=mask, other=0.0).to(tl.float32)
    if OFFSET == 0.0:
        value = value.to(like.dtype.element_ty).to(tl.float32) * scale
    else:
        value *= scale + OFFSET
    return value


@triton.jit
def _rms_norm_kernel(
    x, weight, out, stride, eps,
    OFFSET: tl.constexpr, ADD: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`ADD`: to what `out` holds."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + token * stride + column, mask=column < SIZE, other=0.0).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
    value = _weighted(value, weight + column, column < SIZE, out, OFFSET)
    to = out + token * SIZE + column
    if ADD:
        value = value.to(out.dtype.element_ty).to(tl.float32) + tl.load(to, mask=column < SIZE, other=0.0)
    tl.store(to, value.to(out.dtype.element_ty), mask=column < SIZE)


@triton.jit
def _head_norm_kernel(
    qkv, q_weight, k_weight, stride, q_eps, k_eps,
    OFFSET: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    place = qkv + tl.program_id(0).to(tl.int64) * stride + head * SIZE + column
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if head < HEADS:
        weight, eps = q_weight + column, q_eps
    else:
        weight, eps = k_weight + column, k_eps
    value = tl.load(place, mask=column < SIZE, other=0.0).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
    value = _weighted(value, weight, column < SIZE, qkv, OFFSET)
    tl.store(place, value.to(qkv.dtype.element_ty), mask=column < SIZE)


@triton.jit
def _gate_mul_kernel(
    gate_up, out, GELU: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(gate_up + token * 2 * SIZE + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * SIZE + SIZE + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * SIZE + column, gated(gate, up, GELU).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _softcap_kernel(x, cap, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + i, mask=i < count, other=0.0)
    # tanh(y) = 1 - 2 / (e^2y + 1), right at both ends.
    tl.store(x + i, cap * (1.0 - 2.0 / (tl.exp(value * (2.0 / cap)) + 1.0)), mask=i < count)


@triton.jit
def _rope_kernel(
    qkv,
    q,
    positions,
    slots,
    cos,
    sin,
    keys,
    values,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    t = tl.program_id(0) + tl.arange(0, 1)
    p = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    PAIRS: tl.constexpr = (HEADS + 2 * KV_HEADS) * HALF
    mask = (p < PAIRS)[:, None] & (t >= 0)[None, :]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    element = ((p // HALF) * (2 * HALF) + p % HALF)[:, None]
    cells = qkv + t.to(tl.int64)[None, :] * (2 * PAIRS) + element
    first = tl.load(cells, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(cells + HALF, mask=mask, other=0.0).to(tl.float32)
    write_rotated(first, second, p, t, mask, q, keys, values, positions, slots, cos, sin, HEADS, KV_HEADS, HALF)


def embed(token_ids: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
    """[T] int64, [vocabulary, D] → [T, D]"""
    tokens, size = token_ids.shape[0], embedding.shape[1]
    out = torch.empty(tokens, size, dtype=embedding.dtype, device=embedding.device)
    block = min(1024, triton.next_power_of_2(size))
    _embed_kernel[(tokens, triton.cdiv(size, block))](
        token_ids, embedding, out, embedding.stride(0), SIZE=size, BLOCK=block, PDL=False
    )
    return out


def rms_norm(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """[T, D] → [T, D]"""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _rms_norm(x, norm, out, add=False)
    return out


def add_normed(x: torch.Tensor, norm: Norm, residual: torch.Tensor) -> None:
    """residual += norm(x), in place; both [T, D], `residual` contiguous."""
    _rms_norm(x, norm, residual, add=True)


def softcap(x: torch.Tensor, cap: float) -> None:
    """x becomes cap · tanh(x / cap), in place; contiguous float32."""
    block = 1024
    _softcap_kernel[(triton.cdiv(x.numel(), block),)](x, cap, x.numel(), BLOCK=block, **pdl_options(x.device))


def _rms_norm(x: torch.Tensor, norm: Norm, out: torch.Tensor, *, add: bool) -> None:
    tokens, size = x.shape
    block = triton.next_power_of_2(size)
    _rms_norm_kernel[(tokens,)](
        x, norm.weight, out, x.stride(0), norm.eps, OFFSET=norm.offset, ADD=add, SIZE=size, BLOCK=block,
        num_warps=max(1, min(16, block // 512)), **pdl_options(x.device),
    )  # fmt: skip


def head_norms(qkv: torch.Tensor, heads: tuple[int, int, int], q_norm: Norm, k_norm: Norm) -> None:
    """Norms each query and key head of qkv [T, all heads · E] in place; heads: query, key/value heads, E."""
    query_heads, kv_heads, size = heads
    assert q_norm.offset == k_norm.offset
    block = triton.next_power_of_2(size)
    _head_norm_kernel[(qkv.shape[0], query_heads + kv_heads)](
        qkv, q_norm.weight, k_norm.weight, qkv.stride(0), q_norm.eps, k_norm.eps, OFFSET=q_norm.offset,
        HEADS=query_heads, SIZE=size, BLOCK=block, num_warps=max(1, min(4, block // 128)), **pdl_options(qkv.device),
    )  # fmt: skip


def gate_mul(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """[T, gate then up] contiguous → activation(gate) · up [T, half as wide]"""
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    block = min(2048, triton.next_power_of_2(size))
    _gate_mul_kernel[(tokens, triton.cdiv(size, block))](
        gate_up, out, GELU=activation == "gelu_tanh", SIZE=size, BLOCK=block, num_warps=8 if block == 2048 else 4,
        **pdl_options(out.device),
    )  # fmt: skip
    return out


def rope(qkv: torch.Tensor, q: torch.Tensor, heads: tuple[int, int, int], tensors: dict[str, Any]) -> None:
    """qkv [T, all heads · E] contiguous → q [T, H, E] rotated; k, rotated, and v go to the cache.

    heads and tensors: as `linear_rope` takes them.
    """
    query_heads, kv_heads, size = heads
    pairs = (query_heads + 2 * kv_heads) * size // 2
    block = min(1024, triton.next_power_of_2(pairs))
    _rope_kernel[(qkv.shape[0], triton.cdiv(pairs, block))](
        qkv, q, **tensors, HEADS=query_heads, KV_HEADS=kv_heads, HALF=size // 2, BLOCK=block, num_warps=4,
        **pdl_options(q.device),
    )  # fmt: skip
