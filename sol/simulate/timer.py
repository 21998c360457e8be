"""A timer of the event loop that is exact to microseconds: the loop's own rounds up to milliseconds.

Steps take milliseconds, so a millisecond more on each time to the first token would be seen in every figure. Linux's
timerfd has no such rounding; Python has it from 3.13 on, before that the C library does.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import math
import os
import time
from collections.abc import Callable
from typing import Final

_NONBLOCK_CLOEXEC: Final = os.O_NONBLOCK | os.O_CLOEXEC
_ABSOLUTE: Final = 1
_NANOSECONDS: Final = 10**9


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", _TimeSpec), ("value", _TimeSpec))


class Timer:
    """Calls `callback` once at the time that was `set` last, on `time.monotonic()`'s clock. To be closed."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._library = ctypes.CDLL(None, use_errno=True)
        self._fd: int = self._library.timerfd_create(time.CLOCK_MONOTONIC, _NONBLOCK_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._expired)

    def set(self, when: float | None) -> None:
        """At once if `when` has passed; never if it is None or infinite. Nothing happens once it is closed."""
        if self._fd < 0:
            return
        # All zeros disarm it.
        nanoseconds = 0 if when is None or when == math.inf else max(1, int(when * _NANOSECONDS))
        spec = _TimerSpec(_TimeSpec(0, 0), _TimeSpec(*divmod(nanoseconds, _NANOSECONDS)))
        if self._library.timerfd_settime(self._fd, _ABSOLUTE, ctypes.byref(spec), None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def close(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _expired(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it was set anew in the meantime
            os.read(self._fd, 8)
            self._callback()
