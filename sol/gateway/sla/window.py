"""Counts and distributions over the last so many seconds, in memory that does not depend on how much there was.

A window is a ring of slices; the oldest is emptied when its place is needed again. So it covers between its length less
one slice and its length. Distributions are histograms with buckets that grow by a constant factor, as HDR histograms
do: a quantile is exact to half a bucket, 2.5% here, whatever its size.
"""

from __future__ import annotations

import math
from array import array
from typing import Final

_SLICES: Final = 12
_LEAST: Final = 1e-4
_FACTOR: Final = 1.05
_LOG: Final = math.log(_FACTOR)
_BUCKETS: Final = math.ceil(math.log(3600 / _LEAST) / _LOG) + 2
"""From 0.1 ms to an hour, and one each for what is less or more."""


class SlidingCounts:
    """`size` numbers, each summed over the window."""

    def __init__(self, seconds: float, size: int) -> None:
        self._slice = seconds / _SLICES
        self._size = size
        self._rows = [array("d", bytes(8 * size)) for _ in range(_SLICES)]
        self._epochs = [-1] * _SLICES

    def add(self, index: int, now: float, amount: float = 1.0) -> None:
        epoch = int(now / self._slice)
        place = epoch % _SLICES
        if self._epochs[place] != epoch:
            if epoch < self._epochs[place]:
                return  # older than the window
            self._epochs[place] = epoch
            self._rows[place] = array("d", bytes(8 * self._size))
        self._rows[place][index] += amount

    def totals(self, now: float) -> list[float]:
        newest = int(now / self._slice)
        sums = [0.0] * self._size
        for epoch, row in zip(self._epochs, self._rows, strict=True):
            if newest - _SLICES < epoch <= newest:
                for index, value in enumerate(row):
                    sums[index] += value
        return sums

    def seconds_seen(self, now: float) -> float:
        """How much of the window has passed since its first entry that still counts."""
        newest = int(now / self._slice)
        live = [epoch for epoch in self._epochs if newest - _SLICES < epoch <= newest]
        return now - min(live) * self._slice if live else 0.0


class SlidingHistogram:
    """Of durations in seconds."""

    def __init__(self, seconds: float) -> None:
        self._counts = SlidingCounts(seconds, _BUCKETS)

    def add(self, value: float, now: float) -> None:
        self._counts.add(_bucket(value), now)

    def quantiles(self, shares: tuple[float, ...], now: float) -> tuple[float, ...] | None:
        """The smallest values that these shares (rising) do not exceed; None of nothing."""
        counts = self._counts.totals(now)
        total = sum(counts)
        if not total:
            return None
        found: list[float] = []
        seen = 0.0
        for index, count in enumerate(counts):
            seen += count
            while len(found) < len(shares) and seen >= max(1.0, shares[len(found)] * total - 1e-9):
                found.append(_value(index))
        return tuple(found)


def _bucket(value: float) -> int:
    if not value > _LEAST:
        return 0
    return min(_BUCKETS - 1, 1 + int(math.log(value / _LEAST) / _LOG))


def _value(index: int) -> float:
    """The middle of a bucket."""
    return _LEAST if index == 0 else _LEAST * _FACTOR ** (index - 0.5)
