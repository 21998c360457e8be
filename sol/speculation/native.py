"""`sol.speculation.plan.arithmetic` from the library of CPU kernels (csrc/drafts.cpp)."""

from __future__ import annotations

import ctypes
import logging
from array import array
from ctypes import c_void_p

from sol.ops.cpu.native import DraftLayout, Native, NativeUnavailableError, SolDrafts, SolStepCosts, load
from sol.speculation.plan import acceptance as learning
from sol.speculation.plan import costs as pricing
from sol.speculation.plan import regime as correcting
from sol.speculation.plan.acceptance import Acceptance
from sol.speculation.plan.arithmetic import CHOOSE_FIELDS, LEARN_FIELDS, LENGTHS, Arithmetic, Choice, PythonArithmetic
from sol.speculation.plan.costs import CostModel
from sol.speculation.plan.hand import Hand
from sol.speculation.plan.regime import Regime

logger = logging.getLogger(__name__)

_LOG_ODDS, _BINS = array("d", learning.LOG_ODDS), array("q", learning.BIN_OF)
_KNOTS, _SHARES = array("q", pricing.KNOT_OF), array("d", pricing.SHARE_OF)


def best_arithmetic() -> Arithmetic:
    """The library's; Python's, which decides alike and takes longer, where a GPU's machine has no such library."""
    try:
        return NativeArithmetic()
    except NativeUnavailableError as error:
        logger.info("deciding about drafts is left to Python: %s", error)
        return PythonArithmetic()


class NativeArithmetic:
    """For one controller, as it points to what that has learned."""

    def __init__(self, native: Native | None = None) -> None:
        """Raises `NativeUnavailableError` where there is no library."""
        self._native = native or load()
        # A call takes microseconds: to let other threads run meanwhile would have it wait for them afterwards.
        self._choose = self._native.holding_the_lock("sol_choose_drafts")
        self._learn = self._native.holding_the_lock("sol_learn_drafts")
        self._drafts = SolDrafts(
            log_odds=_address(_LOG_ODDS),
            bins=_address(_BINS),
            most_bin_precision=learning.MOST_BIN_PRECISION,
            most_position_precision=learning.MOST_POSITION_PRECISION,
            most_request_precision=learning.MOST_REQUEST_PRECISION,
            least_information=learning.LEAST_INFORMATION,
            curve_observations=learning.CURVE_OBSERVATIONS,
            prior_drafts=correcting.PRIOR_DRAFTS,
            unverified=correcting.UNVERIFIED,
            most_drafts=correcting.MOST_DRAFTS,
        )
        self._drafts_at = ctypes.addressof(self._drafts)
        self._scores: array[float] | None = None
        """Of the hand that `_drafts` points to"""
        self._acceptance: tuple[Acceptance, ...] = ()
        self._states: ctypes.Array[c_void_p] | None = None
        self._costs: CostModel | None = None
        self._step_costs = SolStepCosts()
        self._step_costs_at = ctypes.addressof(self._step_costs)
        self._seen = array("d", (0.0, 0.0))

    def choose(
        self, hand: Hand, regime: Regime, costs: CostModel, choice: Choice, items: list[int]
    ) -> tuple[list[int], float, int]:
        """See `Arithmetic.choose`."""
        if hand.scores is not self._scores:
            self._point_at(hand)
        if costs is not self._costs:
            self._price_by(costs)
        count = len(items) // CHOOSE_FIELDS
        rows, shares, each, common = costs.parts(choice.shape)
        step = array("d", (rows, shares, each, common, choice.paid, choice.deciding))
        limits = array("d", (choice.least, choice.margin, choice.nearly))
        given = array("q", items)
        chosen = array("q", bytes(8 * count))
        code = self._choose(
            self._drafts_at,
            self._step_costs_at,
            _address(regime.table),
            _address(given),
            count,
            _address(step),
            _address(limits),
            choice.max_tokens,
            LENGTHS,
            _address(chosen),
            _address(self._seen),
        )
        self._native.check(code)
        return chosen.tolist(), self._seen[0], int(self._seen[1])

    def learn(self, hand: Hand, regime: Regime, items: list[int], *, least: float, price: float) -> list[float]:
        """See `Arithmetic.learn`."""
        if hand.scores is not self._scores:
            self._point_at(hand)
        count = len(items) // LEARN_FIELDS
        given, gains = array("q", items), array("d", bytes(8 * count))
        code = self._learn(
            self._drafts_at,
            _address(regime.table),
            _address(given),
            count,
            least,
            price,
            _address(gains),
        )
        self._native.check(code)
        return gains.tolist()

    def _point_at(self, hand: Hand) -> None:
        drafts = self._drafts
        assert all(len(one.state) == DraftLayout.ACCEPTANCE_SIZE for one in hand.acceptance)
        self._scores, self._acceptance = hand.scores, hand.acceptance
        self._states = (c_void_p * len(hand.acceptance))(*[_address(one.state) for one in hand.acceptance])
        drafts.num_slots, drafts.width = len(hand.counts), hand.width
        drafts.scores, drafts.predicted = _address(hand.scores), _address(hand.predicted)
        drafts.expected, drafts.counts = _address(hand.expected), _address(hand.counts)
        drafts.habits = _address(hand.habits)
        drafts.num_drafters, drafts.acceptance = len(hand.acceptance), ctypes.addressof(self._states)

    def _price_by(self, costs: CostModel) -> None:
        self._costs = costs
        parts = self._step_costs
        parts.num_tokens, parts.num_knots = len(costs.per_token), len(costs.factors)
        parts.per_token, parts.factors = _address(costs.per_token), _address(costs.factors)
        parts.knots, parts.shares = _address(_KNOTS), _address(_SHARES)


def _address(values: array[int] | array[float]) -> int:
    return values.buffer_info()[0]
