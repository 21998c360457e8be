"""Arrays and loops judge drafts alike."""

from __future__ import annotations

import random

import pytest

from sol.speculation.plan.acceptance import Acceptance, Habit


@pytest.mark.parametrize("least", [0.03, 0.5, 1.1])
def test_many_drafts_have_the_survivals_that_each_has_alone(least: float) -> None:
    rng = random.Random(0)
    acceptance = Acceptance()
    for _ in range(300):
        count = rng.randint(1, 20)
        right = rng.randint(0, count)
        acceptance.observe([rng.random() for _ in range(count)], right, min(right + 1, count), Habit())
    kept = [0.6 + 0.6 * rng.random() for _ in range(8)]
    scores = [[rng.random() ** 0.1 for _ in range(rng.randint(1, 20))] for _ in range(80)] + [[0.0, 1.0, 1.0], [1.0]]
    habits = [Habit(log_odds=rng.gauss(0.0, 2.0)) for _ in scores]
    together = acceptance.survivals_of_many(scores, habits, kept, least)
    for one, habit, (predicted, expected) in zip(scores, habits, together, strict=True):
        alone = acceptance.survivals(one, len(one), habit, kept, least)
        assert predicted == pytest.approx(alone[0])
        assert expected == pytest.approx(alone[1])
        assert all(least <= worth <= 1.0 for worth in expected)
