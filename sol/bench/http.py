"""HTTP/1.1 for a load generator: an asyncio protocol on llhttp's parser, and a pool of connections.

Why not httpx or aiohttp: both hand a response's body to a task through a queue. The task is woken later, behind all
others, so its clock shows when the *client* got round to a chunk; and a wake-up a chunk costs more than everything
else that has to be done with it. Here the clock is read when the event loop reads the socket, and nothing
else happens then: what was read is parsed afterwards, in short turns. When thousands of streams have something to say
at once, each chunk's time is that of its reading, and not of the parsing of all those before it.

No redirects, no proxies, no cookies, no compression: none of them belongs into a latency.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol, cast

import httptools

KEEP_ALIVE_SECONDS: Final = 3.0
"""A connection that was idle for longer is not used again: servers close theirs after 5 s (uvicorn) or more, and a
request that crosses the server's farewell would fail for no fault of anybody."""

CONNECT_SECONDS: Final = 30.0

_TURN_SECONDS: Final = 0.001
"""How long parsing may keep the event loop from reading."""


class Sink(Protocol):
    """Who takes a response. `now` is when the socket was read."""

    def on_head(self, status: int, headers: dict[str, str]) -> None: ...

    def on_body(self, data: bytes, now: float) -> None: ...

    def on_end(self, now: float) -> None: ...

    def on_failure(self, kind: str, message: str, now: float) -> None: ...


class Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._sink: Sink | None = None
        self._now = 0.0
        """When what is being taken was read."""
        self._sent = 0.0
        self._headers: dict[str, str] = {}
        self._head_complete = False
        self._complete = False
        self._reusable = False
        self.idle_since = 0.0

    def send(self, request: bytes, sink: Sink) -> None:
        """Write a whole request; `sink` takes the response. If the connection has died, the sink is told."""
        assert self._sink is None
        assert self._transport is not None
        self._sink = sink
        self._parser = httptools.HttpResponseParser(self)
        self._headers = {}
        self._head_complete = self._complete = False
        self._sent = self._pool.clock()
        if self._transport.is_closing():
            self._fail("disconnected", "the connection was closed before the request was sent")
        else:
            self._transport.write(request)

    def abort(self) -> None:
        """Close at once; nobody is told."""
        self._sink = None
        if self._transport is not None:
            self._transport.abort()

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one by behaviour alone

    def data_received(self, data: bytes) -> None:
        self._pool.later(self, data, None)

    def connection_lost(self, error: Exception | None) -> None:
        self._pool.forget(self)
        self._pool.later(self, b"", error)

    # The pool, when it is this reading's turn

    def take(self, data: bytes, error: Exception | None, now: float) -> None:
        """`data` was read at `now`; if it is empty, the connection was lost then."""
        self._now = now
        if not data:
            self._lost(error)
            return
        if self._sink is None:  # something that nobody asked for
            self.abort()
            return
        assert self._parser is not None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            inner = error.__context__
            if isinstance(error, httptools.HttpParserCallbackError) and inner is not None:
                raise inner from None
            self._fail("malformed", f"not HTTP/1.1: {error}")
            return
        if self._complete:
            self._finish()

    def _lost(self, error: Exception | None) -> None:
        if self._sink is None:
            return
        if self._head_complete and not {"content-length", "transfer-encoding"} & self._headers.keys() and error is None:
            self._complete = True  # a response of HTTP/1.0's kind ends with its connection
            sink, self._sink = self._sink, None
            sink.on_end(self._now)
            return
        where = "in the middle of the response" if self._head_complete else "before a response"
        self._fail("disconnected", f"the server closed the connection {where}" + (f": {error}" if error else ""))

    # httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self._head_complete = True
        if self._sink is not None:
            self._sink.on_head(self._parser.get_status_code(), self._headers)

    def on_body(self, data: bytes) -> None:
        if self._sink is not None:
            self._sink.on_body(data, self._now)

    def on_message_complete(self) -> None:
        assert self._parser is not None
        if self._parser.get_status_code() < 200:  # 100 Continue and its like precede the response
            self._headers, self._head_complete = {}, False
        else:
            self._complete = True
            self._reusable = self._parser.should_keep_alive()  # it is only known here

    def _finish(self) -> None:
        sink, self._sink = self._sink, None
        # The connection is free before anybody is told: who is told may want one.
        if self._reusable:
            self.idle_since = self._now
            self._pool.put(self)
        else:
            self.abort()
        if sink is not None:
            sink.on_end(self._now)

    def _fail(self, kind: str, message: str) -> None:
        sink = self._sink
        self.abort()
        if sink is not None:
            sink.on_failure(kind, message, max(self._now, self._sent))


