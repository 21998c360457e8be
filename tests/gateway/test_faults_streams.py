"""Answers that are cut: at any byte, in any way, by an engine's fault or its death. Nobody gets half of one that looks
whole, and what came is accounted for once."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import httpx
import pytest
from gateway_harness import CHAT, Running, events, running, said, until

from sol.gateway.config import make_config
from sol.gateway.limits.stage import LimitStage
from sol.gateway.serve import GatewayServer
from sol.simulate.faults import parse_fault

STREAM: dict[str, Any] = {**CHAT, "stream": True, "seed": 3}
AS_SENT = {**STREAM, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
"""What the engine is asked, which is more than the client asked for."""
LIMITS = {"default_tenant": {"requests_per_minute": 10**6, "tokens_per_minute": 10**9}}
CUTS: dict[str, dict[str, Any]] = {
    "reset": {"kind": "reset"},
    "truncated": {"kind": "truncate"},
    "truncated in order": {"kind": "truncate", "clean": True},
}
RULES: list[dict[str, Any]] = [
    {"name": "pii", "kind": "pii", "direction": "both"},
    {"name": "words", "kind": "words", "words": ["no such words"], "direction": "both"},
]


async def cut_at(it: Running, where: range, cut: dict[str, Any]) -> dict[int, httpx.Response]:
    """The same stream once for each place, each cut there; 50 at once."""
    service = it.engines[0].service

    async def ask(at: int) -> httpx.Response:
        return await it.http.post("/v1/chat/completions", json=STREAM, headers={"x-request-id": f"cut-{at}"})

    responses: dict[int, httpx.Response] = {}
    for begin in range(0, len(where), 50):
        places = where[begin : begin + 50]
        faults = [parse_fault({**cut, "after_bytes": at, "header": f"x-request-id=cut-{at}"}) for at in places]
        service.faults.clear()
        service.faults.add(faults, time.monotonic())
        responses |= zip(places, await asyncio.gather(*map(ask, places)), strict=True)
    return responses


async def check_cuts(cut: dict[str, Any], step: int, filters: list[dict[str, Any]]) -> None:
    async with running(limits=LIMITS, filters=filters) as it:
        whole = await it.http.post(it.engines[0].url + "/v1/chat/completions", json=AS_SENT)
        truth, first = said(whole.content), whole.content.index(b"\n\n") + 2
        done = whole.content.index(b"data: [DONE]")
        service = it.engines[0].service
        service.records.clear()
        responses = await cut_at(it, range(0, done + 6, step), cut)
        for at, response in responses.items():
            if response.status_code != 200:
                # Nothing had come that could be passed on.
                assert (response.status_code, response.json()["error"]["code"]) == (502, "upstream_failed")
                assert at < first, at
                continue
            received = events(response.content)
            assert "[DONE]" not in received, at
            assert set(received[-1]) == {"error"}, at
            assert [event for event in received if "error" in event] == received[-1:]
            assert truth.startswith(said(response.content))
        await it.settled(len(responses))
        # Each was asked for once: whoever had a byte of the answer, nobody else answers it.
        assert len(service.records) == len(responses)
        assert all(call.attempt == 1 for call, _ in it.outcomes)
        assert all(outcome.error is not None and not outcome.client_left for _, outcome in it.outcomes)
        stage = next(stage for stage in it.gateway.pipeline.stages if isinstance(stage, LimitStage))
        usages = [outcome.usage for _, outcome in it.outcomes if outcome.usage is not None]
        tokens = sum(usage.prompt_tokens + usage.completion_tokens for usage in usages)
        total = stage.totals["default", "anonymous", "m"]
        assert (total.requests, total.prompt_tokens + total.completion_tokens) == (len(usages), tokens)
        assert all(usage.completion_tokens <= 6 for usage in usages)
        assert not stage._open
        await stage.check_integrity()


@pytest.mark.parametrize("cut", CUTS)
async def test_a_stream_that_is_cut_at_any_byte_ends_with_an_error(cut: str) -> None:
    await check_cuts(CUTS[cut], 31, [])


@pytest.mark.parametrize("cut", CUTS)
async def test_a_filtered_stream_that_is_cut_at_any_byte_ends_with_an_error(cut: str) -> None:
    await check_cuts(CUTS[cut], 53, RULES)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("filters", [[], RULES])
@pytest.mark.parametrize("cut", CUTS)
async def test_a_stream_is_cut_at_every_byte(cut: str, filters: list[dict[str, Any]]) -> None:
    await check_cuts(CUTS[cut], 1, filters)


async def test_an_answer_that_is_cut_at_any_byte_is_a_502() -> None:
    async with running(limits=LIMITS) as it:
        size = len((await it.http.post("/v1/chat/completions", json=CHAT)).content)
        service = it.engines[0].service
        for cut in ({"kind": "reset"}, {"kind": "truncate"}):
            service.faults.clear()
            places = range(0, size - 1, 23)
            service.faults.add(
                [parse_fault({**cut, "after_bytes": at, "header": f"x-request-id=at-{at}"}) for at in places],
                time.monotonic(),
            )
            before = service.num_received
            asked = (
                it.http.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": f"at-{at}"}) for at in places
            )
            for response in await asyncio.gather(*asked):
                assert response.status_code == 502, response.text
                assert response.json()["error"]["code"] == "upstream_failed"
            # Half an answer is not asked for again; a connection that was reset before a word came is tried once more.
            tries = 2 if cut["kind"] == "reset" else 1
            assert len(places) <= service.num_received - before <= tries * len(places)


async def test_streams_of_an_engine_that_is_killed_all_hear_of_it() -> None:
    """A process, and SIGKILL: whatever each stream was about to say, its client is told that there is no more."""
    command = [sys.executable, "-m", "sol", "simulate", "--port", "0", "--step-seconds", "0.01"]
    engine = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert engine.stdout is not None
        words = (await engine.stdout.readline()).decode().split()
        url = next(word for word in words if word.startswith("http://")).rstrip(";")
        data = {
            "server": {"port": 0},
            "models": [{"name": "simulated", "engines": ["a"]}],
            "engines": [{"name": "a", "url": url, "driver": "sol"}],
            "limits": LIMITS,
        }
        async with (
            GatewayServer(make_config(data)) as server,
            httpx.AsyncClient(base_url=server.url, timeout=20) as http,
        ):
            body = {**STREAM, "model": "simulated", "max_tokens": 5000, "ignore_eos": True}
            started = [asyncio.Event() for _ in range(30)]

            async def client(number: int) -> bytes:
                received = b""
                async with http.stream("POST", "/v1/chat/completions", json=body) as response:
                    assert response.status_code == 200
                    async for part in response.aiter_raw():
                        received += part
                        started[number].set()
                return received

            tasks = [asyncio.create_task(client(number)) for number in range(len(started))]
            async with asyncio.timeout(20):
                await asyncio.gather(*(event.wait() for event in started))
            engine.kill()
            for received in await asyncio.gather(*tasks):
                said_ = events(received)
                assert "[DONE]" not in said_
                assert set(said_[-1]) == {"error"}
            stage = next(stage for stage in server.gateway.pipeline.stages if isinstance(stage, LimitStage))
            await until(lambda: not stage._open)
            assert stage.totals["default", "anonymous", "simulated"].requests == len(tasks)
            refused = await http.post("/v1/chat/completions", json={**body, "stream": False})
            assert (refused.status_code, refused.json()["error"]["code"]) == (502, "upstream_failed")
    finally:
        if engine.returncode is None:
            engine.kill()
        await engine.wait()
