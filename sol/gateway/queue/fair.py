"""Weighted fair queueing between classes, then between tenants, with ageing; by length within a tenant's requests.

Start-time fair queueing (Goyal, Vin and Cheng 1997): every class has a tag, a virtual time; the class with the least
tag is served, and its tag moves on by what the request costs, divided by the class's share. One that wants nothing for
a while does not save up for later: when it comes back its tag is at least that of whoever was served last. Tenants of
one class and model are served in the same way, with equal shares.

A tenant's requests are in the order of `arrived + placement × expected seconds`. The key of a request never changes and
those of later ones grow, so a long request is overtaken for so long as it takes itself, and no longer: nobody starves.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

_REMEMBERED: Final = 4096
"""Tenants whose tags are kept while they want nothing."""


@dataclass(slots=True, eq=False, kw_only=True)
class Waiter:
    """A request as the queue sees it. Costs are tokens, times seconds of the dispatcher's clock."""

    model: str
    class_name: str
    tenant: str = ""
    cost: float = 1.0
    """Tokens of its prompt and, as far as anybody knows, of its answer."""
    expected_seconds: float = 0.0
    """How long an engine will be busy with it."""
    first_seconds: float = 0.0
    """How long an engine will take to begin its answer, at least; 0 where nobody knows."""
    arrived: float
    deadline: float | None = None
    """When an answer has to have begun; None: whenever."""
    size: int = 0
    """Bytes that it holds while it waits."""
    was_granted: bool = False
    """It had a place before, which it was made to give up: the queue has let it in, and does not refuse it as full."""
    give_up: float = math.inf
    """When waiting on makes no sense any more; the dispatcher's."""
    on_grant: Callable[[], None]
    """Its turn has come."""
    on_refuse: Callable[[Exception], None]
    """It waits no longer."""
    is_begun: Callable[[], bool] = lambda: True
    """Whether, once granted, an engine has it and counts it."""
    state: str = "new"
    """new → waiting → granted → ended, or new → granted, or waiting → ended."""
    granted_at: float | None = None

    def let_go(self) -> None:
        """It has ended: it may stay in a heap for a while, what it refers to does not have to."""
        self.state = "ended"
        self.on_grant, self.on_refuse, self.is_begun = _nothing, _nothing, _ended


def _nothing(*_: object) -> None:
    pass


def _ended() -> bool:
    return True


class _Line:
    """The waiting requests of one class for one model, by tenant."""

    def __init__(self) -> None:
        self.num_waiting = 0
        self.cost = 0.0
        """Of all that wait."""
        self._now = 0.0
        self._order: list[tuple[float, int, str]] = []
        """(tag, number, tenant) of the tenants who wait; the number breaks ties in the order of coming."""
        self._tenants: dict[str, list[tuple[float, int, Waiter]]] = {}
        self._tags: OrderedDict[str, float] = OrderedDict()
        self._num_gone = 0
        """Entries of requests that do not wait any more."""

    def push(self, waiter: Waiter, key: float, number: int) -> None:
        waiting = self._tenants.get(waiter.tenant)
        if waiting is None:
            waiting = self._tenants[waiter.tenant] = []
            heapq.heappush(self._order, (max(self._tags.get(waiter.tenant, 0.0), self._now), number, waiter.tenant))
        heapq.heappush(waiting, (key, number, waiter))
        self.num_waiting += 1
        self.cost += waiter.cost

    def removed(self, waiter: Waiter) -> None:
        """Its state is not "waiting" any more; it is dropped when it is come across."""
        self.num_waiting -= 1
        self.cost = self.cost - waiter.cost if self.num_waiting else 0.0
        self._num_gone += 1
        if self._num_gone > self.num_waiting:
            self._sweep()

    def oldest(self) -> Waiter | None:
        """Who is served next."""
        while self._order:
            tenant = self._order[0][2]
            self._drop_heads(tenant)
            waiting = self._tenants.get(tenant)
            if waiting:
                return waiting[0][2]
            heapq.heappop(self._order)
            self._tenants.pop(tenant, None)
        return None

    def serve(self, waiter: Waiter, number: int) -> None:
        """`waiter` is the one that `oldest` returned; its state is not "waiting" any more."""
        tag, _, tenant = heapq.heappop(self._order)
        self._now = max(self._now, tag)
        self.charge(tenant, waiter.cost)
        waiting = self._tenants[tenant]
        heapq.heappop(waiting)
        self.num_waiting -= 1
        self.cost = self.cost - waiter.cost if self.num_waiting else 0.0
        if waiting:
            heapq.heappush(self._order, (self._tags[tenant], number, tenant))
        else:
            del self._tenants[tenant]

    def charge(self, tenant: str, cost: float) -> None:
        # The time of all goes on with whoever is served: who comes later begins there, and not far behind.
        self._now = max(self._tags.get(tenant, 0.0), self._now)
        self._tags[tenant] = self._now + cost
        self._tags.move_to_end(tenant)
        if len(self._tags) > _REMEMBERED:
            self._tags.popitem(last=False)

    def waiters(self) -> list[Waiter]:
        return [item[2] for waiting in self._tenants.values() for item in waiting if item[2].state == "waiting"]

    def _drop_heads(self, tenant: str) -> None:
        waiting = self._tenants.get(tenant)
        while waiting and waiting[0][2].state != "waiting":
            heapq.heappop(waiting)
            self._num_gone -= 1

    def _sweep(self) -> None:
        """Drop all that are gone. Done when they are the most, which costs each of them the same few steps."""
        self._num_gone = 0
        for tenant, waiting in list(self._tenants.items()):
            waiting[:] = [item for item in waiting if item[2].state == "waiting"]
            heapq.heapify(waiting)
            if not waiting:
                del self._tenants[tenant]
        self._order = [item for item in self._order if item[2] in self._tenants]
        heapq.heapify(self._order)


