"""Losslessness, exactly: the law of all that is emitted is the target's, path by path, and mutants are caught."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exact_law import (
    TOLERANCE,
    Chain,
    Prefix,
    all_drafts,
    joint,
    make_row,
    speculative_law,
    step_law,
    total_variation,
)

from sol.speculation.verify import rules

RULES = {"rejection": rules.rejection, "block": rules.block}

WISHES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.5},
    {"top_k": 2},
    {"top_p": 0.7},
    {"min_p": 0.3},
    {"temperature": 1.7, "top_k": 3, "top_p": 0.9, "min_p": 0.05},
    {"repetition_penalty": 1.7, "presence_penalty": 0.5, "frequency_penalty": 1.0},
    {"logit_bias": {1: 2.0, 2: -100.0}, "min_tokens": 2},
]


def grammar(prefix: Prefix) -> list[int]:
    """Forbids a token that depends on the last one, and none at first."""
    return [(prefix[-1] + 1) % 4] if prefix else []


@pytest.fixture(params=list(RULES))
def rule(request: pytest.FixtureRequest) -> rules.Rule:
    return RULES[request.param]


@pytest.mark.parametrize("wish", WISHES, ids=str)
def test_sampled_drafts_leave_the_target_s_law(rule: rules.Rule, wish: dict[str, Any]) -> None:
    target, drafter = Chain(4, 1), Chain(4, 2)
    row = make_row(**wish)
    p, masked, q = target.law(row), target.law(row, grammar), drafter.law(row)
    for k in (1, 2, 3):
        assert total_variation(speculative_law(rule, p, q, k), joint(p, k + 1)) <= TOLERANCE
    # The drafter knows nothing of the grammar, and may draft what is forbidden.
    assert total_variation(speculative_law(rule, masked, q, 3), joint(masked, 4)) <= TOLERANCE
    # The drafter has other parameters than the target, so that neither's support holds the other's.
    other = drafter.law(make_row(top_k=2, temperature=0.6))
    assert total_variation(speculative_law(rule, p, other, 3), joint(p, 4)) <= TOLERANCE


@pytest.mark.parametrize("wish", WISHES, ids=str)
def test_given_drafts_leave_the_target_s_law_whatever_they_are(rule: rules.Rule, wish: dict[str, Any]) -> None:
    target = Chain(4, 3)
    for forbid in (grammar, lambda prefix: ()):
        p = target.law(make_row(**wish), forbid)
        wanted = joint(p, 3)
        for drafts in all_drafts(4, 2):
            assert total_variation(joint(p, 3, step_law(rule, p, drafts, None)), wanted) <= TOLERANCE
    p = Chain(5, 4).law(make_row(**wish))
    wanted = joint(p, 4)
    for drafts in [(0, 0, 0), (1, 4, 2), (3, 3, 1)]:
        assert total_variation(joint(p, 4, step_law(rule, p, drafts, None)), wanted) <= TOLERANCE


def test_the_largest_case(rule: rules.Rule) -> None:
    target = Chain(5, 5)
    p = target.law(make_row())
    q = Chain(5, 6, spread=0.7, near=target).law(make_row())
    assert total_variation(speculative_law(rule, p, q, 3), joint(p, 4)) <= TOLERANCE


def test_a_drafter_of_the_target_s_law_is_always_right(rule: rules.Rule) -> None:
    p = Chain(4, 7).law(make_row(top_p=0.8))
    for drafts in all_drafts(4, 3):
        told = [p(drafts[:place]) for place in range(3)]
        if all(float(q[token]) > 0.0 for q, token in zip(told, drafts, strict=True)):
            law = step_law(rule, p, drafts, torch.stack(told))
            assert all(path[:3] == drafts for path, mass in law.items() if mass > 0.0)


def test_a_drafter_may_stop_by_what_it_drafted_before(rule: rules.Rule) -> None:
    p, q = Chain(4, 8).law(make_row()), Chain(4, 9).law(make_row())
    adaptive = speculative_law(rule, p, q, 3, continues=lambda drafts: not drafts or drafts[-1] in (0, 2))
    assert total_variation(adaptive, joint(p, 4)) <= TOLERANCE


def test_the_law_holds_over_several_steps(rule: rules.Rule) -> None:
    """Each step's drafts follow what was emitted before it; a path goes on from wherever the step before it ended."""
    p, q = Chain(3, 10).law(make_row()), Chain(3, 11).law(make_row())
    law, length = {(): 1.0}, 5
    while shorter := [path for path in law if len(path) < length - 1]:
        for path in shorter:
            mass = law.pop(path)
            for first in range(3):
                for second in range(3):
                    told = [q(path), q((*path, first))]
                    drawn = float(told[0][first] * told[1][second])
                    for longer, share in step_law(rule, p, (first, second), torch.stack(told), path).items():
                        law[longer] = law.get(longer, 0.0) + mass * drawn * share
    # The last step may have gone beyond; what it said there is not looked at.
    cut: dict[Prefix, float] = {}
    for path, mass in law.items():
        cut[path[: length - 1]] = cut.get(path[: length - 1], 0.0) + mass
    assert total_variation(cut, joint(p, length - 1)) <= TOLERANCE


