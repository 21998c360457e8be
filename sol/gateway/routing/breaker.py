"""A circuit breaker for one engine: after failures nobody is sent there for a while, then one call tries."""

from __future__ import annotations

from collections import deque
from typing import Final, Literal

from sol.gateway.routing.config import BreakerConfig

Verdict = Literal["ok", "fault", "neutral"]
"""Of a call, as far as the engine is concerned. Neutral: it shows nothing, as when the client left."""

_TRIALS: Final = 2
"""Good ones in a row that close the breaker."""
_MAX_REMEMBERED: Final = 1000


class Breaker:
    """Times are of any one clock. `begin` and `end` come in pairs."""

    def __init__(self, config: BreakerConfig) -> None:
        self._config = config
        self._recent: deque[tuple[float, bool]] = deque(maxlen=_MAX_REMEMBERED)
        """When, and whether it was a fault."""
        self._faults = 0
        self._in_a_row = 0
        self._cooldown = config.cooldown
        self._open_until: float | None = None
        self._trying = False
        self._good_trials = 0
        self.num_opened = 0

    def state(self, now: float) -> Literal["closed", "open", "half_open"]:
        if self._open_until is None:
            return "closed"
        return "open" if now < self._open_until else "half_open"

    def allows(self, now: float) -> bool:
        """Half open, it lets one call at a time through."""
        return self._open_until is None or (now >= self._open_until and not self._trying)

    def begin(self, now: float) -> bool:
        """Whether this call is a trial."""
        if self.state(now) != "half_open" or self._trying:
            return False
        self._trying = True
        return True

    def end(self, verdict: Verdict, now: float, *, trial: bool) -> None:
        if trial:
            self._trying = False
        if verdict == "neutral":
            return
        if verdict == "ok":
            self._in_a_row = 0
            self._remember(now, False)
            if trial and self._open_until is not None:
                self._good_trials += 1
                if self._good_trials >= _TRIALS:
                    self._close()
            return
        self._in_a_row += 1
        self._remember(now, True)
        many = self._in_a_row >= self._config.consecutive_failures or self._rate(now) >= self._config.error_rate
        if trial or (self._open_until is None and many):
            self.open(now)

    def open(self, now: float) -> None:
        """Also for what is seen elsewhere than in a call: an engine that hangs."""
        if self._open_until is not None and now < self._open_until:
            return
        self._open_until = now + self._cooldown
        self._cooldown = min(2 * self._cooldown, self._config.max_cooldown)
        self._good_trials = 0
        self.num_opened += 1

    def _close(self) -> None:
        self._open_until = None
        self._cooldown = self._config.cooldown
        self._in_a_row = self._faults = 0
        self._recent.clear()

    def _remember(self, now: float, fault: bool) -> None:
        if len(self._recent) == _MAX_REMEMBERED:
            self._faults -= self._recent.popleft()[1]
        self._recent.append((now, fault))
        self._faults += fault
        self._forget(now)

    def _forget(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - self._config.window:
            self._faults -= self._recent.popleft()[1]

    def _rate(self, now: float) -> float:
        self._forget(now)
        total = len(self._recent)
        return self._faults / total if total >= self._config.min_requests else 0.0
