"""The dispatcher on a clock of the test's own: credits, deadlines, bounds, and that every waiter leaves once."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sol.gateway.errors import error_headers
from sol.gateway.queue.config import CLASSES, ClassesConfig, QueueConfig
from sol.gateway.queue.dispatcher import Dispatcher
from sol.gateway.queue.errors import HopelessError, PassedDeadlineError, QueueFullError, QueueTimeoutError
from sol.gateway.queue.fair import Waiter


class Places:
    """Engines with so many places together, and perhaps too many prompts before them."""

    def __init__(self, total: int) -> None:
        self.places = total
        self.taken = 0
        self.taken_by: Counter[str] = Counter()
        self.crowded = False
        self.demanded = 0

    def total(self, model: str, *, besides: Collection[str] = ()) -> float:
        return self.places

    def free(self, model: str, *, patient: bool, besides: Collection[str] = ()) -> float:
        return 0 if patient and self.crowded else max(0, self.places - self.taken)

    def held(self, model: str, classes: Collection[str]) -> int:
        return sum(self.taken_by[name] for name in classes)

    def granted(self, waiter: Waiter) -> None:
        self.taken += 1
        self.taken_by[waiter.class_name] += 1
        assert self.taken <= self.places  # credits never become negative

    def in_demand(self, model: str) -> None:
        self.demanded += 1


class Queue:
    def __init__(self, places: int, classes: dict[str, Any] | None = None, **options: Any) -> None:
        self.engines = Places(places)
        self.dispatcher = Dispatcher(
            ["m"], ClassesConfig.model_validate(classes or {}), QueueConfig(**options), self.engines
        )
        self.granted: list[Waiter] = []
        self.refused: list[tuple[Waiter, Exception]] = []

    def offer(self, class_name: str, now: float, **options: Any) -> Waiter:
        waiter = Waiter(
            model="m", class_name=class_name, arrived=now,
            on_grant=lambda: self.granted.append(waiter),
            on_refuse=lambda error: self.refused.append((waiter, error)),
            **options,
        )  # fmt: skip
        self.dispatcher.offer(waiter, now)
        return waiter

    def leave(self, waiter: Waiter, now: float) -> None:
        if waiter.state == "granted":
            self.engines.taken -= 1
            self.engines.taken_by[waiter.class_name] -= 1
        self.dispatcher.leave(waiter, now)
        self.dispatcher.check_integrity()


def test_what_is_not_given_of_a_class_is_as_always() -> None:
    classes = ClassesConfig.model_validate({"batch": {"share": 3}})
    assert (classes.batch.share, classes.batch.max_wait, classes.batch.max_in_flight) == (3, 3600, 0.9)
    assert (classes.realtime.share, classes.best_effort.max_waiting) == (8, 10_000)
    with pytest.raises(ValueError, match="only batch and best_effort"):
        ClassesConfig.model_validate({"realtime": {"preempt": "abort_and_retry"}})


def test_who_finds_a_place_does_not_wait_and_the_next_gets_it_back() -> None:
    queue = Queue(1)
    first, second = queue.offer("batch", 0.0), queue.offer("batch", 1.0)
    assert queue.granted == [first]
    assert queue.engines.demanded > 0
    queue.leave(first, 2.0)
    queue.leave(first, 2.0)
    assert queue.granted == [first, second]
    assert queue.dispatcher.counts == {("batch", "at_once"): 1, ("batch", "waited"): 1}


def test_the_urgent_go_first_and_keep_a_part_of_the_places() -> None:
    queue = Queue(10)
    batch = [queue.offer("batch", 0.0) for _ in range(20)]
    assert len(queue.granted) == 9  # the last place is for others
    realtime = queue.offer("realtime", 1.0)
    assert queue.granted[-1] is realtime
    late = queue.offer("realtime", 2.0)
    assert late.state == "waiting"
    queue.leave(batch[0], 3.0)
    assert queue.granted[-1] is late


def test_less_urgent_classes_keep_their_share_when_the_urgent_want_everything() -> None:
    queue = Queue(10)
    running = [queue.offer("realtime", 0.0, cost=10) for _ in range(10)]
    batch = [queue.offer("batch", 0.1, cost=10) for _ in range(50)]
    for step in range(200):
        now = 1.0 + step * 0.01
        queue.offer("realtime", now, cost=10)
        queue.leave(queue.granted[step], now)
    assert running[0].state == "ended"
    # All that became free since: realtime has 8 parts of 10, and ageing gives batch more.
    assert sum(each.state != "waiting" for each in batch) >= 35


def test_nobody_but_the_urgent_is_sent_where_prompts_queue() -> None:
    queue = Queue(10)
    queue.engines.crowded = True
    interactive = queue.offer("interactive", 0.0)
    assert queue.offer("realtime", 0.0).state == "granted"
    assert interactive.state == "waiting"
    queue.engines.crowded = False
    queue.dispatcher.tick(0.1)
    assert interactive.state == "granted"


def test_a_full_queue_refuses_at_once_and_says_when_to_come_back() -> None:
    queue = Queue(1, {"batch": {"share": 2, "max_waiting": 2}}, max_waiting_bytes=2**20)
    for _ in range(3):
        queue.offer("batch", 0.0)
    with pytest.raises(QueueFullError) as refused:
        queue.offer("batch", 0.0)
    assert (b"retry-after", b"1") in error_headers(refused.value)
    assert refused.value.status == 503
    queue.offer("realtime", 0.0, size=2**19)  # another class has a queue of its own
    with pytest.raises(QueueFullError, match="memory"):
        queue.offer("realtime", 0.0, size=2**19 + 1)
    queue.dispatcher.check_integrity()


def test_who_waits_too_long_is_refused() -> None:
    queue = Queue(1, {"interactive": {"share": 4, "max_wait": 5}})
    queue.offer("interactive", 0.0)
    waits = queue.offer("interactive", 1.0)
    queue.dispatcher.tick(5.9)
    assert not queue.refused
    queue.dispatcher.tick(6.0)
    assert [(each, type(error)) for each, error in queue.refused] == [(waits, QueueTimeoutError)]
    queue.leave(waits, 6.1)
    assert queue.dispatcher.num_waiting()["interactive"] == 0


def test_nobody_is_looked_at_whose_time_has_not_come() -> None:
    queue = Queue(1, {"batch": {"max_waiting": 5000}})
    queue.offer("batch", 0.0)
    waits = [queue.offer("batch", 0.0, deadline=100.0 - index) for index in range(50)]
    queue.dispatcher.tick(51.0)
    assert [each for each, _ in queue.refused] == [waits[-1]]
    queue.dispatcher.tick(60.0)
    assert [each for each, _ in queue.refused] == waits[:39:-1]
    # Those who came, waited and went are not remembered until their time would have been over.
    for step in range(1000):
        queue.leave(queue.granted[-1], 60.0)
        queue.offer("batch", 60.0 + step / 1000)
    queue.dispatcher.tick(62.0)
    assert len(queue.dispatcher.expiry) <= 2 * len(queue.dispatcher.queue) + 64


def test_a_deadline_is_given_up_while_there_is_no_use_in_waiting_on() -> None:
    queue = Queue(1)
    queue.offer("realtime", 0.0)
    waits = queue.offer("realtime", 0.0, deadline=3.0, first_seconds=1.0)
    queue.dispatcher.tick(1.9)
    assert waits.state == "waiting"
    queue.dispatcher.tick(2.0)  # an engine would need a second
    (refused,) = queue.refused
    assert isinstance(refused[1], PassedDeadlineError)
    assert refused[1].status == 504
    assert not any(name == b"x-should-retry" for name, _ in error_headers(refused[1]))
    with pytest.raises(PassedDeadlineError):
        queue.offer("realtime", 3.0, deadline=3.5, first_seconds=1.0)


def test_who_had_a_place_is_counted_once_and_not_refused_by_a_guess() -> None:
    queue = Queue(1)
    for _ in range(50):
        queue.offer("batch", 0.0, cost=100)
    for step in range(10):
        queue.leave(queue.granted[-1], 1.0 + step)
    with pytest.raises(HopelessError):
        queue.offer("batch", 10.0, cost=100, deadline=20.0)
    waits = queue.offer("batch", 10.0, cost=100, deadline=20.0, was_granted=True)
    assert waits.state == "waiting"
    counted = dict(queue.dispatcher.counts)
    queue.engines.places = 100
    queue.dispatcher.tick(11.0)
    assert waits.state == "granted"
    assert queue.dispatcher.counts["batch", "waited"] == counted["batch", "waited"] + 39
    late = queue.offer("batch", 11.0, was_granted=True)
    assert late.state == "granted"
    assert queue.dispatcher.counts["batch", "at_once"] == 1


def test_a_deadline_that_the_queue_cannot_meet_is_refused_at_once() -> None:
    queue = Queue(1)
    for _ in range(50):
        queue.offer("batch", 0.0, cost=100)
    for step in range(10):  # one of them a second: 100 tokens a second
        queue.leave(queue.granted[-1], 1.0 + step)
    wait = queue.dispatcher.expected_wait("batch", "m", 10.0)
    assert wait == pytest.approx(39, rel=0.2)
    with pytest.raises(HopelessError) as refused:
        queue.offer("batch", 10.0, cost=100, deadline=20.0)
    assert refused.value.status == 503
    assert refused.value.wait is not None
    assert 5 < refused.value.wait <= 60
    assert queue.offer("batch", 10.0, cost=100, deadline=100.0).state == "waiting"
    assert queue.offer("realtime", 10.0, cost=100, deadline=20.0).state == "waiting"  # its queue is empty


@settings(max_examples=80, deadline=None)
@given(
    places=st.integers(0, 5),
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("offer"), st.sampled_from(CLASSES), st.one_of(st.none(), st.floats(0.1, 20))),
            st.tuples(st.just("leave"), st.integers(0, 50)),
            st.tuples(st.just("places"), st.integers(0, 8)),
            st.tuples(st.just("crowd"), st.booleans()),
            st.tuples(st.just("tick"), st.floats(0, 15)),
        ),
        max_size=100,
    ),
)
def test_every_waiter_is_granted_or_refused_or_leaves_and_nothing_is_lost(places: int, steps: list[Any]) -> None:
    queue = Queue(places, {name: {"share": 1 + index, "max_wait": 30} for index, name in enumerate(CLASSES)})
    alive: list[Waiter] = []
    now = 0.0
    for step in steps:
        now += 0.5
        if step[0] == "offer":
            with contextlib.suppress(HopelessError, PassedDeadlineError):
                alive.append(queue.offer(step[1], now, deadline=None if step[2] is None else now + step[2], size=10))
        elif step[0] == "leave" and alive:
            queue.leave(alive.pop(step[1] % len(alive)), now)
        elif step[0] == "places":
            queue.engines.places = max(step[1], queue.engines.taken)
        elif step[0] == "crowd":
            queue.engines.crowded = step[1]
        elif step[0] == "tick":
            now += step[1]
        queue.dispatcher.tick(now)
        queue.dispatcher.check_integrity()
        assert queue.engines.taken == sum(queue.dispatcher.in_flight.values())
    queue.engines.crowded, queue.engines.places = False, 1000
    queue.dispatcher.tick(now)
    assert not len(queue.dispatcher.queue)
    for waiter in alive:
        queue.leave(waiter, now)
        queue.leave(waiter, now)
    assert queue.engines.taken == 0
    assert not any(queue.dispatcher.in_flight.values())
    ids = [id(each) for each in queue.granted] + [id(each) for each, _ in queue.refused]
    assert len(ids) == len(set(ids))
