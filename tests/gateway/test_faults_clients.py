"""Clients that vanish, that ask again, that are wrong: their engine stops, what came is paid for once, and nobody else
notices."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
from gateway_harness import CHAT, COMPLETION, Running, events, running, until

from sol.gateway.limits.stage import LimitStage
from sol.gateway.parsing import make_call
from sol.gateway.reply import Headers, KeptReply

LONG: dict[str, Any] = {**COMPLETION, "max_tokens": 3000, "ignore_eos": True, "stream": True}
LIMITS = {"default_tenant": {"requests_per_minute": 10**6, "tokens_per_minute": 10**9}}
SLOW = {"step_seconds": 0.01}


def limits_of(it: Running) -> LimitStage:
    return next(stage for stage in it.gateway.pipeline.stages if isinstance(stage, LimitStage))


async def standing(it: Running) -> tuple[int, int]:
    """Requests and tokens of the one tenant, as its limit has them."""
    stage = limits_of(it)
    await stage.check_integrity()
    (limit,) = stage._limits._make("anonymous", "default", None, "m")
    found = await stage.ledger.standing(limit)
    return found.requests, int(found.tokens)


async def test_streams_that_are_left_at_any_event_stop_their_engine_and_are_paid_for_once() -> None:
    async with running(laws=SLOW, limits=LIMITS) as it:

        async def client(number: int) -> int:
            """Events that were received."""
            received = b""
            headers = {"x-request-id": f"client-{number}"}
            async with it.http.stream("POST", "/v1/completions", json=LONG, headers=headers) as response:
                async for part in response.aiter_raw():
                    received += part
                    if received.count(b"\n\n") > number:
                        break
            return received.count(b"\n\n")

        received = await asyncio.gather(*map(client, range(30)))
        await it.settled(30)
        await until(lambda: it.engines[0].service.num_open == 0 and len(it.records()) == 30)
        records = {record["x_request_id"]: record for record in it.records()}
        for call, outcome in it.outcomes:
            number, usage = int(call.id.removeprefix("client-")), outcome.usage
            assert outcome.client_left
            assert usage is not None
            assert not usage.estimated
            record = records[call.id]
            assert record["ended"] == "abort"
            assert usage.prompt_tokens == record["prompt_tokens"]
            assert received[number] <= usage.completion_tokens <= record["completion_tokens"] < 2000
        total = limits_of(it).totals["default", "anonymous", "m"]
        usages = [outcome.usage for _, outcome in it.outcomes if outcome.usage is not None]
        assert total.completion_tokens == sum(usage.completion_tokens for usage in usages)
        assert await standing(it) == (30, total.prompt_tokens + total.completion_tokens)


async def test_clients_that_leave_before_a_word_is_said_stop_their_engine() -> None:
    async with running(
        faults=[{"kind": "hang"}], limits=LIMITS, routing={"breaker": {"consecutive_failures": 1}}
    ) as it:
        tasks = [
            asyncio.create_task(it.http.post("/v1/completions", json={**LONG, "stream": bool(number % 2)}))
            for number in range(10)
        ]
        await until(lambda: it.engines[0].service.num_received == 10)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await it.settled(10)
        await until(lambda: it.engines[0].service.num_open == 0)
        assert all(outcome.client_left and outcome.usage is None for _, outcome in it.outcomes)
        assert it.engine("a").breaker.num_opened == 0
        # They were let through, and did no work that anybody knows of.
        assert await standing(it) == (10, 0)


async def test_clients_that_leave_before_they_have_said_it_all_were_never_there() -> None:
    async with running(limits=LIMITS) as it:
        address = urlsplit(it.server.url)
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n"
        for data in (head[:20], head, head + b'{"model":"m",'):
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            writer.write(data)
            await writer.drain()
            await asyncio.sleep(0.02)
            writer.transport.abort()
            await reader.read()
        assert (await it.http.post("/v1/completions", json=COMPLETION)).status_code == 200
        await it.settled(1)
        assert (len(it.outcomes), it.engines[0].service.num_received) == (1, 1)
        assert (await standing(it))[0] == 1


async def test_many_repetitions_of_one_request_are_one_request() -> None:
    async with running(laws=SLOW, limits=LIMITS) as it:
        body = {**COMPLETION, "max_tokens": 40, "ignore_eos": True}
        headers = {"idempotency-key": "once"}
        first = asyncio.create_task(it.http.post("/v1/completions", json=body, headers=headers))
        await until(lambda: it.engines[0].service.num_received == 1)
        again = [asyncio.create_task(it.http.post("/v1/completions", json=body, headers=headers)) for _ in range(50)]
        await until(lambda: it.gateway.single_flight.num_joined == 50)
        for task in (first, *again[::3]):  # some do not wait for it
            task.cancel()
        answers = await asyncio.gather(*again, return_exceptions=True)
        contents = {answer.content for answer in answers if isinstance(answer, httpx.Response)}
        assert len(contents) == 1
        await it.settled(1)
        assert (len(it.outcomes), len(it.records())) == (1, 1)
        assert await standing(it) == (1, it.records()[0]["prompt_tokens"] + 40)


async def test_the_official_clients_retry_after_a_time_out_of_its_own_ends_the_first_work() -> None:
    """It closes the connection, which ends the work, and asks again: no two are ever under way for it."""
    faults = [{"kind": "hang", "count": 1}]
    async with running(faults=faults, limits=LIMITS) as it:
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, it.engines[0].service.num_open)
                await asyncio.sleep(0.001)

        watching = asyncio.create_task(watch())
        async with openai.AsyncOpenAI(base_url=it.server.url + "/v1", api_key="x", timeout=2, max_retries=2) as client:
            answer = await client.completions.create(model="m", prompt="The water", max_tokens=6)
        watching.cancel()
        assert answer.usage is not None
        await it.settled(2)
        assert most <= 1
        assert it.engines[0].service.num_received == 2
        # It says how long it waits, so the gateway may give up first.
        assert sorted(outcome.status for _, outcome in it.outcomes) in ([200, 499], [200, 504])
        assert (await standing(it))[1] == answer.usage.total_tokens


async def test_what_clients_do_wrong_never_opens_the_breaker() -> None:
    """400s, 404s and 413s of an engine, clients that leave and deadlines that pass, far more than its thresholds."""
    routing = {"breaker": {"consecutive_failures": 2, "min_requests": 4, "error_rate": 0.1}}
    async with running(routing=routing, limits=LIMITS) as it:
        wrong: list[tuple[str, dict[str, Any]]] = [
            ("/v1/completions", {**COMPLETION, "temperature": -1}),
            ("/v1/completions", {**COMPLETION, "max_tokens": 10**6}),
            ("/v1/completions", {**COMPLETION, "prompt": "word " * 9000}),
            ("/v1/chat/completions", {**CHAT, "messages": []}),
            ("/v1/embeddings", {"model": "m", "input": "x"}),
        ]
        for _ in range(8):
            answers = await asyncio.gather(*(it.http.post(path, json=body) for path, body in wrong))
            assert all(400 <= answer.status_code < 500 for answer in answers)
            hurried = await it.http.post(
                "/v1/completions", json={**LONG, "stream": False}, headers={"x-request-timeout": "0.01"}
            )
            assert hurried.status_code == 504
            with contextlib.suppress(httpx.TimeoutException):
                await it.http.post("/v1/completions", json={**LONG, "stream": False}, timeout=0.03)
        assert (it.engine("a").breaker.num_opened, it.engine("a").health.is_well) == (0, True)
        assert (await it.http.post("/v1/completions", json=COMPLETION)).status_code == 200


class Deaf(KeptReply):
    """A client that takes nothing until it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.is_written_to, self.takes = asyncio.Event(), asyncio.Event()

    async def start(self, status: int, headers: Headers) -> None:
        self.started = True

    async def write(self, data: bytes) -> None:
        self.is_written_to.set()
        await self.takes.wait()

    async def end(self) -> None:
        pass


