"""How probable a looked-up draft is: what matches of its kind were worth elsewhere, and in this text so far."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

_KNOTS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 22, 24)
_WORTH: Final = (
    (0.20, 0.37, 0.51, 0.57, 0.64, 0.72, 0.78, 0.83, 0.91, 0.935),
    (0.42, 0.59, 0.73, 0.76, 0.85, 0.90, 0.91, 0.94, 0.95, 0.96),
    (0.72, 0.82, 0.91, 0.93, 0.965, 0.98, 0.985, 0.985, 0.985, 0.985),
)
LONGEST: Final = _KNOTS[-1]
"""Longer matches are worth no more than those of so many tokens."""
HIGHEST: Final = 0.998
LONG: Final = 8
"""Matches from so many tokens on are counted apart from shorter ones: they are of another kind (copies)."""
_MEMORY: Final = 0.995
"""What an observation weighs after one more: about the last two hundred count."""
_STUBBORNNESS: Final = 0.5
"""So many expected misses does the table's word weigh."""


def _table() -> tuple[tuple[float, ...], ...]:
    rows = []
    for worth in _WORTH:
        row = [0.0]
        for (low, high), (least, most) in zip(pairwise(_KNOTS), pairwise(worth), strict=True):
            row += [least + (most - least) * (length - low) / (high - low) for length in range(low, high)]
        rows.append((*row, worth[-1]))
    return tuple(rows)


WORTH: Final = _table()
"""[min(agreeing, 3) - 1][min(match length, LONGEST)]: how often the next token is the one that `agreeing` earlier
occurrences of the last tokens, all that were found, were followed by."""

_MISSES: Final = tuple(1.0 - each for each in WORTH[0])


def worth(length: int, agreeing: int, share: float) -> float:
    """The table's word. `share`: of the occurrences' weight, what speaks for this token."""
    return WORTH[agreeing - 1 if agreeing < 3 else 2][length if length < LONGEST else LONGEST] * share


class Tally:
    """Of one kind of prediction in one text: misses, and how many were expected. Old observations fade."""

    __slots__ = ("_expected", "_missed", "ratio")

    def __init__(self) -> None:
        self._expected = 0.0
        self._missed = 0.0
        self.ratio = 1.0
        """By how much misses are commoner than expected"""

    def record(self, worth: float, hit: bool) -> None:
        """A token came where one had been promised with probability `worth`."""
        expected = self._expected = self._expected * _MEMORY + 1.0 - worth
        missed = self._missed = self._missed * _MEMORY + (not hit)
        self.ratio = (missed + _STUBBORNNESS) / (expected + _STUBBORNNESS)

    def score(self, worth: float) -> float:
        """The probability after correction, from 0 to `HIGHEST`."""
        corrected = 1.0 - (1.0 - worth) * self.ratio
        return 0.0 if corrected < 0.0 else min(corrected, HIGHEST)


class TrackRecord:
    """Corrects the table by what happened in one text: misses get as much more probable as they were than expected.

    Short and long matches are counted apart.
    """

    __slots__ = ("_long", "_short")

    def __init__(self) -> None:
        self._short, self._long = Tally(), Tally()

    def record(self, length: int, worth: float, hit: bool) -> None:
        """A token came where a match of `length` tokens had promised one with probability `worth`."""
        (self._long if length >= LONG else self._short).record(worth, hit)

    def score(self, length: int, worth: float) -> float:
        """The probability after correction, from 0 to `HIGHEST`."""
        return (self._long if length >= LONG else self._short).score(worth)

    def lone_scores(self, length: int, count: int) -> list[float]:
        """Of `count` drafts in a row that a single match of `length` tokens promises, which grows with each."""
        short, long = self._short.ratio, self._long.ratio
        scores = []
        for reach in range(length, min(length + count, LONGEST)):
            score = 1.0 - _MISSES[reach] * (long if reach >= LONG else short)
            scores.append(HIGHEST if score > HIGHEST else score if score > 0.0 else 0.0)
        if len(scores) < count:
            scores += [self.score(LONGEST, WORTH[0][LONGEST])] * (count - len(scores))
        return scores
