"""The fair queue by itself: shares, ageing, tenants, lengths; and that nobody starves or is forgotten."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sol.gateway.queue.config import CLASSES
from sol.gateway.queue.fair import FairQueue, Waiter

SHARES = {"realtime": 8.0, "interactive": 4.0, "batch": 2.0, "best_effort": 1.0}


def queue(ageing: float = 1e9, placement: float = 1.0) -> FairQueue:
    return FairQueue(SHARES, ageing=ageing, placement=placement)


def waiter(class_name: str = "batch", arrived: float = 0.0, **options: Any) -> Waiter:
    options = {"model": "m", **options}
    return Waiter(class_name=class_name, arrived=arrived, on_grant=lambda: None, on_refuse=lambda _: None, **options)


def anybody(_class_name: str, _model: str) -> bool:
    return True


def serve(fair: FairQueue, count: int, now: float = 0.0, may_go: Callable[[str, str], bool] = anybody) -> list[Waiter]:
    served = []
    for _ in range(count):
        one = fair.pop(may_go, now)
        if one is None:
            break
        served.append(one)
    return served


def test_classes_get_their_shares_of_the_tokens_and_not_of_the_requests() -> None:
    fair = queue()
    for _ in range(400):
        fair.push(waiter("realtime", cost=10))
        fair.push(waiter("batch", cost=40))
    tokens: Counter[str] = Counter()
    for one in serve(fair, 200):
        tokens[one.class_name] += int(one.cost)
    assert tokens["realtime"] / tokens["batch"] == pytest.approx(4.0, rel=0.1)


def test_who_wants_nothing_saves_nothing_up() -> None:
    fair = queue()
    for _ in range(100):
        fair.push(waiter("batch"))
    serve(fair, 100)
    for _ in range(20):
        fair.push(waiter("batch"))
        fair.push(waiter("realtime"))
    first = Counter(one.class_name for one in serve(fair, 10))
    assert first["batch"] >= 1  # realtime was away, and does not get all that it did not use
    assert first["realtime"] >= 7


def test_what_a_tenant_had_while_nobody_else_wanted_any_is_not_held_against_it() -> None:
    fair = queue()
    for _ in range(1000):
        fair.pass_by(waiter(tenant="busy", cost=100), 0.0)
    for _ in range(20):
        fair.push(waiter(tenant="new", cost=100))
        fair.push(waiter(tenant="busy", cost=100))
    assert Counter(one.tenant for one in serve(fair, 10))["busy"] >= 4


def test_one_that_passes_by_is_charged_like_any_other() -> None:
    fair = queue()
    for _ in range(8):
        fair.pass_by(waiter("realtime", cost=100), 0.0)
    fair.push(waiter("realtime", cost=100))
    fair.push(waiter("interactive", cost=100))
    assert serve(fair, 1)[0].class_name == "interactive"


def test_ageing_raises_a_share_up_to_the_largest() -> None:
    fair = queue(ageing=10)
    assert [fair.effective_share("batch", waited) for waited in (0, 5, 10, 20, 1000)] == [2, 3, 4, 6, 8]
    assert fair.effective_share("realtime", 1000) == 8


def test_ageing_gives_those_who_wait_more_of_what_there_is() -> None:
    def share_of_best_effort(ageing: float) -> float:
        fair = queue(ageing=ageing)
        for number in range(300):
            fair.push(waiter("best_effort", arrived=0.0))
            fair.push(waiter("realtime", arrived=float(number)))
        served = [one for now in range(100, 200) for one in serve(fair, 1, now=float(now))]
        return sum(one.class_name == "best_effort" for one in served) / len(served)

    assert share_of_best_effort(1e9) == pytest.approx(1 / 9, abs=0.03)
    assert share_of_best_effort(20.0) > 0.3


def test_short_ones_go_before_long_ones_for_so_long_as_these_take() -> None:
    fair = queue(placement=1.0)
    long = waiter(arrived=0.0, expected_seconds=5.0)
    fair.push(long)
    for number in range(10):
        fair.push(waiter(arrived=float(number), expected_seconds=0.5))
    served = serve(fair, 11)
    assert served.index(long) == 5  # those of 0, 1, 2, 3 and 4 were before it, those from 5 on behind
    fair = queue(placement=0.0)
    fair.push(first := waiter(arrived=0.0, expected_seconds=5.0))
    fair.push(waiter(arrived=1.0, expected_seconds=0.5))
    assert serve(fair, 1) == [first]


def test_a_tenant_with_many_requests_does_not_hold_up_another() -> None:
    fair = queue()
    for _ in range(100):
        fair.push(waiter(tenant="many", cost=10))
    serve(fair, 10)
    fair.push(one := waiter(arrived=5.0, tenant="few", cost=10))
    assert one in serve(fair, 2)


def test_a_class_or_model_that_may_not_go_holds_up_nobody() -> None:
    fair = queue()
    fair.push(waiter("realtime", model="full"))
    fair.push(other := waiter("realtime", model="m"))
    fair.push(batch := waiter("batch", model="m"))
    assert serve(fair, 3, may_go=lambda _, model: model == "m") == [other, batch]
    assert len(fair) == 1


def test_those_that_left_leave_nothing_behind() -> None:
    fair = queue()
    stays = waiter(arrived=0.0)
    fair.push(stays)
    gone = [waiter(arrived=float(number), tenant=str(number % 7)) for number in range(1000)]
    for one in gone:
        fair.push(one)
    for one in gone:
        fair.remove(one)
    line = fair._lines["batch", "m"]
    assert sum(len(waiting) for waiting in line._tenants.values()) <= 3  # the heaps were swept
    assert fair.waiters() == [stays]
    assert serve(fair, 2) == [stays]
    assert fair.cost_waiting("batch") == 0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("push"), st.sampled_from(CLASSES), st.integers(0, 2), st.integers(1, 1000)),
            st.tuples(st.just("remove"), st.integers(0, 100)),
            st.tuples(st.just("pop"), st.sets(st.sampled_from(CLASSES))),
        ),
        max_size=120,
    )
)
def test_every_waiter_leaves_exactly_once(steps: list[Any]) -> None:
    fair, waiting, left, now = queue(ageing=5), [], [], 0.0
    for step in steps:
        now += 1.0
        if step[0] == "push":
            one = waiter(step[1], arrived=now, tenant=str(step[2]), cost=float(step[3]))
            fair.push(one)
            waiting.append(one)
        elif step[0] == "remove" and waiting:
            one = waiting.pop(step[1] % len(waiting))
            fair.remove(one)
            left.append(one)
        elif step[0] == "pop":
            popped = fair.pop(lambda name, _, allowed=step[1]: name in allowed, now)  # type: ignore[misc]
            assert (popped is None) == (not any(each.class_name in step[1] for each in waiting))
            if popped is not None:
                waiting.remove(popped)
                left.append(popped)
        assert len(fair) == len(waiting)
        assert set(map(id, fair.waiters())) == set(map(id, waiting))
        for name in CLASSES:
            cost = sum(each.cost for each in waiting if each.class_name == name)
            assert math.isclose(fair.cost_waiting(name), cost, abs_tol=1e-6)
    rest = serve(fair, 1000, now)
    assert sorted(map(id, rest)) == sorted(map(id, waiting))
    assert len(set(map(id, left + rest))) == len(left) + len(rest)


@settings(max_examples=30, deadline=None)
@given(
    others=st.lists(st.tuples(st.sampled_from(CLASSES), st.integers(1, 100)), min_size=1, max_size=30),
    mine=st.sampled_from(CLASSES),
    seconds=st.floats(0, 20),
)
def test_nobody_starves(others: list[tuple[str, int]], mine: str, seconds: float) -> None:
    """However many come without end, one that waits is served after no more of their tokens than shares allow."""
    fair = queue(ageing=30)
    now = 0.0
    me = waiter(mine, arrived=0.0, tenant="me", cost=100.0, expected_seconds=seconds)
    fair.push(me)
    for number in range(3000):
        name, cost = others[number % len(others)]
        fair.push(waiter(name, arrived=now, tenant="they", cost=float(cost)))
        now += 0.05
        if fair.pop(anybody, now) is me:
            return
    raise AssertionError("it was never served")
