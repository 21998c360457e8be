"""Redis and the database away, at the start and in mid-run, under load and over HTTP: nobody gets a 500, a good key
stays one, and what was used is on the books when they are back."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from redis_servers import RedisServer

from sol.gateway.auth import hash_key
from sol.gateway.config import make_config
from sol.gateway.limits.config import DatabaseOptions
from sol.gateway.limits.database import Database
from sol.gateway.limits.keys import create_key
from sol.gateway.limits.stage import LimitStage
from sol.gateway.limits.usage import usage_by
from sol.gateway.serve import GatewayServer
from sol.simulate.config import simulate_config
from sol.simulate.server import SimulatedServer

LIMITS: dict[str, Any] = {"tenants": {"acme": {"tokens_per_minute": 10**6, "requests_per_minute": 10**5}}}
TOKENS = 26
"""Of a request of `ask`."""


@asynccontextmanager
async def front(limits: Any, **sections: Any) -> AsyncIterator[tuple[GatewayServer, SimulatedServer]]:
    async with SimulatedServer(simulate_config({"port": 0, "step_seconds": 0.002})) as engine:
        data = {
            "server": {"port": 0},
            "models": [{"name": "simulated", "engines": ["one"]}],
            "engines": [{"name": "one", "url": engine.url, "driver": "sol"}],
            "keys": [{"key_sha256": hash_key("sk-file"), "id": "file", "tenant": "acme"}],
            "limits": limits,
            **sections,
        }
        async with GatewayServer(make_config(data)) as server:
            yield server, engine


async def ask(session: aiohttp.ClientSession, server: GatewayServer, key: str = "sk-file", stream: bool = False) -> int:
    """The status. An answer must be whole, an error one that says why."""
    body = {"model": "simulated", "prompt": list(range(20)), "max_tokens": 6, "ignore_eos": True, "stream": stream}
    headers = {"authorization": f"Bearer {key}"}
    async with session.post(f"{server.url}/v1/completions", json=body, headers=headers) as response:
        text = await response.text()
        if response.status != 200:
            assert '"error"' in text
        elif stream:
            assert text.endswith("data: [DONE]\n\n")
        return response.status


@asynccontextmanager
async def load(server: GatewayServer, seen: list[int]) -> AsyncIterator[None]:
    """Six clients, one request after another; every third is a stream."""
    stop = False

    async def client(session: aiohttp.ClientSession, number: int) -> None:
        while not stop:
            seen.append(await ask(session, server, stream=number % 3 == 0))

    async with aiohttp.ClientSession() as session:
        tasks = [asyncio.create_task(client(session, number)) for number in range(6)]
        try:
            yield
        finally:
            stop = True
            await asyncio.gather(*tasks)


async def until(holds: Callable[[], Awaitable[bool]], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not await holds():
        assert time.monotonic() < end
        await asyncio.sleep(0.05)


def stage_of(server: GatewayServer) -> LimitStage:
    return next(stage for stage in server.gateway.pipeline.stages if isinstance(stage, LimitStage))


async def more(seen: list[int], number: int) -> None:
    """Wait until so many more have been answered."""
    before = len(seen)

    async def answered() -> bool:
        return len(seen) >= before + number

    await until(answered)


@pytest.mark.parametrize("fail", ["local", "open"])
async def test_redis_that_goes_and_comes_in_mid_run_is_noticed_by_nobody(fail: str, redis_server: RedisServer) -> None:
    seen: list[int] = []
    redis = {"url": redis_server.url, "fail": fail, "timeout_seconds": 0.2}
    async with front({**LIMITS, "redis": redis}) as (server, engine):
        stage = stage_of(server)
        async with load(server, seen):
            await more(seen, 30)
            redis_server.stop()
            await more(seen, 60)
            redis_server.start()
            await more(seen, 60)
            redis_server.freeze()
            await more(seen, 60)
            redis_server.thaw()
            await more(seen, 30)
        assert set(seen) == {200}

        async def settled() -> bool:
            return not stage._open

        await until(settled)  # clients have their last byte before that
        total = stage.totals["acme", "file", "simulated"]
        assert total.requests == len(seen) == len(engine.service.records)
        assert total.prompt_tokens + total.completion_tokens == TOKENS * len(seen)


async def test_redis_that_is_away_at_the_start_is_used_when_it_comes(redis_server: RedisServer) -> None:
    redis_server.stop()
    redis = {"url": redis_server.url, "timeout_seconds": 0.2}
    limits = {"tenants": {"acme": {"requests_per_minute": 1000}}, "redis": redis}
    async with front(limits) as (server, _), aiohttp.ClientSession() as session:
        assert [await ask(session, server) for _ in range(3)] == [200] * 3
        redis_server.start()
        stage = stage_of(server)
        (limit,) = stage._limits._make("file", "acme", None, "simulated")

        async def counted_there() -> bool:
            assert await ask(session, server) == 200
            shared = stage.ledger._shared  # type: ignore[attr-defined]
            with contextlib.suppress(Exception):
                return bool((await shared.standing(limit)).requests)
            return False

        await until(counted_there)


async def test_a_database_that_is_away_at_the_start_makes_no_key_a_bad_one(tmp_path: Path) -> None:
    """litellm and others turned valid keys into 401 then, and did not recover."""
    away, path = tmp_path / "away", tmp_path / "database"
    away.mkdir()
    writer = Database(DatabaseOptions(url=f"sqlite:///{away}/sol.db", journal=tmp_path / "other"))
    stored = await create_key(writer, id="stored", tenant="new")
    await writer.close()
    path.write_text("no directory")
    database = {
        "url": f"sqlite:///{path}/sol.db", "journal": str(tmp_path / "journal"), "timeout_seconds": 1,
        "key_refresh_seconds": 0.5,
    }  # fmt: skip
    async with front(LIMITS, database=database) as (server, engine), aiohttp.ClientSession() as session:
        assert await ask(session, server, stored) == 503
        assert await ask(session, server, "sk-made-up") == 503
        assert await ask(session, server) == 200  # the file's key needs no database
        path.unlink()
        away.rename(path)

        async def good() -> bool:
            status = await ask(session, server, stored)
            assert status in (200, 503)
            return status == 200

        await until(good)
        assert await ask(session, server, "sk-made-up") == 401
        answered = len(engine.service.records)
    reader = Database(DatabaseOptions(url=f"sqlite:///{path}/sol.db", journal=tmp_path / "other"))
    rows = {row["key_id"]: row for row in await usage_by(reader, ["key_id"])}
    await reader.close()
    assert rows["file"]["requests"] == 1  # of the time before there was a database
    assert sum(row["requests"] for row in rows.values()) == answered
    assert sum(row["prompt_tokens"] + row["completion_tokens"] for row in rows.values()) == TOKENS * answered


async def test_a_database_that_goes_in_mid_run_costs_nobody_an_answer_and_loses_no_record(tmp_path: Path) -> None:
    away, path = tmp_path / "away", tmp_path / "database"
    path.mkdir()
    seen: list[int] = []
    database = {"url": f"sqlite:///{path}/sol.db", "journal": str(tmp_path / "journal"), "timeout_seconds": 1}
    async with front(LIMITS, database=database) as (server, engine):
        async with load(server, seen):
            await more(seen, 30)
            path.rename(away)
            path.write_text("no directory")
            await more(seen, 60)
            path.unlink()
            away.rename(path)
            await more(seen, 30)
        assert set(seen) == {200}
        assert len(engine.service.records) == len(seen)
    reader = Database(DatabaseOptions(url=f"sqlite:///{path}/sol.db", journal=tmp_path / "other"))
    (row,) = await usage_by(reader, ["tenant"])
    await reader.close()
    assert (row["requests"], row["prompt_tokens"] + row["completion_tokens"]) == (len(seen), TOKENS * len(seen))
