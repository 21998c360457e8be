"""The stage: what calls reserve, what they are told, and what is settled and recorded when they end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from redis_servers import RedisServer

from sol.gateway.call import Call, Outcome, Principal, Usage
from sol.gateway.errors import DrainingError, NoCapacityError, RateLimitError
from sol.gateway.limits.accounts import Accounts
from sol.gateway.limits.config import DatabaseOptions, LimitsConfig, Price
from sol.gateway.limits.cost import cost_nano
from sol.gateway.limits.estimate import Estimates
from sol.gateway.limits.failover import FailoverLedger
from sol.gateway.limits.ledger import Limit, RequestBeyondLimitError
from sol.gateway.limits.policy import Limits, UnknownPolicyError
from sol.gateway.limits.redis_ledger import RedisLedger
from sol.gateway.limits.stage import LimitStage
from sol.gateway.limits.usage import usage_by
from sol.gateway.pipeline import Pipeline

PRICES = {"llama": Price(input=Decimal("0.5"), cached_input=Decimal("0.05"), output=Decimal("1.5"))}


def config(**options: Any) -> LimitsConfig:
    return LimitsConfig.model_validate(options)


def call(*, key: str = "k", tenant: str = "acme", limits: str | None = "small", **options: Any) -> Call:
    json: dict[str, Any] = {"model": "llama", "prompt": [1] * 10, **options.pop("json", {})}
    return Call(
        id="a request", path=options.pop("path", "/v1/completions"), method="POST", headers={}, body=b"", json=json,
        model=json["model"], stream=False, arrived=time.monotonic(),
        principal=Principal(key_id=key, tenant=tenant, limits=limits), **options,
    )  # fmt: skip


def answered(prompt: int = 10, completion: int = 5, cached: int = 0) -> Callable[[Call], Awaitable[Outcome]]:
    async def work(call: Call) -> Outcome:
        call.attempt, call.backend = 1, "one"
        call.usage = Usage(prompt_tokens=prompt, completion_tokens=completion, cached_tokens=cached)
        return Outcome(status=200, usage=call.usage)

    return work


async def tokens_of(stage: LimitStage, scope: str) -> tuple[int, int]:
    standing = await stage.ledger.standing(Limit(scope))
    return standing.requests, standing.tokens


async def test_a_call_reserves_what_it_declared_and_settles_what_it_used() -> None:
    stage = LimitStage(config(policies={"small": {"requests_per_minute": 5, "tokens_per_minute": 100}}), PRICES)
    pipeline = Pipeline([stage])
    first = call(output_tokens=60)

    async def look(running: Call) -> Outcome:
        assert await tokens_of(stage, "key k") == (1, 70)
        with pytest.raises(RateLimitError) as caught:
            await pipeline.run(refused, answered())
        assert caught.value.wait == pytest.approx(60, abs=1)
        return await answered(10, 5, cached=4)(running)

    refused = call(output_tokens=60)
    await pipeline.run(first, look)
    assert await tokens_of(stage, "key k") == (1, 15)
    headers = dict(first.response_headers)
    assert headers[b"x-ratelimit-limit-requests"] == b"5"
    assert headers[b"x-ratelimit-remaining-requests"] == b"4"
    assert headers[b"x-ratelimit-limit-tokens"] == b"100"
    assert headers[b"x-ratelimit-remaining-tokens"] == b"30"
    assert headers[b"x-ratelimit-reset-tokens"] == b"1m0.01s" or headers[b"x-ratelimit-reset-tokens"].startswith(b"1m")
    assert dict(refused.response_headers)[b"x-ratelimit-remaining-tokens"] == b"30"
    total = stage.totals["acme", "k", "llama"].as_dict()
    assert total == {"requests": 1, "prompt_tokens": 10, "cached_tokens": 4, "completion_tokens": 5,
                     "cost_nano": 6 * 500 + 4 * 50 + 5 * 1500}  # fmt: skip
    await stage.check_integrity()


async def test_what_is_not_the_clients_fault_is_given_back() -> None:
    stage = LimitStage(config(policies={"small": {"requests_per_minute": 100}}), {})
    pipeline = Pipeline([stage])

    async def no_capacity(_: Call) -> Outcome:
        raise NoCapacityError("none")

    async def wrong(running: Call) -> Outcome:
        running.attempt = 1
        return Outcome(status=400)

    async def gone(_: Call) -> Outcome:
        raise asyncio.CancelledError

    with pytest.raises(NoCapacityError):
        await pipeline.run(call(), no_capacity)
    with pytest.raises(asyncio.CancelledError):
        await pipeline.run(call(), gone)
    assert await tokens_of(stage, "key k") == (0, 0)
    await pipeline.run(call(), wrong)
    assert await tokens_of(stage, "key k") == (1, 0)
    assert stage.totals == {}


async def test_a_client_that_leaves_pays_for_what_was_generated_once() -> None:
    stage = LimitStage(config(policies={"small": {"tokens_per_minute": 1000}}), PRICES)

    async def left(running: Call) -> Outcome:
        await answered(10, 7)(running)
        raise asyncio.CancelledError

    leaving = call(output_tokens=100)
    with pytest.raises(asyncio.CancelledError):
        await Pipeline([stage]).run(leaving, left)
    await stage.leave(leaving, Outcome(status=200, usage=leaving.usage))
    assert await tokens_of(stage, "key k") == (1, 17)
    assert stage.totals["acme", "k", "llama"].completion_tokens == 7


async def test_every_limit_applies_and_the_narrowest_is_told() -> None:
    stage = LimitStage(
        config(
            policies={"small": {"requests_per_minute": 10, "models": {"llama": {"requests_per_minute": 3}}}},
            tenants={"acme": {"tokens_per_minute": 500}},
            default_tenant={"tokens_per_minute": 50},
            models={"llama": {"requests_per_minute": 4}},
        ),
        {},
    )
    pipeline = Pipeline([stage])
    for _ in range(3):
        last = call(output_tokens=5)
        await pipeline.run(last, answered())
    assert dict(last.response_headers)[b"x-ratelimit-remaining-requests"] == b"0"
    with pytest.raises(RateLimitError, match="key k on model llama"):
        await pipeline.run(call(output_tokens=5), answered())
    await pipeline.run(call(key="other", limits="small", output_tokens=5), answered())
    with pytest.raises(RateLimitError, match="model llama"):
        await pipeline.run(call(key="third", output_tokens=5), answered())
    with pytest.raises(RequestBeyondLimitError, match="tenant new"):
        await pipeline.run(call(tenant="new", output_tokens=50), answered())
    assert stage.refused == 3
    assert await tokens_of(stage, "tenant acme") == (4, 60)


def test_a_policy_that_is_missing_does_not_make_a_key_unlimited() -> None:
    limits = Limits(config(policies={"small": {"requests_per_minute": 1}}))
    with pytest.raises(UnknownPolicyError, match="'large'"):
        limits.of(Principal(key_id="k", tenant="t", limits="large"), "llama")
    assert limits.of(Principal(key_id="k", tenant="t"), "llama") == ()


async def test_undeclared_answers_are_reserved_for_as_others_were() -> None:
    stage = LimitStage(
        config(policies={"small": {"tokens_per_minute": 10_000}}, output_estimate={"quantile": 0.9, "initial": 300}), {}
    )
    pipeline = Pipeline([stage])

    async def reserved(**options: Any) -> int:
        amount = 0

        async def look(running: Call) -> Outcome:
            nonlocal amount
            before = await tokens_of(stage, "key k")
            amount = before[1] - settled
            return Outcome(status=503)

        settled = (await tokens_of(stage, "key k"))[1]
        await pipeline.run(call(**options), look)
        return amount

    assert await reserved() == 10 + 300
    for number in range(1, 31):
        await pipeline.run(call(), answered(10, number))
    assert await reserved() == 10 + 27
    assert await reserved(json={"n": 3}) == 10 + 3 * 27
    assert await reserved(output_tokens=500) == 10 + 500
    assert await reserved(path="/v1/embeddings") == 10
    # Known of the model, if not of the key.
    assert stage._estimates.output("newcomer", "llama") == 27
    assert stage._estimates.output("newcomer", "other") == 300


async def test_a_guess_does_not_make_a_request_impossible() -> None:
    stage = LimitStage(config(policies={"small": {"tokens_per_minute": 100}}), {})
    await Pipeline([stage]).run(call(), answered())
    with pytest.raises(RequestBeyondLimitError):
        await Pipeline([stage]).run(call(output_tokens=500), answered())


def test_prompts_are_estimated_by_others_of_about_their_length() -> None:
    estimates = Estimates(config().output_estimate)
    assert 350 <= estimates.input("llama", 1000) <= 400
    for _ in range(25):
        estimates.learn_input("llama", 1000, 250)
        estimates.learn_input("llama", 8, 12)
    assert estimates.input("llama", 600) == 150
    assert estimates.input("llama", 9) == 14
    assert estimates.input("other", 1000) > 300


def test_costs_are_whole_billionths() -> None:
    usage = Usage(prompt_tokens=1_000_000, cached_tokens=400_000, completion_tokens=3)
    assert cost_nano(usage, PRICES["llama"]) == 300_000_000 + 20_000_000 + 4500
    assert cost_nano(usage, Price(input=Decimal("0.0001"), output=Decimal(0))) == 100_000
    assert cost_nano(usage, None) == 0


async def test_a_refusal_waits_for_answers_whose_last_byte_is_sent() -> None:
    """The client has its answer, and sends the next request before the first one is settled."""
    stage = LimitStage(config(policies={"small": {"tokens_per_minute": 100}}), {})
    first, second = call(output_tokens=80), call(output_tokens=80)
    await stage.enter(first)
    entering = asyncio.create_task(stage.enter(second))
    await asyncio.sleep(0)
    await stage.leave(first, Outcome(status=200, usage=Usage(prompt_tokens=5, completion_tokens=5)))
    await entering
    await stage.leave(second, Outcome(status=200, usage=Usage(prompt_tokens=5, completion_tokens=5)))
    assert await tokens_of(stage, "key k") == (2, 20)


async def test_records_are_the_totals(tmp_path: Path) -> None:
    options = DatabaseOptions(url=f"sqlite:///{tmp_path}/sol.db", journal=tmp_path / "journal")
    accounts = Accounts(options)
    stage = LimitStage(config(), PRICES, accounts=accounts, canonical={"alias": "llama"})
    pipeline = Pipeline([stage])
    await pipeline.start()
    for number in range(20):
        asked = call(key=f"k{number % 2}", limits=None, json={"model": "alias"})
        await pipeline.run(asked, answered(number, 3, cached=1))
    rows = {("acme", f"k{number}", "llama"): stage.totals["acme", f"k{number}", "llama"] for number in range(2)}
    await pipeline.close()
    reader = Accounts(options)
    for row in await usage_by(reader.database, ["tenant", "key_id", "model"]):
        total = rows.pop((row["tenant"], row["key_id"], row["model"])).as_dict()
        assert {name: row[name] for name in total} == total
    assert rows == {}
    await reader.close()


async def test_what_a_dead_gateway_had_seen_is_recorded_by_another(redis_server: RedisServer, tmp_path: Path) -> None:
    def gateway(accounts: Accounts | None) -> LimitStage:
        stage = LimitStage(config(policies={"small": {"tokens_per_minute": 1000}}), PRICES, accounts=accounts)
        stage.ledger = FailoverLedger(RedisLedger(redis_server.url, lease=1.5), "local", lease=1.5)
        return stage

    accounts = Accounts(DatabaseOptions(url=f"sqlite:///{tmp_path}/sol.db", journal=tmp_path / "journal"))
    doomed, heir = gateway(None), gateway(accounts)
    await doomed.start()
    await heir.start()
    running, waiting = call(output_tokens=100), call(output_tokens=200)
    for item in (running, waiting):
        await doomed.enter(item)
    running.attempt, running.backend = 1, "one"
    running.usage = Usage(prompt_tokens=10, completion_tokens=42)
    await asyncio.sleep(1.2)  # it says once what it has seen
    assert doomed._task is not None
    doomed._task.cancel()
    deadline = time.monotonic() + 20
    while not heir.totals:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    await accounts.usage.flush()
    (row,) = await usage_by(accounts.database, ["tenant", "key_id"])
    assert (row["requests"], row["completion_tokens"], row["estimated"]) == (1, 42, 1)
    # It was not dead, only slow: the truth replaces what was made out of what was known.
    await doomed.leave(running, Outcome(status=200, usage=Usage(prompt_tokens=10, completion_tokens=50)))
    assert await tokens_of(heir, "key k") == (2, 60 + 210)
    await heir.close()
    await doomed.close()


async def test_a_stage_without_limits_asks_nobody_and_records_all_the_same() -> None:
    stage = LimitStage(config(), {})
    asked = call(limits=None)
    await Pipeline([stage]).run(asked, answered())
    assert asked.response_headers == []
    assert stage.totals["acme", "k", "llama"].requests == 1
    with pytest.raises(DrainingError):
        await Pipeline([stage]).run(call(limits=None), _draining)
    assert stage._open == {}


async def _draining(_: Call) -> Outcome:
    raise DrainingError("bye")
