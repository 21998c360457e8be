"""How many retries are affordable: a fleet that fails because it is overloaded is not helped by more load.

Each call pays in a share of a retry, and a few are given every second, so that engines that die with many requests cost
nobody an answer, while what all calls together may add to a fleet in trouble is bounded. Times are of any one clock.
"""

from __future__ import annotations

from typing import Final

_EVERY_SECOND: Final = 10.0
_SAVED: Final = 100.0
"""Retries that are saved up at most, and to begin with; more where more calls than that are open."""


class RetryBudget:
    def __init__(self, share: float, now: float) -> None:
        self._share = share
        self._saved = _SAVED
        self._at = now

    def called(self, num_open: int) -> None:
        """A call came, and with it there are `num_open`."""
        self._saved = min(self._saved + self._share, max(_SAVED, num_open))

    def take(self, now: float) -> bool:
        """Whether one more retry is affordable; it is spent then."""
        if self._saved < _SAVED:
            self._saved = min(_SAVED, self._saved + _EVERY_SECOND * (now - self._at))
        self._at = now
        if self._saved < 1:
            return False
        self._saved -= 1
        return True
