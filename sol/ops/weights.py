"""What an op multiplies by. An op dispatches on the type of a weight, so a quantised model is the same model."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Dense:
    """`weight` [rows, in_features] in the model's own floating-point type; either side may be the contiguous one."""

    weight: torch.Tensor


@dataclass(frozen=True, slots=True)
class Linear:
    """A projection: row segments, each with a format of its own, that together give [rows, in_features].

    A fused projection (q, k, v or gate, up) is one `Linear`. Real files mix formats within one, which is why it is a
    sequence; neighbours of the same format are one segment.
    """

    segments: tuple[Dense, ...]
    bias: torch.Tensor | None = None
    """[rows]"""


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm (arXiv:1910.07467): x / sqrt(mean(x²) + eps) · weight, computed in float32."""

    weight: torch.Tensor
    """[hidden_size]"""
    eps: float


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding (arXiv:2104.09864) in Hugging Face's layout: element i pairs with i + head_dim / 2."""

    cos: torch.Tensor
    """[max_positions, head_dim / 2] float32"""
    sin: torch.Tensor
