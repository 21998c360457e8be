"""Finds the first of several strings in a text that arrives in pieces."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Final, NamedTuple, Self

_ROOT: Final = 0


class StopMatch(NamedTuple):
    stop: str
    end: int
    """Characters of the fed text up to and including the match."""


class StopStrings:
    """An Aho-Corasick automaton: constant work for each character, however many strings there are.

    The match is the one that ends first in the text; of several that end there, the longest. Where the pieces of the
    text were cut makes no difference.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._depth: list[int] = [0]
        self._stop: list[str | None] = [None]
        self._fail: list[int] = [_ROOT]
        for stop in stops:
            self._insert(stop)
        self._link()
        self._state = _ROOT

    def fork(self) -> Self:
        """The same strings for another text: the automaton is shared, the place in the text is not."""
        other = copy.copy(self)
        other._state = _ROOT
        return other

    @property
    def pending(self) -> int:
        """How many of the last characters fed may be the beginning of a stop string."""
        return self._depth[self._state]

    def feed(self, text: str, *, stopping: bool = True) -> StopMatch | None:
        """Go on with `text`; the rest of it after a match is not looked at. With `stopping` false, strings that end in
        `text` do not count, though one may begin there."""
        state = self._state
        for index, character in enumerate(text):
            while state != _ROOT and character not in self._next[state]:
                state = self._fail[state]
            state = self._next[state].get(character, _ROOT)
            stop = self._stop[state]
            if stopping and stop is not None:
                self._state = state
                return StopMatch(stop, index + 1)
        self._state = state
        return None

    def _insert(self, stop: str) -> None:
        state = _ROOT
        for character in stop:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._stop.append(None)
                self._fail.append(_ROOT)
            state = self._next[state][character]
        self._stop[state] = stop

    def _link(self) -> None:
        """For each state, the state of its longest proper suffix that is also a prefix; breadth first."""
        queue = list(self._next[_ROOT].values())
        for state in queue:
            for character, child in self._next[state].items():
                fallback = self._fail[state]
                while fallback != _ROOT and character not in self._next[fallback]:
                    fallback = self._fail[fallback]
                self._fail[child] = self._next[fallback].get(character, _ROOT)
                if self._stop[child] is None:
                    self._stop[child] = self._stop[self._fail[child]]
                queue.append(child)
