"""Figures of speculation, by their definitions, and what a request may ask of it."""

from __future__ import annotations

from typing import Any

import pytest

from sol.engine.types import DraftCounts, RequestOutput, SpeculationParams, SpeculationUsage
from sol.errors import RequestError
from sol.speculation.request import check_speculation
from sol.speculation.usage import acceptance_rate, add_counts, add_usages, advance, mean_acceptance_length


def counts(drafts: int, draft_tokens: int, accepted: int) -> DraftCounts:
    return DraftCounts(num_drafts=drafts, num_draft_tokens=draft_tokens, num_accepted_tokens=accepted)


def test_rates_and_lengths() -> None:
    assert acceptance_rate(counts(2, 8, 6)) == 0.75
    assert mean_acceptance_length(counts(2, 8, 6)) == 4.0
    assert mean_acceptance_length(counts(2, 8, 0)) == 1.0
    assert acceptance_rate(counts(0, 0, 0)) is None
    assert mean_acceptance_length(counts(0, 0, 0)) is None
    assert add_counts([counts(1, 2, 1), counts(3, 5, 4)]) == counts(4, 7, 5)


def test_choices_add_up() -> None:
    one = SpeculationUsage(num_steps=10, drafters={"suffix": counts(2, 8, 6)}, speedup=3.0)
    two = SpeculationUsage(num_steps=30, drafters={"suffix": counts(1, 1, 1), "ngram": counts(5, 5, 0)}, speedup=1.0)
    new = SpeculationUsage(num_steps=1)
    total = add_usages([(one, 30), (two, 30), (new, 1)])
    assert total is not None
    assert total.num_steps == 41
    assert total.drafters == {"suffix": counts(3, 9, 7), "ngram": counts(5, 5, 0)}
    # 60 tokens that would take 60 plain took 10 + 30.
    assert total.speedup == pytest.approx(1.5)
    assert one.drafters == {"suffix": counts(2, 8, 6)}, "the choices keep their own"
    assert add_usages([]) is None
    assert add_usages([(new, 1)]) == new


def test_an_engine_that_says_nothing_decodes_plainly() -> None:
    def output(usage: SpeculationUsage | None = None) -> RequestOutput:
        return RequestOutput(request_id="a", new_token_ids=[], speculation=usage)

    usage: SpeculationUsage | None = SpeculationUsage()
    usage, steps = advance(usage, output(), 1)
    assert steps == 1
    usage, steps = advance(usage, output(), 2)  # two steps' worth that piled up
    assert steps == 2
    assert usage == SpeculationUsage(num_steps=3)
    said = SpeculationUsage(num_steps=5, drafters={"ngram": counts(2, 8, 6)})
    usage, steps = advance(usage, output(said), 8)
    assert (usage, steps) == (said, 2)
    usage, steps = advance(usage, output(SpeculationUsage(num_steps=9)), 3)
    assert steps == 3, "a stop string may leave fewer tokens than there were steps"
    assert advance(usage, output(usage), 0)[1] == 0
    assert advance(None, output(), 4) == (None, 4)


@pytest.mark.parametrize(
    ("wish", "param", "says"),
    [
        ({"drafter": "oracle"}, "drafter", "one of those that this engine has (ngram, suffix), not 'oracle'"),
        ({"drafter": "o" * 10_000}, "drafter", "ngram, suffix"),
        ({"drafter": 5}, "drafter", "not 5"),
        ({"enabled": "no"}, "enabled", "true or false, not 'no'"),
        ({"include_origins": 1}, "include_origins", "true or false, not 1"),
        ({"tenant": ""}, "tenant", "a string of 1 to 256 characters, not ''"),
        ({"tenant": "t" * 257}, "tenant", "1 to 256 characters"),
        ({"tenant": 5}, "tenant", "not 5"),
    ],
)
def test_what_cannot_be_asked_for_is_refused_by_name(wish: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(RequestError) as error:
        check_speculation(SpeculationParams(**wish), ["ngram", "suffix"])
    assert error.value.param == f"speculation.{param}"
    assert says in error.value.message
    assert len(error.value.message) < 250


def test_an_engine_without_drafters_says_so() -> None:
    check_speculation(SpeculationParams(tenant="t" * 256, include_origins=True), [])
    with pytest.raises(RequestError, match="does not speculate; it is 'ngram'"):
        check_speculation(SpeculationParams(drafter="ngram"), [])
