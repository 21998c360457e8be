"""Speculation in the scheduler: what a controller may do, and what rows wait for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from token_runner import TokenRunner, expected_output, make_config, make_core, make_request

from sol.engine.scheduler import Scheduler
from sol.engine.speculation import Speculation
from sol.engine.types import Draft, ProposalPlan, SchedulerOutput, StepOutput
from sol.speculation.plan import Candidate, Drafter, FixedController, GuardedController, StepShape


class Failing(FixedController):
    """Goes wrong in one of its methods once it was called a few times."""

    def __init__(self, method: str, how: Callable[..., Any], after: int) -> None:
        super().__init__(["lookup"], 4)
        calls, right = [0], getattr(self, method)

        def wrong(*arguments: Any, **named: Any) -> Any:
            calls[0] += 1
            return how(*arguments, **named) if calls[0] > after else right(*arguments, **named)

        setattr(self, method, wrong)


def fails(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("a step took no time")


def too_many(shape: StepShape, candidates: Sequence[Candidate], *, max_tokens: int) -> list[int]:
    return [candidate.max_tokens + 1 for candidate in candidates]


@pytest.mark.parametrize("work_ahead", [0, 1])
@pytest.mark.parametrize(
    ("method", "how"),
    [
        ("add", fails),
        ("remove", fails),
        ("choose_drafts", fails),
        ("choose_proposals", fails),
        ("observe_step", fails),
        ("speedup", fails),
        ("take_stats", fails),
        ("choose_drafts", too_many),
        ("choose_drafts", lambda *_, **__: []),
        ("choose_drafts", lambda shape, candidates, **__: [-1 for _ in candidates]),
        ("choose_proposals", lambda *_, **__: []),
    ],
)
def test_a_controller_that_fails_costs_drafts_and_no_request(
    method: str, how: Callable[..., Any], work_ahead: int, caplog: pytest.LogCaptureFixture
) -> None:
    speculation = Speculation(Failing(method, how, after=2), num_speculative_tokens=4)
    config = make_config()
    core = make_core(config, TokenRunner(config), work_ahead, speculation)
    requests = [make_request(f"r{i}", [i, 2, 3], seed=i, max_tokens=12 + i) for i in range(4)]
    core.add(requests)
    made: dict[str, list[int]] = {request.request_id: [] for request in requests}
    with caplog.at_level(logging.ERROR):
        while core.has_work:
            for output in core.step().outputs:
                made[output.request_id] += output.new_token_ids
            assert core.dead is None
            core.check_integrity()
    assert made == {request.request_id: expected_output(request, 64)[0] for request in requests}
    assert speculation.failure is not None
    assert len([record for record in caplog.records if "decodes plainly" in record.message]) == 1


def test_what_a_controller_says_of_drafts_has_to_fit() -> None:
    candidates = [
        Candidate(
            request_id=name, draft=Draft(drafter="lookup", token_ids=[1, 2], scores=None), max_tokens=2, num_tokens=5
        )
        for name in ("a", "b")
    ]
    shape = StepShape(num_tokens=2, num_requests=2, num_logits_rows=2, num_context_tokens=12)
    guarded = GuardedController(Failing("choose_drafts", lambda *_, **__: [2, 2], after=0))
    assert guarded.choose_drafts(shape, candidates, max_tokens=4) == [2, 2]
    assert guarded.choose_drafts(shape, candidates, max_tokens=3) == [0, 0]
    assert "room for 3" in str(guarded.failure)


class Falls(FixedController):
    """A lookup first, a drafter with a KV cache where that finds nothing."""

    def choose_proposals(self, shape: StepShape, rows: Sequence[Drafter]) -> list[ProposalPlan | None]:
        return [
            ProposalPlan(
                drafter="lookup", max_tokens=row.max_tokens, fallback="model", fallback_max_tokens=8, trust=1.0
            )
            for row in rows
        ]


def test_where_nobody_can_write_ahead_text_is_looked_up_all_the_same() -> None:
    """Five blocks are held, and the sixth is kept for whoever needs one next."""
    speculation = Speculation(Falls([], 8), num_speculative_tokens=8, caching=["model"])
    scheduler = Scheduler(make_config(max_model_len=24, num_blocks=6), speculation)
    scheduler.add(make_request("a", list(range(11)), max_tokens=13))
    scheduler.add(make_request("b", list(range(20, 28)), max_tokens=13))
    plan = scheduler.schedule()
    assert plan is not None
    lookup = ProposalPlan(drafter="lookup", max_tokens=8, trust=1.0)
    assert plan.proposals == {"a": lookup, "b": lookup}


def drafted(scheduler: Scheduler, names: Sequence[str], sampled: bool = False) -> None:
    """Reads the oldest step; everybody sampled gets the token 5, and a draft of 8."""
    result = StepOutput(sampled_token_ids={name: [5] for name in names}, logprobs={})
    result.drafts = {name: Draft(drafter="suffix", token_ids=[1] * 8, scores=None, sampled=sampled) for name in names}
    scheduler.update_from_output(result)


def ahead(names: Sequence[str], by_chance: bool = False, **changes: Any) -> SchedulerOutput | None:
    """The plan behind a step under way of requests that all have drafts for tokens after it."""
    config = make_config(max_num_seqs=16, num_blocks=128, **changes)
    speculation = Speculation(FixedController(["suffix"], 8), num_speculative_tokens=8)
    scheduler = Scheduler(config, speculation)
    for i, name in enumerate(names):
        scheduler.add(make_request(name, [i, 2], max_tokens=30))
    scheduler.schedule()
    # Planned before the drafts are there, so that they do not keep it from being planned.
    second = scheduler.schedule()
    assert second is not None
    drafted(scheduler, names, by_chance)
    return scheduler.schedule()


@pytest.mark.parametrize(
    ("changes", "waits"),
    [
        ({}, True),
        ({"num_invariant_tokens": 10}, True),
        ({"num_invariant_tokens": 9}, False),  # one draft for eight requests
        ({"num_invariant_tokens": 8}, False),
        ({"max_num_logits_rows": 8}, False),
        ({"max_num_batched_tokens": 16, "max_num_logits_rows": 12}, True),
    ],
)
def test_a_step_waits_for_a_result_only_where_enough_drafts_can_be_verified_then(
    changes: dict[str, Any], waits: bool
) -> None:
    eight = [f"r{i}" for i in range(8)]
    plan = ahead(eight, **changes)
    if waits:
        assert plan is None
    else:
        assert plan is not None
        assert plan.num_scheduled_tokens == dict.fromkeys(eight, 1)


def test_nobody_is_planned_while_a_neighbours_drafts_are_verified() -> None:
    """Two batches in turns would each be as slow as both together."""
    speculation = Speculation(FixedController(["suffix"], 8), num_speculative_tokens=8)
    scheduler = Scheduler(make_config(), speculation)
    for i, name in enumerate(("a", "b")):
        scheduler.add(make_request(name, [i, 2], max_tokens=30))
    scheduler.schedule()
    result = StepOutput(sampled_token_ids={"a": [5], "b": [5]}, logprobs={})
    result.drafts["a"] = Draft(drafter="suffix", token_ids=[1] * 4, scores=None)
    scheduler.update_from_output(result)
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.num_scheduled_tokens == {"a": 5, "b": 1}
    assert scheduler.schedule() is None
    scheduler.update_from_output(StepOutput(sampled_token_ids={"a": [1, 9], "b": [6]}, logprobs={}))
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.num_scheduled_tokens == {"a": 1, "b": 1}


def test_rows_do_not_wait_because_of_what_drafts_by_chance_are() -> None:
    plan = ahead(["a", "b"], by_chance=True)
    assert plan is not None
    assert plan.num_scheduled_tokens == {"a": 1, "b": 1}
