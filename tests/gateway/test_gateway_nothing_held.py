"""What must not hold a call, a limit or a credential for longer than it is theirs."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from gateway_harness import CHAT, running, until
from test_gateway_upstreams import HEAD, framed, request

from sol.errors import ConfigError
from sol.gateway.config import make_config
from sol.gateway.limits.redis_ledger import RedisLedger
from sol.gateway.limits.stage import LimitStage
from sol.gateway.relay import attempt
from sol.gateway.relay.sse import usage_in
from sol.gateway.serve import GatewayServer


def config(url: str, **engine: Any) -> Any:
    return make_config(
        {
            "server": {"port": 0},
            "models": [{"name": "m", "engines": ["a"]}],
            "engines": [{"name": "a", "url": url, **engine}],
            "routing": {"health": {"interval": 0.02}},
        }
    )


async def test_a_client_that_reads_nothing_is_not_waited_for_when_its_stream_breaks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attempt, "_LAST_WORD_SECONDS", 0.1)
    broke = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (await request(reader)).startswith(b"POST"):
            # One event, larger than what all buffers on the way to the client take; then no more.
            event = b'data: {"choices":[{"index":0,"delta":{"content":"' + b"a" * 4_000_000 + b'"}}]}\n\n'
            writer.write(HEAD + framed(event))
            await writer.drain()
            broke.set()
        writer.close()

    engine = await asyncio.start_server(handle, "127.0.0.1", 0)
    host, port = engine.sockets[0].getsockname()
    async with engine, GatewayServer(config(f"http://{host}:{port}")) as server:
        loop = asyncio.get_running_loop()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            body = b'{"model":"m","stream":true,"messages":[]}'
            await loop.sock_connect(client, ("127.0.0.1", int(server.url.rpartition(":")[2])))
            head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
            await loop.sock_sendall(client, head + body)
            await broke.wait()
            await until(lambda: server.app.num_open == 0)
            assert server.gateway.relay.num_open == 0


async def test_credentials_do_not_follow_a_redirection() -> None:
    heads: list[bytes] = []

    async def elsewhere(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.close()

    other = await asyncio.start_server(elsewhere, "127.0.0.1", 0)
    target = other.sockets[0].getsockname()[1]
    probed = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal probed
        await request(reader)
        writer.write(b"HTTP/1.1 307 x\r\nlocation: http://127.0.0.1:%d/\r\ncontent-length: 0\r\n\r\n" % target)
        probed += 1
        writer.close()

    engine = await asyncio.start_server(handle, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{engine.sockets[0].getsockname()[1]}"
    async with other, engine, GatewayServer(config(url, driver="vllm", headers={"x-api-key": "s3cret"})):
        await until(lambda: probed >= 6)
    assert heads == []


async def test_a_call_that_cannot_be_accounted_for_gives_back_what_it_reserved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("the accounts are broken")

    limits = {"default_tenant": {"requests_per_minute": 100, "tokens_per_minute": 1000}}
    async with running(limits=limits) as it:
        stage = next(stage for stage in it.gateway.pipeline.stages if isinstance(stage, LimitStage))
        monkeypatch.setattr(stage, "_record", broken)
        for _ in range(3):
            assert (await it.http.post("/v1/chat/completions", json={**CHAT, "max_tokens": 6})).status_code == 200
        await it.settled(3)
        await until(lambda: not stage._open)
        used = sum(outcome.usage.prompt_tokens + outcome.usage.completion_tokens for _, outcome in it.outcomes
                   if outcome.usage is not None)  # fmt: skip
        (limit,) = stage._limits._make("anonymous", "default", None, "m")
        assert (await stage.ledger.standing(limit)).tokens == used


@pytest.mark.parametrize("tokens", [-1, 10**13, 10**30])
def test_nonsense_of_an_engine_charges_nobody(tokens: int) -> None:
    assert usage_in(b'{"usage":{"prompt_tokens":1,"completion_tokens":%d}}' % tokens) is None
    assert usage_in(b'{"usage":{"prompt_tokens":%d,"completion_tokens":1}}' % tokens) is None


@pytest.mark.parametrize("url", ["redis://:gehe/im@host:6379/0", "redis://:x@host:geheim/0"])
def test_a_password_that_is_read_wrongly_is_not_shown(url: str) -> None:
    with pytest.raises(ConfigError) as error:
        RedisLedger(url)
    assert "gehe" not in str(error.value)
