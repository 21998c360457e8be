"""Round-to-nearest quantisation of a matrix, without calibration: what `--quantization int8` and `int4` do at load.

Deterministic: a row depends on nothing but its own weights, and every sum has one order.
"""

from __future__ import annotations

from typing import Final

import torch

from sol.ops.weights import Int4Group, Int8Channel

GROUP_SIZE: Final = 32
"""The smallest group of the int4 kernels: without calibration, 64 loses a quarter to a half more (squared error)."""

_CHUNK_ELEMENTS: Final = 1 << 17
"""So many weights are quantised at once: what they need stays in a core's cache."""

_SHRINK: Final = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
"""The parts of a group's range that the search for its scale tries. Leaving out an outlier rounds the others finer."""


def int8_channel(weight: torch.Tensor) -> Int8Channel:
    """[rows, in_features] of any floating type → codes from -127 to 127, one scale a row.

    Raises ValueError for weights that are not finite.
    """
    rows, columns = weight.shape
    codes = torch.empty((rows, columns), dtype=torch.int8)
    scales = torch.empty(rows)
    step = max(1, _CHUNK_ELEMENTS // columns)
    for begin in range(0, rows, step):
        part = weight[begin : begin + step].float()
        largest = _checked(part.abs().amax(dim=1))
        scale = torch.where(largest > 0, largest / 127.0, 1.0)
        codes[begin : begin + step] = (part / scale.unsqueeze(1)).round_().clamp_(-127, 127).to(torch.int8)
        scales[begin : begin + step] = scale
    return Int8Channel(codes, scales)


def int4_group(weight: torch.Tensor, group_size: int) -> Int4Group:
    """[rows, in_features] of any floating type → 4-bit codes, a scale and a zero point for each `group_size` columns.

    Of several ranges for each group the one with the smallest squared error is taken, after its scale was fitted to
    the codes by least squares. Raises ValueError for weights that are not finite.
    """
    rows, columns = weight.shape
    groups = columns // group_size
    codes = torch.empty((rows, columns // 2), dtype=torch.uint8)
    scales, zeros = torch.empty((rows, groups)), torch.empty((rows, groups), dtype=torch.uint8)
    step = max(1, _CHUNK_ELEMENTS // columns)
    for begin in range(0, rows, step):
        part = weight[begin : begin + step].float().reshape(-1, group_size)
        found, scale, zero = _search(part)
        found = found.to(torch.uint8).view(-1, columns)
        codes[begin : begin + step] = found[:, 0::2] | (found[:, 1::2] << 4)
        scales[begin : begin + step] = scale.view(-1, groups)
        zeros[begin : begin + step] = zero.to(torch.uint8).view(-1, groups)
    return Int4Group(codes, scales, zeros, group_size)


def _search(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """float32 [groups, size] → codes [groups, size], scales [groups] and zero points [groups], all float32."""
    # Zero lies within the range, so that it can be met exactly and the zero point is a code.
    low, high = weights.amin(dim=1).clamp_(max=0), weights.amax(dim=1).clamp_(min=0)
    _checked(low)
    _checked(high)
    ranges = None
    for shrink in _SHRINK:
        scale = high * (shrink / 15) - low * (shrink / 15)
        scale = torch.where(scale > 0, scale, 1.0)
        zero = (low * -shrink / scale).round_().clamp_(0, 15)
        products, squares = _fit(weights, _steps(weights, scale, zero))
        # With the fitted scale the squared error is Σw² - (Σw·step)² / Σstep²: the least where this is the most.
        gain = torch.where(squares > 0, products * products / squares, 0.0)
        if ranges is None:
            ranges = gain, scale, zero
        else:
            better = gain > ranges[0]
            ranges = (
                torch.where(better, gain, ranges[0]),
                torch.where(better, scale, ranges[1]),
                torch.where(better, zero, ranges[2]),
            )
    assert ranges is not None
    _, scale, zero = ranges
    steps = _steps(weights, scale, zero)
    products, squares = _fit(weights, steps)
    scale = torch.where(squares > 0, products / squares, scale)
    _checked(scale)  # of finite weights near the largest float, sums are not
    return steps.add_(zero.unsqueeze(1)), scale, zero


def _steps(weights: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """Codes less the zero point, [groups, size]."""
    steps = (weights / scale.unsqueeze(1)).round_()
    return torch.clamp(steps, -zero.unsqueeze(1), 15 - zero.unsqueeze(1), out=steps)


def _fit(weights: torch.Tensor, steps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Σ weight · step and Σ step² of each group: their quotient is the scale that fits best."""
    return (weights * steps).sum(dim=1), (steps * steps).sum(dim=1)


def _checked(extremes: torch.Tensor) -> torch.Tensor:
    if not bool(torch.isfinite(extremes).all()):
        raise ValueError("it holds values that are not finite, or too large")
    return extremes
