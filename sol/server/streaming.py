"""Server-sent events, and clients that leave before they have their answer."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sol.errors import DeadlineExceededError
from sol.server.errors import error_code, error_event, error_status, report
from sol.server.state import ServerState, shutting_down

ResultT = TypeVar("ResultT")

DONE = "data: [DONE]\n\n"

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold the events back
]


def quote(text: str) -> str:
    """A JSON string. Characters that some clients take for the end of a line are escaped."""
    if text.isascii() or "\u2028" in text or "\u2029" in text or "\x85" in text:
        return json.dumps(text)
    return json.dumps(text, ensure_ascii=False)


def to_json(data: object) -> str:
    return json.dumps(data, separators=(",", ":"))


def event(data: object) -> str:
    return f"data: {to_json(data)}\n\n"


async def run_until_disconnect(
    state: ServerState, receive: Receive, work: Coroutine[Any, Any, ResultT], deadline: float | None = None
) -> ResultT:
    """The result of `work`, which is cancelled as soon as nobody waits for it any more.

    The request's body must have been read: what `receive` says next is that the client left. Raises
    `ClientDisconnect` then, `EngineNotReadyError` when the server stops, and `DeadlineExceededError` at the monotonic
    second `deadline`.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_wait_for_disconnect(receive))
    stopping = asyncio.ensure_future(state.stopping.wait())
    tasks: list[asyncio.Future[Any]] = [working, leaving, stopping]
    try:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        await asyncio.wait(tasks, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        if not (leaving.done() or stopping.done()):
            raise DeadlineExceededError("the answer was not complete by the request's deadline")
        raise ClientDisconnect if leaving.done() else shutting_down()
    finally:
        for task in tasks:
            task.cancel()
        # Waits until `work` has let go of the engine.
        await asyncio.gather(*tasks, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A response of server-sent events, each string of `events` holding whole ones.

    Nothing is sent before the first of them is there, so that what fails at once is an HTTP error, which clients
    retry. What fails later is an event of its own, and no `[DONE]` follows it.
    """

    def __init__(self, state: ServerState, events: AsyncGenerator[str, None]) -> None:
        super().__init__()
        self._state = state
        self._events = events
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_until_disconnect(self._state, receive, self._send_events(send))
        except ClientDisconnect:
            return
        except Exception as error:
            if not self._started:
                raise
            report(error)
            self._state.metrics.count_error(error_status(error), error_code(error))
            await self._send(send, error_event(error))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_events(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            async for text in events:
                if not self._started:
                    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                    self._started = True
                await self._send(send, text)

    async def _send(self, send: Send, text: str) -> None:
        await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
