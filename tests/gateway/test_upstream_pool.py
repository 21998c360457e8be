"""Connections to real servers: kept, given up, opened anew; TLS, IPv6, credentials in URLs; what cannot be reached."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from gateway_harness import until

from sol.errors import ConfigError
from sol.gateway.config import make_config
from sol.gateway.upstream.errors import LostError, UnreachableError
from sol.gateway.upstream.head import header_lines
from sol.gateway.upstream.pool import Origin, Upstreams

Handler = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


async def answer_ok(head: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(OK)


class Server:
    def __init__(self) -> None:
        self.heads: list[bytes] = []
        self.open: set[asyncio.StreamWriter] = set()
        self.num_connections = 0
        self.port = 0


@asynccontextmanager
async def serving(handle: Handler = answer_ok, host: str = "127.0.0.1", **options: Any) -> AsyncIterator[Server]:
    found = Server()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        found.num_connections += 1
        found.open.add(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                for line in head.lower().split(b"\r\n"):
                    if line.startswith(b"content-length:"):
                        await reader.readexactly(int(line.partition(b":")[2]))
                found.heads.append(head)
                await handle(head, writer)
        found.open.discard(writer)
        writer.close()

    server = await asyncio.start_server(serve, host, 0, **options)
    found.port = server.sockets[0].getsockname()[1]
    try:
        yield found
        await until(lambda: not found.open)
    finally:
        server.close()


@asynccontextmanager
async def upstreams(**options: float) -> AsyncIterator[Upstreams]:
    found = Upstreams(**{"connect_timeout": 20.0, "keep_alive": 20.0, **options})
    try:
        yield found
    finally:
        await found.close()


async def ask(origin: Origin, body: bytes = b"{}") -> tuple[int, bytes]:
    response = await origin.post(origin.opening("POST", "/v1/x", b""), b"", body)
    parts = b""
    while data := await response.read():
        parts += data
    return response.status, parts


async def test_a_connection_is_used_again_and_several_at_once_have_several() -> None:
    async with serving() as server, upstreams() as all_of_them:
        origin = all_of_them.origin(f"http://127.0.0.1:{server.port}")
        assert all_of_them.origin(f"http://127.0.0.1:{server.port}") is origin
        for _ in range(5):
            assert await ask(origin) == (200, b"ok")
        assert server.num_connections == 1
        assert [await asyncio.gather(*(ask(origin) for _ in range(4)))] == [[(200, b"ok")] * 4]
        assert server.num_connections == origin.num_opened == 4
        head = server.heads[0].decode().lower()
        assert head == f"post /v1/x http/1.1\r\nhost: 127.0.0.1:{server.port}\r\ncontent-length: 2\r\n\r\n"


async def test_unused_connections_are_closed_after_a_while() -> None:
    async with serving() as server, upstreams(keep_alive=0.05) as all_of_them:
        origin = all_of_them.origin(f"http://127.0.0.1:{server.port}")
        await ask(origin)
        await until(lambda: not server.open)
        assert await ask(origin) == (200, b"ok")
        assert server.num_connections == 2


async def test_a_connection_that_the_server_has_closed_is_not_used() -> None:
    async with serving() as server, upstreams() as all_of_them:
        origin = all_of_them.origin(f"http://127.0.0.1:{server.port}")
        for number in range(3):
            assert await ask(origin) == (200, b"ok")
            assert server.num_connections == number + 1
            for writer in server.open:
                writer.close()
            (kept,) = origin._idle
            await until(lambda kept=kept: not kept.is_open)  # type: ignore[misc]


async def test_a_get_is_asked_again_where_an_old_connection_is_closed_on_it_and_a_post_is_not() -> None:
    async def once(head: bytes, writer: asyncio.StreamWriter) -> None:
        """One answer a connection; the next request is read, and the connection closed."""
        if writer in answered:
            writer.close()
            raise ConnectionError
        answered.add(writer)
        writer.write(OK)

    answered: set[asyncio.StreamWriter] = set()
    async with serving(once) as server, upstreams() as all_of_them:
        origin = all_of_them.origin(f"http://127.0.0.1:{server.port}")
        question = origin.opening("GET", "/health", b"")
        for _ in range(3):
            assert await origin.get(question, max_bytes=100) == (200, b"ok")
        assert server.num_connections == 3
        with pytest.raises(LostError):
            await ask(origin)
        assert len(server.heads) == 6  # of the GETs two were asked twice, and the POST once


async def test_of_an_answer_to_a_get_no_more_is_read_than_is_allowed() -> None:
    async def much(head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 10000000\r\n\r\n")
        while True:
            writer.write(b"x" * 10_000)
            await writer.drain()

    async with serving(much) as server, upstreams() as all_of_them:
        origin = all_of_them.origin(f"http://127.0.0.1:{server.port}")
        assert await origin.get(origin.opening("GET", "/metrics", b""), max_bytes=25_000) == (200, b"x" * 25_000)
        await until(lambda: not server.open)


async def test_a_cancelled_request_closes_its_connection() -> None:
    async def silent(head: bytes, writer: asyncio.StreamWriter) -> None:
        arrived.set()

    arrived = asyncio.Event()
    async with serving(silent) as server, upstreams() as all_of_them:
        task = asyncio.create_task(ask(all_of_them.origin(f"http://127.0.0.1:{server.port}")))
        await arrived.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: not server.open)


async def test_closing_ends_what_is_open_and_opens_nothing_more() -> None:
    async def silent(head: bytes, writer: asyncio.StreamWriter) -> None:
        arrived.set()

    arrived = asyncio.Event()
    async with serving(silent) as server, upstreams() as all_of_them:
        origin = all_of_them.origin(f"http://127.0.0.1:{server.port}")
        task = asyncio.create_task(ask(origin))
        await arrived.wait()
        await all_of_them.close()
        with pytest.raises(LostError):
            await task
        with pytest.raises(LostError):
            await ask(origin)


async def test_large_bodies_go_both_ways() -> None:
    async def echo(head: bytes, writer: asyncio.StreamWriter) -> None:
        size = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size + b"y" * size)
        await writer.drain()

    async with serving(echo) as server, upstreams() as all_of_them:
        origin = all_of_them.origin(f"http://127.0.0.1:{server.port}")
        for size in (0, 1, 20_000, 3_000_000):
            status, body = await ask(origin, b"x" * size)
            assert (status, len(body)) == (200, size)
        assert server.num_connections == 1


async def test_paths_credentials_and_a_host_in_the_configuration() -> None:
    async with serving() as server, upstreams() as all_of_them:
        origin = all_of_them.origin(f"http://me:s%40cret@127.0.0.1:{server.port}/pre fix/")
        await ask(origin)
        first, _, rest = server.heads[-1].partition(b"\r\n")
        assert first == b"POST /pre%20fix/v1/x HTTP/1.1"
        assert b"authorization: Basic bWU6c0BjcmV0\r\n" in rest
        lines = header_lines({"Authorization": "Bearer x", "Host": "elsewhere"})
        await origin.get(origin.opening("GET", "/a?b=c", lines), max_bytes=9)
        assert server.heads[-1].lower().count(b"authorization:") == server.heads[-1].lower().count(b"host:") == 1
        assert server.heads[-1].startswith(b"GET /pre%20fix/a?b=c HTTP/1.1\r\n")


async def test_ipv6() -> None:
    with contextlib.closing(socket.socket(socket.AF_INET6)) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
    async with serving(host="::1") as server, upstreams() as all_of_them:
        assert await ask(all_of_them.origin(f"http://[::1]:{server.port}")) == (200, b"ok")
        assert b"\r\nhost: [::1]:%d\r\n" % server.port in server.heads[0]


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """One for localhost that nobody has signed, and its key."""
    made, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    found = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(key), "-out", str(made),
         "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"],
        capture_output=True, check=False,
    )  # fmt: skip
    if found.returncode:
        pytest.skip("openssl cannot make a certificate here")
    return made, key


async def test_tls_is_checked(certificate: tuple[Path, Path]) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certificate)
    async with serving(ssl=context) as server, upstreams() as all_of_them:
        url = f"https://localhost:{server.port}"
        with pytest.raises(UnreachableError):
            await ask(all_of_them.origin(url))
        trusting = all_of_them.origin(url + "/")
        trusting._tls = ssl.create_default_context(cafile=certificate[0])
        for _ in range(2):
            assert await ask(trusting, b"x" * 100_000) == (200, b"ok")
        assert trusting.num_opened == 1


async def test_what_cannot_be_reached_says_why() -> None:
    with socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))
        async with upstreams() as all_of_them:
            with pytest.raises(UnreachableError, match="refused"):
                await ask(all_of_them.origin(f"http://127.0.0.1:{dead.getsockname()[1]}"))
            with pytest.raises(UnreachableError):
                await ask(all_of_them.origin("http://no-such-host.invalid:8000"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("a b", "x"),
        ("", "x"),
        ("x-y", "a\r\nb: c"),
        ("x-y", "secret\0"),
        ("x-y", " secret"),
        ("Content-Length", "3"),
        ("é", "x"),
    ],
)
def test_headers_that_are_none_are_refused_by_the_configuration(name: str, value: str) -> None:
    data = {
        "models": [{"name": "m", "engines": ["a"]}],
        "engines": [{"name": "a", "url": "http://127.0.0.1:1", "headers": {name: value}}],
    }
    with pytest.raises(ConfigError) as refused:
        make_config(data)
    assert "engines[a]" in refused.value.message
    assert len(value) < 2 or value not in refused.value.message
    with pytest.raises(ConfigError, match="api_key"):
        make_config({**data, "engines": [{"name": "a", "url": "http://127.0.0.1:1", "api_key": "secret\n"}]})


async def test_a_server_that_has_closed_one_old_connection_is_asked_again_on_a_new_one() -> None:
    """Several idle connections of a server that was restarted: whoever asks again does not get the next of them."""

    async def once(head: bytes, writer: asyncio.StreamWriter) -> None:
        if writer in answered:
            writer.close()
            raise ConnectionError
        answered.add(writer)
        together.set() if len(answered) >= 3 else None
        await together.wait()
        writer.write(OK)

    answered: set[asyncio.StreamWriter] = set()
    together = asyncio.Event()
    async with serving(once) as server, upstreams() as all_of_them:
        origin = all_of_them.origin(f"http://127.0.0.1:{server.port}")
        await asyncio.gather(*(ask(origin) for _ in range(3)))
        with pytest.raises(LostError):
            await ask(origin)
        assert await ask(origin) == (200, b"ok")
        assert server.num_connections == 4
