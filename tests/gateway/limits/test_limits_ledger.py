"""The ledgers, in memory and in Redis, against a model that remembers everything."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from sol.gateway.errors import RateLimitError
from sol.gateway.limits.ledger import Ledger, Limit, RequestBeyondLimitError, Reservation
from sol.gateway.limits.memory import MemoryLedger
from sol.gateway.limits.redis_ledger import RedisLedger


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Setting:
    ledger: Ledger
    clock: Clock


@pytest.fixture(params=["memory", "redis"])
async def setting(request: pytest.FixtureRequest) -> AsyncIterator[Setting]:
    clock = Clock()
    ledger: Ledger
    if request.param == "memory":
        ledger = MemoryLedger(clock=clock)
    else:
        ledger = RedisLedger(request.getfixturevalue("shared_redis"), prefix=uuid.uuid4().hex, clock=clock, timeout=10)
    yield Setting(ledger, clock)
    await ledger.check_integrity()
    await ledger.close()


def reservation(*limits: Limit, tokens: int = 0, name: str | None = None, info: str = "") -> Reservation:
    return Reservation(id=name or uuid.uuid4().hex, limits=limits, tokens=tokens, info=info)


async def test_what_is_reserved_counts_until_it_is_settled_for_less(setting: Setting) -> None:
    limit = Limit("key a", tokens=100)
    first = reservation(limit, tokens=80)
    await setting.ledger.reserve(first)
    assert first.standings[0].tokens == 80
    with pytest.raises(RateLimitError, match=r"key a: 20 of 100 tokens a minute are left, and the request may take 30"):
        await setting.ledger.reserve(reservation(limit, tokens=30))
    assert await setting.ledger.settle(first, 10)
    await setting.ledger.reserve(reservation(limit, tokens=90))
    assert (await setting.ledger.standing(limit)).tokens == 100


async def test_settling_twice_and_reserving_twice_change_nothing(setting: Setting) -> None:
    limit = Limit("key a", requests=10, tokens=100)
    first = reservation(limit, tokens=40)
    await setting.ledger.reserve(first)
    await setting.ledger.reserve(first)
    assert (await setting.ledger.standing(limit)).tokens == 40
    assert await setting.ledger.settle(first, 30)
    assert not await setting.ledger.settle(first, 40)
    await setting.ledger.reserve(first)  # as where it was slow on its way, and its client has left
    standing = await setting.ledger.standing(limit)
    assert (standing.requests, standing.tokens) == (1, 30)


async def test_a_request_that_never_ran_is_not_counted(setting: Setting) -> None:
    limit = Limit("key a", requests=1, tokens=100)
    for _ in range(3):
        given_up = reservation(limit, tokens=100)
        await setting.ledger.reserve(given_up)
        assert await setting.ledger.settle(given_up, 0, requests=0)
    standing = await setting.ledger.standing(limit)
    assert (standing.requests, standing.tokens) == (0, 0)


async def test_all_limits_or_none_are_taken_from(setting: Setting) -> None:
    wide, narrow = Limit("tenant t", requests=10, tokens=1000), Limit("key a", requests=1)
    await setting.ledger.reserve(reservation(wide, narrow, tokens=5))
    with pytest.raises(RateLimitError, match="key a: 1 requests a minute are used"):
        await setting.ledger.reserve(reservation(wide, narrow, tokens=5))
    standing = await setting.ledger.standing(wide)
    assert (standing.requests, standing.tokens) == (1, 5)


async def test_nothing_carries_over_and_no_minute_begins(setting: Setting) -> None:
    """Whoever waits for as long as it is told is let through, and not a moment earlier."""
    limit = Limit("key a", requests=3)
    for _ in range(3):
        await setting.ledger.reserve(reservation(limit))
        setting.clock.now += 19.0
    refused = reservation(limit)
    with pytest.raises(RateLimitError) as caught:
        await setting.ledger.reserve(refused)
    assert caught.value.wait == pytest.approx(3.0, abs=0.02)
    assert refused.standings[0].requests == 3
    assert refused.standings[0].reset == pytest.approx(60.0 - 19.0, abs=0.02)
    setting.clock.now += caught.value.wait - 0.02
    with pytest.raises(RateLimitError):
        await setting.ledger.reserve(refused)
    setting.clock.now += 0.02
    await setting.ledger.reserve(refused)
    setting.clock.now += 3600.0
    assert (await setting.ledger.standing(limit)).requests == 0
    for _ in range(3):
        await setting.ledger.reserve(reservation(limit))


async def test_the_longest_wait_of_several_limits_is_told(setting: Setting) -> None:
    early, late = Limit("key a", requests=1), Limit("tenant t", tokens=100)
    await setting.ledger.reserve(reservation(early))
    setting.clock.now += 30
    await setting.ledger.reserve(reservation(late, tokens=60))
    with pytest.raises(RateLimitError, match="tenant t") as caught:
        await setting.ledger.reserve(reservation(early, late, tokens=50))
    assert caught.value.wait == pytest.approx(60.0, abs=0.02)


async def test_tokens_nobody_reserved_count_from_when_they_are_known(setting: Setting) -> None:
    limit = Limit("key a", tokens=100)
    long = reservation(limit, tokens=20)
    await setting.ledger.reserve(long)
    setting.clock.now += 50
    await setting.ledger.settle(long, 90)
    assert (await setting.ledger.standing(limit)).tokens == 90
    setting.clock.now += 11
    assert (await setting.ledger.standing(limit)).tokens == 70
    setting.clock.now += 50
    assert (await setting.ledger.standing(limit)).tokens == 0


async def test_a_request_beyond_its_limit_is_told_so(setting: Setting) -> None:
    limit = Limit("key a", requests=5, tokens=100)
    with pytest.raises(RequestBeyondLimitError, match="may take 101 tokens, and the limit of key a is 100"):
        await setting.ledger.reserve(reservation(limit, tokens=101))
    with pytest.raises(RequestBeyondLimitError, match="0 requests"):
        await setting.ledger.reserve(reservation(Limit("key b", requests=0)))
    assert (await setting.ledger.standing(limit)).requests == 0


async def test_reservations_of_the_dead_are_found_by_one(setting: Setting) -> None:
    limit = Limit("key a", tokens=100)
    dead, alive = (reservation(limit, tokens=30, info=f"info of {name}") for name in ("dead", "alive"))
    await setting.ledger.reserve(dead)
    await setting.ledger.reserve(alive)
    await setting.ledger.renew([(dead.id, "7 tokens")])
    setting.clock.now += 40
    await setting.ledger.renew([(alive.id, ""), ("of somebody unknown", "")])
    assert await setting.ledger.expire() == []
    setting.clock.now += 30
    both = await asyncio.gather(setting.ledger.expire(), setting.ledger.expire())
    found = [orphan for orphans in both for orphan in orphans]
    assert [(orphan.id, orphan.info, orphan.seen) for orphan in found] == [(dead.id, "info of dead", "7 tokens")]
    # Its owner was only asleep.
    assert await setting.ledger.settle(dead, 12)
    assert not await setting.ledger.settle(dead, 12)


async def test_what_a_ledger_does_not_know_is_charged_when_it_is_settled(setting: Setting) -> None:
    limit = Limit("key a", tokens=100)
    unknown = reservation(limit, tokens=50)
    assert await setting.ledger.settle(unknown, 40)
    assert not await setting.ledger.settle(unknown, 40)
    assert (await setting.ledger.standing(limit)).tokens == 40


async def test_two_hundred_at_once_are_let_through_exactly_as_far_as_the_limit_goes(setting: Setting) -> None:
    limits = (Limit("key a", requests=150, tokens=100_000), Limit("tenant t", tokens=1000))
    waiting = [reservation(*limits, tokens=10) for _ in range(200)]

    async def run(item: Reservation) -> bool:
        try:
            await setting.ledger.reserve(item)
        except RateLimitError:
            return False
        await asyncio.sleep(0)
        return True

    passed = await asyncio.gather(*map(run, waiting))
    assert sum(passed) == 100
    await asyncio.gather(*(setting.ledger.settle(item, 7) for item, ok in zip(waiting, passed, strict=True) if ok))
    assert (await setting.ledger.standing(limits[1])).tokens == 700


SCOPES = ("key a", "key b", "tenant t", "model m")


class LedgerMachine(RuleBasedStateMachine):
    """A ledger against a list of everything that ever happened: time, scope, requests, tokens."""

    make: Any = None
    loop: asyncio.AbstractEventLoop

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.ledger: Ledger = self.make(self.clock)
        self.limits = {"key a": Limit("key a", 4, 100), "key b": Limit("key b", None, 60),
                       "tenant t": Limit("tenant t", 6, 150), "model m": Limit("model m", 8, None)}  # fmt: skip
        self.events: list[list[Any]] = []
        """[quantum, scope, requests, tokens]"""
        self.open: dict[str, tuple[Reservation, int, list[list[Any]], float]] = {}
        self.orphans: dict[str, tuple[Reservation, int, list[list[Any]], float]] = {}
        self.done: list[Reservation] = []
        self.asked = 0

    def wait(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(coroutine)

    def quantum(self) -> int:
        return math.floor(round(self.clock.now * 1000) / 10)

    def used(self, scope: str) -> tuple[int, int]:
        kept = [event for event in self.events if event[1] == scope and event[0] > self.quantum() - 6001]
        return sum(event[2] for event in kept), sum(event[3] for event in kept)

    @rule(seconds=st.sampled_from([0.01, 0.5, 7.0, 30.0, 59.99, 60.0, 61.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now = round(self.clock.now + seconds, 3)

    @rule(scopes=st.sets(st.sampled_from(SCOPES), min_size=1), tokens=st.integers(0, 120))
    def reserve(self, scopes: set[str], tokens: int) -> None:
        limits = tuple(self.limits[scope] for scope in sorted(scopes))
        item = reservation(*limits, tokens=tokens, name=f"request {self.asked:06}")
        self.asked += 1
        fits = True
        for limit in limits:
            requests, used = self.used(limit.scope)
            fits &= limit.requests is None or requests + 1 <= limit.requests
            fits &= limit.tokens is None or tokens == 0 or used + tokens <= limit.tokens
        try:
            self.wait(self.ledger.reserve(item))
        except RateLimitError as error:
            assert not fits
            wait = error.wait
            assert wait is None or 0 < wait <= 60.02
        else:
            assert fits
            events = [[self.quantum(), limit.scope, 1, tokens] for limit in limits]
            self.events += events
            self.open[item.id] = (item, tokens, events, self.clock.now + 60)
        for limit, standing in zip(limits, item.standings, strict=True):
            assert (standing.requests, standing.tokens) == self.used(limit.scope)

    @rule(data=st.data(), tokens=st.integers(0, 150), requests=st.integers(0, 1))
    def settle(self, data: st.DataObject, tokens: int, requests: int) -> None:
        known = {**self.open, **self.orphans}
        if not known:
            return
        key = data.draw(st.sampled_from(sorted(known)))
        item, reserved, events, _ = known[key]
        assert self.wait(self.ledger.settle(item, tokens, requests))
        self.open.pop(key, None)
        self.orphans.pop(key, None)
        for event in events:
            event[2] = requests
            event[3] = min(reserved, tokens)
            if tokens > reserved:
                self.events.append([self.quantum(), event[1], 0, tokens - reserved])
        self.done.append(item)

    @rule(data=st.data())
    def settle_again(self, data: st.DataObject) -> None:
        if self.done:
            assert not self.wait(self.ledger.settle(data.draw(st.sampled_from(self.done)), 50))

    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        if self.open:
            chosen = data.draw(st.sets(st.sampled_from(sorted(self.open))))
            self.wait(self.ledger.renew([(key, "seen") for key in sorted(chosen)]))
            for key in chosen:
                item, reserved, events, _ = self.open[key]
                self.open[key] = (item, reserved, events, self.clock.now + 60)

    @rule()
    def expire(self) -> None:
        dead = {key for key, entry in self.open.items() if entry[3] <= self.clock.now}
        assert {orphan.id for orphan in self.wait(self.ledger.expire())} == dead
        for key in dead:
            self.orphans[key] = self.open.pop(key)

    @invariant()
    def sums_are_the_events(self) -> None:
        for scope, limit in self.limits.items():
            standing = self.wait(self.ledger.standing(limit))
            assert (standing.requests, standing.tokens) == self.used(scope)
        self.wait(self.ledger.check_integrity())

    def teardown(self) -> None:
        self.wait(self.ledger.close())


def run_machine(make: Any, examples: int) -> None:
    loop = asyncio.new_event_loop()
    machine = type("Machine", (LedgerMachine,), {"make": staticmethod(make), "loop": loop})
    try:
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=examples,
                stateful_step_count=30,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                derandomize=True,
                database=None,
            ),
        )
    finally:
        loop.close()


def test_the_ledger_in_memory_does_as_its_model() -> None:
    run_machine(lambda clock: MemoryLedger(clock=clock, retention=1e9), 60)


def test_the_ledger_in_redis_does_as_its_model(shared_redis: str) -> None:
    run_machine(
        lambda clock: RedisLedger(shared_redis, prefix=uuid.uuid4().hex, clock=clock, timeout=10, retention=1e6), 10
    )
