"""How much of prompts an engine has before it, and how much of them it may have so that a new one is begun soon.

An engine computes prompts in the order in which they come, more or less: one that is sent behind a second of them waits
for a second, whoever sent it. So those who can wait are sent only while few tokens are before them. How many that are
is learned as BBR learns what a network path holds (Cardwell et al. 2016, "BBR: Congestion-Based Congestion Control"):
the highest rate at which prompts were computed lately, times the least time that one took, is what the engine needs to
be busy; what a given time adds to this is the queue in it. Because there always is that queue, a rate that could be
higher becomes so, and the room with it.

Each answer that begins is a sample of the rate: what was before its prompt, and the prompt, were computed meanwhile. A
single one says too much where what was before it was nearly done, so they are averaged over half a second.
"""

from __future__ import annotations

import math
from typing import Final

_BIN: Final = 0.5
_BINS: Final = 60


class Prompts:
    """Of one engine. Times are seconds of any clock that only goes forward."""

    def __init__(self) -> None:
        self.tokens = 0
        """Of prompts that were sent and whose answers have not begun, as far as that can be seen."""
        self._epochs = [-1] * _BINS
        self._computed = [0] * _BINS
        self._seconds = [0.0] * _BINS
        self._least = [math.inf] * _BINS

    def sent(self, tokens: int) -> int:
        """How much has to be computed until the answer begins: this prompt and all before it."""
        self.tokens += tokens
        return self.tokens

    def begun(self, tokens: int, load: int, seconds: float, now: float) -> None:
        """The answer to a prompt has begun, `seconds` after it was sent; `load`: what `sent` said then."""
        self.tokens -= tokens
        epoch = int(now / _BIN)
        place = epoch % _BINS
        if self._epochs[place] != epoch:
            self._epochs[place] = epoch
            self._computed[place], self._seconds[place], self._least[place] = 0, 0.0, math.inf
        self._computed[place] += load
        self._seconds[place] += seconds
        self._least[place] = min(self._least[place], seconds)

    def gone(self, tokens: int) -> None:
        """It will have no answer, or has one of which nobody saw the beginning."""
        self.tokens -= tokens

    def room(self, now: float, ahead: float) -> float:
        """Tokens that may be before a new prompt, if it is to wait for `ahead` seconds at most; infinite where nothing
        was seen lately."""
        oldest = int(now / _BIN) - _BINS
        live = [place for place, epoch in enumerate(self._epochs) if epoch > oldest and self._seconds[place] > 0]
        if not live:
            return math.inf
        rate = max(self._computed[place] / self._seconds[place] for place in live)
        return rate * (min(self._least[place] for place in live) + ahead)
