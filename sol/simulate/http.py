"""HTTP/1.1 on bare asyncio, for a server that has to misbehave.

A framework would serve well and could not cut a connection in the middle of a chunk, reset it, or delay its bytes; and
with a task for each stream it would spend more on waking them than on what they write. Here a request is parsed by
httptools and handed over whole; who answers it writes when there is something to write, from one loop for all.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final, cast
from urllib.parse import unquote

import httptools

MAX_BODY_BYTES: Final = 32 * 2**20
_MAX_HEADER_BYTES: Final = 64 * 2**10
_MAX_PIPELINED: Final = 1024
_MAX_PIPELINED_BYTES: Final = 2**20
_REASONS: Final = {
    200: "OK", 400: "Bad Request", 401: "Unauthorized", 403: "Forbidden", 404: "Not Found", 405: "Method Not Allowed",
    408: "Request Timeout", 409: "Conflict", 413: "Content Too Large", 422: "Unprocessable Content",
    429: "Too Many Requests", 431: "Request Header Fields Too Large", 500: "Internal Server Error", 502: "Bad Gateway",
    503: "Service Unavailable", 504: "Gateway Timeout",
}  # fmt: skip
_LINGER_NOT: Final = struct.pack("ii", 1, 0)

Header = tuple[str, str]


class Exchange:
    """One request and its response, which is either `respond` or `start_stream`, `write` … `finish`."""

    def __init__(self, connection: Connection, method: str, path: str, headers: dict[str, str], body: bytes) -> None:
        self._connection = connection
        self.method = method
        self.path = path
        """Decoded, without the query."""
        self.headers = headers
        """By lower-case name; several of one name are joined by commas."""
        self.body = body
        self.on_leave: Callable[[], None] | None = None
        """Called when the connection goes away before the response is finished."""
        self.started = False
        self.finished = False
        self.request_id = ""
        self.on_control_port = False
        self.extra_headers: list[Header] = []
        """For the response's head."""
        self._chunked = connection.keeps_chunks

    def respond(self, status: int, body: bytes, content_type: str, headers: Iterable[Header] = ()) -> None:
        """The whole response."""
        head = self._head(status, [("content-type", content_type), ("content-length", str(len(body))), *headers])
        self.started = True
        self._connection.send(head if self.method == "HEAD" else head + body)
        self._finish(close=False)

    def respond_partly(self, body: bytes, size: int, content_type: str) -> None:
        """A head that promises all of `body`, its first `size` bytes, and the connection's end."""
        self.started = True
        head = self._head(200, [("content-type", content_type), ("content-length", str(len(body)))])
        self._connection.send(head + body[:size])
        self.cut()

    def start_stream(self, headers: Iterable[Header]) -> None:
        framing = [("transfer-encoding", "chunked")] if self._chunked else []
        self.started = True
        self._connection.send(self._head(200, [*headers, *framing]))

    def write(self, data: bytes) -> None:
        """More of a stream."""
        self._connection.send(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def finish(self) -> None:
        """The stream's proper end."""
        if self._chunked:
            self._connection.send(b"0\r\n\r\n")
        self._finish(close=not self._chunked)

    def _finish(self, *, close: bool) -> None:
        self.finished = True
        self._connection.after_sending(self._connection.cut if close else self._connection.next_request)

    def cut(self) -> None:
        """Close the connection once what was written is out, whatever the response lacks."""
        self.finished = True
        self._connection.after_sending(self._connection.cut)

    def reset(self) -> None:
        """Reset the connection at once: what was not sent is lost."""
        self.finished = True
        self._connection.reset()

    def hold(self, seconds: float) -> None:
        """Send nothing for a while; what is written meanwhile comes after it."""
        self._connection.hold(seconds)

    def slow_down(self, delay: float, bytes_per_second: float | None) -> None:
        """From now on, everything on this connection takes so long to its client."""
        self._connection.delay, self._connection.bytes_per_second = delay, bytes_per_second

    def _head(self, status: int, headers: Iterable[Header]) -> bytes:
        lines = [f"HTTP/1.1 {status} {_REASONS.get(status, 'Error')}"]
        lines += [f"{name}: {value}" for name, value in (*headers, *self.extra_headers)]
        if not self._connection.keep_alive:
            lines.append("connection: close")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class Connection(asyncio.Protocol):
    """`handle` is called with each request, one at a time; `connections` holds those that are open."""

    def __init__(self, handle: Callable[[Exchange], None], connections: set[Connection]) -> None:
        self._handle = handle
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._headers: dict[str, str] = {}
        self._header_bytes = 0
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._ready: deque[tuple[str, bytes, dict[str, str], bytes, bool, bool]] = deque()
        self._queued_bytes = 0
        """Of bodies that came while another request was answered"""
        self._exchange: Exchange | None = None
        self.keep_alive = True
        self.keeps_chunks = True
        """Whether the client understands them: HTTP/1.1, not 1.0."""
        self.delay = 0.0
        self.bytes_per_second: float | None = None
        self._outbox: deque[tuple[float, bytes | Callable[[], None]]] = deque()
        self._free_at = 0.0
        """When the simulated line has sent what it was given."""
        self._timer: asyncio.TimerHandle | None = None
        self.closed: asyncio.Future[None] = self._loop.create_future()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one without inheriting from it
        self._connections.add(self)
        raw = transport.get_extra_info("socket")
        if raw is not None:
            with contextlib.suppress(OSError):  # not TCP
                raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, _error: Exception | None) -> None:
        self._connections.discard(self)
        if not self.closed.done():
            self.closed.set_result(None)
        if self._timer is not None:
            self._timer.cancel()
        exchange, self._exchange = self._exchange, None
        self._ready.clear()
        self._transport = None
        if exchange is not None and not exchange.finished and exchange.on_leave is not None:
            exchange.on_leave()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.keep_alive = False  # nothing is upgraded; the request itself was taken
        except httptools.HttpParserError:
            if self._transport is not None:
                self._refuse(400, "this is not HTTP")

    # What httptools calls.

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers = {}
        self._body = []
        self._header_bytes = self._body_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._count_header(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_header(len(name) + len(value))
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        self._headers[key] = f"{self._headers[key]}, {text}" if key in self._headers else text

    def on_headers_complete(self) -> None:
        if self._headers.get("expect", "").lower() == "100-continue" and self._transport is not None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._body_bytes > MAX_BODY_BYTES:
            self._refuse(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
            return
        self._body.append(body)

    def on_message_complete(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        method = self._parser.get_method().decode("latin-1")
        modern = self._parser.get_http_version() == "1.1"
        keep = self._parser.should_keep_alive()
        self._ready.append((method, self._url, self._headers, b"".join(self._body), modern, keep))
        if self._exchange is None and len(self._ready) == 1:
            self._take()
        else:  # pipelined: it waits
            self._queued_bytes += self._body_bytes
            # Who does not read does not hear that the client leaves, so only what would take much memory has to wait.
            if len(self._ready) > _MAX_PIPELINED or self._queued_bytes > _MAX_PIPELINED_BYTES:
                self._transport.pause_reading()

    def _count_header(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > _MAX_HEADER_BYTES:
            self._refuse(431, f"the headers are larger than {_MAX_HEADER_BYTES} bytes")

    def _refuse(self, status: int, message: str) -> None:
        """Answer what cannot be a request, and close. Between the answers to others there is no place for it."""
        if self._transport is None or self._transport.is_closing():
            return
        if self._exchange is None:
            body = (
                b'{"error":{"message":"%b","type":"invalid_request_error","param":null,"code":null}}' % message.encode()
            )
            head = f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: application/json\r\nconnection: close\r\n"
            self._transport.write(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
        self._transport.close()

    # What exchanges call.

    def next_request(self) -> None:
        self._exchange = None
        if self._transport is None:
            return
        if not self.keep_alive:
            self._transport.close()
            return
        self.delay, self.bytes_per_second = 0.0, None
        if self._ready:
            self._loop.call_soon(self._take)  # not from here: a thousand pipelined ones would be a deep recursion
        else:
            self._queued_bytes = 0
            self._transport.resume_reading()

    def _take(self) -> None:
        if self._transport is None or self._exchange is not None or not self._ready:
            return
        method, url, headers, body, self.keeps_chunks, self.keep_alive = self._ready.popleft()
        path = url.partition(b"?")[0].decode("latin-1")
        if path.startswith("http://"):  # as proxies are asked
            path = "/" + path.removeprefix("http://").partition("/")[2]
        self._exchange = exchange = Exchange(self, method, unquote(path), headers, body)
        self._handle(exchange)

    def send(self, data: bytes) -> None:
        if self._transport is None:
            return
        if self._outbox or self.delay or self.bytes_per_second or self._free_at:
            self._post(data, len(data))
        else:
            self._transport.write(data)

    def after_sending(self, action: Callable[[], None]) -> None:
        if self._outbox or self._free_at:
            self._post(action, 0)
        else:
            action()

    def hold(self, seconds: float) -> None:
        self._free_at = max(time.monotonic(), self._free_at) + seconds

    def cut(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def reset(self) -> None:
        if self._transport is None:
            return
        raw: Any = self._transport.get_extra_info("socket")
        if raw is not None:
            with contextlib.suppress(OSError):  # the client was faster
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
        self._transport.abort()

    def close(self) -> None:
        """Close once the line has sent what it was given."""
        self.after_sending(self.cut)

    def _post(self, item: bytes | Callable[[], None], size: int) -> None:
        now = time.monotonic()
        begin = max(now + (self.delay if size else 0.0), self._free_at)
        self._free_at = begin + (size / self.bytes_per_second if self.bytes_per_second else 0.0)
        self._outbox.append((self._free_at, item))
        if self._timer is None:
            self._timer = self._loop.call_later(self._free_at - now, self._deliver)

    def _deliver(self) -> None:
        self._timer = None
        now = time.monotonic()
        while self._outbox and self._outbox[0][0] <= now and self._transport is not None:
            item = self._outbox.popleft()[1]
            if callable(item):
                item()
            else:
                self._transport.write(item)
        if self._outbox:
            self._timer = self._loop.call_later(max(0.0, self._outbox[0][0] - now), self._deliver)
        elif not self.delay and not self.bytes_per_second:
            self._free_at = 0.0