class FairQueue:
    """The waiting requests of models that share engines. `shares` by class; `ageing` in seconds."""

    def __init__(self, shares: Mapping[str, float], *, ageing: float, placement: float) -> None:
        self._shares = dict(shares)
        self._largest = max(shares.values())
        self._ageing = ageing
        self._placement = placement
        self._lines: dict[tuple[str, str], _Line] = {}
        """By class and model."""
        self._now = 0.0
        self._tags = dict.fromkeys(shares, 0.0)
        self._numbers = itertools.count()
        self._waiting = dict.fromkeys(shares, 0)

    def __len__(self) -> int:
        return sum(self._waiting.values())

    def num_waiting(self, class_name: str, model: str) -> int:
        line = self._lines.get((class_name, model))
        return 0 if line is None else line.num_waiting

    def cost_waiting(self, class_name: str) -> float:
        """Tokens of all that wait in this class."""
        return sum(line.cost for (name, _), line in self._lines.items() if name == class_name)

    def waiters(self) -> list[Waiter]:
        return [waiter for line in self._lines.values() for waiter in line.waiters()]

    def next_of(self, class_name: str, model: str) -> Waiter | None:
        line = self._lines.get((class_name, model))
        return None if line is None else line.oldest()

    def push(self, waiter: Waiter) -> None:
        name = waiter.class_name
        if not self._waiting[name]:
            self._tags[name] = max(self._tags[name], self._now)
        waiter.state = "waiting"
        key = waiter.arrived + self._placement * waiter.expected_seconds
        self._line(waiter).push(waiter, key, next(self._numbers))
        self._waiting[name] += 1

    def remove(self, waiter: Waiter) -> None:
        """One that waits stops waiting."""
        waiter.let_go()
        self._waiting[waiter.class_name] -= 1
        self._line(waiter).removed(waiter)

    def pop(self, may_go: Callable[[str, str], bool], now: float) -> Waiter | None:
        """Whose turn it is among the classes and models that may go; charged. None: nobody's."""
        for name in sorted((name for name, count in self._waiting.items() if count), key=self._tags.__getitem__):
            best: Waiter | None = None
            best_line: _Line | None = None
            for (class_name, model), line in self._lines.items():
                if class_name != name or not line.num_waiting or not may_go(name, model):
                    continue
                waiter = line.oldest()
                if waiter is not None and (best is None or waiter.arrived < best.arrived):
                    best, best_line = waiter, line
            if best is not None:
                assert best_line is not None
                best.state = "granted"
                best_line.serve(best, next(self._numbers))
                self._charge(best, self._tags[name], now)
                self._waiting[name] -= 1
                return best
        return None

    def pass_by(self, waiter: Waiter, now: float) -> None:
        """One that does not have to wait is charged like any other."""
        waiter.state = "granted"
        self._line(waiter).charge(waiter.tenant, waiter.cost)
        self._charge(waiter, max(self._tags[waiter.class_name], self._now), now)

    def effective_share(self, class_name: str, waited: float) -> float:
        share = self._shares[class_name]
        return min(share * (1 + max(0.0, waited) / self._ageing), max(share, self._largest))

    def _charge(self, waiter: Waiter, start: float, now: float) -> None:
        name = waiter.class_name
        self._now = max(self._now, start)
        self._tags[name] = start + waiter.cost / self.effective_share(name, now - waiter.arrived)

    def _line(self, waiter: Waiter) -> _Line:
        place = waiter.class_name, waiter.model
        line = self._lines.get(place)
        if line is None:
            line = self._lines[place] = _Line()
        return line
