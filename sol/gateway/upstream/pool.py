"""Connections to engines: kept while they are young, opened where there is none."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import socket
import ssl
from collections.abc import Sequence
from typing import Final
from urllib.parse import quote, unquote, urlsplit

import aiohappyeyeballs
from aiohappyeyeballs import AddrInfoType

from sol.gateway.upstream.connection import Connection, Response
from sol.gateway.upstream.errors import ConnectTimeoutError, LostError, UnreachableError
from sol.gateway.upstream.head import header_lines

_DNS_SECONDS: Final = 10.0
_NEXT_ADDRESS_SECONDS: Final = 0.25
"""After which the next of a name's addresses is tried, too (RFC 8305, section 5)."""
_FINISH_SECONDS: Final = 1.0
"""For the last bytes of an answer that nobody waits for."""
_SWEEP_SECONDS: Final = 1.0
_IN_TARGETS: Final = "/?&=%:@!$'()*+,;~#[]"


class Upstreams:
    """All connections, by the address they are to. To be used in one event loop.

    `connect_timeout`: seconds for a name, a connection and TLS together; `keep_alive`: seconds for which an unused
    connection is kept.
    """

    def __init__(self, *, connect_timeout: float, keep_alive: float) -> None:
        self._connect_timeout = connect_timeout
        self._keep_alive = keep_alive
        self._origins: dict[str, Origin] = {}

    def origin(self, url: str) -> Origin:
        """`url`: with a scheme and a host, without query; what it has of a path comes before every request's."""
        found = self._origins.get(url)
        if found is None:
            found = self._origins[url] = Origin(url, self._connect_timeout, self._keep_alive)
        return found

    async def close(self) -> None:
        """Close all connections, and wait until they are: also those of requests that nobody waits for any more."""
        await asyncio.gather(*(origin.close() for origin in self._origins.values()))


