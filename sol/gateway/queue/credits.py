"""How many requests an engine should have at once.

More than it can work on at the same time would only wait in the engine, where nobody can put a more urgent one before
them. Nothing is limited until there is a reason. There are three: the engine says that requests wait in it, it refuses
some (429, 503), or too many of its answers begin or go on more slowly than their class is promised. Then it gets no
more than it takes well, and, while requests wait for it in the gateway and it has nearly all that it may, more with
every look at it that finds none of these: an eighth more at first, and near the number at which it last was far too
much one more, then two … (multiplicative decrease, a threshold between fast and slow growth, growth that becomes faster
while nothing speaks against it, and none where what there is is not used, as TCP's congestion control has them). One or
two that wait in the engine may have come during a step: they are taken off, and say nothing more.
"""

from __future__ import annotations

import math
from typing import Final

_GROWTH: Final = 8
_NEAR: Final = 0.85
"""Of the number that was too much, from which on growth is slow."""
_FEW: Final = 3
_PART: Final = 16
"""So many that wait in the engine, or one for so many that run, have not come just now."""
_FULL_KV: Final = 0.95
_SLOWER: Final = 0.9
_ENOUGH: Final = 10
"""Answers, before their times say anything."""
_MISSES: Final = 0.05
_STEP_SECONDS: Final = 1.0


class Credits:
    """Of one engine. `initial`: what it was told to take at most; None: nobody knows. `floor`: what it gets at least,
    if it takes so many at all."""

    def __init__(self, *, floor: int, initial: int | None = None) -> None:
        self.limit = initial
        """None: as many as come."""
        self.in_demand = False
        """Whether somebody had to wait since the last look."""
        self._most = math.inf if initial is None else initial
        self._floor = min(floor, self._most)
        self._peak = 0
        self._num_answers = 0
        self._num_slow = 0
        self._num_refused = 0
        self._too_much: float | None = None
        self._num_good = 0
        """Times that it has grown near this."""
        self._updated = -math.inf

    def taken(self, in_flight: int) -> None:
        """So many are open now."""
        self._peak = max(self._peak, in_flight)

    def answered(self, *, slow: bool) -> None:
        """An answer has ended. `slow`: the engine alone took longer than its class is promised."""
        self._num_answers += 1
        self._num_slow += slow

    def refused(self, times: int = 1) -> None:
        """The engine said 429 or 503."""
        self._num_refused += times

    def look(
        self,
        now: float,
        *,
        in_flight: int,
        running: float | None = None,
        waiting: float | None = None,
        kv_usage: float | None = None,
    ) -> None:
        """Learn from what was seen since the last look. `running` and `waiting` are what the engine newly said, others'
        requests included; None: it said nothing new."""
        if now - self._updated < _STEP_SECONDS:
            return
        most = max(self._peak, in_flight)
        queued = waiting or 0.0
        many = queued >= max(_FEW, (running or 0.0) / _PART)
        slow = self._num_answers >= _ENOUGH and self._num_slow > _MISSES * self._num_answers
        if many or (queued > 0 and self.limit is not None):
            # Prompts may wait for a step that has room, not for others to end: never less than half in one step.
            self._shrink(max(most - queued, most / 2))
            if many:
                self._too_much, self._num_good = most, 0
        elif self._num_refused or slow:
            self._shrink(most * _SLOWER)
            self._too_much, self._num_good = most, 0
        elif (
            self.limit is not None and self.in_demand and self.limit < self._most
            and most >= self.limit - self.limit // _GROWTH
            and (kv_usage is None or kv_usage < _FULL_KV)
        ):  # fmt: skip
            near = self._too_much is not None and self.limit >= _NEAR * self._too_much
            self._num_good += near
            more = 1 + self._num_good // 4 if near else max(1, self.limit // _GROWTH)
            self.limit = int(min(self.limit + more, self._most))
        elif self._num_answers < _ENOUGH and not self._num_refused and waiting is None:
            return  # too little was seen to forget it again
        self._updated = now
        self.in_demand = False
        self._peak = in_flight
        self._num_answers = self._num_slow = self._num_refused = 0

    def _shrink(self, limit: float) -> None:
        if self.limit is not None:
            limit = min(limit, self.limit)
        self.limit = int(max(self._floor, math.floor(limit)))
