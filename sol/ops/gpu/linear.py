"""Projections of few tokens: weights are read once, at the memory's speed, and everything around them is fused in.

The weights are the tall side of a matrix product whose other side is the tokens, padded to `BLOCK_T`. A program owns
`BLOCK_R` rows of the weights (and, with split-K, a part of their columns) and all tokens. What it computes for a token
does not depend on the other tokens, and the order of its additions is fixed by the configuration alone: with one
configuration for 1 to 16 tokens, a token's result has the same bits in a step of 1 and of 16.

With split-K the program that ends last adds up the parts, in their order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sol.ops.gpu.launch import DOT_PRECISION, Counters, has_large_tiles, pdl_options
from sol.ops.gpu.tuning import LARGEST_CLASS, LinearConfig, linear_config, measured_config
from sol.ops.program import Activation
from sol.ops.weights import Norm

STORE = tl.constexpr(0)
RESIDUAL = tl.constexpr(1)
GATE = tl.constexpr(2)
ROPE = tl.constexpr(3)
GATE_GELU = tl.constexpr(4)

MAX_TOKENS = 64
"""More are a matter of arithmetic, and of cuBLAS; but see `is_measured`."""


# Not specialised: one compiled kernel for all token counts of a class.
@triton.jit(do_not_specialize=["num_tokens"])
def _linear_kernel(
    x,
    w,
    out,
    bias,
    partials,
    counters,
    positions,
    slots,
    cos,
    sin,
    keys,
    values,
    gamma,
    scaled,
    squares,
    eps,
    num_tokens,
    stride_x,
    stride_w,
    stride_out,
    EPILOGUE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SQUARES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[t, r] = epilogue(Σ_k x[t, k] · w[r, k]); one program: `BLOCK_R` rows, all tokens, 1/`SPLIT_K` of the columns.

    GATE, GATE_GELU and ROPE combine two rows; a block then holds `BLOCK_R` / 2 pairs, the rows of each side by side.
    """
    GATED: tl.constexpr = EPILOGUE == GATE or EPILOGUE == GATE_GELU
    PAIRED: tl.constexpr = GATED or EPILOGUE == ROPE
    tile = tl.program_id(0)
    part = tl.program_id(1)
    j = tl.arange(0, BLOCK_R)
    if PAIRED:
        pair = tile * (BLOCK_R // 2) + j // 2
        if GATED:
            rows = pair + (j % 2) * (ROWS // 2)
        else:
            rows = (pair // HALF) * (2 * HALF) + pair % HALF + (j % 2) * HALF
        in_rows = pair < ROWS // 2
    else:
        rows = tile * BLOCK_R + j
        in_rows = rows < ROWS
    EVEN_ROWS: tl.constexpr = ROWS % BLOCK_R == 0
    EVEN_COLUMNS: tl.constexpr = COLUMNS % (BLOCK_K * SPLIT_K) == 0
    STEPS: tl.constexpr = (COLUMNS + BLOCK_K * SPLIT_K - 1) // (BLOCK_K * SPLIT_K)
    k = part * (STEPS * BLOCK_K) + tl.arange(0, BLOCK_K)
    w_rows = w + rows.to(tl.int64)[:, None] * stride_w
    if PDL:
        if EARLY:
            gdc_launch_dependents()
        gdc_wait()
        if not EARLY:
            gdc_launch_dependents()
    t = tl.arange(0, BLOCK_T)
    in_tokens = t < num_tokens
    x_columns = x + t.to(tl.int64)[None, :] * stride_x
    accumulator = tl.zeros((BLOCK_R, BLOCK_T), tl.float32)
    for _ in range(STEPS):
        if EVEN_COLUMNS:
            w_mask = in_rows[:, None]
            x_mask = in_tokens[None, :]
        else:
            w_mask = in_rows[:, None] & (k < COLUMNS)[None, :]
            x_mask = in_tokens[None, :] & (k < COLUMNS)[:, None]
        if EVEN_COLUMNS and EVEN_ROWS:
            w_tile = tl.load(w_rows + k[None, :], eviction_policy="evict_first")
        else:
            w_tile = tl.load(w_rows + k[None, :], mask=w_mask, other=0.0, eviction_policy="evict_first")
        x_tile = tl.load(x_columns + k[:, None], mask=x_mask, other=0.0)
        accumulator = tl.dot(w_tile, x_tile, accumulator, input_precision=DOT_PRECISION)
        k += BLOCK_K
    if SPLIT_K > 1:
        # The program of a block's rows that ends last adds up all parts, in their order.
        cells = j[:, None] * BLOCK_T + t[None, :]
        block = partials + tile.to(tl.int64) * (SPLIT_K * BLOCK_R * BLOCK_T)
        tl.store(block + part * (BLOCK_R * BLOCK_T) + cells, accumulator)
        tl.debug_barrier()
        if tl.atomic_add(counters + tile, 1, sem="acq_rel") != SPLIT_K - 1:
            return
        accumulator = tl.zeros((BLOCK_R, BLOCK_T), tl.float32)
        for s in range(SPLIT_K):
            accumulator += tl.load(block + s * (BLOCK_R * BLOCK_T) + cells, cache_modifier=".cg")
        tl.store(counters + tile, 0)
    if SQUARES > 0:
        # x has been multiplied by the norm's weight, and not yet divided by its root mean square.
        total = tl.zeros((BLOCK_T,), tl.float32)
        for first in range(0, SQUARES, 64):
            part_of = first + tl.arange(0, 64)
            cells = part_of[:, None] * BLOCK_T + t[None, :]
            total += tl.sum(tl.load(squares + cells, mask=(part_of < SQUARES)[:, None], other=0.0), 0)
        accumulator *= tl.rsqrt(total / COLUMNS + eps)[None, :]
    if HAS_BIAS:
        accumulator += tl.load(bias + rows, mask=in_rows, other=0.0).to(tl.float32)[:, None]
    if PAIRED:
        first, second = tl.split(tl.permute(tl.reshape(accumulator, (BLOCK_R // 2, 2, BLOCK_T)), (0, 2, 1)))
        p = tile * (BLOCK_R // 2) + tl.arange(0, BLOCK_R // 2)
        mask = (p < ROWS // 2)[:, None] & in_tokens[None, :]
        if GATED:
            h = gated(first, second, EPILOGUE == GATE_GELU)
            tl.store(out + t.to(tl.int64)[None, :] * stride_out + p[:, None], h.to(out.dtype.element_ty), mask=mask)
        else:
            write_rotated(
                first, second, p, t, mask, out, keys, values, positions, slots, cos, sin, HEADS, KV_HEADS, HALF
            )
    else:
        mask = in_rows[:, None] & in_tokens[None, :]
        cells = out + t.to(tl.int64)[None, :] * stride_out + rows[:, None]
        if EPILOGUE == RESIDUAL:
            accumulator += tl.load(cells, mask=mask, other=0.0).to(tl.float32)
        value = accumulator.to(out.dtype.element_ty)
        tl.store(cells, value, mask=mask)
        if gamma is not None:
            # The beginning of the norm that comes next: x times its weight, and this tile's part of Σx².
            wide = tl.where(mask, value.to(tl.float32), 0.0)
            weight = tl.load(gamma + rows, mask=in_rows, other=0.0).to(tl.float32)
            to = scaled + t.to(tl.int64)[None, :] * ROWS + rows[:, None]
            tl.store(to, (wide * weight[:, None]).to(out.dtype.element_ty), mask=mask)
            tl.store(squares + tile * BLOCK_T + t, tl.sum(wide * wide, 0))


@triton.jit
def gated(gate, up, GELU: tl.constexpr):
    """SiLU(gate) · up, or GELU(gate) · up in its approximation by tanh (arXiv:1606.08415); float32."""
    if GELU:
        # (1 + tanh(y)) / 2 = 1 / (1 + e^-2y)
        exponent = gate * (1.5957691216057308 + 0.07135481627159748 * gate * gate)
    else:
        exponent = gate
    return gate / (1.0 + tl.exp(-exponent)) * up


@triton.jit
def write_rotated(
    first,
    second,
    p,
    t,
    mask,
    q,
    keys,
    values,
    positions,
    slots,
    cos,
    sin,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Turns q and k by their positions' angles (arXiv:2104.09864), stores q, and k and v in the cache.

    first, second [pairs, tokens] float32: elements i and i + HALF of heads; p [pairs] counts pairs over all heads of
    q, k and v; t [tokens].
    """
    head = p // HALF
    i = p % HALF
    is_q = (head < HEADS)[:, None]
    is_v = (head >= HEADS + KV_HEADS)[:, None]
    in_tokens = mask & (t >= 0)[None, :]
    # Where a token is padding of the block, its position and slot are not read.
    position = tl.load(positions + t[None, :] + tl.zeros_like(head)[:, None], mask=in_tokens, other=0)
    slot = tl.load(slots + t[None, :] + tl.zeros_like(head)[:, None], mask=in_tokens, other=0)
    turned = in_tokens & (is_v == 0)
    c = tl.load(cos + position * HALF + i[:, None], mask=turned, other=1.0)
    s = tl.load(sin + position * HALF + i[:, None], mask=turned, other=0.0)
    low = (first * c - second * s).to(q.dtype.element_ty)
    high = (second * c + first * s).to(q.dtype.element_ty)
    to_q = q + t.to(tl.int64)[None, :] * (HEADS * 2 * HALF) + (head * (2 * HALF) + i)[:, None]
    tl.store(to_q, low, mask=mask & is_q)
    tl.store(to_q + HALF, high, mask=mask & is_q)
    is_k = (is_q == 0) & (is_v == 0)
    to_k = keys + slot * (KV_HEADS * 2 * HALF) + ((head - HEADS) * (2 * HALF) + i)[:, None]
    tl.store(to_k, low, mask=mask & is_k)
    tl.store(to_k + HALF, high, mask=mask & is_k)
    to_v = values + slot * (KV_HEADS * 2 * HALF) + ((head - HEADS - KV_HEADS) * (2 * HALF) + i)[:, None]
    tl.store(to_v, low, mask=mask & is_v)
    tl.store(to_v + HALF, high, mask=mask & is_v)


@dataclass(frozen=True, slots=True)
class Scaled:
    """A residual on the way through RMSNorm (arXiv:1910.07467): 1/rms commutes with the projection that follows."""

    x: torch.Tensor
    """[T, D]: residual · norm weight, rounded once, where the reference rounds residual/rms too"""
    squares: torch.Tensor
    """[tiles, token class] float32: parts of each token's Σ residual²"""
    norm: Norm


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    epilogue: tl.constexpr,
    config: LinearConfig | None,
    counters: Counters,
    *,
    bias: torch.Tensor | None,
    stride_out: int,
    rope: dict[str, Any] | None = None,
    heads: tuple[int, int, int] = (1, 1, 1),
    squares: torch.Tensor | None = None,
    norm: Norm | None = None,
    scaled: torch.Tensor | None = None,
) -> None:
    rows, columns = weight.shape
    tokens = x.shape[0]
    config = config or _config(x, rows, columns)
    tiles = triton.cdiv(rows, config.block_rows)
    partials = counting = None
    if config.split_k > 1:
        counting = counters.of(tiles)
        size = tiles * config.split_k * config.block_rows * config.block_tokens
        partials = torch.empty(size, dtype=torch.float32, device=x.device)
    tensors = dict.fromkeys(("positions", "slots", "cos", "sin", "keys", "values")) if rope is None else rope
    _linear_kernel[(tiles, config.split_k)](
        x,
        weight,
        out,
        bias,
        partials,
        counting,
        **tensors,
        gamma=None if norm is None or scaled is None else norm.weight,
        scaled=scaled,
        squares=squares,
        eps=0.0 if norm is None else norm.eps,
        num_tokens=tokens,
        stride_x=x.stride(0),
        stride_w=weight.stride(0),
        stride_out=stride_out,
        EPILOGUE=epilogue,
        ROWS=rows,
        COLUMNS=columns,
        HEADS=heads[0],
        KV_HEADS=heads[1],
        HALF=heads[2] // 2,
        HAS_BIAS=bias is not None,
        SQUARES=squares.shape[0] if squares is not None and scaled is None else 0,
        BLOCK_T=config.block_tokens,
        BLOCK_R=config.block_rows,
        BLOCK_K=config.block_k,
        SPLIT_K=config.split_k,
        EARLY=config.early,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **pdl_options(x.device),
    )


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    counters: Counters,
    *,
    bias: torch.Tensor | None = None,
    config: LinearConfig | None = None,
) -> None:
    """out = x · weightᵀ + bias. x [T, in], T ≤ 128; weight [rows, in], rows contiguous; out [T, rows]."""
    _launch(x, weight, out, STORE, config, counters, bias=bias, stride_out=out.stride(0))


def linear_residual(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    counters: Counters,
    *,
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
    config: LinearConfig | None = None,
) -> Scaled | None:
    """residual += x · weightᵀ + bias, in place; residual [T, rows]. With the norm that comes next: begins it."""
    rows, columns = weight.shape
    config = config or _config(x, rows, columns)
    begun = None
    if norm is not None:
        tiles = triton.cdiv(rows, config.block_rows)
        begun = Scaled(
            x=torch.empty(x.shape[0], rows, dtype=residual.dtype, device=x.device),
            squares=torch.empty(tiles, config.block_tokens, dtype=torch.float32, device=x.device),
            norm=norm,
        )
    _launch(
        x,
        weight,
        residual,
        RESIDUAL,
        config,
        counters,
        bias=bias,
        stride_out=residual.stride(0),
        norm=norm,
        scaled=None if begun is None else begun.x,
        squares=None if begun is None else begun.squares,
    )
    return begun


def is_measured(weight: torch.Tensor, tokens: int) -> bool:
    """Whether this kernel was measured to be the faster one for a step of so many tokens, more than `MAX_TOKENS`."""
    if tokens > LARGEST_CLASS:
        return False
    rows, columns = weight.shape
    large = has_large_tiles(weight.device)
    return measured_config(rows, columns, tokens, weight.element_size(), large) is not None


def _config(x: torch.Tensor, rows: int, columns: int) -> LinearConfig:
    return linear_config(rows, columns, x.shape[0], x.element_size(), has_large_tiles(x.device))


def _begun(x: torch.Tensor | Scaled) -> tuple[torch.Tensor, dict[str, Any]]:
    return (x, {}) if isinstance(x, torch.Tensor) else (x.x, {"squares": x.squares, "norm": x.norm})


def linear_gate_mul(
    x: torch.Tensor | Scaled,
    weight: torch.Tensor,
    out: torch.Tensor,
    counters: Counters,
    *,
    bias: torch.Tensor | None = None,
    activation: Activation = "silu",
    config: LinearConfig | None = None,
) -> None:
    """out = activation(gate) · up, where [gate; up] are the rows of x · weightᵀ + bias; out [T, rows / 2]."""
    x, norm = _begun(x)
    epilogue = GATE_GELU if activation == "gelu_tanh" else GATE
    _launch(x, weight, out, epilogue, config, counters, bias=bias, stride_out=out.stride(0), **norm)


def linear_rope(
    x: torch.Tensor | Scaled,
    weight: torch.Tensor,
    q: torch.Tensor,
    counters: Counters,
    *,
    heads: tuple[int, int, int],
    rope: dict[str, Any],
    bias: torch.Tensor | None = None,
    config: LinearConfig | None = None,
) -> None:
    """q, k, v = x · weightᵀ + bias; q and k rotated; q [T, H, E] written, k and v written to the cache.

    heads: query heads, key/value heads, head size. rope: tensors `positions`, `slots` [T] int64, `cos`, `sin`
    [positions, E / 2] float32, `keys`, `values` [blocks, block size, kv heads, E].
    """
    x, norm = _begun(x)
    _launch(x, weight, q, ROPE, config, counters, bias=bias, stride_out=0, rope=rope, heads=heads, **norm)
