"""Engines of which some are ill: hung, slow, flapping, dead, with probes that never come back. Everybody is answered by
the others."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from gateway_harness import CHAT, Recorder, Running, events, running, until

from sol.gateway.call import Call, Outcome
from sol.gateway.config import make_config
from sol.gateway.serve import GatewayServer
from sol.simulate.faults import parse_fault

QUICK_PROBES = {"interval": 0.02, "timeout": 20, "unhealthy_after": 2, "healthy_after": 3}
"""Often, and patient: on a busy machine a good engine may take long, and is none that hangs."""


def set_faults(it: Running, index: int, *faults: dict[str, Any]) -> None:
    server = it.engines[index]
    server.service.faults.clear()
    server.service.faults.add([parse_fault(fault) for fault in faults], time.monotonic())
    server._update()


def check(answer: httpx.Response) -> None:
    assert answer.status_code == 200, answer.text
    if answer.headers["content-type"].startswith("text/event-stream"):
        received = events(answer.content)
        assert received[-1] == "[DONE]"
        assert not any("error" in event for event in received)


async def load(it: Running, number: int, at_once: int = 20) -> None:
    """So many requests, every second one a stream, each of which must be answered."""
    few = asyncio.Semaphore(at_once)

    async def ask(index: int) -> None:
        async with few:
            check(await it.http.post("/v1/chat/completions", json={**CHAT, "stream": bool(index % 2), "seed": index}))

    await asyncio.gather(*map(ask, range(number)))


@asynccontextmanager
async def never_fewer_than(it: Running, least: int) -> AsyncIterator[list[int]]:
    """So many engines can be asked at any moment; yields how many it were, moment by moment."""
    seen: list[int] = []

    async def watch() -> None:
        while True:
            seen.append(len(it.gateway.fleet.pool("m").askable(time.monotonic()).engines))
            await asyncio.sleep(0.002)

    watching = asyncio.create_task(watch())
    yield seen
    watching.cancel()
    assert min(seen) >= least


async def test_a_third_of_ten_engines_flapping_costs_nobody_an_answer() -> None:
    """Three go and come, each in its own way: their port, their health route, their answers."""
    async with running(10, routing={"health": QUICK_PROBES}) as it, never_fewer_than(it, 5) as seen:

        async def flap() -> None:
            random_ = random.Random(0)
            while True:
                seconds = random_.uniform(0.05, 0.15)
                set_faults(it, 0, {"kind": "refuse", "seconds": seconds})
                set_faults(it, 1, {"kind": "unhealthy", "period": 0.1}, {"kind": "error", "status": 503, "share": 0.5})
                set_faults(it, 2, {"kind": "not_ready", "seconds": seconds}, {"kind": "reset", "share": 0.3})
                await asyncio.sleep(2 * seconds)

        flapping = asyncio.create_task(flap())
        await load(it, 300)
        flapping.cancel()
        assert min(seen) < 10  # they were noticed
        assert all(outcome.error is None for _, outcome in it.outcomes)
        # Nothing was answered twice: as many answers were finished as were asked for.
        finished = [record for index in range(10) for record in it.records(index) if record["ended"] == "finished"]
        assert len(finished) == 300


async def test_when_all_flap_they_are_not_all_left_out() -> None:
    async with running(10, routing={"health": QUICK_PROBES}) as it, never_fewer_than(it, 5) as seen:
        for index in range(10):
            set_faults(it, index, {"kind": "unhealthy", "period": 0.1 + 0.03 * index})
        await until(lambda: sum(not engine.health.is_well for engine in it.gateway.fleet) > 2)
        await load(it, 200)
        assert min(seen) < 10


async def test_an_engine_that_hangs_is_left_by_its_probes_and_delays_nobody_elses() -> None:
    """Its health route takes the request and never answers: other engines are probed as before, and answers go on."""
    async with running(3, routing={"health": QUICK_PROBES}) as it:
        await until(lambda: all(engine.signals is not None for engine in it.gateway.fleet))
        set_faults(it, 0, *({"kind": "hang", "path": path} for path in ("/health", "/metrics", "/ready")))
        set_faults(it, 1, {"kind": "unhealthy"})
        await until(lambda: not it.engine("b").health.is_well)
        assert it.engine("a").health.is_well  # not known yet: it has not answered, nor run out of time
        await load(it, 20)
        set_faults(it, 1)
        await until(lambda: it.engine("b").health.is_well)


async def test_an_engine_whose_probes_run_out_of_time_is_left_out() -> None:
    health = {**QUICK_PROBES, "timeout": 1, "unhealthy_after": 1, "max_ejected": 0.7}
    async with running(4, routing={"health": health}) as it:
        await until(lambda: all(engine.signals is not None for engine in it.gateway.fleet))
        set_faults(it, 0, {"kind": "hang", "path": "/health"})
        await until(lambda: not it.engine("a").health.is_well)
        received = it.engines[0].service.num_received
        await load(it, 20)
        assert it.engines[0].service.num_received == received


async def test_requests_that_hang_in_one_engine_leave_the_others_to_everybody_else() -> None:
    async with running(3, routing={"health": {"interval": 3600}}, relay={"first_byte_timeout": 3}) as it:
        set_faults(it, 0, {"kind": "hang"})
        answers = await asyncio.gather(*(it.http.post("/v1/chat/completions", json=CHAT) for _ in range(60)))
        stuck = [answer for answer in answers if answer.status_code != 200]
        # Those that it had taken are not repeated: its work may be running. Their number is what the breaker allows.
        assert all((answer.status_code, answer.headers["x-should-retry"]) == (504, "false") for answer in stuck)
        assert len(stuck) == it.engines[0].service.num_received
        assert it.engine("a").breaker.num_opened >= 1
        await load(it, 40)
        assert len(it.outcomes) == 100


async def test_a_slow_engine_gets_less_to_do() -> None:
    async with running(2, laws={"step_seconds": 0.004}) as it:
        set_faults(it, 0, {"kind": "slow", "factor": 15.0})
        await load(it, 120, at_once=8)
        slow, fast = (engine.service.num_received for engine in it.engines)
        assert slow + fast == 120
        assert slow < fast


async def test_one_dead_engine_among_many_is_nobodys_business() -> None:
    """One port that refuses, and one that swallows connections, which is worse."""
    with socket.socket() as deaf, socket.socket() as dead, contextlib.ExitStack() as stack:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        for _ in range(4):  # the backlog is full: who comes now is not even answered
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(deaf.getsockname())
        dead.bind(("127.0.0.1", 0))  # and nobody listens
        ports = {"dead": dead.getsockname()[1], "deaf": deaf.getsockname()[1]}
        async with running(6) as it:
            names = list(it.gateway.fleet.engines)
            engines = [{"name": name, "url": it.engine(name).base_url, "driver": "sol"} for name in names]
            engines += [
                {"name": name, "url": f"http://127.0.0.1:{port}", "driver": "sol"} for name, port in ports.items()
            ]
            data = {
                "server": {"port": 0},
                "models": [{"name": "m", "engines": [*names, *ports]}],
                "engines": engines,
                "relay": {"connect_timeout": 1},
                "routing": {"health": {**QUICK_PROBES, "unhealthy_after": 1}},
            }
            async with (
                GatewayServer(make_config(data)) as server,
                httpx.AsyncClient(base_url=server.url, timeout=20, verify=False) as http,
            ):
                answers = (http.post("/v1/chat/completions", json=CHAT) for _ in range(80))
                for answer in await asyncio.gather(*answers):
                    check(answer)
                fleet = server.gateway.fleet.engines
                await until(lambda: not fleet["dead"].health.is_well and not fleet["deaf"].health.is_well)
                ended: list[tuple[Call, Outcome]] = []
                server.gateway.pipeline.stages = (Recorder(ended), *server.gateway.pipeline.stages)
                for _ in range(30):
                    check(await http.post("/v1/chat/completions", json=CHAT))
                await until(lambda: len(ended) == 30)
                # They are out: nobody is sent there, not even to be sent on.
                asked = [each.detail for call, _ in ended for each in call.decisions if each.stage == "route"]
                assert len(asked) >= 30
                assert not {"dead", "deaf"} & set(asked)


async def test_engines_that_die_one_after_another_while_many_ask_lose_no_answer() -> None:
    """A rolling restart without ceremony: whose answer had begun is told, and all others are served."""
    async with running(4, routing={"health": QUICK_PROBES}, laws={"step_seconds": 0.002}) as it:
        told = served = 0

        async def client(number: int) -> None:
            nonlocal told, served
            for turn in range(12):
                body = {**CHAT, "stream": bool((number + turn) % 2), "max_tokens": 20}
                answer = await it.http.post("/v1/chat/completions", json=body)
                if answer.status_code == 502:
                    assert "broke in the middle" in answer.json()["error"]["message"]
                    told += 1
                    continue
                assert answer.status_code == 200, answer.text
                if body["stream"] and "error" in events(answer.content)[-1]:
                    assert "[DONE]" not in events(answer.content)
                    told += 1
                    continue
                check(answer)
                served += 1

        async def restart() -> None:
            for index in range(4):
                set_faults(it, index, {"kind": "crash", "seconds": 0.15, "startup_seconds": 0.05})
                await asyncio.sleep(0.3)

        await asyncio.gather(restart(), *map(client, range(16)))
        assert (told + served, len(it.outcomes)) == (192, 192)
        assert served > 96
