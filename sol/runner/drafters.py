"""The drafters an engine has: asked as a plan says, timed, checked, and put aside where they fail.

A drafter may fail in any way. That costs its drafts and never a request: what it raises or returns is looked at here,
and it is left alone for a while that doubles with every failure in a row.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from sol.engine.types import Draft, Drafting, ProposalPlan, SchedulerOutput
from sol.speculation.propose import Proposal, ProposalRow, Proposer
from sol.speculation.usage import expected_accepted

logger = logging.getLogger(__name__)

FIRST_REST: Final = 1.0
"""Seconds after a first failure"""
LONGEST_REST: Final = 300.0


@dataclass(slots=True)
class _Member:
    proposer: Proposer
    num_failures: int = 0
    """In a row"""
    rests_until: float = -math.inf


@dataclass(slots=True)
class Round:
    """What came of asking."""

    proposals: dict[str, tuple[str, Proposal]] = field(default_factory=dict)
    """By request: who proposes, and what (at least one token)"""
    draftings: list[Drafting] = field(default_factory=list)


class Drafters:
    """`clock` counts seconds."""

    def __init__(
        self, proposers: Sequence[Proposer], *, vocab_size: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._members = {proposer.name: _Member(proposer) for proposer in proposers}
        self._vocab_size = vocab_size
        self._clock = clock

    @property
    def names(self) -> list[str]:
        return list(self._members)

    def propose(self, plans: Mapping[str, ProposalPlan], rows: Mapping[str, ProposalRow]) -> Round:
        """`rows` has those of `plans` that can be drafted for (a request that failed in the step cannot)."""
        result = Round()
        started = self._clock()
        asked: dict[str, list[ProposalRow]] = {}
        for request_id, row in rows.items():
            plan = plans[request_id]
            row.max_tokens = plan.max_tokens
            asked.setdefault(plan.drafter, []).append(row)
        second: dict[str, list[ProposalRow]] = {}
        for name, members in asked.items():
            for row, proposal in zip(members, self._ask(name, members, result), strict=True):
                plan = plans[row.request_id]
                if plan.fallback is not None and plan.fallback_max_tokens and expected(proposal) < plan.trust:
                    row.max_tokens = plan.fallback_max_tokens
                    second.setdefault(plan.fallback, []).append(row)
                if proposal.token_ids:
                    result.proposals[row.request_id] = name, proposal
        for name, members in second.items():
            for row, proposal in zip(members, self._ask(name, members, result), strict=True):
                if proposal.token_ids:
                    result.proposals[row.request_id] = name, proposal
        if result.draftings:
            # What lies between the calls is their price too, and not the target's.
            between = self._clock() - started - sum(drafting.seconds for drafting in result.draftings)
            for drafting in result.draftings:
                drafting.seconds += between / len(result.draftings)
        return result

    def leave(self, plan: SchedulerOutput) -> None:
        """What the requests that a plan removes leave behind is forgotten."""
        preempted = plan.preempted_request_ids
        removed = plan.removed_request_ids
        self.forget([name for name in removed if name not in preempted], finished=True)
        self.forget([name for name in removed if name in preempted], finished=False)

    def forget(self, request_ids: Sequence[str], *, finished: bool) -> None:
        if not request_ids:
            return
        for name, member in self._members.items():
            try:
                member.proposer.forget(request_ids, finished=finished)
            except Exception as error:
                self._put_aside(name, member, error)

    def _ask(self, name: str, rows: Sequence[ProposalRow], result: Round) -> list[Proposal]:
        """One proposal a row, an empty one where the drafter has none or rests."""
        nothing = [Proposal(token_ids=[]) for _ in rows]
        member = self._members.get(name)
        if member is None:
            raise RuntimeError(f"the plan asks the drafter {name!r}, which this engine does not have")
        started = self._clock()
        if started < member.rests_until:
            return nothing
        error: str | None = None
        proposals = nothing
        try:
            proposals = member.proposer.propose(rows)
            self._check(proposals, rows)
            for proposal, row in zip(proposals, rows, strict=True):
                if row.sampling.grammar is not None:
                    _cut(proposal, row)
            member.num_failures = 0
        except Exception as failure:
            self._put_aside(name, member, failure)
            error = f"{type(failure).__name__}: {failure}"
            proposals = nothing
        result.draftings.append(
            Drafting(
                drafter=name,
                num_requests=len(rows),
                num_tokens=sum(len(proposal.token_ids) for proposal in proposals),
                seconds=self._clock() - started,
                error=error,
                request_ids=[row.request_id for row in rows],
                num_request_tokens=[row.num_tokens for row in rows],
            )
        )
        return proposals

    def _put_aside(self, name: str, member: _Member, error: Exception) -> None:
        rest = min(LONGEST_REST, FIRST_REST * 2.0**member.num_failures)
        member.num_failures += 1
        member.rests_until = self._clock() + rest
        logger.warning(
            "the drafter %s failed and is put aside for %.0f s, requests go on without it: %s: %s",
            name,
            rest,
            type(error).__name__,
            error,
            exc_info=member.num_failures == 1,
        )

    def _check(self, proposals: Sequence[Proposal], rows: Sequence[ProposalRow]) -> None:
        """Raise `ValueError` for what no drafter may return."""
        if len(proposals) != len(rows):
            raise ValueError(f"{len(proposals)} proposals for {len(rows)} requests")
        for proposal, row in zip(proposals, rows, strict=True):
            token_ids, scores = proposal.token_ids, proposal.scores
            if len(token_ids) > row.max_tokens:
                raise ValueError(f"{len(token_ids)} drafts where at most {row.max_tokens} were asked for")
            for token_id in token_ids:
                if not (isinstance(token_id, int) and 0 <= token_id < self._vocab_size):
                    raise ValueError(f"{token_id!r} is not in the vocabulary of {self._vocab_size} tokens")
            if scores is not None and not (
                len(scores) == len(token_ids) and all(0.0 <= score <= 1.0 for score in scores)
            ):
                raise ValueError(f"scores {scores} of {len(token_ids)} drafts are not one probability each")
            if proposal.probs is not None:
                self._check_probs(proposal.probs, token_ids)

    def _check_probs(self, probs: torch.Tensor, token_ids: Sequence[int]) -> None:
        if tuple(probs.shape) != (len(token_ids), self._vocab_size):
            raise ValueError(f"probs {tuple(probs.shape)} of {len(token_ids)} drafts from {self._vocab_size} tokens")
        chosen = probs[torch.arange(len(token_ids)), torch.tensor(token_ids, dtype=torch.int64)]
        if not bool((probs >= 0.0).all() & probs.isfinite().all() & (chosen > 0.0).all()):
            raise ValueError("drafts were drawn from what are no distributions, or that do not hold them")


def _cut(proposal: Proposal, row: ProposalRow) -> None:
    """Leave off the drafts from the first on that the request's grammar forbids. Not those that were sampled: whether
    one is verified must not depend on which it is."""
    grammar = row.sampling.grammar
    if grammar is None or proposal.probs is not None or not proposal.token_ids:
        return
    count = grammar.num_allowed(row.sampling.output_token_ids, proposal.token_ids)
    proposal.token_ids = proposal.token_ids[:count]
    proposal.scores = None if proposal.scores is None else proposal.scores[:count]


def as_draft(drafter: str, proposal: Proposal) -> Draft:
    """What the scheduler hears of a proposal."""
    return Draft(
        drafter=drafter, token_ids=proposal.token_ids, scores=proposal.scores, sampled=proposal.probs is not None
    )


def expected(proposal: Proposal) -> float:
    """How many of its drafts the drafter itself expects to be accepted."""
    if proposal.scores is None:
        return float(len(proposal.token_ids))
    return expected_accepted(proposal.scores)
