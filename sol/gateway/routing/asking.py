"""Somebody's function that names tasks, asked in threads of its own and not waited for longer than it is worth.

What it says is advice: a call goes on without it. So a function that hangs costs each call `budget` seconds at most,
and no call anything once as many wait for it as may: nothing piles up behind it. The threads are the process's last
concern: one that never comes back keeps nobody from ending it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Final

logger = logging.getLogger("sol.gateway")

Classifier = Callable[[str], str | None]
"""Text to the name of a task."""

_THREADS: Final = 4
_MOST_OPEN: Final = 64
"""Texts that are looked at or wait for it."""


class Asking:
    def __init__(self, classifier: Classifier, budget: float) -> None:
        """`budget`: seconds that one answer is waited for."""
        self._classifier = classifier
        self._budget = budget
        self._texts: SimpleQueue[tuple[str, asyncio.Future[Any]]] = SimpleQueue()
        self._num_open = 0
        self._num_threads = 0
        self._is_late = False

    async def ask(self, text: str) -> Any:
        """What the function says; None also where it fails, or says nothing in time."""
        if self._num_open >= _MOST_OPEN:
            return None
        self._num_open += 1
        if self._num_threads < min(self._num_open, _THREADS):
            self._num_threads += 1
            threading.Thread(target=self._run, name="classifier of tasks", daemon=True).start()
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._texts.put((text, answer))
        try:
            async with asyncio.timeout(self._budget):
                found = await answer
        except TimeoutError:
            if not self._is_late:
                logger.warning("the classifier of tasks does not answer within %g s; calls go without", self._budget)
            self._is_late = True
            return None
        self._is_late = False
        return found

    def _run(self) -> None:
        while True:
            text, answer = self._texts.get()
            found: Any = None
            try:
                if not answer.cancelled():  # else nobody waits any more
                    found = self._classifier(text)
            except BaseException:  # whatever it was, the thread goes on
                logger.exception("the classifier of tasks failed")
            with contextlib.suppress(RuntimeError):  # the loop has ended
                answer.get_loop().call_soon_threadsafe(self._answered, answer, found)

    def _answered(self, answer: asyncio.Future[Any], found: Any) -> None:
        self._num_open -= 1
        if not answer.done():
            answer.set_result(found)
