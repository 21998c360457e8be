"""Limits as clients meet them: a gateway over HTTP, before simulated engines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator
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

KEYS = ("sk-one", "sk-two")
HEADERS = [{"authorization": f"Bearer {key}"} for key in KEYS]


def engines(**options: Any) -> SimulatedServer:
    return SimulatedServer(simulate_config({"port": 0, "step_seconds": 0.002, **options}))


def file_of(server: SimulatedServer, limits: Any, **sections: Any) -> dict[str, Any]:
    return {
        "server": {"port": 0},
        "models": [{"name": "simulated", "engines": ["one"]}],
        "engines": [{"name": "one", "url": server.url, "driver": "sol"}],
        "keys": [{"key_sha256": hash_key(key), "id": key[3:], "tenant": "acme"} for key in KEYS],
        "limits": limits,
        "prices": {"simulated": {"input": 1, "cached_input": 0.5, "output": 2}},
        **sections,
    }


@asynccontextmanager
async def gateway(server: SimulatedServer, limits: Any, **sections: Any) -> AsyncIterator[GatewayServer]:
    async with GatewayServer(make_config(file_of(server, limits, **sections))) as running:
        yield running


def stage_of(server: GatewayServer) -> LimitStage:
    return next(stage for stage in server.gateway.pipeline.stages if isinstance(stage, LimitStage))


def body(max_tokens: int | None, *, stream: bool = False, prompt: int = 20) -> dict[str, Any]:
    declared = {} if max_tokens is None else {"max_tokens": max_tokens}
    return {"model": "simulated", "prompt": list(range(prompt)), "stream": stream, "ignore_eos": True, **declared}


async def ended(server: SimulatedServer) -> list[dict[str, Any]]:
    """What the engine says of its requests, once none is open."""
    deadline = time.monotonic() + 20
    while server.service.num_open:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    return list(server.service.records)


async def test_two_hundred_clients_use_a_limit_up_and_not_more(tmp_path: Path) -> None:
    """Answers and streams; the ledger, the engine and the database agree to the token."""
    limit = 12_000
    database = DatabaseOptions(url=f"sqlite:///{tmp_path}/sol.db", journal=tmp_path / "journal")
    sections = {"database": {"url": f"sqlite:///{tmp_path}/sol.db", "journal": str(tmp_path / "journal")}}
    async with engines() as server:
        async with gateway(server, {"tenants": {"acme": {"tokens_per_minute": limit}}}, **sections) as front:
            url, stage = f"{front.url}/v1/completions", stage_of(front)
            used = {"one": 0, "two": 0}
            wrongly: list[Any] = []

            async def client(session: aiohttp.ClientSession, number: int) -> None:
                while True:
                    data = body(10, stream=number % 3 == 0)
                    async with session.post(url, json=data, headers=HEADERS[number % 2]) as response:
                        text = await response.text()
                        if response.status == 429:
                            assert json.loads(text)["error"]["code"] == "rate_limit_exceeded"
                            assert 0 < float(response.headers["retry-after-ms"]) <= 60_020
                            if int(response.headers["x-ratelimit-remaining-tokens"]) >= 30:
                                wrongly.append(dict(response.headers))
                            return
                        assert response.status == 200, text
                        assert response.headers["x-ratelimit-limit-tokens"] == str(limit)
                        used[KEYS[number % 2][3:]] += 30

            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
                await asyncio.gather(*(client(session, number) for number in range(200)))
            assert wrongly == []
            assert sum(used.values()) == limit
            records = await ended(server)
            assert sum(item["prompt_tokens"] + item["completion_tokens"] for item in records) == limit
            await stage.check_integrity()
            totals = {key: total.as_dict() for (_, key, _), total in stage.totals.items()}
        for key, tokens in used.items():
            assert totals[key]["prompt_tokens"] + totals[key]["completion_tokens"] == tokens
        # The gateway has stopped: nothing of it is still on its way.
        reader = Database(database)
        rows = {row["key_id"]: row for row in await usage_by(reader, ["key_id"])}
        await reader.close()
        assert {key: {name: rows[key][name] for name in totals[key]} for key in totals} == totals
        assert sum(row["cached_tokens"] for row in rows.values()) == sum(item["cached_tokens"] for item in records)


async def test_clients_that_leave_are_settled_for_what_came() -> None:
    async with engines() as server, gateway(server, {"tenants": {"acme": {"tokens_per_minute": 10**6}}}) as front:
        stage = stage_of(front)

        async def client(session: aiohttp.ClientSession, number: int) -> None:
            data = body(20_000, stream=True)
            async with session.post(f"{front.url}/v1/completions", json=data, headers=HEADERS[0]) as response:
                for _ in range(2 * number):  # an event and an empty line for each token
                    await response.content.readline()

        async with aiohttp.ClientSession() as session:
            await asyncio.gather(*(client(session, number) for number in range(1, 20)))
        records = await ended(server)
        deadline = time.monotonic() + 10
        while stage._open:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        total = stage.totals["acme", "one", "simulated"]
        assert total.requests == len(records) == 19
        assert total.prompt_tokens == sum(item["prompt_tokens"] for item in records)
        generated = sum(item["completion_tokens"] for item in records)
        # No less than clients got, and no more than the engine made; it makes some that nobody gets, until it knows.
        assert sum(range(1, 20)) <= total.completion_tokens <= generated < 19 * 20_000
        standing = await stage.ledger.standing(stage._limits._make("one", "acme", None, "simulated")[0])
        assert standing.tokens == total.prompt_tokens + total.completion_tokens
        await stage.check_integrity()


async def test_an_engine_that_dies_costs_what_it_had_answered() -> None:
    limits = {"tenants": {"acme": {"tokens_per_minute": 10**5, "requests_per_minute": 100}}}
    async with engines() as server, gateway(server, limits) as front:
        stage = stage_of(front)
        async with aiohttp.ClientSession() as session:
            url = f"{front.url}/v1/completions"
            async with session.post(url, json=body(20_000, stream=True), headers=HEADERS[0]) as response:
                for _ in range(20):
                    await response.content.readline()
                faults = f"{server.control_url}/simulate/faults"
                async with session.post(faults, json={"kind": "crash", "seconds": 30, "startup_seconds": 30}) as set_:
                    assert set_.status < 300, await set_.text()
                rest = await response.text()
            assert '"error"' in rest
            assert "[DONE]" not in rest
            async with session.post(url, json=body(500), headers=HEADERS[0]) as response:
                assert response.status in (502, 503)
                assert response.headers["x-ratelimit-remaining-requests"] == "98"
        total = stage.totals["acme", "one", "simulated"]
        (record,) = await ended(server)
        assert total.requests == 1
        assert 0 < total.completion_tokens <= record["completion_tokens"]
        standing = await stage.ledger.standing(stage._limits._make("one", "acme", None, "simulated")[0])
        # What could not be served is not counted.
        assert (standing.requests, standing.tokens) == (1, total.prompt_tokens + total.completion_tokens)


async def test_keys_of_the_database_open_the_gateway_and_its_absence_is_not_their_fault(tmp_path: Path) -> None:
    path = tmp_path / "sol.db"
    options = DatabaseOptions(url=f"sqlite:///{path}", journal=tmp_path / "journal")
    writer = Database(options)
    secret = await create_key(writer, id="stored", tenant="new")
    sections = {"database": {"url": f"sqlite:///{path}", "journal": str(tmp_path / "journal")}, "keys": []}
    async with engines() as server, gateway(server, {}, **sections) as front, aiohttp.ClientSession() as session:
        path.rename(tmp_path / "away")
        path.mkdir()

        async def ask(key: str) -> int:
            headers = {"authorization": f"Bearer {key}"}
            async with session.post(f"{front.url}/v1/completions", json=body(2), headers=headers) as response:
                if response.status == 503:
                    assert response.headers["retry-after"] == "2"
                return response.status

        assert await ask(secret) == 200
        assert await ask("sk-unknown") == 503
        path.rmdir()
        (tmp_path / "away").rename(path)
        deadline = time.monotonic() + 20
        while (status := await ask("sk-unknown")) != 401:
            assert status == 503
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
        assert await ask(secret) == 200
    rows = await usage_by(writer, ["key_id", "tenant"])
    await writer.close()
    assert [(row["key_id"], row["tenant"], row["requests"]) for row in rows] == [("stored", "new", 2)]


async def test_a_gateway_that_is_killed_leaves_what_it_had_seen_to_another(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    """And its client asks again there: both are counted, each for what it was."""
    sections = {"database": {"url": f"sqlite:///{tmp_path}/sol.db", "journal": str(tmp_path / "journal")}}
    limits = {"tenants": {"acme": {"tokens_per_minute": 5000}}, "redis": {"url": redis_server.url}, "lease_seconds": 3}
    async with engines(step_seconds=0.01) as server, gateway(server, limits, **sections) as heir:
        file = tmp_path / "gateway.yaml"
        file.write_text(json.dumps(file_of(server, limits, **sections)))
        command = [sys.executable, "-m", "sol", "gateway", "--config", str(file)]
        doomed = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert doomed.stdout is not None
        words = (await doomed.stdout.readline()).decode().split()
        url = next(word for word in words if word.startswith("http")).rstrip(":")
        async with aiohttp.ClientSession() as session:
            data = body(2000, stream=True)
            lines = 0
            with contextlib.suppress(aiohttp.ClientError):
                async with session.post(f"{url}/v1/completions", json=data, headers=HEADERS[0]) as response:
                    assert response.status == 200
                    while await response.content.readline():
                        lines += 1
                        if lines == 400:  # two seconds: it has told Redis of it more than once
                            doomed.kill()
            await doomed.wait()
            stage = stage_of(heir)
            deadline = time.monotonic() + 30
            while not stage.totals:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
            (record,) = await ended(server)
            total = stage.totals["acme", "one", "simulated"]
            assert (total.requests, total.prompt_tokens) == (1, 20)
            assert 1 <= total.completion_tokens <= record["completion_tokens"]
            async with session.post(f"{heir.url}/v1/completions", json=body(10), headers=HEADERS[0]) as response:
                assert response.status == 200
                # What the dead one had reserved it still holds, for as long as it would have been in the window.
                assert int(response.headers["x-ratelimit-remaining-tokens"]) == 5000 - 2020 - 30
    reader = Database(DatabaseOptions(url=f"sqlite:///{tmp_path}/sol.db"))
    (row,) = await usage_by(reader, ["tenant"])
    await reader.close()
    assert (row["requests"], row["completion_tokens"], row["estimated"]) == (2, total.completion_tokens, 1)


@pytest.mark.parametrize("fail", ["local", "closed"])
async def test_a_redis_that_is_not_there_is_never_a_500(fail: str) -> None:
    limits = {
        "tenants": {"acme": {"requests_per_minute": 2}},
        "redis": {"url": "redis://127.0.0.1:1/0", "fail": fail},
    }
    async with engines() as server, gateway(server, limits) as front, aiohttp.ClientSession() as session:
        seen = []
        for _ in range(3):
            url = f"{front.url}/v1/completions"
            async with session.post(url, json=body(2), headers=HEADERS[0]) as response:
                seen.append(response.status)
        assert seen == ([200, 200, 429] if fail == "local" else [503, 503, 503])
