"""What was begun and given up is accounted for as the engine counts it, also what was on its way or never sent."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from gateway_harness import CHAT, COMPLETION, Running, running, until

from sol.gateway.limits.stage import LimitStage

LIMITS = {"default_tenant": {"requests_per_minute": 10**6, "tokens_per_minute": 10**9}}
SLOW = {"step_seconds": 0.01}
LONG: dict[str, Any] = {"max_tokens": 3000, "ignore_eos": True}


async def check_accounts(it: Running, count: int) -> None:
    """The totals and the limit say what the engine's own records of all requests add up to."""
    service = it.engines[0].service
    await until(lambda: service.num_open == 0)
    stage = next(stage for stage in it.gateway.pipeline.stages if isinstance(stage, LimitStage))
    total = stage.totals["default", "anonymous", "m"]
    # A record is of a choice; those of one request have one prompt.
    prompts = {record["x_request_id"]: record["prompt_tokens"] for record in it.records()}
    assert (len(prompts), total.prompt_tokens) == (count, sum(prompts.values()))
    assert total.completion_tokens == sum(record["completion_tokens"] for record in it.records())
    (limit,) = stage._limits._make("anonymous", "default", None, "m")
    standing = await stage.ledger.standing(limit)
    assert (standing.requests, standing.tokens) == (count, total.prompt_tokens + total.completion_tokens)
    await stage.check_integrity()
    assert len(service.usages) == 0  # what was asked for is forgotten


@pytest.mark.parametrize("body", [{**COMPLETION, **LONG}, {**CHAT, **LONG}, {**COMPLETION, **LONG, "n": 2}])
@pytest.mark.parametrize("stream", [False, True])
async def test_clients_that_leave_at_any_moment_pay_for_what_was_done(body: dict[str, Any], stream: bool) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with running(laws=SLOW, limits=LIMITS) as it:

        async def client(steps: int) -> None:
            task = asyncio.create_task(it.http.post(path, json={**body, "stream": stream}))
            await until(lambda: it.engines[0].service.num_received == 10)
            before = it.engines[0].service.engine.counters.num_steps
            await until(lambda: it.engines[0].service.engine.counters.num_steps >= before + steps)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        await asyncio.gather(*(client(steps) for steps in range(3, 23, 2)))
        await it.settled(10)
        assert all(outcome.client_left and outcome.usage is not None for _, outcome in it.outcomes)
        assert not any(outcome.usage.estimated for _, outcome in it.outcomes if outcome.usage is not None)
        await check_accounts(it, 10)


async def test_a_deadline_that_passes_ends_the_work_and_pays_for_it() -> None:
    async with running(laws=SLOW, limits=LIMITS) as it:
        answer = await it.http.post(
            "/v1/completions", json={**COMPLETION, **LONG}, headers={"x-request-timeout": "1.5"}
        )
        assert answer.json()["error"]["code"] == "deadline_exceeded"
        await it.settled(1)
        await check_accounts(it, 1)
