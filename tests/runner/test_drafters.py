"""Drafters are asked as planned; one that fails is put aside, longer each time, and tried again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from sol.engine.types import Draft, NewRequestData, ProposalPlan, SchedulerOutput
from sol.runner.drafters import FIRST_REST, LONGEST_REST, Drafters, as_draft, expected
from sol.sampling.processing import SamplingRow
from sol.sampling_params import SamplingParams
from sol.speculation.propose import Proposal, ProposalRow

VOCAB = 10


class Scripted:
    """Returns or raises what `answer` makes of the rows."""

    def __init__(self, name: str, answer: Callable[[Sequence[ProposalRow]], Any]) -> None:
        self.name = name
        self.answer = answer
        self.asked: list[dict[str, int]] = []
        """Each call's requests and how many drafts each may have"""
        self.forgotten: list[tuple[list[str], bool]] = []

    def propose(self, rows: Sequence[ProposalRow]) -> list[Proposal]:
        self.asked.append({row.request_id: row.max_tokens for row in rows})
        return self.answer(rows)  # type: ignore[no-any-return]

    def forget(self, request_ids: Sequence[str], *, finished: bool) -> None:
        self.forgotten.append((list(request_ids), finished))


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def always(
    token_ids: list[int], scores: list[float] | None = None
) -> Callable[[Sequence[ProposalRow]], list[Proposal]]:
    return lambda rows: [Proposal(token_ids=token_ids[: row.max_tokens], scores=scores) for row in rows]


def failing(error: Exception) -> Callable[[Sequence[ProposalRow]], list[Proposal]]:
    def fail(rows: Sequence[ProposalRow]) -> list[Proposal]:
        raise error

    return fail


def row(request_id: str) -> ProposalRow:
    return ProposalRow(
        request_id=request_id,
        sampling=SamplingRow(SamplingParams(), 0, 0, [1, 2], [3], []),
        max_tokens=1,
        block_ids=np.arange(4),
        num_computed_tokens=2,
    )


def rows(*request_ids: str) -> dict[str, ProposalRow]:
    return {request_id: row(request_id) for request_id in request_ids}


def plan(drafter: str = "a", max_tokens: int = 3, **fallback: Any) -> ProposalPlan:
    return ProposalPlan(drafter=drafter, max_tokens=max_tokens, **fallback)


def test_each_request_is_drafted_for_by_whom_the_plan_names() -> None:
    a, b = Scripted("a", always([1, 2, 3])), Scripted("b", always([4, 5]))
    drafters = Drafters([a, b], vocab_size=VOCAB)
    result = drafters.propose({"x": plan("a", 2), "y": plan("b", 5), "z": plan("a", 3)}, rows("x", "y", "z"))
    assert drafters.names == ["a", "b"]
    assert a.asked == [{"x": 2, "z": 3}], "one call for all of its requests"
    assert b.asked == [{"y": 5}]
    found = {name: (drafter, proposal.token_ids) for name, (drafter, proposal) in result.proposals.items()}
    assert found == {"x": ("a", [1, 2]), "y": ("b", [4, 5]), "z": ("a", [1, 2, 3])}
    assert [(d.drafter, d.num_requests, d.num_tokens, d.error) for d in result.draftings] == [
        ("a", 2, 5, None), ("b", 1, 2, None)
    ]  # fmt: skip


def test_a_request_that_failed_in_the_step_is_not_drafted_for() -> None:
    a = Scripted("a", always([1]))
    result = Drafters([a], vocab_size=VOCAB).propose({"x": plan(), "gone": plan()}, rows("x"))
    assert set(result.proposals) == {"x"}
    assert a.asked == [{"x": 3}]


@pytest.mark.parametrize(
    ("first", "asks_second"),
    [
        (always([1, 2], [0.9, 0.9]), False),
        (always([1, 2], [0.3, 0.9]), True),
        (always([1]), False),
        (always([]), True),
        (failing(RuntimeError("broken")), True),
    ],
    ids=["trusted", "not trusted", "without scores", "nothing", "fails"],
)
def test_the_second_drafter_is_asked_where_the_first_expects_too_little(first: Any, asks_second: bool) -> None:
    a, b = Scripted("a", first), Scripted("b", always([7, 8, 9]))
    planned = plan("a", 2, fallback="b", fallback_max_tokens=3, trust=1.0)
    result = Drafters([a, b], vocab_size=VOCAB).propose({"x": planned}, rows("x"))
    assert b.asked == ([{"x": 3}] if asks_second else [])
    assert result.proposals["x"][0] == ("b" if asks_second else "a")


def test_the_first_drafts_stay_where_the_second_has_none() -> None:
    a, b = Scripted("a", always([1], [0.1])), Scripted("b", always([]))
    planned = plan("a", fallback="b", fallback_max_tokens=3, trust=1.0)
    result = Drafters([a, b], vocab_size=VOCAB).propose({"x": planned}, rows("x"))
    assert result.proposals["x"][1].token_ids == [1]


