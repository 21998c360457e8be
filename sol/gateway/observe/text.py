"""Numbers that are counted in the event loop, and Prometheus' text format.

Nothing here has a lock, since all of it belongs to one thread, and a series keeps its labels as text: observing costs a
fraction of a microsecond, where prometheus-client takes several, and a line of the page costs half of one. The page of
a large gateway has ten thousand lines, which are written while streams wait.

https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Final, Generic, Literal, TypeVar

CONTENT_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"
MAX_VALUES: Final = 1000
"""Of a label whose values come from outside; the rest are `other`."""
OTHER: Final = "other"

Kind = Literal["counter", "gauge", "histogram"]
Label = tuple[str, str]
_Key = TypeVar("_Key", bound=Hashable)


class Histogram:
    """`bounds`: upper ends of buckets, inclusive, ascending; one more bucket takes the rest."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Of each bucket alone."""
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


class Capped(Generic[_Key]):
    """Gives each of the first `most` values a label of its own, for good, and all later ones `OTHER`."""

    def __init__(self, most: int = MAX_VALUES) -> None:
        self._most = most
        self._known: set[_Key] = set()

    def admits(self, value: _Key) -> bool:
        if value in self._known:
            return True
        if len(self._known) >= self._most:
            return False
        self._known.add(value)
        return True


def labels(pairs: Iterable[Label]) -> str:
    """As they stand between the braces."""
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in pairs)


def family(name: str, kind: Kind, text: str, series: Iterable[tuple[str, float]]) -> Iterator[str]:
    """A metric of which each series is a number: its lines. Of none, nothing: not even its name."""
    every = list(series)  # now: who writes it may pause, and things change meanwhile
    if every:
        yield _head(name, kind, text)
    for label, value in every:
        yield f"{name}{{{label}}} {_number(value)}\n" if label else f"{name} {_number(value)}\n"


def histograms(name: str, text: str, series: Iterable[tuple[str, Histogram]]) -> Iterator[str]:
    """The same of histograms, which must have labels. Those that saw nothing are left out."""
    every = [(label, histogram) for label, histogram in series if any(histogram.counts)]
    if every:
        yield _head(name, "histogram", text)
    for label, histogram in every:
        seen = 0
        for end, count in zip(_ends(histogram.bounds), histogram.counts, strict=True):
            seen += count
            yield f"{name}_bucket{{{label},{end}}} {seen}\n"
        yield f"{name}_sum{{{label}}} {_number(histogram.total)}\n{name}_count{{{label}}} {seen}\n"


def counted(names: Sequence[str], counts: Iterable[tuple[tuple[str, ...], int]]) -> Iterator[tuple[str, float]]:
    """Series of counts by the values of the labels `names`."""
    for values, count in sorted(counts):
        yield labels(zip(names, values, strict=True)), count


def _head(name: str, kind: Kind, text: str) -> str:
    return f"# HELP {name} {text}\n# TYPE {name} {kind}\n"


@functools.cache
def _ends(bounds: tuple[float, ...]) -> tuple[str, ...]:
    """The labels of buckets."""
    return tuple(f'le="{_number(bound)}"' for bound in (*bounds, math.inf))


def _number(value: float) -> str:
    if isinstance(value, int):
        return str(int(value))  # True, too
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
