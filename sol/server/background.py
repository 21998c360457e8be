"""Work that takes long and that nobody waits for when the process ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

ResultT = TypeVar("ResultT")


def run_in_background(
    work: Callable[[], ResultT], discard: Callable[[ResultT], object], *, name: str
) -> asyncio.Future[ResultT]:
    """The result of `work`, which runs in a daemon thread. Cancel the future to leave it: then `discard` is called with
    the result as soon as it is there."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[ResultT] = loop.create_future()

    def succeed(result: ResultT) -> None:
        if future.done():
            discard(result)
        else:
            future.set_result(result)

    def fail(error: BaseException) -> None:
        if not future.done():
            future.set_exception(error)

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            try:
                loop.call_soon_threadsafe(fail, error)
            except RuntimeError:  # the loop is closed: the server has ended meanwhile
                return
            return
        try:
            loop.call_soon_threadsafe(succeed, result)
        except RuntimeError:
            discard(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
