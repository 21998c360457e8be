"""The ladder of one model: how far down it is, and why.

The next step is taken when its condition has held for `after` seconds without a break, and taken back when all that it
looks at has been well below its bounds for `recover_after` seconds. One step at a time, each with a wait of its own:
what a step does shows in the signals only later, and a ladder that does not wait for that swings. While the signal that
a step was taken for is absent, the step stays: engines that are too busy to say how they are have not recovered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sol.gateway.degradation.config import Pressure, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """As `Pressure`. None: nobody knows, which is no reason for anything."""

    burn_rate: float | None = None
    wait_seconds: float | None = None
    utilisation: float | None = None
    kv_usage: float | None = None


class Ladder:
    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = tuple(steps)
        self.level = 0
        """Steps that are taken: the first so many."""
        self.reason = ""
        """What decided the last change."""
        self._taken_for: list[str] = []
        """Of each step that is taken, the signal."""
        self._pressed_since: float | None = None
        self._calm_since: float | None = None

    @property
    def taken(self) -> tuple[Step, ...]:
        return self.steps[: self.level]

    def update(self, measured: Measured, now: float) -> bool:
        """Whether the level has changed."""
        return self._down(measured, now) or self._up(measured, now)

    def _down(self, measured: Measured, now: float) -> bool:
        if self.level == len(self.steps):
            return False
        step = self.steps[self.level]
        signal = _exceeds(measured, step.when, 1.0)
        if signal is None:
            self._pressed_since = None
            return False
        if self._pressed_since is None:
            self._pressed_since = now
        if now - self._pressed_since < step.after:
            return False
        self._taken_for[self.level :] = [signal]
        value, bound = getattr(measured, signal), getattr(step.when, signal)
        self._change(self.level + 1, f"{signal} {value:.3g} (bound {bound:g})")
        return True

    def _up(self, measured: Measured, now: float) -> bool:
        if not self.level:
            return False
        step = self.steps[self.level - 1]
        taken_for = self._taken_for[self.level - 1] if self.level <= len(self._taken_for) else None
        absent = taken_for is not None and getattr(measured, taken_for) is None
        if absent or _exceeds(measured, step.when, step.recover_below) is not None:
            self._calm_since = None
            return False
        if self._calm_since is None:
            self._calm_since = now
        if now - self._calm_since < step.recover_after:
            return False
        self._change(self.level - 1, "recovered")
        return True

    def _change(self, level: int, reason: str) -> None:
        self.level, self.reason = level, reason
        self._pressed_since = self._calm_since = None


def _exceeds(measured: Measured, bounds: Pressure, part: float) -> str | None:
    """The name of the first signal that is at or above its bound (or this part of it); None: none is."""
    for name in ("burn_rate", "wait_seconds", "utilisation", "kv_usage"):
        value, bound = getattr(measured, name), getattr(bounds, name)
        if value is not None and bound is not None and value >= bound * part:
            return name
    return None
