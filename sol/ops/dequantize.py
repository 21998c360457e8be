"""Every stored weight type to floating point, in torch, on whatever device the bytes are.

This is the specification of those types: the reference ops multiply by what comes out, and a backend that computes on
the stored codes is held to it. For ggml's block formats the layouts and the order of operations are ggml's
(`dequantize_row_*` in ggml-quants.c), so that the results are equal bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from sol.ops.weights import Dense, GGUFBlocks, Int4Group, Int8Channel, Stored

_CHUNK_ELEMENTS: Final = 1 << 18
"""So many elements are dequantised at once: their float32 copies stay in a core's cache."""


def dequantize(stored: Stored, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A stored matrix as `dtype` [rows, in_features], columns in the model's order (any `perm` is undone).

    Values are computed in float32 and rounded to `dtype` once. A `Dense` weight of that type comes back as it is.
    """
    if isinstance(stored, Dense):
        return stored.weight.to(dtype)
    rows, columns, device = _extent(stored)
    out = torch.empty((rows, columns), dtype=dtype, device=device)
    step = max(1, _CHUNK_ELEMENTS // columns)
    for begin in range(0, rows, step):
        out[begin : begin + step] = _rows(stored, slice(begin, begin + step))
    return out


def dequantize_rows(stored: Stored, ids: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Chosen rows of a stored matrix: ids int64 [n] → `dtype` [n, in_features]. What an embedding reads."""
    if isinstance(stored, Dense):
        return stored.weight[ids].to(dtype)
    return _rows(stored, ids).to(dtype)


def dequantize_blocks(data: torch.Tensor, kind: str) -> torch.Tensor:
    """`data`: uint8 [..., nbytes], whole blocks of ggml's type `kind` along the last dimension, contiguous.

    Returns float32 [..., elements]. KeyError for a type that is not in `GGML_BLOCKS`.
    """
    blocks = data.reshape(-1, GGML_BLOCKS[kind][1])
    return _FORMATS[kind](blocks).reshape(*data.shape[:-1], -1)


def _extent(stored: GGUFBlocks | Int8Channel | Int4Group) -> tuple[int, int, torch.device]:
    if isinstance(stored, GGUFBlocks):
        return stored.data.shape[0], stored.in_features, stored.data.device
    columns = stored.codes.shape[1] * (2 if isinstance(stored, Int4Group) else 1)
    return stored.codes.shape[0], columns, stored.codes.device


def _rows(stored: GGUFBlocks | Int8Channel | Int4Group, which: slice | torch.Tensor) -> torch.Tensor:
    """float32 [chosen rows, in_features]"""
    if isinstance(stored, GGUFBlocks):
        return dequantize_blocks(stored.data[which].contiguous(), stored.kind)
    if isinstance(stored, Int8Channel):
        return stored.codes[which].to(torch.float32) * stored.scales[which].unsqueeze(1)
    packed = stored.codes[which]
    codes = torch.stack((packed & 0x0F, packed >> 4), dim=-1).reshape(len(packed), -1, stored.group_size)
    # Code minus zero point is a small whole number, exact in int8 and in float32: one rounding remains, the product's.
    zeros = 8 if stored.zeros is None else stored.zeros[which].to(torch.int8).unsqueeze(2)
    values = ((codes.to(torch.int8) - zeros).to(torch.float32) * stored.scales[which].unsqueeze(2)).flatten(1)
    if stored.perm is None:
        return values
    out = torch.empty_like(values)
    out[:, stored.perm.long()] = values
    return out


# --- ggml's formats


def _f16(bytes_: torch.Tensor) -> torch.Tensor:
    """uint8 [n, 2k] holding float16 → float32 [n, k]."""
    return bytes_.contiguous().view(torch.float16).to(torch.float32)


def _nibbles(bytes_: torch.Tensor) -> torch.Tensor:
    """uint8 [n, 16] → uint8 [n, 32]: the low halves, then the high halves."""
    return torch.cat((bytes_ & 0x0F, bytes_ >> 4), dim=1)


def _shifted(bytes_: torch.Tensor, width: int, shifts: tuple[int, ...], mask: int) -> torch.Tensor:
    """uint8 [n, k · width] → [n, k, len(shifts) · width]: each run of `width` bytes once for each shift, masked."""
    runs = bytes_.reshape(len(bytes_), -1, width)
    return torch.cat([(runs >> shift) & mask for shift in shifts], dim=2)


def _fifth_bits(bytes_: torch.Tensor) -> torch.Tensor:
    """uint8 [n, 4] → uint8 [n, 32]: bit i of the 32-bit word, moved to bit 4."""
    positions = torch.arange(8, dtype=torch.uint8, device=bytes_.device)
    return (((bytes_.unsqueeze(2) >> positions) & 1) << 4).flatten(1)


def _f32(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.view(torch.float32)


def _bf16(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.view(torch.bfloat16).to(torch.float32)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    scale = _f16(blocks[:, :2])
    return scale * (_nibbles(blocks[:, 2:]).to(torch.int8) - 8).to(torch.float32)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    scale, minimum = _f16(blocks[:, :4]).unbind(dim=1)
    return scale[:, None] * _nibbles(blocks[:, 4:]).to(torch.float32) + minimum[:, None]


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    scale = _f16(blocks[:, :2])
    codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return scale * (codes.to(torch.int8) - 16).to(torch.float32)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    scale, minimum = _f16(blocks[:, :4]).unbind(dim=1)
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return scale[:, None] * codes.to(torch.float32) + minimum[:, None]


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    scale = _f16(blocks[:, :2])
    return scale * blocks[:, 2:].view(torch.int8).to(torch.float32)


# The k-quants: super-blocks of 256 elements, whose sub-blocks have scales that are themselves quantised.


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    # 16 bytes of scale and minimum (four bits each, 16 elements each), 64 of bit pairs, two float16.
    packed = blocks[:, :16]
    scale, minimum = _f16(blocks[:, 80:84]).unbind(dim=1)
    scales = scale[:, None] * (packed & 0x0F).to(torch.float32)
    minima = minimum[:, None] * (packed >> 4).to(torch.float32)
    codes = _shifted(blocks[:, 16:80], 32, (0, 2, 4, 6), 3).reshape(-1, 16, 16).to(torch.float32)
    return scales[:, :, None] * codes - minima[:, :, None]


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    # 32 bytes of third bits, 64 of bit pairs, 12 of six-bit scales (16 elements each), one float16.
    packed = blocks[:, 96:108]
    low, high = _shifted(packed[:, :8], 8, (0, 4), 0x0F), _shifted(packed[:, 8:], 4, (0, 2, 4, 6), 0x03)
    scales = ((low | (high << 4)).flatten(1).to(torch.int8) - 32).to(torch.float32)
    pairs = _shifted(blocks[:, 32:96], 32, (0, 2, 4, 6), 3).reshape(-1, 16, 16)
    third = _shifted(blocks[:, :32], 32, tuple(range(8)), 1).reshape(-1, 16, 16)
    # The third bit says that nothing is to be subtracted.
    codes = (pairs.to(torch.int8) - ((third ^ 1) << 2).to(torch.int8)).to(torch.float32)
    return (_f16(blocks[:, 108:]) * scales)[:, :, None] * codes


def _scales_and_minima(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What begins a Q4_K or Q5_K super-block → float32 [n, 8, 1] each, of 32 elements.

    Two float16, then twelve bytes with eight six-bit scales and eight six-bit minima: of the first four the whole
    value lies in the low six bits of bytes 0 to 3 (scales) and 4 to 7 (minima); of the last four the low four bits
    lie in bytes 8 to 11, and the high two on top of the first four.
    """
    scale, minimum = _f16(blocks[:, :4]).unbind(dim=1)
    first, second, third = blocks[:, 4:16].reshape(-1, 3, 4).unbind(dim=1)
    scales = torch.cat((first & 0x3F, (third & 0x0F) | ((first >> 2) & 0x30)), dim=1)
    minima = torch.cat((second & 0x3F, (third >> 4) | ((second >> 2) & 0x30)), dim=1)
    return (
        (scale[:, None] * scales.to(torch.float32)).unsqueeze(2),
        (minimum[:, None] * minima.to(torch.float32)).unsqueeze(2),
    )


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, minima = _scales_and_minima(blocks)
    codes = _shifted(blocks[:, 16:], 32, (0, 4), 0x0F).reshape(-1, 8, 32)
    return scales * codes.to(torch.float32) - minima


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, minima = _scales_and_minima(blocks)
    low = _shifted(blocks[:, 48:], 32, (0, 4), 0x0F).reshape(-1, 8, 32)
    fifth = _shifted(blocks[:, 16:48], 32, tuple(range(8)), 1).reshape(-1, 8, 32)
    return scales * (low | (fifth << 4)).to(torch.float32) - minima


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    # 128 bytes of low nibbles, 64 of high bit pairs, 16 int8 scales of 16 elements each, one float16.
    # Each half of 128 elements takes 64 low and 32 high bytes; its quarters of 32 share the high bytes' bit pairs.
    low = _shifted(blocks[:, :128], 64, (0, 4), 0x0F).reshape(-1, 8, 32)
    high = _shifted(blocks[:, 128:192], 32, (0, 2, 4, 6), 0x03).reshape(-1, 8, 32)
    quants = ((low | (high << 4)).to(torch.int8) - 32).reshape(-1, 16, 16).to(torch.float32)
    scales = _f16(blocks[:, 208:]) * blocks[:, 192:208].view(torch.int8).to(torch.float32)
    return scales[:, :, None] * quants


GGML_BLOCKS: Final[dict[str, tuple[int, int]]] = {
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2),
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34),
    "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
}  # fmt: skip
"""Of every ggml type that can be dequantised: elements in a block, bytes in a block."""

_FORMATS: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
