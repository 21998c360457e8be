"""What takes milliseconds to look at a text: run in threads, within a time budget."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

from sol.gateway.filters.rules import Rule


class Detection(NamedTuple):
    """`text[start:end]` of text number `text` of those that were given."""

    text: int
    start: int
    end: int
    label: str


class BudgetError(Exception):
    """The time is up, and not everything has been looked at."""


class Detector(Protocol):
    rule: Rule
    budget: float
    """Seconds for the texts of one request."""

    def detect(self, texts: Sequence[str], deadline: float) -> list[Detection]:
        """Called in a thread, one call at a time. Raises `BudgetError` when `time.monotonic()` passes `deadline`."""
        ...


class DetectorThread:
    """One detector and the one thread in which it works; requests wait for each other."""

    def __init__(self, detector: Detector) -> None:
        self.detector = detector
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"filter-{detector.rule.config.name}")

    async def detect(self, texts: Sequence[str]) -> list[Detection]:
        """Raises `BudgetError` once the budget is spent, waiting for the thread included. What has not begun by then is
        not begun any more, and what has ends at its own next look at the clock, so late work does not pile up."""
        deadline = time.monotonic() + self.detector.budget
        future = asyncio.get_running_loop().run_in_executor(self._pool, self.detector.detect, texts, deadline)
        try:
            return await asyncio.wait_for(future, self.detector.budget)
        except TimeoutError:
            raise BudgetError from None

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
