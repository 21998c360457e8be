"""One connection to an engine: one request at a time, and its answer as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol, cast

import httptools

from sol.gateway.upstream.errors import LostError, MalformedError, UpstreamHttpError

MAX_HEAD_BYTES: Final = 64 * 2**10
"""Of an answer's head, interim answers before it, trailers after it, and what is between two pieces of its body."""
_MANY: Final = 256 * 2**10
"""Bytes of a body that nobody has taken, at which no more are read."""
_LAST_BYTES: Final = 64 * 2**10
"""Of an answer that nobody reads any more."""
_SENT_TOGETHER: Final = 16 * 2**10
"""Bytes of a request's body up to which copying it behind its head is cheaper than a second piece to write."""
_NONE: Final = asyncio.Transport()
"""Before there is one."""
_LENGTHS: Final = frozenset({b"content-length", b"transfer-encoding"})


class Pool(Protocol):
    """Where a connection belongs."""

    def put(self, connection: Connection) -> None:
        """It can be used again."""
        ...

    def finishing(self, connection: Connection) -> None:
        """Nobody reads its answer any more, of which only the end is missing."""
        ...

    def made(self, connection: Connection) -> None: ...

    def lost(self, connection: Connection) -> None: ...


class Response:
    """An answer. `status` and `headers` (lower-case names) are there once `head` has returned."""

    __slots__ = (
        "_connection", "_error", "_fault", "_parts", "_size", "_take", "_waiter", "ended", "headers", "status",
    )  # fmt: skip

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._error: UpstreamHttpError | None = None
        self._parts: list[bytes] = []
        self._size = 0
        """Of the parts."""
        self._take: Callable[[bytes], bool] | None = None
        self._fault: Exception | None = None
        """What that raised."""
        self._waiter: asyncio.Future[None] | None = None
        self.status = 0
        """0: its head has not come."""
        self.headers: list[tuple[bytes, bytes]] = []
        self.ended = False
        """All has come, or nothing more will."""

    @property
    def content_type(self) -> bytes:
        """Without parameters, in lower case; empty: none is said."""
        for name, value in self.headers:
            if name == b"content-type":
                return value.partition(b";")[0].strip().lower()
        return b""

    async def head(self) -> None:
        """Wait for the status and the headers. Raises `LostError` or `MalformedError`."""
        while not self.status:
            if self._error is not None:
                raise self._error
            await self._wait()

    async def read(self) -> bytes:
        """What has come of the body since the last time; empty once all has. Where the connection is lost, raises
        `LostError` or `MalformedError` after all that came before."""
        while not self._parts:
            if self._error is not None:
                raise self._error
            if self.ended:
                return b""
            await self._wait()
        parts = self._parts
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        self._parts = []
        if self._size > _MANY:
            self._connection.go_on()
        self._size = 0
        return data

    async def pass_to(self, take: Callable[[bytes], bool]) -> None:
        """Call `take` with what comes of the body, in the moment it is read: nobody has to be woken for each piece.
        Returns when `take` has returned False, or after the end of the body. Raises what `read` and `take` raise."""
        while not self.ended or self._parts:
            if self._parts:
                if not take(await self.read()):
                    return
                continue
            self._take = take
            try:
                await self._wait()
            finally:
                refused = self._take is None
                self._take = None
            if self._fault is not None:
                raise self._fault
            if refused:
                return
        if self._error is not None:
            raise self._error

    def release(self) -> None:
        """Nothing more of it is needed: its last bytes are waited for by nobody, and then the connection can be used
        again."""
        if not self.ended:
            self._connection.finish()

    def close(self) -> None:
        """Of one that has not come to its end, this closes the connection: the engine stops working on it."""
        if not self.ended:
            self._connection.abort()

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _come(self) -> None:
        """Something new is there, or is not coming any more."""
        take = self._take
        if take is None:
            self._wake()
            return
        if self._parts:
            parts, self._parts, self._size = self._parts, [], 0
            try:
                if not take(parts[0] if len(parts) == 1 else b"".join(parts)):
                    self._take = None
            except Exception as fault:
                self._fault, self._take = fault, None
        if self._take is None or self.ended:
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Connection(asyncio.Protocol):
    """`pool` is told of everything that makes it usable or useless."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._transport: asyncio.Transport = _NONE
        self._parser: httptools.HttpResponseParser = httptools.HttpResponseParser(self)
        self._response: Response | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_size = 0
        self._without_body = 0
        """Bytes since the last one of a body."""
        self._complete = self._reusable = self._surplus = False
        self._finishing = False
        self.idle_since = 0.0
        """loop.time() when it was put into its pool, or began to finish."""

    @property
    def is_open(self) -> bool:
        return self._transport is not _NONE and not self._transport.is_closing()

    def send(self, head: bytes, body: bytes) -> Response:
        """Write a request: its line and headers, with the empty line, and its body."""
        assert self._response is None
        transport = self._transport
        self._headers = []
        self._head_size = self._without_body = 0
        self._complete = self._reusable = self._surplus = self._finishing = False
        self._response = response = Response(self)
        if transport.is_closing():
            self._end(LostError("the connection was closed"))
        elif len(body) <= _SENT_TOGETHER:
            transport.write(head + body)
        else:
            transport.writelines((head, body))
        return response

    def abort(self) -> None:
        """Close at once. Whoever waits for an answer is told."""
        if self._transport is not _NONE:
            self._transport.abort()
        self._end(LostError("the connection was closed"))

    def finish(self) -> None:
        """Read on to the end of the answer for nobody."""
        if not self.is_open:
            return
        self._finishing = True
        self.go_on()
        self._pool.finishing(self)

    def go_on(self) -> None:
        """Read again."""
        if self.is_open:
            self._transport.resume_reading()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one by behaviour alone
        self._pool.made(self)

    def data_received(self, data: bytes) -> None:
        response = self._response
        if response is None:  # something that nobody asked for
            self.abort()
            return
        self._without_body += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            inner = error.__context__ if isinstance(error, httptools.HttpParserCallbackError) else None
            if inner is not None and not isinstance(inner, MalformedError):
                raise inner from None
            if not self._complete:  # else what follows the answer is wrong, and not the answer
                self._fail(inner or MalformedError("what came is no HTTP/1.1"))
                return
            self._surplus = True
        if self._complete:
            self._completed()
        elif self._without_body > MAX_HEAD_BYTES:
            self._fail(_too_much())
        elif self._finishing:
            if response._size > _LAST_BYTES:
                self.abort()
        else:
            response._come()
            if response._size > _MANY:
                self._transport.pause_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._pool.lost(self)
        del self._parser  # it refers to this
        response = self._response
        if response is not None and error is None and response.status and not self._has_length():
            self._end(None)  # the body was all there was to come: it had no other end
            return
        self._end(LostError("the engine closed the connection"))

    # httptools

    def on_message_begin(self) -> None:
        if self._complete:
            self._surplus = True

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_size += len(name) + len(value)
        if self._head_size > MAX_HEAD_BYTES:
            raise _too_much()
        if self._response is not None and not self._response.status:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        response = self._response
        if status < 200 or self._complete or response is None:
            return  # an interim answer, or one that nobody asked for
        if any(name == b"transfer-encoding" and value.lower() != b"chunked" for name, value in self._headers):
            raise MalformedError("the answer has an encoding that nobody asked for")
        response.status, response.headers = status, self._headers

    def on_body(self, data: bytes) -> None:
        self._without_body = 0
        response = self._response
        if response is not None and not self._complete:
            response._size += len(data)
            if not self._finishing:
                response._parts.append(data)

    def on_message_complete(self) -> None:
        response = self._response
        if response is None or self._complete:
            return
        if not response.status:  # 100 Continue and its like
            self._headers = []
            return
        self._complete = True
        self._reusable = self._parser.should_keep_alive()  # it is only known here

    def _completed(self) -> None:
        transport = self._transport
        self._end(None)
        # An engine that answered before it had read all of the request reads the rest of it as the next one.
        if self._reusable and not self._surplus and self.is_open and not transport.get_write_buffer_size():
            self._pool.put(self)
        else:
            transport.abort()

    def _has_length(self) -> bool:
        return any(name in _LENGTHS for name, _ in self._headers)

    def _fail(self, error: Exception) -> None:
        assert isinstance(error, UpstreamHttpError)
        self._transport.abort()
        self._end(error)

    def _end(self, error: UpstreamHttpError | None) -> None:
        response, self._response = self._response, None
        if response is not None:
            response._error = error
            response.ended = True
            response._come()


def _too_much() -> MalformedError:
    return MalformedError(f"more than {MAX_HEAD_BYTES} bytes came that are no body")
