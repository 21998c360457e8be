"""Which engine is chosen, by what was learned of each: units, on clocks of the tests' own."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from typing import Any

import pytest

from sol.engines.signals import Signals
from sol.errors import UnknownModelError
from sol.gateway.call import Call
from sol.gateway.config import make_config
from sol.gateway.errors import NoCapacityError
from sol.gateway.parsing import make_call
from sol.gateway.routing.affinity import prefix_key, ranked, seed_of
from sol.gateway.routing.breaker import Breaker
from sol.gateway.routing.config import BreakerConfig, HealthConfig
from sol.gateway.routing.fleet import Fleet
from sol.gateway.routing.health import Health
from sol.gateway.routing.latency import LatencyModel
from sol.gateway.routing.router import Router


def make_fleet(num_engines: int = 4, routing: dict[str, Any] | None = None) -> tuple[Fleet, Router]:
    names = "abcdefgh"[:num_engines]
    config = make_config(
        {
            "models": [{"name": "m", "aliases": ["alias"], "engines": list(names)}],
            "engines": [{"name": name, "url": f"http://127.0.0.1:{index + 1}"} for index, name in enumerate(names)],
            "routing": routing or {},
        }
    )
    fleet = Fleet(config)
    return fleet, Router(fleet, config.routing)


def call(prompt: str = "Hello", **changes: Any) -> Call:
    body = json.dumps({"model": "m", "prompt": prompt, **changes}).encode()
    return make_call("/v1/completions", {}, body, call_id="x", arrived=time.monotonic())


def test_a_breaker_opens_after_failures_in_a_row_and_closes_after_good_trials() -> None:
    breaker = Breaker(BreakerConfig(consecutive_failures=3, cooldown=5, max_cooldown=8))
    for _ in range(10):
        breaker.end("fault", 0.0, trial=breaker.begin(0.0))
        breaker.end("neutral", 0.0, trial=False)
        breaker.end("ok", 0.0, trial=False)
        breaker.end("ok", 0.0, trial=False)
    assert breaker.allows(0.0)
    for _ in range(3):
        breaker.end("neutral", 1.0, trial=False)
        breaker.end("fault", 1.0, trial=False)
    assert not breaker.allows(5.9)
    assert breaker.state(6.1) == "half_open"
    assert breaker.begin(6.1)
    assert not breaker.allows(6.1)  # one at a time
    breaker.end("neutral", 6.2, trial=True)  # its client left: it says nothing, and holds nothing up
    assert breaker.begin(6.2)
    breaker.end("fault", 6.3, trial=True)
    assert not breaker.allows(6.3 + 7.9)  # longer than the first time, and no longer than the longest
    for _ in range(2):
        assert breaker.begin(15.0)
        breaker.end("ok", 15.0, trial=True)
    assert breaker.state(15.0) == "closed"


def test_a_breaker_opens_at_a_rate_of_failures_within_its_window() -> None:
    breaker = Breaker(BreakerConfig(error_rate=0.5, min_requests=10, window=30, consecutive_failures=100))
    for step in range(9):
        breaker.end("fault" if step % 2 else "ok", 0.0, trial=False)
    assert breaker.allows(1.0)
    later = 40.0  # all of it is forgotten
    for step in range(9):
        breaker.end("fault" if step % 3 else "ok", later, trial=False)
    assert breaker.allows(later)
    breaker.end("fault", later, trial=False)
    assert not breaker.allows(later)


def test_health_takes_several_probes_to_change_either_way() -> None:
    health = Health(HealthConfig(unhealthy_after=3, healthy_after=2))
    for result in ("bad", "bad", "good", "bad", "bad"):
        health.probed(result, "why")  # type: ignore[arg-type]
        assert health.is_well
    health.probed("bad", "because")
    assert (health.is_well, health.reason) == (False, "because")
    health.probed("good")
    health.probed("bad")
    health.probed("good")
    assert not health.is_well
    health.probed("good")
    assert health.is_well
    health.probed("refused")  # nobody is there: no doubt
    assert not health.is_well
    assert not health.is_listening


def test_at_most_half_are_left_out_for_looking_ill_and_those_who_are_gone_are_not_asked() -> None:
    fleet, _ = make_fleet(4)
    pool, now = fleet.pool("alias"), time.monotonic()
    engines = pool.engines
    for engine in engines[:2]:
        engine.breaker.open(now)
    assert (pool.askable(now).engines, pool.askable(now).panic) == (list(engines[2:]), False)
    engines[2].breaker.open(now)
    assert (pool.askable(now).engines, pool.askable(now).panic) == (list(engines), True)
    engines[0].health.probed("refused")
    assert pool.askable(now).engines == list(engines[1:])
    for engine in engines:
        engine.health.probed("refused")
    assert pool.askable(now).engines == list(engines)  # nothing is better than none
    with pytest.raises(UnknownModelError):
        fleet.pool("other")


def test_latency_is_learned_by_length_and_load() -> None:
    model, rng = LatencyModel(), random.Random(0)
    for step in range(600):
        tokens, load = rng.choice([100, 4000]), rng.randrange(20)
        seconds = (0.05 if tokens == 100 else 0.5) + 0.01 * load
        model.observe(tokens, load, seconds * rng.uniform(0.95, 1.05), step * 0.1)
    now = 60.0
    assert model.expect(100, 0, now) == pytest.approx(0.05, abs=0.03)
    assert model.expect(4000, 0, now) == pytest.approx(0.5, rel=0.15)
    slope = (model.expect(4000, 20, now) - model.expect(4000, 0, now)) / 20
    assert slope == pytest.approx(0.01, rel=0.5)
    # What was learned long ago gives way to what is usual.
    assert model.expect(4000, 0, now + 600, usual=0.1) == pytest.approx(0.1, rel=0.05)


def test_the_faster_engine_gets_more_and_the_slower_is_not_forgotten() -> None:
    fleet, router = make_fleet(2)
    rng, chosen = random.Random(1), Counter[str]()
    fast, slow = fleet.engines["a"], fleet.engines["b"]
    for _ in range(300):
        engine = router.choose(call()).engine
        chosen[engine.name] += 1
        base = 0.02 if engine is fast else 0.06
        now = time.monotonic()
        engine.latency.observe(2, engine.in_flight, base * (1 + 0.5 * engine.in_flight) * rng.uniform(0.9, 1.1), now)
        engine.in_flight = min(8, engine.in_flight + 1)
        for each in (fast, slow):  # one finishes a request three times as often
            if rng.random() < (0.75 if each is fast else 0.25) and each.in_flight:
                each.in_flight -= 1
    assert chosen["a"] > 1.5 * chosen["b"] > 0


def test_others_requests_count_while_what_is_known_of_them_is_fresh() -> None:
    fleet, _ = make_fleet(2, {"signal_age": 10})
    engine = fleet.engines["a"]
    engine.in_flight = 3
    engine.scraped(Signals(running=5, waiting=4, read_at=100.0), own=2)
    engine.in_flight = 1
    assert engine.load(105.0) == 1 + 7
    assert engine.load(111.0) == 1  # stale: the gateway believes itself alone
    engine.scraped(Signals(read_at=200.0), own=1)
    assert engine.load(200.0) == 1


def test_full_engines_are_passed_over_and_those_asked_already() -> None:
    fleet, router = make_fleet(3)
    a, b, c = fleet.engines.values()
    a.max_in_flight, a.in_flight = 2, 2
    assert {router.choose(call()).engine.name for _ in range(40)} == {"b", "c"}
    assert router.choose(call(), [b]).engine is c
    with pytest.raises(NoCapacityError, match="all the requests it may have"):
        router.choose(call(), [b, c])
    only = call()
    only.only_engines = frozenset({"b"})
    assert router.choose(only).engine is b
    assert router.choose(only, [b]).engine is c  # rather another than none


def test_prefixes_stay_with_their_engine_and_move_little_when_one_is_gone() -> None:
    fleet, router = make_fleet(4)
    prompts = [f"{index}" * 2000 for index in range(200)]
    calls = [call(prompt) for prompt in prompts]
    for each in calls:
        each.prefix_key = prefix_key(each, 1024)
    first = [router.choose(each) for each in calls]
    assert {choice.rule for choice in first} == {"prefix"}
    assert [choice.engine for choice in first] == [router.choose(each).engine for each in calls]
    spread = Counter(choice.engine.name for choice in first)
    assert min(spread.values()) > 25
    gone = fleet.engines["a"]
    gone.health.probed("refused")
    moved = [(old.engine, router.choose(each).engine) for old, each in zip(first, calls, strict=True)]
    assert all(old is new for old, new in moved if old is not gone)
    assert len({new for old, new in moved if old is gone}) == 3


def test_a_favourite_that_is_busy_or_slow_is_left_for_the_next_in_its_order() -> None:
    fleet, router = make_fleet(3, {"affinity": {"free_requests": 4, "load_bound": 1.5}})
    one = call("x" * 2000)
    one.prefix_key = prefix_key(one, 1024)
    favourite = router.choose(one).engine
    favourite.in_flight = 4
    for each in fleet:
        each.in_flight = max(each.in_flight, 3)
    assert router.choose(one).engine is favourite  # 4 of a mean of 3.7, bound 1.5
    favourite.in_flight = 12
    escaped = router.choose(one)
    assert (escaped.rule, escaped.engine is favourite) == ("prefix_escape", False)
    assert router.choose(one).engine is escaped.engine  # those who come after agree on it
    favourite.in_flight, now = 0, time.monotonic()
    for each in fleet:
        for _ in range(20):
            each.latency.observe(500, 0, 5.0 if each is favourite else 0.1, now)
    assert router.choose(one).engine is not favourite


def test_prefix_keys_are_of_the_beginning_and_of_nothing_else() -> None:
    def key(**body: Any) -> int | None:
        one = call()
        one.json = body
        return prefix_key(one, 100)

    system = {"role": "system", "content": "s" * 100}
    assert key(prompt="p" * 99) is None
    assert key(prompt="p" * 100) == key(prompt="p" * 100 + "more") != key(prompt="q" * 100)
    assert key(messages=[system, {"role": "user", "content": "a"}]) == key(messages=[system])
    assert key(messages=[{"role": "user", "content": [{"type": "text", "text": "s" * 120}]}]) == key(messages=[system])
    assert key(prompt=list(range(25))) == key(prompt=list(range(30))) is not None
    assert key(prompt=list(range(24))) is None
    assert key() is None
    order = ranked(7, [seed_of(name) for name in "abc"])
    assert sorted(order) == [0, 1, 2]


def test_an_engine_stalls_when_its_work_stands_still() -> None:
    fleet, _ = make_fleet(1)
    engine = fleet.engines["a"]
    flight = engine.begin(call())
    started = flight.started_at
    assert not engine.is_stalled(started + 1000, 30)  # who waits for its first byte may wait long, for all one can see
    engine.scraped(Signals(progress=1.0, read_at=started), own=1)
    assert not engine.is_stalled(started + 20, 30)
    assert engine.is_stalled(started + 40, 30)  # but its steps are counted, and there are none
    engine.scraped(Signals(progress=2.0, read_at=started + 39), own=1)
    assert not engine.is_stalled(started + 40, 30)
    flight.first_byte()
    engine.last_byte_at = started + 50
    assert not engine.is_stalled(started + 79, 30)
    assert engine.is_stalled(started + 81, 30)
    flight.waits_for_client = lambda: True
    assert not engine.is_stalled(started + 1000, 30)  # nothing is read while the client takes nothing
    other = engine.begin(call())
    other.first_byte()
    assert engine.is_stalled(started + 1000, 30)
    other.end("neutral")
    flight.end("ok")
    assert not engine.is_stalled(started + 1000, 30)
    assert (engine.in_flight, engine.num_streaming) == (0, 0)
