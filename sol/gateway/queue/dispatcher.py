"""The queue of engines that share models, on a clock it is given: who waits, who goes, who is told to give up.

    dispatcher.offer(waiter, now)      granted at once, or waits, or an error is raised
    dispatcher.leave(waiter, now)      once for each, however it ended; others may be granted by it
    dispatcher.tick(now)               now and then: deadlines, and places that came without anybody leaving

It neither sleeps nor awaits, so all of it can be tested, and simulated, faster than the time that it is about.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Collection, Iterable
from typing import Final, Protocol

from sol.gateway.queue.config import CLASSES, RANK, ClassesConfig, QueueConfig
from sol.gateway.queue.errors import HopelessError, PassedDeadlineError, QueueFullError, QueueTimeoutError
from sol.gateway.queue.fair import FairQueue, Waiter
from sol.gateway.queue.service import DrainRate

_LONGEST_RETRY: Final = 60.0
"""Seconds a client is told to wait at most; over two minutes, OpenAI's clients do not come back at all."""
_SPARE: Final = 64
"""Entries of those who wait no longer that are not worth a sweep."""


class Capacity(Protocol):
    """What the engines of a model take."""

    def total(self, model: str, *, besides: Collection[str] = ()) -> float:
        """Requests that they may have at once; infinite where nothing limits them. `besides`: engines, by their names,
        that do not count."""
        ...

    def free(self, model: str, *, patient: bool, besides: Collection[str] = ()) -> float:
        """Of these, how many they could be given now. `patient`: by those engines only that have few prompts before
        them, so that one that comes for somebody in a hurry finds no queue there. `besides`: engines, by their names,
        that do not count."""
        ...

    def held(self, model: str, classes: Collection[str]) -> int:
        """Places of `total` that requests of these classes have, or are on their way to."""
        ...

    def granted(self, waiter: Waiter) -> None:
        """It is on its way to one of them."""
        ...

    def in_demand(self, model: str) -> None:
        """Somebody waits for them."""
        ...


