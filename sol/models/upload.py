"""From a file's pages to a GPU's memory, reading and sending at the same time.

A plain copy of memory-mapped weights reads a page, sends it, reads the next, with one thread. Here torch's threads
read a piece into pinned memory while the piece before is on its way.
"""

from __future__ import annotations

from typing import Final

import torch

_PIECE: Final = 32 << 20
"""Bytes: long enough for the bus to be at its full speed, short enough that two threads share one early."""
_PIECES: Final = 3


class Uploader:
    """Copies tensors to one device, in order, on its current stream. On a CPU it is for tests."""

    def __init__(self, device: torch.device, piece: int = _PIECE) -> None:
        self._device = device
        pinned = device.type == "cuda"
        self._pieces = [torch.empty(piece, dtype=torch.uint8, pin_memory=pinned) for _ in range(_PIECES)]
        self._sent = [torch.Event(device) if pinned else None for _ in range(_PIECES)]
        self._next = 0

    def upload(self, source: torch.Tensor) -> torch.Tensor:
        """The same tensor on the device; the copy may still be under way, in the stream's order."""
        out = torch.empty(source.shape, dtype=source.dtype, device=self._device)
        if source.numel() == 0:
            return out
        bytes_in, bytes_out = (t.view(-1).view(torch.uint8) for t in (source.contiguous(), out))
        size = self._pieces[0].shape[0]
        for start in range(0, bytes_in.shape[0], size):
            part = bytes_in[start : start + size]
            piece, sent = self._pieces[self._next][: part.shape[0]], self._sent[self._next]
            if sent is not None:
                sent.synchronize()
            piece.copy_(part)
            bytes_out[start : start + size].copy_(piece, non_blocking=True)
            if sent is not None:
                sent.record()
            self._next = (self._next + 1) % _PIECES
        return out
