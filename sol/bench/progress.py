"""How far a load is: one line on a terminal that is written over, a line every few seconds elsewhere.

Not rich's live display: it draws for milliseconds at a time, in which the client would be late.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Final, TextIO

from sol.bench.load import ClosedLoop, Load
from sol.bench.run import Tally

_TERMINAL_SECONDS: Final = 0.5
_LOG_SECONDS: Final = 5.0
_FIRST_LINE_SECONDS: Final = 1.0


async def show_progress(load: Load, tally: Tally, out: TextIO = sys.stderr) -> None:
    """Of a load, until cancelled."""
    total = load.num_conversations if isinstance(load, ClosedLoop) else len(load.arrivals)
    await show_round(load.name, tally, total, out)


async def show_round(name: str, tally: Tally, total: int | None = None, out: TextIO = sys.stderr) -> None:
    """Of anything that has a name, until cancelled; `total` requests, if that is known."""
    terminal = out.isatty()
    begin = time.monotonic()
    width, pause = 0, _TERMINAL_SECONDS if terminal else _FIRST_LINE_SECONDS
    try:
        while True:
            await asyncio.sleep(pause)
            pause = _TERMINAL_SECONDS if terminal else _LOG_SECONDS
            line = describe(name, tally, total, time.monotonic() - begin)
            out.write(f"\r{line:<{width}}" if terminal else f"{line}\n")
            out.flush()
            width = len(line)
    finally:
        if terminal:
            out.write("\r" + " " * width + "\r")
            out.flush()


def describe(name: str, tally: Tally, total: int | None, seconds: float) -> str:
    parts = [
        f"{name}: {seconds:.0f} s",
        f"{tally.num_finished:,}" + (f" of {total:,}" if total is not None else "") + " requests done",
        f"{tally.num_in_flight:,} in flight",
        f"{tally.num_tokens / seconds if seconds else 0:,.0f} tokens/s",
    ]
    if tally.num_errors:
        parts.append(f"{tally.num_errors:,} errors")
    if tally.longest_lag > 0.05:
        parts.append(f"client's longest stall {1000 * tally.longest_lag:.0f} ms")
    return ", ".join(parts)
