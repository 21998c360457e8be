"""Whether it pays to wait: two ways of stepping, compared by what they brought.

Where steps are planned ahead, drafts can be verified only by a step that is planned after the one before it was read.
The device waits for the host meanwhile, for a time that depends on the host, on the number of requests and on who reads
the outputs. No model of costs knows it, so it is measured: tokens a second of steps that were waited for, and of steps
that were not. Where waiting brought less, it is left off, for longer each time that a new try shows the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_TRIAL: Final = 4
"""Steps that are waited for before they are judged"""
_FIRST_PAUSE, _LAST_PAUSE = 16, 1024
"""Steps without waiting after a trial that brought nothing, doubling from one to the next"""
_WORTH: Final = 1.01
"""Waiting has to bring so many times what not waiting brings."""
_RATE: Final = 0.2
"""Of a new measurement in the running mean"""


@dataclass(slots=True)
class _Regime:
    """Of numbers of requests between two powers of two"""

    ahead: float = 0.0
    """Tokens a second and request of steps that were planned ahead; 0 before the first"""
    waited: float = 0.0
    num_waited: int = 0
    """Steps that were waited for since the trial began"""
    pause: int = 0
    """Steps that are left of a pause"""
    next_pause: int = _FIRST_PAUSE


class Pace:
    def __init__(self) -> None:
        self._regimes: dict[int, _Regime] = {}

    def may_wait(self, num_requests: int) -> bool:
        """Asked once for each step that could be waited for."""
        regime = self._regime(num_requests)
        if regime.pause:
            regime.pause -= 1
            return False
        return True

    def observe(self, num_requests: int, num_tokens: int, seconds: float, *, ahead: bool) -> None:
        """A step that only decodes brought so many tokens in so many seconds, drafting included."""
        if seconds <= 0.0:
            return
        regime = self._regime(num_requests)
        rate = num_tokens / (num_requests * seconds)
        if ahead:
            regime.ahead += (rate - regime.ahead) * (_RATE if regime.ahead else 1.0)
            return
        regime.waited += (rate - regime.waited) * (_RATE if regime.num_waited else 1.0)
        regime.num_waited += 1
        if regime.num_waited < _TRIAL or not regime.ahead:
            return
        if regime.waited < _WORTH * regime.ahead:
            regime.pause, regime.num_waited = regime.next_pause, 0
            regime.next_pause = min(_LAST_PAUSE, 2 * regime.next_pause)
        else:
            regime.next_pause = _FIRST_PAUSE

    def _regime(self, num_requests: int) -> _Regime:
        return self._regimes.setdefault(num_requests.bit_length(), _Regime())