class Origin:
    """A server, and the connections to it. Their number is not limited: the queue limits requests."""

    def __init__(self, url: str, connect_timeout: float, keep_alive: float) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._host = parts.hostname
        self._is_tls = parts.scheme == "https"
        usual = 443 if self._is_tls else 80
        self._port = parts.port or usual
        self._tls: ssl.SSLContext | None = None
        self._prefix = quote(parts.path.rstrip("/"), safe=_IN_TARGETS)
        host = f"[{self._host}]" if ":" in self._host else self._host.encode("idna").decode("ascii")
        self._host_line = header_lines({"host": host if self._port == usual else f"{host}:{self._port}"})
        self._authorization = b""
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
            self._authorization = header_lines({"authorization": f"Basic {base64.b64encode(pair).decode()}"})
        self._connect_timeout = connect_timeout
        self._keep_alive = keep_alive
        self._addresses: Sequence[AddrInfoType] = ()
        self._resolved_at = 0.0
        self._idle: list[Connection] = []
        self._finishing: set[Connection] = set()
        self._open: set[Connection] = set()
        self._none_open: asyncio.Future[None] | None = None
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False
        self.num_opened = 0
        """Connections, ever."""

    def opening(self, method: str, target: str, lines: bytes) -> bytes:
        """The beginning of a request, which can be used again: its first line, and header lines. `lines`: some, each
        with its end; where they have `host` or `authorization`, theirs count."""
        low = b"\n" + lines.lower()
        parts = [
            f"{method} {self._prefix}{quote(target, safe=_IN_TARGETS)} HTTP/1.1\r\n".encode("ascii"),
            b"" if b"\nhost:" in low else self._host_line,
            b"" if b"\nauthorization:" in low else self._authorization,
            lines,
        ]
        return b"".join(parts)

    async def post(self, opening: bytes, lines: bytes, body: bytes) -> Response:
        """`lines`: further header lines. Returns when the answer's head has come.

        Raises `UnreachableError`, or `LostError` and `MalformedError` where the request may have been seen.
        """
        loop = asyncio.get_running_loop()
        kept = self._take(loop.time())
        connection = kept or await self._connect(loop)
        response = connection.send(b"%b%bcontent-length: %d\r\n\r\n" % (opening, lines, len(body)), body)
        try:
            await response.head()
        except LostError:
            if kept is not None:
                self._drop_idle()  # a server that has closed one is closing the others: who asks again gets a new one
            raise
        except BaseException:
            response.close()
            raise
        return response

    async def get(self, opening: bytes, *, max_bytes: int) -> tuple[int, bytes]:
        """The status and the body, or as much of it as is allowed. On a connection that turns out to have been closed
        meanwhile it is asked again on a new one: to be asked twice does no harm.

        Raises as `post` does."""
        head = opening + b"\r\n"
        loop = asyncio.get_running_loop()
        kept = self._take(loop.time())
        if kept is not None:
            try:
                return await _whole(kept.send(head, b""), max_bytes)
            except LostError:
                self._drop_idle()
        return await _whole((await self._connect(loop)).send(head, b""), max_bytes)

    async def close(self) -> None:
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        self._idle.clear()
        self._finishing.clear()
        if self._open:
            self._none_open = asyncio.get_running_loop().create_future()
            for connection in list(self._open):
                connection.abort()
            await self._none_open

    # For connections

    def made(self, connection: Connection) -> None:
        self._open.add(connection)
        if self._closed:
            connection.abort()

    def put(self, connection: Connection) -> None:
        self._finishing.discard(connection)
        if self._closed:
            connection.abort()
            return
        connection.idle_since = self._now()
        self._idle.append(connection)

    def finishing(self, connection: Connection) -> None:
        connection.idle_since = self._now()
        self._finishing.add(connection)

    def lost(self, connection: Connection) -> None:
        # One that is idle is left out when it is come across.
        self._finishing.discard(connection)
        self._open.discard(connection)
        if not self._open and self._none_open is not None and not self._none_open.done():
            self._none_open.set_result(None)

    def _now(self) -> float:
        """The loop's time; from now on, what gets too old is seen."""
        loop = asyncio.get_running_loop()
        if self._sweep is None:
            self._sweep = loop.call_later(min(_SWEEP_SECONDS, self._keep_alive), self._drop_old)
        return loop.time()

    def _drop_old(self) -> None:
        now = asyncio.get_running_loop().time()
        self._sweep = None
        young = []
        for connection in self._idle:
            if connection.is_open and now - connection.idle_since < self._keep_alive:
                young.append(connection)
            else:
                connection.abort()
        self._idle = young
        for connection in [each for each in self._finishing if now - each.idle_since >= _FINISH_SECONDS]:
            connection.abort()
            self._finishing.discard(connection)
        if self._idle or self._finishing:
            self._now()

    def _drop_idle(self) -> None:
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.abort()

    def _take(self, now: float) -> Connection | None:
        """The one that was used last: those that a burst has opened grow old."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and now - connection.idle_since < self._keep_alive:
                return connection
            connection.abort()
        return None

    async def _connect(self, loop: asyncio.AbstractEventLoop) -> Connection:
        try:
            async with asyncio.timeout(self._connect_timeout):
                made = await aiohappyeyeballs.start_connection(
                    await self._resolve(loop), happy_eyeballs_delay=_NEXT_ADDRESS_SECONDS, interleave=1, loop=loop
                )
                with contextlib.suppress(OSError):  # it is gone already: the first that is written finds out
                    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                _, connection = await loop.create_connection(
                    lambda: Connection(self),
                    sock=made,
                    ssl=self._context(),
                    server_hostname=self._host if self._is_tls else None,
                )
        except TimeoutError:
            self._addresses = ()
            raise ConnectTimeoutError("it does not take connections") from None
        except (OSError, UnicodeError) as error:
            self._addresses = ()
            raise UnreachableError(_reason(error)) from None
        self.num_opened += 1
        return connection

    async def _resolve(self, loop: asyncio.AbstractEventLoop) -> Sequence[AddrInfoType]:
        """The addresses of the name, another one first each time: a name may stand for several servers."""
        if not self._addresses or loop.time() - self._resolved_at > _DNS_SECONDS:
            self._addresses = await loop.getaddrinfo(
                self._host, self._port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP
            )
            self._resolved_at = loop.time()
        else:
            self._addresses = (*self._addresses[1:], self._addresses[0])
        return self._addresses

    def _context(self) -> ssl.SSLContext | None:
        if self._is_tls and self._tls is None:
            self._tls = ssl.create_default_context()
            self._tls.set_alpn_protocols(["http/1.1"])
        return self._tls


def _reason(error: OSError | UnicodeError) -> str:
    if isinstance(error, OSError) and not isinstance(error, (socket.gaierror, ssl.SSLError)) and error.errno:
        return os.strerror(error.errno)
    return getattr(error, "strerror", None) or "no connection"


async def _whole(response: Response, max_bytes: int) -> tuple[int, bytes]:
    parts, size = [], 0
    try:
        await response.head()
        while size < max_bytes and (data := await response.read()):
            parts.append(data)
            size += len(data)
    finally:
        response.close()
    return response.status, b"".join(parts)[:max_bytes]
