"""Engines that fail in every way the simulator knows: the client is told, or need not know, and nothing is lost."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest
from gateway_harness import CHAT, COMPLETION, Running, events, running, until

from sol.gateway.relay.budget import RetryBudget
from sol.simulate.faults import parse_fault

STREAM = {**CHAT, "stream": True}
NO_PROBES = {"health": {"interval": 3600}}


def set_faults(it: Running, index: int, *faults: dict[str, Any]) -> None:
    server = it.engines[index]
    server.service.faults.clear()
    server.service.faults.add([parse_fault(fault) for fault in faults], time.monotonic())
    server._update()


async def ask(it: Running, **changes: Any) -> httpx.Response:
    return await it.http.post("/v1/chat/completions", json={**CHAT, **changes})


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "crash", "seconds": 60},
        {"kind": "error", "status": 503},
        {"kind": "error", "status": 502},
        {"kind": "reset"},
        {"kind": "not_ready"},
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_an_engine_that_does_not_answer_costs_nobody_an_answer(fault: dict[str, Any], stream: bool) -> None:
    async with running(2, routing=NO_PROBES) as it:
        await until(lambda: it.engine("a").signals is not None)
        set_faults(it, 0, fault)
        choose = it.gateway.relay._router.choose

        def first_a(call: Any, asked: Any = ()) -> Any:
            it.engine("b").max_in_flight = None if asked else 0  # so that a is asked first
            return choose(call, asked)

        it.gateway.relay._router.choose = first_a  # type: ignore[method-assign]
        response = await ask(it, stream=stream)
        assert response.status_code == 200, response.text
        if stream:
            assert events(response.content)[-1] == "[DONE]"
        await it.settled(1)
        call, outcome = it.outcomes[0]
        assert (call.backend, call.attempt, outcome.error) == ("b", 2, None)
        assert len(it.records(1)) == 1


@pytest.mark.parametrize(("status", "counts"), [(500, True), (501, True), (400, False), (404, False), (429, False)])
async def test_what_an_engine_answers_is_passed_on_and_only_its_own_faults_count(status: int, counts: bool) -> None:
    breaker = {"consecutive_failures": 3}
    async with running(2, routing={**NO_PROBES, "breaker": breaker}) as it:
        set_faults(it, 0, {"kind": "error", "status": status, "message": "so it is", "retry_after": 3})
        set_faults(it, 1, {"kind": "error", "status": status, "message": "so it is", "retry_after": 3})
        for _ in range(8):
            response = await ask(it)
            assert (response.status_code, response.json()["error"]["message"]) == (status, "so it is")
            assert response.headers["retry-after"] == "3"
        assert any(each.breaker.num_opened for each in it.gateway.fleet) == counts
        assert all(call.attempt == 1 for call, _ in it.outcomes)
        assert [outcome.status for _, outcome in it.outcomes] == [status] * 8


async def test_when_nobody_answers_the_last_failure_is_told() -> None:
    async with running(2, routing=NO_PROBES) as it:
        for index in (0, 1):
            set_faults(it, index, {"kind": "crash", "seconds": 60})
        response = await ask(it)
        assert response.status_code == 502
        assert "cannot be reached" in response.json()["error"]["message"]
        for index in (0, 1):
            set_faults(it, index, {"kind": "error", "status": 503, "retry_after": 2})
        overloaded = await ask(it)
        assert (overloaded.status_code, overloaded.headers["retry-after"]) == (503, "2")
        assert it.outcomes[-1][0].attempt == 2


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "reset", "after_events": 3},
        {"kind": "reset", "after_bytes": 700},
        {"kind": "truncate", "after_events": 3},
        {"kind": "truncate", "after_bytes": 777},
        {"kind": "truncate", "after_bytes": 778, "clean": True},
        {"kind": "truncate", "after_events": 4, "clean": True},
        {"kind": "error_event", "after_events": 3},
    ],
)
async def test_a_stream_that_breaks_ends_with_an_error_event_and_never_in_silence(
    path: str, fault: dict[str, Any]
) -> None:
    async with running(faults=[fault]) as it:
        body = {**(CHAT if "chat" in path else COMPLETION), "stream": True}
        response = await it.http.post(path, json=body)
        assert response.status_code == 200
        received = events(response.content)  # all whole
        assert "[DONE]" not in received
        assert [set(event) for event in received if "error" in event] == [{"error"}]
        assert set(received[-1]["error"]) == {"message", "type", "param", "code"}
        assert any("choices" in event for event in received)
        await it.settled(1)
        call, outcome = it.outcomes[0]
        assert outcome.error is not None
        assert not outcome.client_left
        assert call.attempt == 1
        assert outcome.usage is not None
        assert outcome.usage.completion_tokens <= 6


async def test_an_answer_that_breaks_is_no_answer_and_is_not_asked_for_again() -> None:
    async with running(2) as it:
        for index in (0, 1):
            set_faults(it, index, {"kind": "truncate", "after_bytes": 100})
        response = await ask(it)
        assert response.status_code == 502
        assert "broke in the middle" in response.json()["error"]["message"]
        assert len(it.records(0)) + len(it.records(1)) == 1


async def test_an_engine_that_hangs_before_the_first_byte_is_a_timeout_that_is_never_repeated() -> None:
    async with running(2, relay={"first_byte_timeout": 1}, routing=NO_PROBES) as it:
        for index in (0, 1):
            set_faults(it, index, {"kind": "hang"})
        response = await ask(it, stream=True)
        assert response.status_code == 504
        assert response.headers["x-should-retry"] == "false"
        assert response.json()["error"]["code"] == "upstream_timeout"
        assert it.engines[0].service.num_received + it.engines[1].service.num_received == 1


async def test_an_engine_that_hangs_in_a_stream_ends_it() -> None:
    async with running(relay={"idle_timeout": 0.2}, faults=[{"kind": "pause", "after_events": 3, "seconds": 60}]) as it:
        response = await ask(it, stream=True)
        received = events(response.content)
        assert received[-1]["error"]["code"] == "upstream_timeout"
        assert "[DONE]" not in received
        await until(lambda: it.engines[0].service.num_open == 0)  # the engine was told to stop


async def test_a_slow_stream_is_none_that_hangs() -> None:
    async with running(relay={"idle_timeout": 1.5}, laws={"step_seconds": 0.15}) as it:
        response = await ask(it, stream=True, max_tokens=12)
        assert events(response.content)[-1] == "[DONE]"


async def test_a_clients_deadline_is_kept_and_is_no_fault_of_the_engine() -> None:
    async with running(faults=[{"kind": "hang"}], routing={"breaker": {"consecutive_failures": 1}, **NO_PROBES}) as it:
        response = await it.http.post("/v1/completions", json=COMPLETION, headers={"x-request-timeout": "0.1"})
        assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert it.engine("a").breaker.num_opened == 0
        wrong = await it.http.post("/v1/completions", json=COMPLETION, headers={"x-request-timeout": "soon"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "x-request-timeout")


async def test_an_engine_that_is_killed_and_comes_back_is_left_out_meanwhile() -> None:
    health = {"interval": 0.03, "healthy_after": 2, "unhealthy_after": 2}
    async with running(2, routing={"health": health}) as it:
        engine = it.engine("a")
        set_faults(it, 0, {"kind": "crash", "seconds": 600})
        await until(lambda: not engine.health.is_well)
        received = it.engines[0].service.num_received
        for _ in range(6):
            assert (await ask(it)).status_code == 200
        assert it.engines[0].service.num_received == received
        assert (await it.http.get("/ready")).status_code == 200
        set_faults(it, 0)
        await until(lambda: engine.health.is_well)


async def test_an_engine_that_makes_no_progress_is_left_out_although_it_says_that_it_is_well() -> None:
    health = {"interval": 0.03, "timeout": 20, "stall_seconds": 1.5}
    async with running(2, routing={"health": health}) as it:
        engines = list(it.gateway.fleet)
        tasks = [asyncio.create_task(ask(it, stream=True, max_tokens=400)) for _ in range(8)]
        await until(lambda: all(engine.num_streaming for engine in engines))
        set_faults(it, 0, {"kind": "stall"})
        await until(lambda: engines[0].breaker.num_opened > 0)
        assert engines[0].health.is_well
        assert engines[1].breaker.num_opened == 0
        fresh = await ask(it)
        assert fresh.status_code == 200
        assert it.outcomes[-1][0].backend == "b"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_most_engines_that_look_ill_are_asked_all_the_same() -> None:
    health = {"interval": 0.03, "unhealthy_after": 1}
    async with running(3, routing={"health": health}) as it:
        for index in range(3):
            set_faults(it, index, {"kind": "unhealthy"})
        await until(lambda: not any(engine.health.is_well for engine in it.gateway.fleet))
        assert (await it.http.get("/ready")).status_code == 503
        for _ in range(5):
            assert (await ask(it)).status_code == 200


async def test_a_third_of_the_engines_flapping_costs_nobody_an_answer() -> None:
    health = {"interval": 0.02, "unhealthy_after": 2, "healthy_after": 3}
    async with running(3, routing={"health": health}) as it:
        set_faults(
            it, 0, {"kind": "unhealthy", "period": 0.1}, {"kind": "error", "status": 503, "share": 0.5},
            {"kind": "reset", "share": 0.2},
        )  # fmt: skip
        for _ in range(4):
            answers = await asyncio.gather(*(ask(it, stream=bool(index % 2)) for index in range(15)))
            assert [answer.status_code for answer in answers] == [200] * 15
        assert all(outcome.error is None for _, outcome in it.outcomes)


def test_retries_are_affordable_for_a_few_and_not_for_all() -> None:
    budget = RetryBudget(0.2, 0.0)
    assert [budget.take(0.0) for _ in range(101)] == [True] * 100 + [False]
    assert [budget.take(0.5) for _ in range(6)] == [True] * 5 + [False]  # ten a second
    for _ in range(11):
        budget.called(1)
    assert [budget.take(0.5) for _ in range(3)] == [True, True, False]  # and a fifth of the calls
    for _ in range(10_000):
        budget.called(300)
    assert sum(budget.take(0.5) for _ in range(400)) == 300


async def test_bytes_that_are_no_answer() -> None:
    async with running() as it:
        set_faults(it, 0, {"kind": "malformed", "after_events": 2})
        response = await ask(it, stream=True)
        assert response.status_code == 200  # a chunk is not decoded: what is in it, its reader finds out
        assert response.content.endswith(b"\n\n")
