from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from engine_child import MAX_MODEL_LEN
from token_runner import TokenRunner, expected_output, make_config, make_core, make_request

from sol.config import EngineConfig
from sol.engine.async_engine import AsyncEngine, _Stream
from sol.engine.client import EngineClient, InProcessClient
from sol.engine.process import ProcessClient
from sol.engine.types import (
    TARGET,
    DraftCounts,
    EngineOutput,
    EngineRequest,
    EngineStats,
    RequestOutput,
    SchedulerOutput,
    SpeculationUsage,
    StepOutput,
)
from sol.errors import EngineDeadError, RequestError

CHILD = str(Path(__file__).with_name("engine_child.py"))


class GatedRunner(TokenRunner):
    """Steps only while the gate is open."""

    def __init__(self) -> None:
        super().__init__(make_config(max_model_len=MAX_MODEL_LEN, num_blocks=2048))
        self.gate = threading.Event()
        self.gate.set()

    def execute(self, plan: SchedulerOutput) -> StepOutput:
        assert self.gate.wait(30)
        return super().execute(plan)


class PausingRunner(GatedRunner):
    """Closes its gate behind the first step, so that what a consumer has taken by then does not hang on its speed."""

    def execute(self, plan: SchedulerOutput) -> StepOutput:
        first = not self.plans
        output = super().execute(plan)
        if first:
            self.gate.clear()
        return output


def in_process(runner: TokenRunner | None = None) -> InProcessClient:
    runner = runner or GatedRunner()
    return InProcessClient(make_core(runner.config, runner))


def process() -> ProcessClient:
    return ProcessClient(EngineConfig(), command=[sys.executable, CHILD, "slow"])


@asynccontextmanager
async def serving(make: Callable[[], EngineClient]) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(await asyncio.to_thread(make))
    try:
        yield engine
    finally:
        await asyncio.to_thread(engine.close)


async def collect(engine: AsyncEngine, request: EngineRequest) -> RequestOutput:
    tokens: list[int] = []
    logprobs = []
    async for output in engine.generate(request):
        tokens += output.new_token_ids
        logprobs += output.logprobs or []
    output.new_token_ids = tokens
    output.logprobs = None if output.logprobs is None else logprobs
    return output


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


both = pytest.mark.parametrize("make", [in_process, process])


@both
async def test_many_requests_at_once(make: Callable[[], EngineClient]) -> None:
    requests = [make_request(f"r{i}", [i % 7, 1, 2, 3, 4], seed=i, eos=True, max_tokens=20) for i in range(40)]
    async with serving(make) as engine:
        counted: list[EngineStats] = []
        engine.add_stats_listener(counted.append)
        outputs = await asyncio.gather(*(collect(engine, request) for request in requests))
        assert engine.num_open == 0
        assert engine.stalled_for() == 0.0
        assert engine.info.model == "token-runner"
        await until(lambda: engine.stats.num_running == 0)
    for request, output in zip(requests, outputs, strict=True):
        assert (output.new_token_ids, output.finish_reason) == expected_output(request, MAX_MODEL_LEN)
    assert sum(stats.num_generated_tokens for stats in counted) == sum(len(o.new_token_ids) for o in outputs)
    assert sum(stats.num_prompt_tokens for stats in counted) == 5 * len(requests)


@both
async def test_closing_the_iterator_ends_the_request(make: Callable[[], EngineClient]) -> None:
    async with serving(make) as engine:
        stream = engine.generate(make_request("a", [1], max_tokens=None))
        await anext(stream)
        assert engine.num_open == 1
        await stream.aclose()
        assert engine.num_open == 0
        await until(lambda: engine.stats.num_running == 0 and engine.stats.kv_cache_usage == 0.0)
        assert (await collect(engine, make_request("a", [1], max_tokens=3))).finish_reason == "length"


