"""The small steps around cuBLAS's products, one pass over the data each."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sol.ops.gpu.launch import pdl_options
from sol.ops.gpu.linear import write_rotated
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
def _rms_norm_kernel(x, weight, out, stride, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + token * stride + column, mask=column < SIZE, other=0.0).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
    # Hugging Face's order of roundings, which is the reference's.
    scale = tl.load(weight + column, mask=column < SIZE, other=0.0)
    value = value.to(out.dtype.element_ty).to(tl.float32) * scale.to(tl.float32)
    tl.store(out + token * SIZE + column, value.to(out.dtype.element_ty), mask=column < SIZE)


@triton.jit
def _head_norm_kernel(
    qkv, q_weight, k_weight, stride, q_eps, k_eps,
    HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    place = qkv + tl.program_id(0).to(tl.int64) * stride + head * SIZE + column
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if head < HEADS:
        scale, eps = tl.load(q_weight + column, mask=column < SIZE, other=0.0), q_eps
    else:
        scale, eps = tl.load(k_weight + column, mask=column < SIZE, other=0.0), k_eps
    value = tl.load(place, mask=column < SIZE, other=0.0).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
    value = value.to(qkv.dtype.element_ty).to(tl.float32) * scale.to(tl.float32)
    tl.store(place, value.to(qkv.dtype.element_ty), mask=column < SIZE)


@triton.jit
def _silu_mul_kernel(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(gate_up + token * 2 * SIZE + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * SIZE + SIZE + column, mask=mask, other=0.0).to(tl.float32)
    h = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + token * SIZE + column, h.to(out.dtype.element_ty), mask=mask)


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
    tokens, size = x.shape
    out = torch.empty(tokens, size, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(size)
    _rms_norm_kernel[(tokens,)](
        x, norm.weight, out, x.stride(0), norm.eps, SIZE=size, BLOCK=block,
        num_warps=max(1, min(16, block // 512)), **pdl_options(x.device),
    )  # fmt: skip
    return out


def head_norms(qkv: torch.Tensor, heads: tuple[int, int, int], q_norm: Norm, k_norm: Norm) -> None:
    """Norms each query and key head of qkv [T, all heads · E] in place; heads: query, key/value heads, E."""
    query_heads, kv_heads, size = heads
    block = triton.next_power_of_2(size)
    _head_norm_kernel[(qkv.shape[0], query_heads + kv_heads)](
        qkv, q_norm.weight, k_norm.weight, qkv.stride(0), q_norm.eps, k_norm.eps,
        HEADS=query_heads, SIZE=size, BLOCK=block, num_warps=max(1, min(4, block // 128)), **pdl_options(qkv.device),
    )  # fmt: skip


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[T, gate then up] contiguous → SiLU(gate) · up [T, half as wide]"""
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    block = min(2048, triton.next_power_of_2(size))
    _silu_mul_kernel[(tokens, triton.cdiv(size, block))](
        gate_up, out, SIZE=size, BLOCK=block, num_warps=8 if block == 2048 else 4, **pdl_options(out.device)
    )
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
