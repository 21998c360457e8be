"""A gateway over simulated engines in a thread of its own, for tests that are not asynchronous: fuzzers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from gateway_harness import Running, running

Result = TypeVar("Result")


class InThread:
    def __init__(self, it: Running, loop: asyncio.AbstractEventLoop) -> None:
        self._it = it
        self._loop = loop
        self.url = it.server.url

    def look(self, at: Callable[[Running], Result]) -> Result:
        """What `at` finds, looking from the gateway's own thread."""

        async def ask() -> Result:
            return at(self._it)

        return asyncio.run_coroutine_threadsafe(ask(), self._loop).result(20)


@contextmanager
def running_in_thread(num_engines: int = 1, **options: Any) -> Iterator[InThread]:
    ready: concurrent.futures.Future[InThread] = concurrent.futures.Future()
    ended: concurrent.futures.Future[None] = concurrent.futures.Future()

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        async with running(num_engines, **options) as it:
            stop = asyncio.Event()
            stops.append(lambda: loop.call_soon_threadsafe(stop.set))
            ready.set_result(InThread(it, loop))
            await stop.wait()

    def work() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            (ended if ready.done() else ready).set_exception(error)
        else:
            ended.set_result(None)

    stops: list[Callable[[], object]] = []
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield ready.result(30)
    finally:
        for stop in stops:
            stop()
        thread.join(30)
    ended.result(1)  # what the harness found to be left open