class Dispatcher:
    def __init__(self, models: Iterable[str], classes: ClassesConfig, options: QueueConfig, capacity: Capacity) -> None:
        self.models = tuple(models)
        self._classes = {name: classes.of(name) for name in CLASSES}
        self._options = options
        self._capacity = capacity
        shares = {name: each.share for name, each in self._classes.items()}
        self._shares = shares
        self.queue = FairQueue(shares, ageing=options.ageing, placement=options.placement)
        self.rate = DrainRate()
        self.expiry: list[tuple[float, int, Waiter]] = []
        """A heap of those who wait, by when they give up; many that went before are still in it."""
        self._numbers = itertools.count()
        self.again: dict[Waiter, Collection[str]] = {}
        """Those who had a place, at engines that failed them (by their names), and wait for one at another."""
        self.in_flight = dict.fromkeys(CLASSES, 0)
        self.waiting_bytes = 0
        self.counts: dict[tuple[str, str], int] = {}
        """Since the beginning, by class and what happened: at_once, waited, left, full, timeout, hopeless, deadline."""

    def offer(self, waiter: Waiter, now: float) -> None:
        """Raises `QueueFullError`, `HopelessError` or `PassedDeadlineError`."""
        name, model = waiter.class_name, waiter.model
        if not self.queue.num_waiting(name, model) and self._may_go(name, model) and not self._others_first(waiter):
            self.queue.pass_by(waiter, now)
            self._grant(waiter, now, "at_once")
            return
        if not waiter.was_granted:
            self._check_room(waiter)
        self._check_deadline(waiter, now)
        self.rate.backlog(now, True)
        self.queue.push(waiter)
        heapq.heappush(self.expiry, (waiter.give_up, next(self._numbers), waiter))
        self.waiting_bytes += waiter.size
        self.pump(now)

    def offer_again(self, waiter: Waiter, besides: Collection[str], now: float) -> None:
        """One whose place was at an engine that failed it: the next place at any engine `besides` these is its own.
        Raises `PassedDeadlineError` and `HopelessError`."""
        self._check_deadline(waiter, now)
        waiter.state = "waiting"
        self.again[waiter] = besides
        heapq.heappush(self.expiry, (waiter.give_up, next(self._numbers), waiter))
        self.pump(now)

    def leave(self, waiter: Waiter, now: float, *, successor: str | None = None) -> None:
        """It has ended, or waits no longer. A second time does nothing. `successor`: the class that its place was made
        free for, whoever's turn it is."""
        if waiter.state == "waiting":
            self._count(waiter, "left")
            self._remove(waiter)
        elif waiter.state == "granted":
            waiter.let_go()
            self.in_flight[waiter.class_name] -= 1
            if successor is not None:
                self._grant_next(lambda name, model: name == successor and self._may_go(name, model), now)
            self.pump(now)

    def tick(self, now: float) -> None:
        """Refuse those who cannot be served in time, and grant what has become free."""
        while self.expiry and self.expiry[0][0] <= now:
            waiter = heapq.heappop(self.expiry)[2]
            if waiter.state == "waiting":
                refuse = waiter.on_refuse
                self._remove(waiter)
                refuse(self._given_up(waiter, now))
        if len(self.expiry) > 2 * len(self.queue) + _SPARE:
            self.expiry = [entry for entry in self.expiry if entry[2].state == "waiting"]
            heapq.heapify(self.expiry)
        self.pump(now)

    def expected_wait(self, class_name: str, model: str, now: float) -> float:
        """Seconds until a request that comes now would be granted; 0 where that cannot be told."""
        if not self.queue.num_waiting(class_name, model) and self._may_go(class_name, model):
            return 0.0
        rate = self.rate.per_second()
        if rate is None:
            return 0.0
        mine = self.queue.cost_waiting(class_name)
        active = sum(share for name, share in self._shares.items() if name == class_name or self._waits(name))
        return mine * active / (rate * self._shares[class_name])

    def longest_wait(self, now: float, class_name: str, model: str | None = None) -> float:
        """Seconds that the next of its waiting requests has waited: of those for this model, or of all."""
        models = self.models if model is None else (model,)
        nexts = (self.queue.next_of(class_name, each) for each in models)
        return max((now - waiter.arrived for waiter in nexts if waiter is not None), default=0.0)

    def num_waiting(self, model: str | None = None) -> dict[str, int]:
        models = self.models if model is None else (model,)
        return {name: sum(self.queue.num_waiting(name, each) for each in models) for name in CLASSES}

    def check_integrity(self) -> None:
        """Raises AssertionError where the queue contradicts itself."""
        waiters = self.queue.waiters()
        assert len(waiters) == len(self.queue) == sum(self.num_waiting().values())
        assert self.waiting_bytes == sum(waiter.size for waiter in waiters)
        assert {id(waiter) for waiter in waiters} <= {id(entry[2]) for entry in self.expiry}
        assert all(waiter.state == "waiting" for waiter in self.again)
        assert all(count >= 0 for count in self.in_flight.values())

    def _waits(self, name: str) -> bool:
        return any(self.queue.num_waiting(name, model) > 0 for model in self.models)

    def _others_first(self, waiter: Waiter) -> bool:
        """Whether somebody waits who might get the same place."""
        if any(self._may_go_again(each, besides) for each, besides in self.again.items()):
            return True
        return len(self.queue) > 0 and any(
            self.queue.num_waiting(name, model) > 0 and self._may_go(name, model)
            for name in CLASSES for model in self.models
        )  # fmt: skip

    def _may_go_again(self, waiter: Waiter, besides: Collection[str]) -> bool:
        model = waiter.model
        if self._capacity.free(model, patient=False, besides=besides) >= 1:
            return True
        return not self._capacity.total(model, besides=besides)  # there is nobody to wait for

    def _may_go(self, name: str, model: str) -> bool:
        if self._capacity.free(model, patient=RANK[name] > 0) < 1:
            return False
        part = self._classes[name].max_in_flight
        if part >= 1:
            return True
        total = self._capacity.total(model)
        if math.isinf(total):
            return True
        held = self._capacity.held(model, CLASSES[RANK[name] :])
        return held < math.ceil(part * total - 1e-9)  # of few places, nobody's is kept free

    def pump(self, now: float) -> None:
        """Grant what is free."""
        for waiter, besides in list(self.again.items()):
            if self._may_go_again(waiter, besides):
                del self.again[waiter]
                waiter.state = "granted"
                self._grant(waiter, now, "waited")
        while self._grant_next(self._may_go, now):
            pass
        for model in self.models:
            if any(self.queue.num_waiting(name, model) for name in CLASSES):
                self._capacity.in_demand(model)
        self.rate.backlog(now, len(self.queue) > 0)

    def _grant_next(self, may_go: Callable[[str, str], bool], now: float) -> bool:
        """Whether there was somebody whose turn it is."""
        if not len(self.queue):
            return False
        self.rate.backlog(now, True)
        waiter = self.queue.pop(may_go, now)
        if waiter is None:
            return False
        self.waiting_bytes -= waiter.size
        self.rate.left(waiter.cost)
        self._grant(waiter, now, "waited")
        return True

    def _grant(self, waiter: Waiter, now: float, how: str) -> None:
        waiter.granted_at = now
        self.in_flight[waiter.class_name] += 1
        if not waiter.was_granted:
            self._count(waiter, how)
        self._capacity.granted(waiter)
        waiter.on_grant()

    def _remove(self, waiter: Waiter) -> None:
        if self.again.pop(waiter, None) is not None:
            waiter.let_go()
            return
        self.queue.remove(waiter)
        self.waiting_bytes -= waiter.size

    def _check_room(self, waiter: Waiter) -> None:
        name, model = waiter.class_name, waiter.model
        num_waiting = self.queue.num_waiting(name, model)
        if num_waiting >= self._classes[name].max_waiting:
            self._count(waiter, "full")
            raise QueueFullError(
                f"{num_waiting} requests of the class {name} wait for the model {model}, and no more may; try again "
                "later",
                wait=self._retry_after(name),
            )
        if self.waiting_bytes + waiter.size > self._options.max_waiting_bytes:
            self._count(waiter, "full")
            raise QueueFullError("the requests that wait take all the memory they may; try again later",
                                 wait=self._retry_after(name))  # fmt: skip

    def _check_deadline(self, waiter: Waiter, now: float) -> None:
        """Set when it gives up, or raise if that is now."""
        name = waiter.class_name
        # The time that an engine worked on it was no waiting.
        waiter.give_up = (now if waiter.was_granted else waiter.arrived) + self._classes[name].max_wait
        if waiter.deadline is None:
            return
        latest = waiter.deadline - waiter.first_seconds
        waiter.give_up = min(waiter.give_up, latest)
        if now >= waiter.give_up:
            raise self._given_up(waiter, now)
        if waiter.was_granted:
            return  # it goes before those whose number the guess below is made from
        wait = self.expected_wait(name, waiter.model, now)
        if now + wait > latest:
            self._count(waiter, "hopeless")
            raise HopelessError(
                f"an answer could not begin within the {waiter.deadline - now:.3g} s that there are for it: the queue "
                f"of the class {name} is {wait:.3g} s long; try again later, or allow more time",
                wait=self._retry_after(name),
            )

    def _given_up(self, waiter: Waiter, now: float) -> Exception:
        name, waited = waiter.class_name, now - waiter.arrived
        if waiter.deadline is not None and now >= waiter.deadline - waiter.first_seconds:
            self._count(waiter, "deadline")
            return PassedDeadlineError(
                f"the request waited for {waited:.3g} s, and no engine could begin an answer in what is left of its "
                "time; try again later, or allow more time",
                wait=self._retry_after(name),
            )
        self._count(waiter, "timeout")
        return QueueTimeoutError(
            f"no engine could take the request within {waited:.3g} s; try again later", wait=self._retry_after(name)
        )

    def _retry_after(self, name: str) -> float:
        """When half of what waits in its class will be gone."""
        rate = self.rate.per_second()
        if rate is None:
            return 1.0
        active = sum(share for each, share in self._shares.items() if each == name or self._waits(each))
        seconds = self.queue.cost_waiting(name) * active / (rate * self._shares[name]) / 2
        return min(max(seconds, 1.0), _LONGEST_RETRY)

    def _count(self, waiter: Waiter, what: str) -> None:
        place = waiter.class_name, what
        self.counts[place] = self.counts.get(place, 0) + 1