@both
async def test_cancelling_the_consumer_ends_the_request(make: Callable[[], EngineClient]) -> None:
    async with serving(make) as engine:
        task = asyncio.create_task(collect(engine, make_request("a", [1], max_tokens=None)))
        await until(lambda: engine.stats.num_running == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.num_open == 0
        await until(lambda: engine.stats.num_running == 0)


async def test_an_iterator_that_was_never_started_leaves_no_trace() -> None:
    async with serving(in_process) as engine:
        stream = engine.generate(make_request("a", [1]))
        await stream.aclose()
        assert engine.num_open == 0


async def test_ids_in_use_are_refused() -> None:
    runner = GatedRunner()
    async with serving(lambda: in_process(runner)) as engine:
        first = engine.generate(make_request("a", [1], max_tokens=None))
        second = engine.generate(make_request("a", [2]))
        await anext(first)
        with pytest.raises(RequestError, match="in use"):
            engine.generate(make_request("a", [2]))
        with pytest.raises(RequestError, match="in use"):
            await anext(second)
        runner.gate.clear()
        await first.aclose()
        with pytest.raises(RequestError, match="in use"):  # its last output is still to come
            engine.generate(make_request("a", [2]))
        runner.gate.set()


async def test_a_slow_consumer_gets_what_piled_up_at_once() -> None:
    request = make_request("slow", [1, 2], max_tokens=200, logprobs=1)
    runner = PausingRunner()
    async with serving(lambda: in_process(runner)) as engine:
        stream = engine.generate(request)
        first = await anext(stream)
        runner.gate.set()
        await until(lambda: engine.num_open == 0)  # everything has come, nobody has taken it
        rest = [output async for output in stream]
    assert len(rest) == 1
    assert first.new_token_ids + rest[0].new_token_ids == expected_output(request, MAX_MODEL_LEN)[0]
    assert rest[0].finish_reason == "length"
    assert rest[0].logprobs is not None
    assert [entry.top[0][0] for entry in rest[0].logprobs] == rest[0].new_token_ids


async def test_origins_pile_up_and_sums_are_the_latest() -> None:
    stream = _Stream()
    sums = [SpeculationUsage(num_steps=n, drafters={"ngram": DraftCounts(num_drafts=n)}) for n in (1, 2)]
    stream.put(RequestOutput(request_id="a", new_token_ids=[1], origins=[TARGET], speculation=sums[0]))
    stream.put(RequestOutput(request_id="a", new_token_ids=[2, 3], origins=["ngram", TARGET], speculation=sums[1]))
    stream.put(RequestOutput(request_id="a", new_token_ids=[], finish_reason="error", error="no more"))
    merged = await stream.get()
    assert merged.new_token_ids == [1, 2, 3]
    assert merged.origins == [TARGET, "ngram", TARGET]
    assert merged.speculation is sums[1]
    assert merged.finish_reason == "error"
    assert merged.logprobs is None


async def test_a_refused_request_gets_an_output_with_the_reason() -> None:
    async with serving(in_process) as engine:
        output = await collect(engine, make_request("long", [1] * MAX_MODEL_LEN))
        assert output.finish_reason == "error"
        assert "max_model_len" in (output.error or "")


async def test_stalled_for_measures_silence_while_requests_are_open() -> None:
    runner = GatedRunner()
    async with serving(lambda: in_process(runner)) as engine:
        await asyncio.sleep(0.05)
        assert engine.stalled_for() == 0.0
        runner.gate.clear()
        task = asyncio.create_task(collect(engine, make_request("a", [1], max_tokens=2)))
        await until(lambda: engine.stalled_for() > 0.05)
        runner.gate.set()
        await task
        assert engine.stalled_for() == 0.0


async def test_a_killed_engine_fails_every_open_iterator(caplog: pytest.LogCaptureFixture) -> None:
    client = await asyncio.to_thread(process)
    async with serving(lambda: client) as engine:
        tasks = [asyncio.create_task(collect(engine, make_request(f"r{i}", [i], max_tokens=None))) for i in range(5)]
        await until(lambda: engine.stats.num_running == 5)
        os.kill(client.pid, signal.SIGKILL)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(r, EngineDeadError) and "SIGKILL" in r.message for r in results)
        assert len({id(r) for r in results}) == 5
        assert engine.dead is not None
        assert engine.num_open == 0
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            engine.generate(make_request("late", [1]))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "the engine is gone" in said[0]
    assert "SIGKILL" in said[0]


async def test_what_had_come_before_the_death_is_not_lost() -> None:
    client = await asyncio.to_thread(process)
    async with serving(lambda: client) as engine:
        stream = engine.generate(make_request("a", [1], max_tokens=None))
        before = await anext(stream)
        messages: list[EngineStats] = []
        engine.add_stats_listener(messages.append)
        await until(lambda: len(messages) > 4)
        os.kill(client.pid, signal.SIGKILL)
        await until(lambda: engine.dead is not None)
        rest = await anext(stream)
        wanted = expected_output(make_request("a", [1], max_tokens=64), MAX_MODEL_LEN)[0]
        assert (before.new_token_ids + rest.new_token_ids)[:5] == wanted[:5]
        with pytest.raises(EngineDeadError):
            await anext(stream)


async def test_a_failing_step_reaches_every_stream() -> None:
    class Failing(GatedRunner):
        def execute(self, plan: SchedulerOutput) -> StepOutput:
            if len(self.plans) == 3:
                raise ArithmeticError("no more")
            return super().execute(plan)

    async with serving(lambda: in_process(Failing())) as engine:
        outputs = await asyncio.gather(
            *(collect(engine, make_request(f"r{i}", [i], max_tokens=None)) for i in range(3))
        )
        assert {output.finish_reason for output in outputs} == {"error"}
        assert {output.error for output in outputs} == {"the engine failed: ArithmeticError: no more"}
        await until(lambda: engine.dead is not None)


async def test_a_client_that_breaks_is_a_dead_engine() -> None:
    class Broken(InProcessClient):
        def receive(self) -> EngineOutput:
            raise OSError("the line is cut")

    async with serving(lambda: Broken(make_core())) as engine:
        await until(lambda: engine.dead is not None)
        with pytest.raises(EngineDeadError, match="the line is cut"):
            engine.generate(make_request("a", [1]))


@both
async def test_close_fails_open_iterators(make: Callable[[], EngineClient], caplog: pytest.LogCaptureFixture) -> None:
    engine = AsyncEngine(await asyncio.to_thread(make))
    task = asyncio.create_task(collect(engine, make_request("a", [1], max_tokens=None)))
    await until(lambda: engine.stats.num_running == 1)
    engine.close()
    with pytest.raises(EngineDeadError, match="closed"):
        await task
    engine.close()
    assert not caplog.records


def test_a_closed_loop_ends_the_thread() -> None:
    client = in_process()

    async def main() -> AsyncEngine:
        engine = AsyncEngine(client)
        await collect(engine, make_request("a", [1], max_tokens=2))
        return engine

    engine = asyncio.run(main())
    client.add([make_request("b", [1])])
    engine._thread.join(20)
    assert not engine._thread.is_alive()
    engine.close()