async def test_a_client_that_does_not_read_makes_no_engine_hang() -> None:
    # Without metrics, only bytes tell whether the engine goes on.
    async with running(engine={"metrics_path": "/none"}) as it:
        gateway, reply, engine = it.gateway, Deaf(), it.engine("a")
        body = json.dumps({**COMPLETION, "stream": True}).encode()
        call = make_call("/v1/completions", {}, body, call_id="x", arrived=time.monotonic())
        task = asyncio.create_task(gateway.pipeline.run(call, lambda call: gateway.answer(call, reply)))
        await reply.is_written_to.wait()
        assert engine.num_streaming == 1
        assert not engine.is_stalled(time.monotonic() + 1000, 30)
        reply.takes.set()
        assert (await task).status == 200


async def test_one_client_that_does_not_read_holds_up_nobody() -> None:
    async with running(laws={"step_seconds": 0.001, "max_model_len": 100_000, "num_blocks": 40_000}) as it:
        address = urlsplit(it.server.url)
        data = json.dumps({**LONG, "max_tokens": 60_000}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data)
        _reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=1024)
        writer.write(head + data)
        await until(lambda: it.engine("a").num_streaming == 1)
        for _ in range(20):
            answer = await it.http.post("/v1/completions", json={**COMPLETION, "stream": True})
            assert events(answer.content)[-1] == "[DONE]"
        assert it.engine("a").num_streaming == 1
        writer.transport.abort()
        await it.settled(21)
        assert it.outcomes[-1][1].client_left
        await until(lambda: it.engines[0].service.num_open == 0)
