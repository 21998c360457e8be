"""A client that sends bytes and shows bytes: what libraries hide is what these tests look at."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit


async def until(holds: Callable[[], bool | Awaitable[bool]]) -> None:
    """Wait for what has no event of its own."""
    async with asyncio.timeout(20):
        while True:
            result = holds()
            if await result if inspect.isawaitable(result) else result:
                return
            await asyncio.sleep(0.005)


def request_bytes(method: str, path: str, body: bytes = b"", *, version: str = "1.1", **headers: str) -> bytes:
    lines = [f"{method} {path} HTTP/{version}", "host: simulated", *(f"{k}: {v}" for k, v in headers.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def post(path: str, body: Any, *, version: str = "1.1", **headers: str) -> bytes:
    data = json.dumps(body).encode()
    return request_bytes("POST", path, data, version=version, **{"content-length": str(len(data)), **headers})


async def ask(url: str, data: bytes) -> bytes:
    """Everything that comes until the server closes, or has answered a single request whole. Raises what the
    connection does."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write(data)
        answer = b""
        async with asyncio.timeout(30):
            while not _whole(answer, data) and (more := await reader.read(65536)):
                answer += more
        return answer
    finally:
        writer.close()


def _whole(answer: bytes, request: bytes) -> bool:
    if b"connection: close" in request or b"HTTP/1.0" in request:
        return False
    head, separator, body = answer.partition(b"\r\n\r\n")
    if not separator:
        return False
    if b"transfer-encoding: chunked" in head:
        return body.endswith(b"0\r\n\r\n")
    length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
    return bool(length) and len(body) >= int(length)


def split_head(answer: bytes) -> tuple[bytes, bytes]:
    """The head, and the body freed of its chunks."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" not in head:
        return head, body
    joined = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        joined += body[: int(size, 16)]
        body = body[int(size, 16) + 2 :]
    return head, joined