class Pool:
    """Connections to one host and port. Not limited in number: a limit would hold requests back unseen."""

    def __init__(self, host: str, port: int, *, tls: bool, clock: Callable[[], float]) -> None:
        self._host = host
        self._port = port
        self._tls = ssl.create_default_context() if tls else None
        self._idle: list[Connection] = []
        self._readings: deque[tuple[Connection, bytes, Exception | None, float]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        """While there are readings, and a turn is due."""
        self.clock = clock
        self.num_opened = 0

    def take(self) -> Connection | None:
        """An idle connection, the one used last."""
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and self.clock() - connection.idle_since < KEEP_ALIVE_SECONDS:
                return connection
            connection.abort()
        return None

    async def connect(self) -> Connection:
        """A new one. Raises `OSError` (also for names and certificates) and `TimeoutError`."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_SECONDS):
            _, connection = await loop.create_connection(
                lambda: Connection(self),
                self._host,
                self._port,
                ssl=self._tls,
                server_hostname=self._host if self._tls is not None else None,
            )
        self.num_opened += 1
        return connection

    def later(self, connection: Connection, data: bytes, error: Exception | None) -> None:
        """Something was read just now: note when."""
        self._readings.append((connection, data, error, self.clock()))
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.call_soon(self._parse)

    def _parse(self) -> None:
        assert self._loop is not None
        readings, until = self._readings, self.clock() + _TURN_SECONDS
        try:
            while readings:
                connection, data, error, now = readings.popleft()
                connection.take(data, error, now)
                if self.clock() > until:
                    break
        finally:
            if readings:
                self._loop.call_soon(self._parse)
            else:
                self._loop = None

    def put(self, connection: Connection) -> None:
        self._idle.append(connection)

    def forget(self, connection: Connection) -> None:
        if connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> None:
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.abort()


def request_head(
    method: str, path: str, *, host: str, headers: dict[str, str], content_length: int | None = None
) -> bytes:
    """The request line and headers. Values must hold no line breaks; `sol.bench.endpoint` checks those of users."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", *(f"{name}: {value}" for name, value in headers.items())]
    if content_length is not None:
        lines.append(f"Content-Length: {content_length}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class _Whole:
    """A sink that waits for all of a response."""

    def __init__(self, done: asyncio.Future[tuple[int, bytes]]) -> None:
        self._done = done
        self._status = 0
        self._parts: list[bytes] = []

    def on_head(self, status: int, headers: dict[str, str]) -> None:
        self._status = status

    def on_body(self, data: bytes, now: float) -> None:
        self._parts.append(data)

    def on_end(self, now: float) -> None:
        if not self._done.done():
            self._done.set_result((self._status, b"".join(self._parts)))

    def on_failure(self, kind: str, message: str, now: float) -> None:
        if not self._done.done():
            self._done.set_exception(ConnectionError(message))


async def fetch(pool: Pool, request: bytes, *, seconds: float) -> tuple[int, bytes]:
    """(status, body) of a request outside of the measurement. Raises `OSError` or `TimeoutError`."""
    done: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
    connection: Connection | None = None
    try:
        async with asyncio.timeout(seconds):
            connection = pool.take() or await pool.connect()
            connection.send(request, _Whole(done))
            return await done
    except BaseException:
        if connection is not None:
            connection.abort()
        raise
