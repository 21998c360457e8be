"""Monte Carlo on the code that serves: rejection and block verification with real noise, and mutants of the noise."""

from __future__ import annotations

from typing import Any

import pytest
from exact_law import Chain, Fixed, joint, make_row
from monte_carlo import Drafting, departure, generate, looked_up, make_rows, sampled_by

from sol.sampling import sampler
from sol.sampling.drafting import draft_coupled
from sol.sampling.noise import Purpose, slot_key, stream_key
from sol.sampling.processing import SamplingRow
from sol.speculation.config import VerifyMethod
from sol.speculation.verify import verifier

VOCABULARY, LENGTH, DRAFTS = 3, 3, 2
DRAWS = 1500

TARGET = Chain(VOCABULARY, 1, spread=1.0)
FAR = Chain(VOCABULARY, 2, spread=1.0)
NEAR = Chain(VOCABULARY, 3, spread=0.5, near=TARGET)


@pytest.fixture(params=["rejection", "block"])
def method(request: pytest.FixtureRequest) -> VerifyMethod:
    found: VerifyMethod = request.param
    return found


@pytest.mark.parametrize(
    ("drafter", "wish"),
    [(FAR, {}), (NEAR, {"temperature": 0.6}), (None, {"temperature": 1.4, "top_p": 0.9}), (FAR, {"top_k": 2})],
)
def test_emitted_tokens_have_the_target_s_law(
    method: VerifyMethod, drafter: Chain | None, wish: dict[str, Any]
) -> None:
    draft = looked_up(VOCABULARY) if drafter is None else sampled_by(drafter)
    paths = generate(TARGET, draft, make_rows(range(DRAWS), **wish), length=LENGTH, k=DRAFTS, method=method)
    assert departure(paths, joint(TARGET.law(make_row(**wish)), LENGTH)) is None


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_first_tokens_of_a_million_requests(method: VerifyMethod) -> None:
    paths = []
    for first in range(0, 1_000_000, 50_000):  # in parts, whose logits fit in memory
        paths += generate(
            TARGET, sampled_by(FAR), make_rows(range(first, first + 50_000)), length=2, k=1, method=method
        )
    assert departure(paths, joint(TARGET.law(make_row()), 2)) is None


def departs(target: Chain, draft: Drafting, method: VerifyMethod, *, length: int, k: int, draws: int = DRAWS) -> bool:
    paths = generate(target, draft, make_rows(range(draws)), length=length, k=k, method=method)
    return departure(paths, joint(target.law(make_row()), length)) is not None


# The targets and drafters below are chosen so that a mutant moves the law by more than the gate tolerates at so few
# draws. Each test shows first that the real code passes with them.


def test_mutant_noise_keyed_by_draft_slot(method: VerifyMethod, monkeypatch: pytest.MonkeyPatch) -> None:
    """What rejected a draft would reject the next step's first one, too."""
    coin = Fixed([0.5, 0.5])
    assert not departs(coin, looked_up(2), method, length=3, k=1)
    monkeypatch.setattr(verifier, "slot_key", lambda seed, choice, start, *rest: slot_key(seed, choice, 0, *rest))
    assert departs(coin, looked_up(2), method, length=3, k=1)


def test_mutant_noise_of_undecided_slots_reused_after_a_rejection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Block verification decides by all drafts: by output index, the next step would find the same numbers again."""

    def by_output_index(seed: int, choice: int, start: int, slot: int, purpose: Purpose) -> int:
        return slot_key(seed, choice, start + slot, 0, purpose)

    coin = Fixed([0.5, 0.5])
    assert not departs(coin, looked_up(2), "block", length=3, k=2, draws=2500)
    monkeypatch.setattr(verifier, "slot_key", by_output_index)
    assert departs(coin, looked_up(2), "block", length=3, k=2, draws=2500)


def test_mutant_a_draft_s_noise_reused_after_its_rejection(
    method: VerifyMethod, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That a draft won over the other tokens says something of their noise: the likelier ones had little of it."""

    def shared(seed: int, choice: int, start: int, slot: int, purpose: Purpose) -> int:
        return slot_key(seed, choice, start, slot, Purpose.DRAFT if purpose is Purpose.RECOVER else purpose)

    target, draft = Fixed([0.01, 0.74, 0.25]), sampled_by(Fixed([0.5, 0.49, 0.01]))
    assert not departs(target, draft, method, length=2, k=1, draws=2500)
    monkeypatch.setattr(verifier, "slot_key", shared)
    assert departs(target, draft, method, length=2, k=1, draws=2500)


@pytest.mark.parametrize("mutated", [False, True])
def test_mutant_drafts_of_the_target_s_own_noise_dropped_after_seeing_them(method: VerifyMethod, mutated: bool) -> None:
    """Any method may verify such drafts. But the noise of one that is dropped samples the token in its place."""
    target = Fixed([0.6, 0.3, 0.1])

    def draft(row: SamplingRow, count: int) -> tuple[list[int], None]:
        token = draft_coupled(target.logits([]).float(), row, [])
        return [token] if count and (not mutated or token == 0) else [], None

    assert departs(target, draft, method, length=2, k=1) is mutated


@pytest.mark.parametrize("mutated", [False, True])
def test_choices_of_a_request_are_independent(
    method: VerifyMethod, mutated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a mutant, whose noise they share, is caught."""
    if mutated:
        monkeypatch.setattr(verifier, "slot_key", lambda seed, choice, *rest: slot_key(seed, 0, *rest))
        monkeypatch.setattr(sampler, "stream_key", lambda seed, choice, position: stream_key(seed, 0, position))
    rows = make_rows(range(1500), choices=(0, 1))
    paths = generate(TARGET, looked_up(VOCABULARY), rows, length=2, k=1, method=method)
    alone = joint(TARGET.law(make_row()), 2)
    both = {(a, b): p * q for a, p in alone.items() for b, q in alone.items()}
    found = departure(list(zip(paths[::2], paths[1::2], strict=True)), both)
    assert (found is not None) is mutated
