"""What an op multiplies by. An op dispatches on the type of a weight, so a quantised model is the same model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, slots=True)
class Dense:
    """`weight` [rows, in_features] in the model's own floating-point type; either side may be the contiguous one."""

    weight: torch.Tensor


@dataclass(frozen=True, slots=True)
class GGUFBlocks:
    """ggml's block formats as they lie in a file (ggml-quants.c)."""

    kind: str
    """ggml's name of the type: Q4_1, Q8_0, Q6_K …"""
    data: torch.Tensor
    """[rows, bytes of a row] uint8, every row whole blocks; may share memory with the file"""
    in_features: int


@dataclass(frozen=True, slots=True)
class Int8Channel:
    """One scale a row: w = codes · scales."""

    codes: torch.Tensor
    """[rows, in_features] int8"""
    scales: torch.Tensor
    """[rows] float32"""


@dataclass(frozen=True, slots=True)
class Int4Group:
    """One scale and zero point for each `group_size` neighbours in a row: w = (code - zero) · scale.

    What AWQ, GPTQ and compressed-tensors' pack-quantized checkpoints hold, in one layout.
    """

    codes: torch.Tensor
    """[rows, in_features / 2] uint8; column 2i is the low half of byte i"""
    scales: torch.Tensor
    """[rows, in_features / group_size] float32"""
    zeros: torch.Tensor | None
    """[rows, in_features / group_size] uint8, 0 to 15; None: 8 throughout"""
    group_size: int
    perm: torch.Tensor | None = None
    """[in_features] int32: stored column i multiplies x[perm[i]] (GPTQ's act-order, columns sorted by group)"""


Stored = Dense | GGUFBlocks | Int8Channel | Int4Group
"""A matrix as a checkpoint gives it."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A matrix in the layout of the CPU kernels (`sol.ops.cpu`); nothing else reads it."""

    format: int
    """One of `sol.ops.cpu.native.Format`"""
    rows: int
    in_features: int
    group_size: int
    """Of INT4, else 0"""
    data: npt.NDArray[np.uint8]
    """[bytes], 64-byte aligned; may be a read-only view of a file"""
    perm: npt.NDArray[np.int32] | None = None
    """[in_features]: packed column i multiplies x[perm[i]]"""


Weight = Stored | Packed


def tensors_of(weight: Weight) -> tuple[torch.Tensor, ...]:
    """The tensors a weight consists of."""
    match weight:
        case Dense(weight=matrix):
            return (matrix,)
        case GGUFBlocks(data=data):
            return (data,)
        case Int8Channel(codes=codes, scales=scales):
            return (codes, scales)
        case Int4Group(codes=codes, scales=scales, zeros=zeros, perm=perm):
            return tuple(tensor for tensor in (codes, scales, zeros, perm) if tensor is not None)
        case Packed():
            return ()


@dataclass(frozen=True, slots=True)
class Linear:
    """A projection: row segments, each with a format of its own, that together give [rows, in_features].

    A fused projection (q, k, v or gate, up) is one `Linear`. Real files mix formats within one, which is why it is a
    sequence; neighbours of the same format are one segment.
    """

    segments: tuple[Weight, ...]
    bias: torch.Tensor | None = None
    """[rows]"""


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm (arXiv:1910.07467): x / sqrt(mean(x²) + eps) · (weight + offset), computed in float32."""

    weight: torch.Tensor
    """[hidden_size]"""
    eps: float
    offset: float = 0.0
    """1 where weights are stored as differences from 1 (Gemma). Then the result is rounded once, at the end; without an
    offset, before it is multiplied by the weight, too. Both are as Hugging Face does it."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding (arXiv:2104.09864) in Hugging Face's layout: element i pairs with i + head_dim / 2."""

    cos: torch.Tensor
    """[max_positions, head_dim / 2] float32"""
    sin: torch.Tensor
