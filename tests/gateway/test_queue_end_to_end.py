"""Classes, queue, deadlines, preemption, service levels and degradation, with engines and clients that talk HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from gateway_harness import CHAT, COMPLETION, Running, events, running, until

ONE = {"max_in_flight": 1}
SLOW = {"step_seconds": 0.01}
KEYS = [{"key": "plain", "default_class": "batch"}, {"key": "rich", "classes": ["realtime"]}]


async def post(it: Running, class_name: str | None = None, **body: Any) -> httpx.Response:
    headers = {} if class_name is None else {"x-sol-class": class_name}
    return await it.http.post("/v1/completions", json={**COMPLETION, **body}, headers=headers)


def waiting(it: Running) -> int:
    return sum(it.gateway.queue.dispatchers["m"].num_waiting().values())


async def started(it: Running, **body: Any) -> asyncio.Task[httpx.Response]:
    """A request of the class batch that the only place is taken by."""
    task = asyncio.create_task(post(it, "batch", ignore_eos=True, **body))
    await until(lambda: it.engine("a").in_flight == 1)
    return task


async def test_a_class_comes_from_the_header_the_tier_the_priority_or_the_key() -> None:
    async with running() as it:
        asked: list[tuple[str | None, dict[str, Any], str]] = [
            (None, {}, "interactive"), (None, {"service_tier": "default"}, "interactive"),
            (None, {"service_tier": "priority"}, "realtime"), (None, {"service_tier": "flex"}, "batch"),
            (None, {"service_tier": "fast"}, "realtime"), (None, {"service_tier": "scale"}, "interactive"),
            (None, {"priority": -1}, "realtime"), (None, {"priority": 3}, "batch"),
            (None, {"priority": 10}, "best_effort"), (None, {"priority": 0}, "interactive"),
            ("batch", {"service_tier": "priority", "priority": -5}, "batch"),
        ]  # fmt: skip
        for header, body, expected in asked:
            # The engine refuses a tier or a priority that it cannot obey: the gateway has, and takes it out.
            answer = await post(it, header, **body)
            assert answer.status_code == 200, answer.text
            assert it.outcomes[-1][0].class_name == expected
        for header, body, param in (
            ("gold", {}, "x-sol-class"), (None, {"service_tier": "gold"}, "service_tier"),
            (None, {"priority": "high"}, "priority"),
        ):  # fmt: skip
            answer = await post(it, header, **body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_a_key_has_its_class_those_below_and_those_it_was_given() -> None:
    async with running(keys=KEYS) as it:

        async def ask(key: str, class_name: str | None) -> int:
            headers = {"authorization": f"Bearer {key}"}
            if class_name is not None:
                headers["x-sol-class"] = class_name
            return (await it.http.post("/v1/completions", json=COMPLETION, headers=headers)).status_code

        assert await ask("plain", None) == 200
        assert it.outcomes[-1][0].class_name == "batch"
        assert [await ask("plain", name) for name in ("realtime", "interactive", "batch", "best_effort")] == [
            403, 403, 200, 200,
        ]  # fmt: skip
        assert [await ask("rich", name) for name in ("realtime", "interactive", "batch")] == [200, 200, 200]


async def test_the_urgent_pass_those_who_wait() -> None:
    async with running(engine=ONE, laws=SLOW) as it:
        first = await started(it, max_tokens=30)
        batch = [asyncio.create_task(post(it, "batch")) for _ in range(3)]
        await until(lambda: waiting(it) == 3)
        urgent = asyncio.create_task(post(it, "realtime"))
        answers = await asyncio.gather(first, *batch, urgent)
        assert [answer.status_code for answer in answers] == [200] * 5
        assert [call.class_name for call, _ in it.outcomes[:2]] == ["batch", "realtime"]
        assert it.engine("a").in_flight == 0
        assert any(decision.action == "waited" for call, _ in it.outcomes for decision in call.decisions)


async def test_a_client_that_leaves_while_it_waits_is_forgotten() -> None:
    async with running(engine=ONE, laws=SLOW) as it:
        first = await started(it, max_tokens=50)
        leaving = asyncio.create_task(post(it, "realtime"))
        await until(lambda: waiting(it) == 1)
        leaving.cancel()
        await until(lambda: waiting(it) == 0)
        assert (await first).status_code == 200
        await it.settled(2)
        assert len(it.records()) == 1  # no engine heard of it
        assert {outcome.client_left for _, outcome in it.outcomes} == {True, False}


async def test_a_full_queue_says_when_to_come_back() -> None:
    classes = {"interactive": {"share": 4, "max_waiting": 1}}
    async with running(engine=ONE, laws=SLOW, classes=classes) as it:
        first = await started(it, max_tokens=40)
        second = asyncio.create_task(post(it))
        await until(lambda: waiting(it) == 1)
        refused = await post(it)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        assert [(await task).status_code for task in (first, second)] == [200, 200]


@pytest.mark.parametrize("promised", [False, True])
async def test_a_deadline_ends_the_wait_and_no_engine_works_for_it(promised: bool) -> None:
    sla = {"levels": [{"class": "realtime", "deadline": 0.2}]} if promised else {}
    async with running(engine=ONE, laws=SLOW, sla=sla) as it:
        first = await started(it, max_tokens=300)
        headers = {"x-sol-class": "realtime"} | ({} if promised else {"x-request-timeout": "0.2"})
        refused = await it.http.post("/v1/completions", json=COMPLETION, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert "retry-after" in refused.headers
        assert not first.done()  # it was not waited for
        assert (await first).status_code == 200
        assert len(it.records()) == 1


PREEMPT = {"batch": {"share": 2, "preempt": "abort_and_retry"}}


async def test_batch_work_gives_way_and_is_done_again() -> None:
    async with running(engine=ONE, laws=SLOW, classes=PREEMPT, queue={"preempt_after": 0.02}) as it:
        batch = await started(it, max_tokens=100)
        urgent = await post(it, "realtime")
        assert urgent.status_code == 200
        assert not batch.done()
        answer = await batch
        assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 100)
        assert [record["ended"] for record in it.records()][-1] == "finished"
        assert sum(record["ended"] == "finished" for record in it.records()) == 2
        assert it.gateway.queue.num_preemptions == 1
        call = next(call for call, _ in it.outcomes if call.class_name == "batch")
        assert any(decision.rule == "preempt" for decision in call.decisions)


async def test_a_stream_is_never_preempted() -> None:
    async with running(engine=ONE, laws=SLOW, classes=PREEMPT, queue={"preempt_after": 0.0}) as it:
        batch = await started(it, max_tokens=40, stream=True)
        assert (await post(it, "realtime")).status_code == 200
        assert events((await batch).content)[-1] == "[DONE]"
        assert it.gateway.queue.num_preemptions == 0


async def test_a_client_that_leaves_after_its_work_was_given_up_leaves_nothing() -> None:
    async with running(engine=ONE, laws=SLOW, classes=PREEMPT, queue={"preempt_after": 0.02}) as it:
        batch = await started(it, max_tokens=200)
        urgent = asyncio.create_task(post(it, "realtime", max_tokens=40, ignore_eos=True))
        await until(lambda: it.gateway.queue.num_preemptions == 1)
        batch.cancel()
        assert (await urgent).status_code == 200
        await it.settled(2)
        assert waiting(it) == 0
        assert not any(it.gateway.queue.dispatchers["m"].in_flight.values())
        it.gateway.queue.dispatchers["m"].check_integrity()


async def test_without_the_queue_nobody_waits() -> None:
    async with running(laws={**SLOW, "max_num_seqs": 1}, queue={"enabled": False}) as it:
        answers = await asyncio.gather(*(post(it) for _ in range(5)))
        assert [answer.status_code for answer in answers] == [200] * 5
        assert it.gateway.queue.dispatchers["m"].counts == {}


async def test_an_engine_in_which_requests_wait_gets_fewer() -> None:
    health = {"health": {"interval": 0.1}}
    async with running(laws={**SLOW, "max_num_seqs": 2}, routing=health, queue={"min_credits": 2}) as it:
        tasks = [asyncio.create_task(post(it, max_tokens=60, ignore_eos=True)) for _ in range(16)]
        await until(lambda: it.engine("a").credits is not None)
        assert (it.engine("a").credits or 0) < 16
        assert [answer.status_code for answer in await asyncio.gather(*tasks)] == [200] * 16


@pytest.mark.parametrize("fault", [{"kind": "reset"}, {"kind": "error", "status": 503}])
async def test_an_engine_that_fails_costs_nobody_an_answer_where_the_other_one_is_busy(fault: dict[str, Any]) -> None:
    async with running(2, engine=ONE, faults=[fault], laws=SLOW) as it:
        answers = await asyncio.gather(*(post(it, stream=bool(index % 2)) for index in range(20)))
        assert [answer.status_code for answer in answers] == [200] * 20
        assert len(it.records(1)) == 20
        it.gateway.queue.dispatchers["m"].check_integrity()


async def test_a_client_that_leaves_while_its_call_waits_for_another_engine_is_forgotten() -> None:
    async with running(2, engine=ONE, faults=[{"kind": "error", "status": 503}], laws=SLOW) as it:
        first = asyncio.create_task(post(it, max_tokens=100, ignore_eos=True))
        await until(lambda: it.engine("b").in_flight == 1)
        second = asyncio.create_task(post(it))
        dispatcher = it.gateway.queue.dispatchers["m"]
        await until(lambda: len(dispatcher.again) == 1)
        second.cancel()
        await until(lambda: not dispatcher.again)
        assert (await first).status_code == 200
        await it.settled(2)
        assert not any(dispatcher.in_flight.values())


async def test_an_engine_that_refuses_gets_fewer_also_where_another_one_answers() -> None:
    refuses = {"kind": "error", "status": 503}
    async with running(2, faults=[refuses], queue={"min_credits": 1}) as it:
        answers = await asyncio.gather(*(post(it) for _ in range(8)))
        assert [answer.status_code for answer in answers] == [200] * 8
        await until(lambda: it.engine("a").credits is not None)
        assert it.engine("b").credits is None


async def test_steps_of_degradation_reach_the_engine_and_the_client() -> None:
    steps = [{"action": "drafts_off"}, {"action": "max_tokens", "max_tokens": 3}, {"action": "shed"}]
    laws = {"num_speculative_tokens": 3, "acceptance_rate": 1.0}
    async with running(laws=laws, degradation=steps) as it:
        ladder = it.gateway.degrade.ladders["m"]
        await it.http.post("/v1/chat/completions", json={**CHAT, "max_tokens": 20, "ignore_eos": True})
        ladder.level = 2
        answer = await it.http.post(
            "/v1/chat/completions", json={**CHAT, "max_tokens": 20, "ignore_eos": True},
            headers={"x-sol-class": "best_effort"},
        )  # fmt: skip
        assert answer.headers["x-sol-degraded"] == "drafts_off, max_tokens"
        assert answer.json()["usage"]["completion_tokens"] == 3
        drafted, plain = (record["num_draft_tokens"] for record in it.records())
        assert drafted > 0
        assert plain == 0
        ladder.level = 3
        shed = await post(it, "best_effort")
        assert (shed.status_code, shed.json()["error"]["code"]) == (503, "load_shed")
        assert (await post(it, "interactive")).status_code == 200


async def test_scaling_is_told_who_waits_and_what_is_promised() -> None:
    sla = {"levels": [{"class": "interactive", "ttft": {"p95": 0.000001}}]}
    async with running(2, engine=ONE, laws=SLOW, sla=sla) as it:
        for _ in range(12):
            await post(it, max_tokens=2, stream=True)
        tasks = [asyncio.create_task(post(it, "batch", max_tokens=40, ignore_eos=True)) for _ in range(6)]
        await until(lambda: waiting(it) == 4 and all(engine.in_flight for engine in it.gateway.fleet))
        (load,) = (await it.http.get("/autoscaling")).json()["models"]
        assert (load["model"], load["num_engines"], load["in_flight"], load["credits"]) == ("m", 2, 2, 2)
        assert load["waiting"]["batch"] == 4
        assert load["utilisation"] == 3.0
        assert load["burn_rate"] == pytest.approx(20.0)
        assert load["desired_engines"] >= 7
        await asyncio.gather(*tasks)
        report = next(each for each in it.gateway.monitor.report() if each.class_name == "interactive")
        assert report.objectives[0].fast.attainment == 0.0
        assert report.ttft is not None
