"""The bit layouts of AWQ, GPTQ and compressed-tensors, brought into `Int4Group` and `Int8Channel`. Codes stay exact.

Sources: AutoAWQ (awq/modules/linear/gemm.py), AutoGPTQ (qlinear_cuda_old.py), compressed-tensors
(compressors/pack_quantized).
"""

from __future__ import annotations

import math
from typing import Final

import torch

from sol.ops.weights import Int4Group

GROUP_SIZES: Final = (128, 64, 32)
"""Of the int4 kernels."""

_AWQ_NIBBLES: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which nibble of a word holds column 0, 1, … of its eight."""


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [rows, n] → uint8 [rows, n · 32 / bits], low bits first; `bits` is 4 or 8."""
    codes = words.contiguous().view(torch.uint8)
    if bits == 4:
        codes = torch.stack((codes & 0x0F, codes >> 4), dim=-1).flatten(1)
    return codes


def unpack_awq(words: torch.Tensor) -> torch.Tensor:
    """int32 [rows, n] → uint8 [rows, 8n], in AWQ's order of nibbles."""
    nibbles = unpack(words, 4)
    return nibbles.view(len(nibbles), -1, 8)[:, :, list(_AWQ_NIBBLES)].flatten(1)


def unpack_down(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [n, columns] with 32 / bits values above each other in a word → uint8 [columns, n · 32 / bits]."""
    return unpack(words.t(), bits)


def kernel_group_size(group_size: int | None, in_features: int) -> int | None:
    """The largest of the kernels' groups that groups of `group_size` (None: whole rows) consist of, if any."""
    common = math.gcd(group_size or in_features, in_features)
    return next((size for size in GROUP_SIZES if common % size == 0), None)


def int4_nbytes(rows: int, in_features: int, group_size: int) -> int:
    """Of an `Int4Group` with zero points."""
    return rows * (in_features // 2 + in_features // group_size * 5)


def int4_group(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    *,
    stored_group_size: int,
    group_size: int,
    perm: torch.Tensor | None = None,
) -> Int4Group:
    """Codes uint8 [rows, in_features], scales float32 and zeros uint8 [rows, stored groups] as an `Int4Group` with
    groups of `group_size`, which divides `stored_group_size` and in_features: scales are repeated."""
    in_features = codes.shape[1]
    if group_size != stored_group_size:
        source = torch.arange(in_features // group_size) * group_size // stored_group_size
        scales = scales[:, source]
        zeros = None if zeros is None else zeros[:, source]
    if zeros is not None and bool((zeros == 8).all()):
        zeros = None
    return Int4Group(
        codes=codes[:, 0::2] | (codes[:, 1::2] << 4),
        scales=scales.contiguous(),
        zeros=None if zeros is None else zeros.contiguous(),
        group_size=group_size,
        perm=perm,
    )
