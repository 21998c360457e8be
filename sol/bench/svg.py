"""Plots as SVG text: lines and points on one pair of axes. Colours and fonts are the page's (`sol.bench.report`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

import numpy as np

_WIDTH, _HEIGHT = 560, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 34, 46
_MAX_POINTS: Final = 1500


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    x: Sequence[float]
    y: Sequence[float]
    points: bool = False
    """Dots instead of a line."""


def plot(
    title: str,
    x_label: str,
    y_label: str,
    series: Sequence[Series],
    *,
    log_x: bool = False,
    y_range: tuple[float, float] | None = None,
) -> str:
    """An `<svg>` element; empty if no series has a point. Long series are thinned out: lines keep every n-th point and
    the extremes between, dots every n-th. Series of one name have one colour, and one place in the legend."""
    kept = [thinned for one in series if len((thinned := _thin(_clean(one, log_x))).x)]
    if not kept:
        return ""
    xs = np.concatenate([np.asarray(one.x, dtype=float) for one in kept])
    ys = np.concatenate([np.asarray(one.y, dtype=float) for one in kept])
    x_axis = _Axis(float(xs.min()), float(xs.max()), _LEFT, _WIDTH - _RIGHT, log=log_x)
    low, high = y_range or _with_room(min(0.0, float(ys.min())), float(ys.max()))
    y_axis = _Axis(low, high, _HEIGHT - _BOTTOM, _TOP)
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title, quote=True)}">',
        f'<text class="title" x="{_LEFT}" y="16">{escape(title)}</text>',
    ]
    for value in y_axis.ticks():
        y = y_axis.place(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_tick(value)}</text>')
    for value in x_axis.ticks():
        x = x_axis.place(value)
        parts.append(f'<line class="grid" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}" x1="{x:.1f}" x2="{x:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{_tick(value)}</text>'
        )
    parts.append(
        f'<text class="label" x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 8}" text-anchor="end">{escape(x_label)}</text>'
    )
    parts.append(f'<text class="label" x="{_LEFT}" y="{_TOP - 4}">{escape(y_label)}</text>')
    names = list(dict.fromkeys(one.name for one in kept))
    for one in kept:
        places = [(x_axis.place(x), y_axis.place(y)) for x, y in zip(one.x, one.y, strict=True)]
        colour = f"c{names.index(one.name) % 6}"
        if one.points:
            parts += [f'<circle class="{colour} dot" cx="{x:.1f}" cy="{y:.1f}" r="2"/>' for x, y in places]
        else:
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f'<polyline class="{colour}" points="{line}"/>')
            if len(places) <= 24:
                parts += [f'<circle class="{colour} dot" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in places]
    if len(names) > 1:
        x = float(_WIDTH - _RIGHT)
        for number, name in reversed(list(enumerate(names))):
            parts.append(
                f'<text class="legend l{number % 6}" x="{x:.0f}" y="16" text-anchor="end">● {escape(name)}</text>'
            )
            x -= 6.4 * (len(name) + 2) + 8
    return "\n".join([*parts, "</svg>"])


def cumulative(name: str, values: Sequence[float]) -> Series:
    """The share of values up to each, in percent."""
    ordered = np.sort(np.asarray(values, dtype=float))
    return Series(name, ordered.tolist(), (100 * np.arange(1, len(ordered) + 1) / max(1, len(ordered))).tolist())


def _with_room(low: float, high: float) -> tuple[float, float]:
    """A little more than that, so that no dot lies on the edge; 0 stays the edge where everything is above it."""
    room = 0.05 * (high - low)
    return (low if low == 0 else low - room), (high if high == 0 else high + room)


class _Axis:
    def __init__(self, low: float, high: float, first: float, last: float, *, log: bool = False) -> None:
        if high <= low:
            low, high = (low / 2, low * 2) if log else (low - 0.5, low + 0.5)
        self._log = log
        self._low, self._high = low, high
        self._first, self._last = first, last

    def place(self, value: float) -> float:
        low, high = self._scale(self._low), self._scale(self._high)
        return self._first + (self._scale(value) - low) / (high - low) * (self._last - self._first)

    def ticks(self) -> list[float]:
        """Round numbers within the range, about six."""
        if self._log:
            decades = range(math.floor(math.log10(self._low)), math.ceil(math.log10(self._high)) + 1)
            marks = (1, 2, 5) if len(decades) <= 4 else (1,)
            found = [
                mark * 10.0**decade for decade in decades for mark in marks
                if self._low * 0.999 <= mark * 10.0**decade <= self._high * 1.001
            ]  # fmt: skip
            if len(found) >= 3 or self._high > 10 * self._low:
                return found
            # Less than a decade: evenly spaced numbers say more than the one or two round ones that lie in it.
        raw = (self._high - self._low) / 6
        unit = 10.0 ** math.floor(math.log10(raw))
        step = unit * next(mark for mark in (1, 2, 5, 10) if mark * unit >= raw)
        first = math.ceil(self._low / step - 1e-9)
        return [number * step for number in range(first, math.floor(self._high / step + 1e-9) + 1)]

    def _scale(self, value: float) -> float:
        return math.log10(value) if self._log else value


def _clean(one: Series, log_x: bool) -> Series:
    pairs = [(x, y) for x, y in zip(one.x, one.y, strict=True) if math.isfinite(x) and math.isfinite(y)]
    if log_x:
        pairs = [(x, y) for x, y in pairs if x > 0]
    return Series(one.name, [x for x, _ in pairs], [y for _, y in pairs], one.points)


def _thin(one: Series) -> Series:
    if len(one.x) <= _MAX_POINTS:
        return one
    if one.points:
        kept = np.linspace(0, len(one.x) - 1, _MAX_POINTS).astype(int).tolist()
    else:  # of each group its highest and its lowest point, so that no peak is lost
        y = np.asarray(one.y)
        groups = np.array_split(np.arange(len(y)), _MAX_POINTS // 2)
        kept = sorted(
            {int(index) for group in groups for index in (group[y[group].argmin()], group[y[group].argmax()])}
        )
    return Series(one.name, [one.x[i] for i in kept], [one.y[i] for i in kept], one.points)


def _tick(value: float) -> str:
    if abs(value) >= 10000:
        return f"{value / 1000:g}k"
    return f"{value:.6g}" if abs(value) > 1e-12 else "0"
