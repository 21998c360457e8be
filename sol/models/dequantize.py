"""GGUF's block formats to float32, in torch, on whatever device the bytes are.

The layouts and the order of operations are ggml's (`dequantize_row_*` in ggml-quants.c), so that the results are
equal bit by bit. Supported are the types of `sol.models.gguf.BLOCK_SIZES`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from sol.models.gguf import BLOCK_SIZES


def dequantize(data: torch.Tensor, kind: str) -> torch.Tensor:
    """`data`: uint8 [..., nbytes], whole blocks of type `kind` along the last dimension, contiguous.
    Returns float32 [..., elements]."""
    _, nbytes = BLOCK_SIZES[kind]
    blocks = data.reshape(-1, nbytes)
    return _FORMATS[kind](blocks).reshape(*data.shape[:-1], -1)


def _f16(bytes_: torch.Tensor) -> torch.Tensor:
    """uint8 [n, 2k] holding float16 → float32 [n, k]."""
    return bytes_.contiguous().view(torch.float16).to(torch.float32)


def _nibbles(bytes_: torch.Tensor) -> torch.Tensor:
    """uint8 [n, 16] → uint8 [n, 32]: the low halves, then the high halves."""
    return torch.cat((bytes_ & 0x0F, bytes_ >> 4), dim=1)


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


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    scale = _f16(blocks[:, :2])
    return scale * blocks[:, 2:].view(torch.int8).to(torch.float32)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    # 256 elements: 128 bytes of low nibbles, 64 of high bit pairs, 16 int8 scales of 16 elements each, one float16.
    # Each half of 128 elements takes 64 low and 32 high bytes; its quarters of 32 share the high bytes' bit pairs.
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = torch.cat((low & 0x0F, low >> 4), dim=2).reshape(-1, 8, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    high = torch.cat([(high >> shift) & 0x03 for shift in (0, 2, 4, 6)], dim=2).reshape(-1, 8, 32)
    quants = ((low | (high << 4)).to(torch.int8) - 32).reshape(-1, 16, 16).to(torch.float32)
    scales = _f16(blocks[:, 208:]) * blocks[:, 192:208].view(torch.int8).to(torch.float32)
    return scales[:, :, None] * quants


_FORMATS: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
    "Q6_K": _q6_k,
}
