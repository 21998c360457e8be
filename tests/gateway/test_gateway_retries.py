"""Clients that ask again while they are being answered: the work is done once."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from gateway_harness import COMPLETION, Running, running, until

SLOW = {"step_seconds": 0.02}
LONG = {**COMPLETION, "max_tokens": 25}


def post(it: Running, body: dict[str, Any], **headers: str) -> asyncio.Task[httpx.Response]:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return asyncio.create_task(it.http.post("/v1/completions", json=body, headers=names))


async def working(it: Running, count: int = 1) -> None:
    await until(lambda: it.engines[0].service.num_received >= count)


async def test_a_retry_gets_the_answer_that_is_being_made() -> None:
    async with running(laws=SLOW) as it:
        first = post(it, LONG, x_stainless_retry_count="0")
        await working(it)
        retry = post(it, LONG, x_stainless_retry_count="1")
        one, other = await first, await retry
        assert one.status_code == other.status_code == 200
        assert one.content == other.content
        assert it.engines[0].service.num_received == 1
        assert len(it.outcomes) == 1


async def test_a_retry_goes_on_with_the_work_of_one_that_left() -> None:
    async with running(laws=SLOW) as it:
        first = post(it, LONG, idempotency_key="k")
        await working(it)
        retry = post(it, LONG, idempotency_key="k", x_stainless_retry_count="1")
        await until(lambda: it.gateway.single_flight.num_joined == 1)
        first.cancel()
        assert (await retry).status_code == 200
        assert it.engines[0].service.num_received == 1
        assert it.records()[0]["ended"] == "finished"


async def test_work_ends_when_the_last_who_waits_has_left() -> None:
    async with running(laws=SLOW) as it:
        first = post(it, {**LONG, "max_tokens": 2000}, idempotency_key="k")
        await working(it)
        retry = post(it, {**LONG, "max_tokens": 2000}, idempotency_key="k")
        await until(lambda: it.gateway.single_flight.num_joined == 1)
        first.cancel()
        retry.cancel()
        await it.settled(1)
        assert it.outcomes[0][1].client_left
        await until(lambda: it.engines[0].service.num_open == 0)


async def test_the_same_asked_twice_on_purpose_is_answered_twice() -> None:
    async with running(laws=SLOW) as it:
        tasks = [post(it, LONG, x_stainless_retry_count="0") for _ in range(3)] + [post(it, LONG)]
        assert {response.status_code for response in await asyncio.gather(*tasks)} == {200}
        assert it.engines[0].service.num_received == 4


async def test_a_stream_cannot_be_joined() -> None:
    async with running(laws=SLOW) as it:
        first = post(it, {**LONG, "stream": True}, idempotency_key="k")
        await working(it)
        refused = await post(it, {**LONG, "stream": True}, idempotency_key="k")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "request_in_progress")
        assert refused.headers["retry-after"] == "1"
        assert (await first).status_code == 200
        again = await post(it, {**LONG, "stream": True}, idempotency_key="k")
        assert again.status_code == 200


async def test_nobody_gets_what_another_asked_for() -> None:
    keys = [{"key": "one", "tenant": "one"}, {"key": "two", "tenant": "two"}]
    async with running(laws=SLOW, keys=keys) as it:
        first = post(it, LONG, idempotency_key="k", authorization="Bearer one")
        await working(it)
        other = post(it, LONG, idempotency_key="k", authorization="Bearer two")
        changed = await post(it, {**LONG, "max_tokens": 3}, idempotency_key="k", authorization="Bearer one")
        assert changed.status_code == 409
        assert (await first).status_code == (await other).status_code == 200
        assert it.engines[0].service.num_received == 2


async def test_an_error_is_shared_as_an_answer_is() -> None:
    async with running(faults=[{"kind": "hang"}], relay={"first_byte_timeout": 1.5}) as it:
        first = post(it, LONG, idempotency_key="k")
        await working(it)
        second = post(it, LONG, idempotency_key="k")
        assert [(await task).status_code for task in (first, second)] == [504, 504]
        assert it.engines[0].service.num_received == 1
