"""What came of drafts that were chosen, and of those that were not."""

from __future__ import annotations

import pytest

from sol.speculation.plan.regime import Regime


def kept(regime: Regime, survival: float) -> float:
    parts = regime.kept(0)
    return parts[int(survival * len(parts))]


def test_drafts_that_do_not_come_true_are_believed_less() -> None:
    regime = Regime(1)
    for _ in range(20):
        regime.observe_drafts(0, [0.95, 0.9, 0.55], 0)
    assert kept(regime, 0.95) < 0.5
    assert kept(regime, 0.55) < 0.7
    assert kept(regime, 0.2) == 1.0


def test_what_was_not_verified_speaks_for_the_rest() -> None:
    """Else a bad beginning would shut out good drafts: nothing is chosen, so nothing of it is ever seen to be right."""
    regime = Regime(1)
    for _ in range(20):
        regime.observe_drafts(0, [0.95, 0.9], 0)
    before = kept(regime, 0.95)
    for _ in range(200):
        regime.observe_unverified(0, 0.95, right=True)
    assert kept(regime, 0.95) > 2 * before
    assert kept(regime, 0.95) > 0.6


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_what_was_not_verified_and_was_wrong_speaks_against_it(share: float) -> None:
    regime = Regime(1)
    for number in range(400):
        regime.observe_unverified(0, 0.95, right=number % 10 < 10 * share)
    assert kept(regime, 0.95) == pytest.approx(share / 0.95, abs=0.1)
