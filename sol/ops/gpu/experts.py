"""Mixtures of experts: pairs of tokens and experts, grouped by expert into tiles of fixed size, so that each tile
multiplies by one expert's weights.

Nothing waits for the device: how many pairs an expert has is known there alone, and launches are sized by what it can
be at most (tiles that stay empty end at once), so a step may be captured. A token's results do not depend on where in a
tile it stands, and are added up in the order of its scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sol.ops.gpu.launch import DOT_PRECISION, pdl_options
from sol.ops.gpu.linear import gated

FEW_TOKENS: Final = 64
"""Steps of more have larger tiles."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Pairs p = token · experts of a token + place, in tiles of `block`."""

    pairs: torch.Tensor
    """[tiles · block] int32; places that stay empty hold the number of pairs"""
    experts: torch.Tensor
    """[tiles] int32: whose a tile is"""
    block: int


def group(chosen: torch.Tensor, num_experts: int, block: int) -> Groups:
    """chosen [T, experts of a token] int64"""
    flat = chosen.flatten()
    device, pairs = flat.device, flat.shape[0]
    is_of = flat.unsqueeze(1) == torch.arange(num_experts, device=device)
    so_far = is_of.to(torch.int32).cumsum(0, dtype=torch.int32)
    tiles_of = (so_far[-1] + block - 1) // block
    ends = tiles_of.cumsum(0)
    rank = so_far.gather(1, flat.unsqueeze(1)).squeeze(1) - 1
    place = (ends - tiles_of)[flat] * block + rank
    tiles = pairs // block + min(pairs, num_experts)  # each expert has at most one that is not full
    order = torch.full((tiles * block,), pairs, dtype=torch.int32, device=device)
    order.scatter_(0, place, torch.arange(pairs, dtype=torch.int32, device=device))
    tile = torch.arange(tiles, device=device)
    experts = torch.searchsorted(ends, tile, right=True).clamp_(max=num_experts - 1)
    return Groups(pairs=order, experts=experts.to(torch.int32), block=block)


def gate_up(x: torch.Tensor, weight: torch.Tensor, groups: Groups, scores: torch.Tensor) -> torch.Tensor:
    """x [T, D], weight [experts, gate then up, D], scores [T, experts of a token] → SiLU(gate) · up [pairs, I]"""
    out = torch.empty(scores.numel(), weight.shape[1] // 2, dtype=x.dtype, device=x.device)
    _launch(x, weight, out, groups, scores, rows=out.shape[1], is_gated=True)
    return out


def down(h: torch.Tensor, weight: torch.Tensor, groups: Groups, scores: torch.Tensor) -> torch.Tensor:
    """h [pairs, I], weight [experts, D, I] → scores · h · weightᵀ [pairs, D] float32"""
    out = torch.empty(h.shape[0], weight.shape[1], dtype=torch.float32, device=h.device)
    _launch(h, weight, out, groups, scores, rows=weight.shape[1], is_gated=False)
    return out


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    groups: Groups,
    scores: torch.Tensor,
    *,
    rows: int,
    is_gated: bool,
) -> None:
    block_rows = min(64, triton.next_power_of_2(max(16, rows)))
    _experts_kernel[(triton.cdiv(rows, block_rows), groups.experts.shape[0])](
        x, weight, out, groups.pairs, groups.experts, scores, scores.numel(),
        PER_ROW=scores.shape[1] if is_gated else 1, ROWS=rows, COLUMNS=weight.shape[2], GATED=is_gated,
        BLOCK_T=groups.block, BLOCK_R=block_rows, BLOCK_K=64, num_warps=4, num_stages=3,
        **pdl_options(x.device),
    )  # fmt: skip


# Not specialised: one compiled kernel for all numbers of pairs.
@triton.jit(do_not_specialize=["num_pairs"])
def _experts_kernel(
    x, w, out, pairs, experts, scores, num_pairs,
    PER_ROW: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GATED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile's pairs times `BLOCK_R` rows of its expert; `PER_ROW`: pairs that share a row of x."""
    tile = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    pair = tl.load(pairs + tile * BLOCK_T + tl.arange(0, BLOCK_T))
    there = pair < num_pairs
    if tl.min(pair, 0) >= num_pairs:
        return
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    in_rows = rows < ROWS
    MATRIX: tl.constexpr = ROWS * COLUMNS * (2 if GATED else 1)
    w_rows = w + tl.load(experts + tile).to(tl.int64) * MATRIX + rows.to(tl.int64)[:, None] * COLUMNS
    x_rows = x + (pair // PER_ROW).to(tl.int64)[:, None] * COLUMNS
    first = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
    second = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
    for start in range(0, COLUMNS, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        in_columns = (k < COLUMNS)[None, :]
        x_tile = tl.load(x_rows + k[None, :], mask=there[:, None] & in_columns, other=0.0)
        w_tile = tl.load(w_rows + k[None, :], mask=in_rows[:, None] & in_columns, other=0.0)
        first = tl.dot(x_tile, tl.trans(w_tile), first, input_precision=DOT_PRECISION)
        if GATED:
            up_tile = tl.load(w_rows + ROWS * COLUMNS + k[None, :], mask=in_rows[:, None] & in_columns, other=0.0)
            second = tl.dot(x_tile, tl.trans(up_tile), second, input_precision=DOT_PRECISION)
    if GATED:
        value = gated(first, second, False)
    else:
        value = first * tl.load(scores + pair, mask=there, other=0.0)[:, None]
    cells = out + pair.to(tl.int64)[:, None] * ROWS + rows[None, :]
    tl.store(cells, value.to(out.dtype.element_ty), mask=there[:, None] & in_rows[None, :])
