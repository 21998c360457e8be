"""Ctrl-C during generation."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """Whether Ctrl-C was pressed. While it is watched, Ctrl-C breaks off no step half-way: `pressed` turns true, and
    generation that looks at it ends after the step."""

    def __init__(self) -> None:
        self._pressed = False

    def pressed(self) -> bool:
        return self._pressed

    @property
    def can_be_watched(self) -> bool:
        """Whether Ctrl-C would raise KeyboardInterrupt here, so that watching takes it from nobody else."""
        ours = threading.current_thread() is threading.main_thread()
        return ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Only in the main thread, where Python delivers signals."""

        def note(_signal: int, _frame: FrameType | None) -> None:
            self._pressed = True

        self._pressed = False
        previous = signal.signal(signal.SIGINT, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)
