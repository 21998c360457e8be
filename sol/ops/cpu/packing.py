"""From stored weights to packed ones, and the memory these lie in."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from sol.ops.cpu.native import ALIGNMENT, Format, Isa, Native
from sol.ops.weights import Dense, GGUFBlocks, Int4Group, Int8Channel, Packed, Stored

_DENSE: Final = {torch.float32: Format.F32, torch.float16: Format.F16, torch.bfloat16: Format.BF16}
_CHUNK: Final = 64 << 20
_HUGE_PAGES: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def format_of(stored: Stored) -> tuple[Format, int] | None:
    """The kernels' format and group size (0 where the format fixes it); None if they have none for it."""
    match stored:
        case Dense(weight=weight):
            return (_DENSE[weight.dtype], 0) if weight.dtype in _DENSE else None
        case GGUFBlocks(kind=kind):
            return (Format[kind], 0) if kind in Format.__members__ else None
        case Int8Channel():
            return Format.INT8, 0
        case Int4Group(group_size=group_size):
            return Format.INT4, group_size


class Arena:
    """Memory that packed weights share: address space taken in large pieces, on huge pages where the kernel grants
    them, committed when written. Freed when the last array that was taken from a piece is gone."""

    def __init__(self) -> None:
        self._piece: npt.NDArray[np.uint8] = np.empty(0, dtype=np.uint8)
        self._used = 0

    @property
    def huge_pages(self) -> bool:
        """Whether the kernel grants them to those who ask."""
        try:
            return "[never]" not in _HUGE_PAGES.read_text(encoding="ascii")
        except OSError:
            return False

    def take(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """[nbytes], 64-byte aligned, zero."""
        if self._used + nbytes > len(self._piece):
            size = max(_CHUNK, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
            piece = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared gets no huge pages
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with contextlib.suppress(OSError):  # a kernel without them
                    piece.madvise(mmap.MADV_HUGEPAGE)
            self._piece, self._used = np.frombuffer(piece, dtype=np.uint8), 0
        taken = self._piece[self._used : self._used + nbytes]
        self._used += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return taken


def pack(native: Native, isa: Isa, stored: Stored, arena: Arena) -> Packed:
    """Raises `NativeError` for scales that are not finite, or shapes that a format does not allow.

    `stored` has a format that the kernels know (`format_of`)."""
    known = format_of(stored)
    assert known is not None
    kind, group_size = known
    scales = zeros = perm = None
    if isinstance(stored, Dense):
        data, cols = stored.weight, stored.weight.shape[1]
        if data.dtype == torch.bfloat16:  # which numpy does not know; the bytes are all that counts
            data = data.contiguous().view(torch.int16)
    elif isinstance(stored, GGUFBlocks):
        data, cols = stored.data, stored.in_features
    elif isinstance(stored, Int8Channel):
        data, scales, cols = stored.codes, stored.scales, stored.codes.shape[1]
    else:
        data, scales, zeros, perm = stored.codes, stored.scales, stored.zeros, stored.perm
        cols = 2 * data.shape[1]
    rows = data.shape[0]
    out = arena.take(native.packed_nbytes(isa, kind, rows, cols, group_size))
    native.pack(isa, kind, rows, cols, group_size, _array(data), _array(scales), _array(zeros), out)
    return Packed(kind, rows, cols, group_size, out, _array(perm))


def _array(tensor: torch.Tensor | None) -> Any:
    return None if tensor is None else tensor.detach().contiguous().numpy()


def fingerprint(native: Native, isa: Isa) -> bytes:
    """What tells one layout of packed weights from another: the bytes that small matrices of every format become."""
    digest = hashlib.blake2b(digest_size=16)
    cols, rows = 256, 17
    pattern = (np.arange(rows * cols * 4, dtype=np.uint32) * 2654435761 >> 24).astype(np.uint8)
    row_nbytes = {
        Format.F32: cols * 4, Format.F16: cols * 2, Format.BF16: cols * 2, Format.Q4_0: 144, Format.Q4_1: 160,
        Format.Q5_0: 176, Format.Q5_1: 192, Format.Q8_0: 272, Format.Q4_K: 144, Format.Q5_K: 176, Format.Q6_K: 210,
        Format.INT8: cols, Format.INT4: cols // 2,
    }  # fmt: skip
    for kind, nbytes in row_nbytes.items():
        # The top bit of every exponent cleared: no floating-point number among them is infinite or not a number.
        data = pattern[: rows * nbytes].copy()
        data &= 0xBF
        groups = {Format.INT8: 1, Format.INT4: cols // 32}.get(kind, 0)
        scales = np.linspace(0.5, 2.0, rows * groups, dtype=np.float32) if groups else None
        zeros = np.bitwise_and(pattern[: rows * groups], np.uint8(15)) if kind == Format.INT4 else None
        group_size = 32 if kind == Format.INT4 else 0
        out = np.zeros(native.packed_nbytes(isa, kind, rows, cols, group_size), dtype=np.uint8)
        native.pack(isa, kind, rows, cols, group_size, data, scales, zeros, out)
        digest.update(bytes([kind]) + out.tobytes())
    return digest.digest()
