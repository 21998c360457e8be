"""An engine for asyncio: one asynchronous iterator of outputs for each request."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, TypeVar

from sol.engine.client import EngineClient
from sol.engine.types import EngineInfo, EngineOutput, EngineRequest, EngineStats, RequestOutput
from sol.errors import EngineDeadError, RequestError

logger = logging.getLogger(__name__)

ItemT = TypeVar("ItemT")


class AsyncEngine:
    """Use it from the event loop in which it was made; only `close` may be called from elsewhere.

    A thread waits for the engine and hands each of its messages to the loop as a whole.
    """

    def __init__(self, client: EngineClient) -> None:
        self.stats = EngineStats()
        """Of the latest message."""
        self.dead: EngineDeadError | None = None
        """Why the engine is gone; None while it lives."""
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._streams: dict[str, _Stream] = {}
        self._aborted: set[str] = set()
        """Requests that nobody waits for, but whose last output is still to come."""
        self._listeners: list[Callable[[EngineStats], object]] = []
        self._last_sign = time.monotonic()
        """When a message came, or a request was added to none."""
        self._closing = False
        self._died = asyncio.Event()
        self._thread = threading.Thread(target=self._receive, name="engine-outputs", daemon=True)
        self._thread.start()

    @property
    def info(self) -> EngineInfo:
        return self._client.info

    @property
    def num_open(self) -> int:
        """Requests whose last output has not come."""
        return len(self._streams)

    def add_stats_listener(self, callback: Callable[[EngineStats], object]) -> None:
        """Call `callback` in the loop with the stats of every message: its counts are what is new since the last."""
        self._listeners.append(callback)

    async def wait_until_dead(self) -> EngineDeadError:
        """Why, once the engine is gone or closed."""
        await self._died.wait()
        assert self.dead is not None
        return self.dead

    def stalled_for(self) -> float:
        """Seconds since the engine was last heard of; 0 while no request is open."""
        return time.monotonic() - self._last_sign if self._streams else 0.0

    def generate(self, request: EngineRequest) -> AsyncGenerator[RequestOutput, None]:
        """Run a request and yield its outputs; the last one carries `finish_reason`.

        What arrives while the consumer is busy comes as one output. Closing the iterator, or cancelling the task that
        waits for it, ends the request in the engine. Raises `EngineDeadError` at once if the engine is gone, and from
        the iterator if it goes; `RequestError` if the request's id is in use.
        """
        self._check(request)
        return self._generate(request)

    def close(self) -> None:
        """End the engine; open iterators raise `EngineDeadError`. Blocks for the rest of a step, seconds at worst."""
        self._closing = True
        self._client.close()
        self._thread.join()

    async def _generate(self, request: EngineRequest) -> AsyncGenerator[RequestOutput, None]:
        self._check(request)
        request_id = request.request_id
        self._client.add([request])
        if not self._streams:
            self._last_sign = time.monotonic()
        stream = self._streams[request_id] = _Stream()
        try:
            while True:
                output = await stream.get()
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            # Gone from the table already if the last output has come; the id may then belong to another request.
            if self._streams.get(request_id) is stream:
                del self._streams[request_id]
                if self.dead is None:
                    self._aborted.add(request_id)
                    self._client.abort([request_id])

    def _check(self, request: EngineRequest) -> None:
        if self.dead is not None:
            raise EngineDeadError(self.dead.message)
        if request.request_id in self._streams or request.request_id in self._aborted:
            raise RequestError(f"request_id {request.request_id!r} is in use", param="request_id")

    # ── in the thread ────────────────────────────────────────────────────────────────────────────────────────────

    def _receive(self) -> None:
        try:
            while True:
                message = self._client.receive()
                # Here, not in the loop: how alive the engine is does not depend on how busy the loop is.
                self._last_sign = time.monotonic()
                if not self._post(self._deliver, message):
                    return
        except EngineDeadError as error:
            if not self._closing:
                logger.error("the engine is gone: %s", error.message)
            self._post(self._fail, error)
        except Exception as error:
            logger.exception("the engine's messages cannot be received")
            self._post(self._fail, EngineDeadError(f"the engine is lost: {type(error).__name__}: {error}"))

    def _post(self, callback: Callable[[Any], None], argument: object) -> bool:
        """False if the loop is closed: then nobody is left to tell."""
        try:
            self._loop.call_soon_threadsafe(callback, argument)
        except RuntimeError:
            return False
        return True

    # ── in the loop ──────────────────────────────────────────────────────────────────────────────────────────────

    def _deliver(self, message: EngineOutput) -> None:
        self.stats = message.stats
        for output in message.outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.put(output)
            if output.finish_reason is not None:
                self._streams.pop(output.request_id, None)
                self._aborted.discard(output.request_id)
        for listener in self._listeners:
            listener(message.stats)

    def _fail(self, error: EngineDeadError) -> None:
        self.dead = error
        self._died.set()
        for stream in self._streams.values():
            stream.fail(error)
        self._streams.clear()
        self._aborted.clear()


class _Stream:
    """What has come for one request and was not taken yet, merged into one output."""

    def __init__(self) -> None:
        self._output: RequestOutput | None = None
        self._error: EngineDeadError | None = None
        self._arrived = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        self._output = output if self._output is None else _merge(self._output, output)
        self._arrived.set()

    def fail(self, error: EngineDeadError) -> None:
        self._error = error
        self._arrived.set()

    async def get(self) -> RequestOutput:
        await self._arrived.wait()
        output = self._output
        if output is None:
            assert self._error is not None
            raise EngineDeadError(self._error.message)  # its own: a raised exception collects the raiser's traceback
        self._output = None
        if self._error is None:
            self._arrived.clear()
        return output


def _merge(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """`first` and what came after it; `first`'s lists are extended in place. Sums so far are `second`'s."""
    first.new_token_ids += second.new_token_ids
    second.new_token_ids = first.new_token_ids
    second.logprobs = _joined(first.logprobs, second.logprobs)
    if second.prompt_logprobs is None:
        second.prompt_logprobs = first.prompt_logprobs
    second.origins = _joined(first.origins, second.origins)
    if second.speculation is None:
        second.speculation = first.speculation
    return second


def _joined(first: list[ItemT] | None, second: list[ItemT] | None) -> list[ItemT] | None:
    """What ends a request without a token brings no list: what came before stays."""
    if first is None or second is None:
        return second if first is None else first
    first += second
    return first
