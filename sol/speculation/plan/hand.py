"""Drafts at hand, and what is expected of them: arrays that Python and C++ work on alike."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from sol.engine.types import Draft
from sol.speculation.plan.acceptance import REQUEST_PRECISION, Acceptance

_FIRST_SLOTS = 8


class Hand:
    """A row of each array, a "slot", is a request's.

    An array is replaced, never resized, so its address is good as long as the array is the one at hand.
    """

    def __init__(self, acceptance: Sequence[Acceptance], width: int) -> None:
        """`acceptance`: [drafter]; `width`: drafts of a request that are looked at, at most."""
        self.acceptance = tuple(acceptance)
        self.width = width
        self._unscored = array("d", [-1.0] * width)
        self._free = list(range(_FIRST_SLOTS - 1, -1, -1))
        self.counts = array("q", [0] * _FIRST_SLOTS)
        """[slots] drafts that were judged and matter"""
        size = _FIRST_SLOTS * width
        self.scores = array("d", [0.0] * size)
        """[slots, width] as the drafter gave them; negative: it gave none"""
        self.predicted = array("d", [0.0] * size)
        """[slots, width] survivals by `Acceptance`, those of the first `counts`"""
        self.expected = array("d", [0.0] * size)
        """[slots, width] corrected for being chosen"""
        self._new_habits = array("d", [0.0, REQUEST_PRECISION] * len(self.acceptance))
        self.habits = self._new_habits * _FIRST_SLOTS
        """[slots, drafters, 2] log-odds and precision of the request's `Habit` with each drafter"""

    def take(self) -> int:
        """A slot of its own for a new request."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self.counts[slot] = 0
        start = self.habit(slot, 0)
        self.habits[start : start + len(self._new_habits)] = self._new_habits
        return slot

    def habit(self, slot: int, drafter: int) -> int:
        """Where a request's habit begins in `habits`."""
        return 2 * (slot * len(self.acceptance) + drafter)

    def give_back(self, slot: int) -> None:
        self._free.append(slot)

    def put(self, slot: int, draft: Draft) -> int:
        """How many of these drafts there are to judge; their scores are in the slot."""
        width, scores, start = self.width, draft.scores, slot * self.width
        count = len(draft.token_ids)
        if not scores:
            count = min(count, width)
            self.scores[start : start + count] = self._unscored[:count]
            return count
        if count > width or count != len(scores):
            count = min(count, width, len(scores))
            scores = scores[:count]
        self.scores[start : start + count] = array("d", scores)
        return count

    def drop(self, slot: int) -> None:
        """Nothing in the slot matters."""
        self.counts[slot] = 0

    def _grow(self) -> None:
        slots, size = len(self.counts), len(self.scores)
        self.counts = self.counts + array("q", [0] * slots)
        more = array("d", [0.0] * size)
        self.scores, self.predicted, self.expected = self.scores + more, self.predicted + more, self.expected + more
        self.habits = self.habits + self._new_habits * slots
        self._free.extend(range(2 * slots - 1, slots - 1, -1))
