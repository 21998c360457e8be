"""Ctrl-C during generation."""

from __future__ import annotations

import signal
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
