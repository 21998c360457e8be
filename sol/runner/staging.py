"""Small copies between host and device that neither side waits for.

A copy is asynchronous only from and to pinned memory, and pinned memory may not be reused before the copy is done: a
few buffers are used in turn, and each knows the event after its last copy.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

_Ints = npt.NDArray[np.int64]

_BUFFERS: Final = 4
_ALIGNED: Final = 2


class _Buffer:
    """Pinned int64s, as many as the largest copy so far needed. On a CPU plain memory, and nothing to wait for."""

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._event = torch.cuda.Event() if self._pinned else None  # type: ignore[no-untyped-call]
        self._memory = torch.empty(0, dtype=torch.int64)

    def take(self, size: int) -> torch.Tensor:
        """`size` int64s that no copy uses any more."""
        self.wait()
        if size > self._memory.shape[0]:
            self._memory = torch.empty(max(1024, 2 * size), dtype=torch.int64, pin_memory=self._pinned)
        return self._memory[:size]

    def used(self) -> None:
        """A copy from or to it was started."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """For the copy's end."""
        if self._event is not None:
            self._event.synchronize()


class Staging:
    """For one stream. Not thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers = [_Buffer(device) for _ in range(_BUFFERS)]
        self._next = 0
        self._written: tuple[_Buffer, torch.Tensor] | None = None

    @contextmanager
    def write(self, size: int) -> Iterator[_Ints]:
        """A buffer to be filled on the host; `copy_to` says where it goes."""
        buffer = self._take()
        memory = buffer.take(size)
        self._written = (buffer, memory)
        yield memory.numpy()

    def copy_to(self, target: torch.Tensor) -> None:
        """Start copying what was written last, as many int64s as `target` has."""
        assert self._written is not None
        buffer, memory = self._written
        target.view(-1).copy_(memory, non_blocking=True)
        buffer.used()

    def send(self, *arrays: _Ints) -> list[torch.Tensor]:
        """Arrays of int64 to the device, in one copy; they share new memory there.

        Each begins at a multiple of `_ALIGNED` numbers: Triton compiles a kernel again for pointers that are not
        aligned to 16 bytes.
        """
        starts = [0, *itertools.accumulate(-(-array.size // _ALIGNED) * _ALIGNED for array in arrays)]
        with self.write(starts[-1]) as buffer:
            for start, array in zip(starts, arrays, strict=False):
                buffer[start : start + array.size] = array.ravel()
        target = torch.empty(starts[-1], dtype=torch.int64, device=self._device)
        self.copy_to(target)
        return [
            target[start : start + array.size].view(array.shape) for start, array in zip(starts, arrays, strict=False)
        ]

    def read_later(self, source: torch.Tensor) -> Callable[[], list[int]]:
        """Start copying int64s from the device; what is returned waits for them."""
        # A buffer of its own until it is read: how long that takes is up to the engine.
        buffer = _Buffer(self._device)
        memory = buffer.take(source.shape[0])
        memory.copy_(source, non_blocking=True)
        buffer.used()

        def read() -> list[int]:
            buffer.wait()
            values: list[int] = memory.tolist()
            return values

        return read

    def _take(self) -> _Buffer:
        self._next = (self._next + 1) % _BUFFERS
        return self._buffers[self._next]
