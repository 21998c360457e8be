"""Progress on stderr: a bar where somebody watches a terminal, a line now and then in a log, nothing if not wanted."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Final, Literal, Self

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

Unit = Literal["bytes", "items"]

_LINE_SECONDS: Final = 5.0


class Progress:
    """Counts up to `total`.

        with Progress(total, "Loading weights", unit="bytes") as bar:
            bar.advance(n)

    With rich installed and stderr a terminal it draws a bar; otherwise it writes a plain line to stderr, at most one
    every five seconds, and one at the end. `show=False` writes nothing.
    """

    def __init__(self, total: int, description: str, *, unit: Unit = "items", show: bool = True) -> None:
        self._total = total
        self._description = description
        self._unit = unit
        self._show = show
        self._done = 0
        self._last_line = 0.0
        self._rich: RichProgress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self._last_line = time.monotonic()
        if self._show and sys.stderr.isatty():
            self._rich = _rich_progress(self._unit)
        if self._rich is not None:
            self._task = self._rich.add_task(self._description, total=self._total)
            self._rich.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._rich is not None:
            self._rich.stop()
        elif self._show and kind is None:
            self._write_line()

    def advance(self, count: int = 1) -> None:
        """`count` more are done."""
        self._done += count
        if self._rich is not None and self._task is not None:
            self._rich.advance(self._task, count)
        elif self._show and time.monotonic() - self._last_line >= _LINE_SECONDS:
            self._write_line()

    def _write_line(self) -> None:
        self._last_line = time.monotonic()
        if self._unit == "bytes":
            amount = f"{self._done / 1e6:.0f} of {self._total / 1e6:.0f} MB"
        else:
            amount = f"{self._done} of {self._total}"
        sys.stderr.write(f"{self._description}: {amount}\n")
        sys.stderr.flush()


def _rich_progress(unit: Unit) -> RichProgress | None:
    try:
        from rich import progress as rich
        from rich.console import Console
    except ImportError:
        return None
    count = rich.DownloadColumn() if unit == "bytes" else rich.MofNCompleteColumn()
    return rich.Progress(
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        count,
        rich.TimeElapsedColumn(),
        rich.TimeRemainingColumn(),
        console=Console(stderr=True),
    )
