"""Who goes first, and who has to give way.

A policy orders requests by a key that never changes while a request lives, so that the order is total, nobody is
preempted by somebody who could be preempted by them in turn, and a queue is sorted once.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Protocol

from sol.config import SchedulerConfig
from sol.engine.request import Request

Key = tuple[float, int]


class Policy(Protocol):
    """The requests that wait, and an order of all requests: the smaller a key, the more urgent."""

    preemptive: bool
    """Whether a request that waits may be more urgent than one that runs."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]:
        """Those that wait, the most urgent first."""
        ...

    def key(self, request: Request) -> Key: ...

    def add(self, request: Request) -> None: ...

    def put_back(self, request: Request) -> None:
        """A request that was taken and is preempted."""
        ...

    def next(self) -> Request:
        """The request whose turn it is; it stays in the queue."""
        ...

    def remove(self, request: Request) -> None: ...


def make_policy(config: SchedulerConfig) -> Policy:
    if config.scheduling_policy == "priority":
        return PriorityWithAging(config.priority_aging_seconds)
    return FirstComeFirstServed()


def victim(running: Sequence[Request], wanting: Request) -> Request | None:
    """Whom to preempt so that `wanting`, which runs, gets blocks: the least urgent, and never a more urgent one (then
    None). `running` is in the policy's order."""
    last = running[-1]
    return last if last is not wanting else None


class FirstComeFirstServed:
    """The requests that wait, oldest first; of those that run, the youngest gives way.

    Strict: a request that does not fit yet blocks those behind it, so that a long prompt is never overtaken for ever
    by short ones.
    """

    preemptive = False

    def __init__(self) -> None:
        # An OrderedDict because an abort takes requests from the middle.
        self._waiting: OrderedDict[str, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting.values())

    def key(self, request: Request) -> Key:
        return 0.0, request.sequence

    def add(self, request: Request) -> None:
        self._waiting[request.request_id] = request

    def put_back(self, request: Request) -> None:
        """It is older than all that wait, because it had been taken before them."""
        self._waiting[request.request_id] = request
        self._waiting.move_to_end(request.request_id, last=False)

    def next(self) -> Request:
        return next(iter(self._waiting.values()))

    def remove(self, request: Request) -> None:
        del self._waiting[request.request_id]


class PriorityWithAging:
    """The smallest `priority` first, as in vLLM, and one level of it for every `aging_seconds` of age.

    A request's age grows as fast as everybody else's, so that "one level for so many seconds" is an order that never
    changes: by arrival + priority × aging_seconds. A request of priority p is overtaken only by those of a lower p'
    that arrive within (p - p') × aging_seconds after it, however many they are; so nothing starves, and a request that
    has run for so long is not preempted by them either. Strict, as first come, first served is.
    """

    preemptive = True

    def __init__(self, aging_seconds: float) -> None:
        self._aging_seconds = aging_seconds
        self._waiting: list[Request] = []
        """Sorted by key."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting)

    def key(self, request: Request) -> Key:
        return request.arrival_time + request.priority * self._aging_seconds, request.sequence

    def add(self, request: Request) -> None:
        insort(self._waiting, request, key=self.key)

    put_back = add

    def next(self) -> Request:
        return self._waiting[0]

    def remove(self, request: Request) -> None:
        index = bisect_left(self._waiting, self.key(request), key=self.key)
        assert self._waiting[index] is request, f"{request.request_id!r} does not wait"
        del self._waiting[index]