def test_block_verification_accepts_at_least_as_many() -> None:
    better = 0
    for seed in range(6):
        p, q = Chain(4, 20 + seed).law(make_row()), Chain(4, 40 + seed).law(make_row())
        means = {}
        for name, rule in RULES.items():
            mean = 0.0
            for drafts in all_drafts(4, 3):
                told = [q(drafts[:place]) for place in range(3)]
                drawn = float(torch.stack([t[d] for t, d in zip(told, drafts, strict=True)]).prod())
                for path, mass in step_law(rule, p, drafts, torch.stack(told)).items():
                    mean += drawn * mass * len(path)
            means[name] = mean
        assert means["block"] >= means["rejection"] - TOLERANCE
        better += means["block"] > means["rejection"] + 1e-3
    assert better >= 3


def caught(law: dict[Prefix, float], wanted: dict[Prefix, float]) -> bool:
    """By far: not by rounding."""
    assert sum(law.values()) == pytest.approx(1.0)
    return total_variation(law, wanted) > 1e-3


def test_mutant_p_instead_of_the_residual(rule: rules.Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    p, q = Chain(4, 1).law(make_row()), Chain(4, 2).law(make_row())
    monkeypatch.setattr(rules, "residual", lambda p, q, draft, weight: p)
    assert caught(joint(p, 3, step_law(rule, p, (0, 1), None)), joint(p, 3))
    assert caught(speculative_law(rule, p, q, 2), joint(p, 3))


def test_mutant_q_without_its_temperature(rule: rules.Rule) -> None:
    drafter, row = Chain(4, 2), make_row(temperature=0.5)
    p = Chain(4, 1).law(row)
    law = speculative_law(rule, p, drafter.law(row), 2, shown=drafter.law(make_row()))
    assert caught(law, joint(p, 3))


def test_mutant_the_draft_length_chosen_after_seeing_the_tokens(rule: rules.Rule) -> None:
    """A draft that its drafter holds improbable is dropped, and the target's token sampled in its place."""
    p, q = Chain(4, 1).law(make_row()), Chain(4, 2).law(make_row())
    law: dict[Prefix, float] = {}
    for token, probability in enumerate(q(()).tolist()):
        kept = probability > 0.3
        step = step_law(rule, p, (token,) if kept else (), q(()).unsqueeze(0) if kept else None)
        for path, mass in step.items():
            law[path] = law.get(path, 0.0) + probability * mass
    assert caught(joint(p, 2, law), joint(p, 2))


def test_mutant_a_forbidden_draft_dropped(rule: rules.Rule) -> None:
    """It must be verified like any other: its p is 0, and what follows its rejection is the residual, not p."""
    forbidden = 2
    p = Chain(4, 1).law(make_row(), lambda prefix: [forbidden])
    q = Chain(4, 2).law(make_row())
    told = q(()).unsqueeze(0)
    law: dict[Prefix, float] = {}
    for token, probability in enumerate(q(()).tolist()):
        step = step_law(rule, p, (), None) if token == forbidden else step_law(rule, p, (token,), told)
        for path, mass in step.items():
            law[path] = law.get(path, 0.0) + probability * mass
    assert caught(joint(p, 2, law), joint(p, 2))
