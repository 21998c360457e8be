"""How much faster decoding is with speculation, by the clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sol.engine.types import DraftCounts
from sol.speculation.usage import add_counts
from sol.verification.equality import Case, Open, first_difference
from sol.verification.report import Cell, Speed
from sol.verification.session import Answer, Session

_REPETITIONS = 2
"""Of plain, speculative, speculative, plain: what drifts meanwhile counts for both."""


def count_answers(cases: Sequence[Case]) -> int:
    return len(cases) * 4 * _REPETITIONS


def measure(session: Session, cases: Sequence[Case], *, prefix_cache: bool) -> tuple[list[Speed], Cell, list[Open]]:
    """Each case alone, plainly and as the engine is configured; the tokens are compared as well."""
    cell = Cell(prefix_cache=prefix_cache, company="alone", drafter="as configured", sampling="greedy")
    speeds: list[Speed] = []
    differences: list[Open] = []
    for case in cases:
        ours = replace(case.ask, speculation=None)
        plain: list[Answer] = []
        speculative: list[Answer] = []
        for _ in range(_REPETITIONS):
            first, second, third, fourth = session.ask([case.ask, ours, ours, case.ask], together=False)
            plain += [first, fourth]
            speculative += [second, third]
        for answer in speculative:
            difference = first_difference(case, answer.token_ids, cell.name)
            if difference is not None:
                cell.differences.append(difference)
                differences.append(Open(difference, case))
        counts = _counts(speculative)
        cell.num_requests += len(speculative)
        cell.num_tokens += sum(len(answer.token_ids) for answer in speculative)
        cell.num_steps += sum(answer.usage.num_steps for answer in speculative if answer.usage is not None)
        cell.num_draft_tokens += counts.num_draft_tokens
        cell.num_accepted_tokens += counts.num_accepted_tokens
        if any(not answer.decode_seconds for answer in plain + speculative):
            continue  # an answer of one step: there is nothing to measure
        speeds.append(
            Speed(
                prompt=case.prompt,
                plain_tokens_per_second=_rate(plain),
                tokens_per_second=_rate(speculative),
                num_steps=sum(answer.usage.num_steps for answer in speculative if answer.usage is not None),
                num_drafts=counts.num_drafts,
                num_draft_tokens=counts.num_draft_tokens,
                num_accepted_tokens=counts.num_accepted_tokens,
            )
        )
    return speeds, cell, differences


def _rate(answers: Sequence[Answer]) -> float:
    return sum(answer.num_decoded_tokens for answer in answers) / sum(answer.decode_seconds for answer in answers)


def _counts(answers: Sequence[Answer]) -> DraftCounts:
    return add_counts(
        counts for answer in answers if answer.usage is not None for counts in answer.usage.drafters.values()
    )
