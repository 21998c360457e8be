"""Who is given up for whom: the queue's stage without HTTP, its engines' work a coroutine of the test's own."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from gateway_harness import until

from sol.gateway.call import Call, Outcome, Usage
from sol.gateway.config import make_config
from sol.gateway.filters.errors import FilterFailedError
from sol.gateway.parsing import make_call
from sol.gateway.queue.stage import QueueStage
from sol.gateway.reply import KeptReply
from sol.gateway.routing.engine import Engine
from sol.gateway.routing.fleet import Fleet

PREEMPTED = {"preempt": "abort_and_retry"}


class Queue:
    """Engines with one place each, of which `work` takes the place of the one that a call is meant for."""

    def __init__(self, engines: str = "a", *, places: int = 1, classes: dict[str, Any] | None = None) -> None:
        config = make_config(
            {
                "models": [{"name": "m", "engines": list(engines)}],
                "engines": [{"name": name, "url": "http://x:1", "max_in_flight": places} for name in engines],
                "queue": {"preempt_after": 0.0},
                "classes": classes or {"batch": PREEMPTED, "best_effort": PREEMPTED},
            }
        )
        self.fleet = Fleet(config)
        self.stage = QueueStage(self.fleet, config)
        self.dispatcher = self.stage.dispatchers["m"]
        self.order: list[Call] = []
        """Calls, each time that an engine got them."""
        self.given_up: list[Call] = []
        self.may_let_go = asyncio.Event()
        """An engine that is told to stop may take its time."""
        self.may_let_go.set()
        self.ends: dict[Call, asyncio.Event] = {}
        self._tasks: list[asyncio.Task[Outcome]] = []

    def send(self, class_name: str, engine: str = "a", **fields: Any) -> tuple[Call, asyncio.Task[Outcome]]:
        body = json.dumps({"model": "m", "prompt": "x"}).encode()
        call = make_call("/v1/completions", {}, body, call_id="x", arrived=time.monotonic())
        call.class_name = class_name
        for name, value in fields.items():
            setattr(call, name, value)
        self.ends[call] = asyncio.Event()
        task = asyncio.create_task(self._run(call, self.fleet.engines[engine]))
        self._tasks.append(task)
        return call, task

    async def _run(self, call: Call, engine: Engine) -> Outcome:
        outcome = Outcome(status=500)
        try:
            await self.stage.enter(call)
            outcome = await self.stage.carry(call, KeptReply(), lambda: self._work(call, engine))
            return outcome
        finally:
            await self.stage.leave(call, outcome)

    async def _work(self, call: Call, engine: Engine) -> Outcome:
        call.attempt += 1
        call.backend = engine.name
        flight = engine.begin(call)
        self.order.append(call)
        try:
            await self.ends[call].wait()
            return Outcome(status=200, usage=call.usage)
        except asyncio.CancelledError:
            self.given_up.append(call)
            call.usage = Usage(prompt_tokens=1, completion_tokens=50)  # what the engine says of it
            await self.may_let_go.wait()
            raise
        finally:
            flight.end("neutral")

    async def begun(self, count: int) -> None:
        await until(lambda: len(self.order) == count)

    async def waits(self, count: int) -> None:
        await until(lambda: len(self.dispatcher.queue) == count)

    def look(self) -> None:
        self.stage.look(time.monotonic())

    async def finish(self) -> list[Any]:
        """Let all end; what each came to."""
        for each in self.ends.values():
            each.set()
        results = await asyncio.wait_for(asyncio.gather(*self._tasks, return_exceptions=True), 20)
        self.dispatcher.check_integrity()
        assert not any(self.dispatcher.in_flight.values())
        assert not any(engine.in_flight for engine in self.fleet)
        return results


@asynccontextmanager
async def queue(*args: Any, **options: Any) -> AsyncIterator[Queue]:
    made = Queue(*args, **options)
    yield made
    assert {result.status for result in await made.finish()} == {200}


async def test_one_is_given_up_for_one_that_waits_however_long_its_engine_takes_to_let_go() -> None:
    async with queue(places=4) as it:
        for _ in range(4):
            it.send("batch")
        await it.begun(4)
        it.may_let_go.clear()
        urgent, _ = it.send("realtime")
        await it.waits(1)
        for _ in range(5):
            it.look()
            await asyncio.sleep(0)
        assert it.stage.num_preemptions == 1
        it.send("realtime")
        await it.waits(2)
        it.look()
        it.look()
        assert it.stage.num_preemptions == 2
        it.may_let_go.set()
        await it.begun(6)
        assert it.order[4] is urgent


async def test_nobody_is_given_up_on_an_engine_that_could_not_take_the_urgent_one() -> None:
    async with queue("ab") as it:
        it.send("batch", "a")
        await it.begun(1)
        kept, _ = it.send("interactive", "b")
        await it.begun(2)
        it.fleet.engines["a"].breaker.open(time.monotonic())
        it.send("realtime", "b")
        await it.waits(1)
        it.look()
        assert it.stage.num_preemptions == 0
        it.ends[kept].set()
        await it.begun(3)


async def test_the_least_urgent_is_given_up_first() -> None:
    async with queue(places=2, classes={"best_effort": {**PREEMPTED, "max_in_flight": 1.0}, "batch": PREEMPTED}) as it:
        least, _ = it.send("best_effort")
        await it.begun(1)
        it.send("batch")
        await it.begun(2)
        it.send("realtime")
        await it.waits(1)
        it.look()
        await it.begun(3)
        assert it.given_up == [least]


async def test_the_place_goes_to_whom_it_was_made_free_for() -> None:
    async with queue() as it:
        first, _ = it.send("realtime", input_tokens=10**6)  # whose class has had far more than its share
        await it.begun(1)
        it.ends[first].set()
        await until(lambda: not it.fleet.engines["a"].in_flight)
        it.send("batch")
        await it.begun(2)
        urgent, _ = it.send("realtime")
        await it.waits(1)
        it.send("batch")
        await it.waits(2)
        it.look()
        await it.begun(3)
        assert it.order[2] is urgent


async def test_who_was_given_up_waits_again_also_where_the_queue_is_full() -> None:
    async with queue(classes={"batch": {**PREEMPTED, "max_waiting": 1}}) as it:
        given_up, task = it.send("batch")
        await it.begun(1)
        it.send("batch")
        await it.waits(1)
        it.send("realtime")
        await it.waits(2)
        it.look()
        await it.begun(2)
        await it.waits(2)  # both of batch: it was let in, and is not refused for want of room
        assert not task.done()
        assert given_up.usage is None  # of work that was done in vain


async def test_what_a_filter_refuses_is_no_refusal_of_the_engine() -> None:
    async with queue() as it:
        call, task = it.send("interactive")
        await it.begun(1)
        await it.stage.leave(call, Outcome(status=503, error=FilterFailedError("an answer could not be looked at")))
        it.stage.look(time.monotonic() + 10)
        assert it.fleet.engines["a"].credits is None
        it.ends[call].set()
        await task


async def test_a_call_that_cannot_be_learned_from_gives_its_place_back() -> None:
    async with queue() as it:
        call, task = it.send("interactive", stream=True)
        await it.begun(1)
        call.input_tokens = None  # type: ignore[assignment]  # whatever the reason
        usage = Usage(prompt_tokens=1, completion_tokens=3)
        with pytest.raises(TypeError):
            await it.stage.leave(call, Outcome(status=200, usage=usage, first_byte_at=time.monotonic()))
        assert not any(it.dispatcher.in_flight.values())
        it.ends[call].set()
        await task