NONSENSE = {
    "too few proposals": lambda rows: [],
    "too many drafts": lambda rows: [Proposal(token_ids=[1] * (row.max_tokens + 1)) for row in rows],
    "a token beyond the vocabulary": lambda rows: [Proposal(token_ids=[VOCAB]) for _ in rows],
    "a negative token": lambda rows: [Proposal(token_ids=[-1]) for _ in rows],
    "no integer": lambda rows: [Proposal(token_ids=[1.0]) for _ in rows],  # type: ignore[list-item]
    "a score short": lambda rows: [Proposal(token_ids=[1, 2], scores=[0.5]) for _ in rows],
    "a score above 1": lambda rows: [Proposal(token_ids=[1], scores=[1.5]) for _ in rows],
    "a score that is no number": lambda rows: [Proposal(token_ids=[1], scores=[float("nan")]) for _ in rows],
    "distributions of other drafts": lambda rows: [Proposal(token_ids=[1], probs=torch.ones(2, VOCAB)) for _ in rows],
    "nothing at all": lambda rows: None,
}


@pytest.mark.parametrize("answer", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_is_a_failure_and_nobody_drafts(answer: Any) -> None:
    a, b = Scripted("a", answer), Scripted("b", always([4]))
    result = Drafters([a, b], vocab_size=VOCAB).propose({"x": plan("a"), "y": plan("b")}, rows("x", "y"))
    assert set(result.proposals) == {"y"}, "the other drafter's requests have no part in it"
    assert [(drafting.drafter, drafting.error is None) for drafting in result.draftings] == [("a", False), ("b", True)]
    assert result.draftings[0].num_tokens == 0


@pytest.mark.parametrize("error", [ValueError("a bug"), MemoryError(), torch.OutOfMemoryError("device memory")])
def test_whoever_raises_rests_twice_as_long_each_time_and_is_tried_again(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    clock, a = Clock(), Scripted("a", failing(error))
    drafters = Drafters([a], vocab_size=VOCAB, clock=clock)

    def ask() -> bool:
        """Whether the drafter was called"""
        before = len(a.asked)
        result = drafters.propose({"x": plan()}, rows("x"))
        assert result.proposals == {}
        assert len(result.draftings) == len(a.asked) - before
        return len(a.asked) > before

    rest = FIRST_REST
    with caplog.at_level(logging.WARNING):
        for _ in range(12):
            assert ask()
            clock.now += 0.99 * rest
            assert not ask()
            clock.now += 0.02 * rest
            rest = min(2 * rest, LONGEST_REST)
    assert rest == LONGEST_REST
    assert f"put aside for {FIRST_REST:.0f} s" in caplog.messages[0]
    assert type(error).__name__ in caplog.messages[0]
    assert [bool(record.exc_info) for record in caplog.records] == [True] + [False] * 11, "one traceback"

    a.answer = always([5])
    assert drafters.propose({"x": plan()}, rows("x")).proposals["x"][1].token_ids == [5]
    a.answer = failing(error)
    assert ask()
    clock.now += 1.01 * FIRST_REST
    assert ask(), "a success forgives what was before"


def test_what_an_engine_drafts_with_is_told_who_leaves_even_if_one_cannot_bear_it() -> None:
    def forget(request_ids: Sequence[str], *, finished: bool) -> None:
        raise KeyError("who?")

    clock = Clock()
    a, b = Scripted("a", always([1])), Scripted("b", always([2]))
    a.forget = forget  # type: ignore[method-assign]
    drafters = Drafters([a, b], vocab_size=VOCAB, clock=clock)
    drafters.leave(_removing(["x", "y", "z"], preempted={"y"}))
    assert b.forgotten == [(["x", "z"], True), (["y"], False)]
    assert drafters.propose({"x": plan("a")}, rows("x")).proposals == {}
    assert a.asked == [], "it rests"
    clock.now += LONGEST_REST
    assert set(drafters.propose({"x": plan("a")}, rows("x")).proposals) == {"x"}


def _removing(request_ids: list[str], preempted: set[str]) -> SchedulerOutput:
    new: list[NewRequestData] = []
    return SchedulerOutput(
        num_scheduled_tokens={}, new_requests=new, cached_requests=[], removed_request_ids=request_ids,
        preempted_request_ids=preempted,
    )  # fmt: skip


def test_a_plan_that_names_nobody_is_a_bug() -> None:
    with pytest.raises(RuntimeError, match="the drafter 'c', which this engine does not have"):
        Drafters([Scripted("a", always([1]))], vocab_size=VOCAB).propose({"x": plan("c")}, rows("x"))


def test_what_the_scheduler_hears() -> None:
    given = Proposal(token_ids=[1, 2], scores=[0.5, 0.5])
    assert as_draft("a", given) == Draft(drafter="a", token_ids=[1, 2], scores=[0.5, 0.5])
    drawn = Proposal(token_ids=[1], probs=torch.ones(1, VOCAB))
    assert as_draft("a", drawn).sampled
    assert expected(given) == pytest.approx(0.75)
    assert expected(drawn) == 1.0
    assert expected(Proposal(token_ids=[])) == 0.0
