"""Upstream servers that behave as no engine should, written out byte by byte."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
from gateway_harness import CHAT, events, until

from sol.gateway.config import make_config
from sol.gateway.serve import GatewayServer

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNK = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'


def framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def request(reader: asyncio.StreamReader) -> bytes:
    """Its first line; the whole is read."""
    head = await reader.readuntil(b"\r\n\r\n")
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            await reader.readexactly(int(line.partition(b":")[2]))
    return head.split(b"\r\n")[0]


@asynccontextmanager
async def fronting(url: str, **relay: float) -> AsyncIterator[httpx.AsyncClient]:
    data = {
        "server": {"port": 0},
        "models": [{"name": "m", "engines": ["a"]}],
        "engines": [{"name": "a", "url": url}],
        "relay": relay,
    }
    async with GatewayServer(make_config(data)) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=20, verify=False) as http:
            yield http
        await until(lambda: server.gateway.fleet.engines["a"].in_flight == 0)


@asynccontextmanager
async def behind(handle: Handler, **relay: float) -> AsyncIterator[httpx.AsyncClient]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await handle(reader, writer)
        writer.close()

    upstream = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        async with fronting(f"http://127.0.0.1:{upstream.sockets[0].getsockname()[1]}", **relay) as http:
            yield http
    finally:
        upstream.close()


async def test_an_answer_is_over_with_its_done_whatever_the_engine_does_then() -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(HEAD + framed(CHUNK) + framed(b"data: [DONE]\n\n"))
        await reader.read()  # and never ends the stream

    async with behind(handle, idle_timeout=0.2) as http:
        response = await http.post("/v1/chat/completions", json={**CHAT, "stream": True})
        assert events(response.content)[-1] == "[DONE]"
        assert len(events(response.content)) == 2


async def test_pieces_of_any_size_are_whole_events_to_the_client() -> None:
    whole = CHUNK * 3 + b"data: [DONE]\n\n"

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(HEAD)
        for start in range(0, len(whole), 7):
            writer.write(framed(whole[start : start + 7]))
            await writer.drain()
        writer.write(b"0\r\n\r\n")

    async with behind(handle) as http:
        response = await http.post("/v1/chat/completions", json={**CHAT, "stream": True})
        assert response.content == whole


async def test_an_old_connection_that_is_given_up_costs_nobody_an_answer() -> None:
    served = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One answer a connection; the next request on it is read and the connection closed."""
        nonlocal served
        while not (await request(reader)).startswith(b"POST"):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")
        served += 1
        await request(reader)

    async with behind(handle) as http:
        for _ in range(5):
            assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200
    assert served == 5


async def test_what_is_no_http_is_a_502() -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(b"220 this is a mail server\r\n\r\n")

    async with behind(handle) as http:
        response = await http.post("/v1/chat/completions", json=CHAT)
        assert response.status_code == 502
        assert response.json()["error"]["code"] == "upstream_failed"


async def test_errors_in_another_form_get_openais() -> None:
    bodies = iter(
        [b"<html>Not Found</html>", b'{"error": "flat", "error_type": "x"}', b'{"object":"error","message":"x"}']
    )

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (await request(reader)).startswith(b"POST"):
            body = next(bodies)
            writer.write(
                b"HTTP/1.1 422 No\r\ncontent-type: text/html\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
            )

    async with behind(handle) as http:
        for _ in range(3):
            response = await http.post("/v1/chat/completions", json=CHAT)
            assert (response.status_code, response.headers["content-type"]) == (422, "application/json")
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}


async def test_an_answer_that_is_too_large_is_not_kept() -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (await request(reader)).startswith(b"POST"):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100000\r\n\r\n")
            writer.write(b" " * 100_000)

    async with behind(handle, max_response_bytes=50_000) as http:
        response = await http.post("/v1/chat/completions", json=CHAT)
        assert response.status_code == 502
        assert "more than 50000 bytes" in response.json()["error"]["message"]


async def test_an_engine_that_takes_no_connection_is_one_that_was_not_asked() -> None:
    with socket.socket() as deaf, contextlib.ExitStack() as stack:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        for _ in range(4):  # nobody accepts: those beyond the backlog are not even answered
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(deaf.getsockname())
        async with fronting(f"http://127.0.0.1:{deaf.getsockname()[1]}", connect_timeout=0.2) as http:
            response = await http.post("/v1/chat/completions", json=CHAT)
            assert response.status_code == 502
            assert "does not take connections" in response.json()["error"]["message"]
            assert "x-should-retry" not in response.headers


async def test_a_client_that_takes_nothing_does_not_hold_its_engine_for_ever() -> None:
    left = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not (await request(reader)).startswith(b"POST"):
            return
        writer.write(HEAD)
        try:
            while True:
                writer.write(framed(CHUNK * 1000))
                await writer.drain()
        finally:
            left.set()

    async with behind(handle, idle_timeout=0.3) as http:
        stream = http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True})
        async with stream:
            await asyncio.wait_for(left.wait(), 10)
