"""What came of decisions, by how many requests decode: the outer loop that keeps a controller honest.

Drafts are chosen because they look good, and of what looks good some was overrated: predictions of chosen drafts come
true less often than predictions at large (the optimizer's curse). And prices may be wrong, of plain steps as well as of
those with drafts. Neither is known beforehand, so both are measured: how many of the chosen drafts of a predicted
survival were accepted, and what steps with drafts gained over plain decoding. The first corrects predictions, the
second how much a step with drafts has to promise.

A regime is an octave of numbers of requests: prices, and with them who is chosen, are much the same within one.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

BINS: Final = 8
"""Of survivals, equally wide"""
_LAST_BIN: Final = BINS - 1e-9
"""A survival of 1 belongs to the last one."""
PRIOR_DRAFTS: Final = 6.0
"""As if so many drafts of each bin had come true as often as predicted"""
UNVERIFIED: Final = 0.25
"""What a draft counts that was at hand and not chosen, and was compared with the target's token all the same: nothing
was chosen of it, but without it a few bad drafts would shut out good ones for as long as it takes to forget them."""
MOST_DRAFTS: Final = 200.0
"""What is older counts less."""
_LEAST_MARGIN, _MOST_MARGIN = 0.005, 0.5
"""A step with drafts has to promise so much more goodput than the plain one: what deciding costs, and so much that a
regime in which drafts lose is left alone."""
_MARGIN_GAIN, _MARGIN_REQUESTS = 0.2, 16
"""How fast the margin follows what is lost, as a share of it for each step with drafts; half of that with so many
requests, and in proportion with fewer: the gain of one request's step is mostly chance, that of hundreds is not."""
_WORST, _BEST = -0.5, 0.5
"""Gains of single steps beyond count as these: a pause of the machine is no price."""
_PROBING: Final = 0.01
"""So much may be lost to tries."""
_FORGETTING_STEPS, _KEPT = 32, 0.95
"""So much is kept after so many steps of what speaks against drafts: without a new look nothing would come back."""
_PLAIN_EVERY: Final = 128
_PLAIN_UP_TO: Final = 0.5
"""Where drafts are verified at every step, the price of a plain one is a guess. Now and then one is run, unless drafts
gain so much that the guess does not matter."""


class Regime:
    def __init__(self, num_drafters: int) -> None:
        self.table = array("d", ([0.0] * (2 * BINS) + [1.0] * BINS) * num_drafters)
        """[drafters, 3, BINS] of chosen drafts by their predicted survivals: the sum of those, how many were accepted,
        and how much of a prediction that lets come true. `sol.speculation.plan.arithmetic` and its counterpart in C++
        work on it."""
        self.margin = _LEAST_MARGIN
        """Of goodput, for a step with drafts over the plain one"""
        self.asking_margin = 0.0
        """Of tokens, for a proposal beyond what it costs"""
        self._gain = 0.0
        """Of recent steps with drafts over plain decoding"""
        self._steps = 0
        self._steps_since_plain = 0

    @property
    def wants_plain_step(self) -> bool:
        return self._steps_since_plain >= _PLAIN_EVERY and self._gain < _PLAIN_UP_TO

    def kept(self, drafter: int) -> list[float]:
        """[part] how much of predicted survivals came true where they were chosen"""
        start = (3 * drafter + 2) * BINS
        return self.table[start : start + BINS].tolist()

    def observe_drafts(self, drafter: int, survivals: Sequence[float], num_accepted: int) -> None:
        """Drafts with these predicted survivals were verified."""
        table, start = self.table, 3 * drafter * BINS
        last = -1
        for position, survival in enumerate(survivals):
            cell = start + int(survival * _LAST_BIN)
            table[cell] += survival
            if position < num_accepted:
                table[cell + BINS] += 1.0
            if cell != last and last >= 0:  # survivals never rise, so the cell before is complete
                self._keep(last)
            last = cell
        if last >= 0:
            self._keep(last)

    def observe_unverified(self, drafter: int, survival: float, right: bool) -> None:
        """The first of a proposal's drafts, of this predicted survival, was not verified, and turned out so."""
        cell = 3 * drafter * BINS + int(survival * _LAST_BIN)
        self.table[cell] += UNVERIFIED * survival
        self.table[cell + BINS] += UNVERIFIED * right
        self._keep(cell)

    def observe_step(self, num_requests: int, num_drafts: int, gain: float, whole_gain: float) -> None:
        """A step verified so many drafts, and gained so much (0.1 is a tenth) over plain decoding; `whole_gain`: with
        the drafting before it."""
        self._steps += 1
        if self._steps % _FORGETTING_STEPS == 0:
            self._forget()
        share = _MARGIN_GAIN * num_requests / (num_requests + _MARGIN_REQUESTS)
        lost = min(max(whole_gain, _WORST), _BEST)
        if abs(lost) > _PROBING:
            self.asking_margin = min(max(self.asking_margin - share * lost, 0.0), _MOST_MARGIN)
        if not num_drafts:
            self._steps_since_plain = 0
            return
        self._steps_since_plain += 1
        gain = min(max(gain, _WORST), _BEST)
        self._gain += share * (gain - self._gain)
        self.margin = min(max(self.margin - share * gain, _LEAST_MARGIN), _MOST_MARGIN)

    def _keep(self, cell: int) -> None:
        table = self.table
        if table[cell] > MOST_DRAFTS:
            table[cell] *= 0.5
            table[cell + BINS] *= 0.5
        share = (table[cell + BINS] + PRIOR_DRAFTS) / (table[cell] + PRIOR_DRAFTS)
        table[cell + 2 * BINS] = share if share < 1.0 else 1.0

    def _forget(self) -> None:
        self.margin = max(_KEPT * self.margin, _LEAST_MARGIN)
        self.asking_margin *= _KEPT
        table = self.table
        for start in range(0, len(table), 3 * BINS):
            for cell in range(start, start + BINS):
                table[cell] *= _KEPT
                table[cell + BINS] *= _KEPT
                share = (table[cell + BINS] + PRIOR_DRAFTS) / (table[cell] + PRIOR_DRAFTS)
                table[cell + 2 * BINS] = min(share, 1.0)


class Regimes:
    """[octave of numbers of requests]"""

    def __init__(self, num_drafters: int) -> None:
        self._num_drafters = num_drafters
        self._regimes: list[Regime] = []

    def of(self, num_requests: int) -> Regime:
        index = max(num_requests, 1).bit_length() - 1
        while len(self._regimes) <= index:
            self._regimes.append(Regime(self._num_drafters))
        return self._regimes[index]
