"""The client's side of a call: where an answer is written, in whichever way the client is connected."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from typing import Any, Protocol

Headers = Sequence[tuple[bytes, bytes]]


class Reply(Protocol):
    started: bool
    """Whether the client has been told a status: then an error can only be an event."""

    async def start(self, status: int, headers: Headers) -> None: ...

    async def write(self, data: bytes) -> None:
        """Waits while the client does not take what it was sent."""
        ...

    def write_now(self, data: bytes) -> Awaitable[None] | None:
        """Write outside of a task. Returns what is still to be waited for before more is written; None: nothing."""
        ...

    async def end(self) -> None: ...

    async def send(self, status: int, headers: Headers, body: bytes) -> None:
        """A whole answer."""
        ...


class AsgiReply:
    """Over an ASGI server. `extra`: headers that the response has whatever it is."""

    def __init__(self, send: Callable[[dict[str, Any]], Coroutine[Any, None, None]], extra: Headers) -> None:
        self._send = send
        self._extra = extra
        self.started = False
        self.finished = False
        """Whether all was given to the server: from then on, that nobody is there any more means nothing."""

    async def start(self, status: int, headers: Headers) -> None:
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *self._extra]})

    async def write(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    def write_now(self, data: bytes) -> Awaitable[None] | None:
        writing = self._send({"type": "http.response.body", "body": data, "more_body": True})
        try:
            waits_for = writing.send(None)
        except StopIteration:
            return None  # it did not have to wait, as nearly always
        return _Begun(writing, waits_for)

    async def end(self) -> None:
        self.finished = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def send(self, status: int, headers: Headers, body: bytes) -> None:
        self.started = self.finished = True
        length = (b"content-length", b"%d" % len(body))
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, length, *self._extra]})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})


class _Begun:
    """The rest of a coroutine that was begun outside of a task and has come to wait for something."""

    def __init__(self, coroutine: Coroutine[Any, None, None], waits_for: Any) -> None:
        self._coroutine = coroutine
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, None, None]:
        waits_for = self._waits_for
        while True:
            failed: BaseException | None = None
            try:
                yield waits_for
            except BaseException as error:
                failed = error
            try:
                waits_for = self._coroutine.send(None) if failed is None else self._coroutine.throw(failed)
            except StopIteration:
                return


class KeptReply:
    """Keeps a whole answer in memory, for several who wait for it."""

    def __init__(self) -> None:
        self.started = False
        self.status = 0
        self.headers: Headers = ()
        self._parts: list[bytes] = []

    @property
    def body(self) -> bytes:
        return b"".join(self._parts)

    async def start(self, status: int, headers: Headers) -> None:
        self.started, self.status, self.headers = True, status, headers

    async def write(self, data: bytes) -> None:
        self._parts.append(data)

    def write_now(self, data: bytes) -> None:
        self._parts.append(data)

    async def end(self) -> None:
        pass

    async def send(self, status: int, headers: Headers, body: bytes) -> None:
        await self.start(status, headers)
        await self.write(body)
