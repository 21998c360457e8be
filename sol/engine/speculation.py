"""The scheduler's side of speculative decoding: what the controller is asked and told, and what each request hears.

A step is planned without drafts first. What it leaves over of tokens, logits and blocks may go to drafts: they never
cost a neighbour its turn, a prompt its chunk, or anybody a block.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from sol.engine.pace import Pace
from sol.engine.request import Request
from sol.engine.types import (
    TARGET,
    CachedRequestData,
    Draft,
    DraftCounts,
    EngineStats,
    NewRequestData,
    ProposalPlan,
    SchedulerOutput,
    SpeculationUsage,
    StepOutput,
)
from sol.speculation.plan import Candidate, Controller, Drafter, Emission, GuardedController, StepShape

_LEAST_DRAFTS_AHEAD: Final = 0.2
"""For each request of a step, where steps are planned ahead: a step that verifies drafts is read before the next one is
planned, and the device waits for the host meanwhile, a tenth of a step or so. About half of few drafts come out."""

Reserve = Callable[["PlannedRow", int], int]
"""Blocks for the KV cache of so many leading tokens of a row's request, if they can be spared → for how many there
are."""


@dataclass(slots=True)
class PlannedRow:
    """One request in a plan whose result has not been read."""

    request: Request
    entry: NewRequestData | CachedRequestData
    """Its part of the plan"""
    sampled: bool
    decoding: bool
    """Its last token was all there was to compute."""
    draft: Draft | None = None
    """What was at hand for it"""
    num_drafts: int = 0
    """So much of that is verified."""
    prompt_start: int = 0
    """The place in the prompt of the first of its tokens …"""
    num_prompt_logprobs: int = 0
    """… and after how many of them logprobs are wanted of the prompt's next token"""
    writes_ahead: bool = False
    """Whoever drafts for it after the step writes into its blocks behind its tokens."""

    @property
    def drafter(self) -> str | None:
        """Whose drafts are verified"""
        return self.draft.drafter if self.draft is not None and self.num_drafts else None

    @property
    def most_new_tokens(self) -> int:
        return 1 + self.num_drafts if self.sampled else 0


@dataclass(slots=True)
class PlannedStep:
    rows: list[PlannedRow]
    shape: StepShape | None = None
    """Settled once the plan is complete, where somebody wants to know."""
    ahead: bool = False
    """It was planned before the one before it was read."""
    num_tokens: int = 0
    """That it computes, drafts included."""


class Speculation:
    """`caching` are the drafters that write a KV cache of their own into a request's blocks, ahead of its tokens."""

    def __init__(self, controller: Controller, *, num_speculative_tokens: int, caching: Collection[str] = ()) -> None:
        self._controller = GuardedController(controller)
        self._num_speculative_tokens: Final = num_speculative_tokens
        self._caching = frozenset(caching)
        self._pace = Pace()

    @property
    def failure(self) -> Exception | None:
        """What the controller failed with; from then on nothing is drafted."""
        return self._controller.failure

    @property
    def most_ahead(self) -> int:
        """A request may hold blocks for so many tokens after its own: rejected drafts, and what was drafted ahead."""
        return 2 * self._num_speculative_tokens

    def add(self, request: Request) -> None:
        request.usage = SpeculationUsage()
        self._controller.add(request.request_id, request.speculation)

    def remove(self, request: Request) -> None:
        self._controller.remove(request.request_id)

    # ── planning ─────────────────────────────────────────────────────────────────────────────────────────────────

    def waits(self, requests: Sequence[Request], *, max_tokens: int) -> bool:
        """Whether these requests, all that decode, should wait for tokens that have not been read, to have drafts
        verified then; a step of them all has room for `max_tokens` drafts.

        A draft for tokens that are under way by now is no use itself; what it says of those after them is a guess at
        what the next proposal will say.
        """
        candidates = []
        for request in requests if max_tokens > 0 else ():
            draft, passed = request.draft, request.num_pending_tokens
            # Drafts with noise of their own: whether the next ones are verified must not depend on what these are.
            if draft is None or draft.sampled or not passed:
                continue
            limit = min(len(draft.token_ids) - passed, self._num_speculative_tokens, request.num_unplanned_tokens - 1)
            if limit < 1:
                continue
            rest = Draft(
                drafter=draft.drafter,
                token_ids=draft.token_ids[passed:],
                scores=None if draft.scores is None else draft.scores[passed:],
            )
            candidates.append(
                Candidate(
                    request_id=request.request_id, draft=rest, max_tokens=limit, num_tokens=request.num_planned_tokens
                )
            )
        if not candidates or not self._pace.may_wait(len(requests)):
            return False
        shape = StepShape(
            num_tokens=len(requests),
            num_requests=len(requests),
            num_logits_rows=len(requests),
            num_context_tokens=sum(request.num_planned_tokens for request in requests),
        )
        return any(self._choose(shape, candidates, max_tokens, works_ahead=True))

    def _choose(
        self, shape: StepShape, candidates: Sequence[Candidate], max_tokens: int, *, works_ahead: bool
    ) -> list[int]:
        counts = self._controller.choose_drafts(shape, candidates, max_tokens=max_tokens)
        if works_ahead and sum(counts) < _LEAST_DRAFTS_AHEAD * shape.num_requests:
            return [0] * len(counts)
        return counts

    def extend(
        self, plan: SchedulerOutput, step: PlannedStep, *, max_tokens: int, reserve: Reserve, works_ahead: bool = False
    ) -> None:
        """Add at most `max_tokens` drafts to a plan that is complete but for them, and say who drafts afterwards.

        `works_ahead`: without drafts the next step would be planned before this one is read.
        """
        rows = step.rows
        sampled = [row for row in rows if row.sampled]
        shape = StepShape(
            num_tokens=sum(plan.num_scheduled_tokens.values()),
            num_requests=len(rows),
            num_logits_rows=len(sampled) + sum(plan.num_prompt_logprobs.values()),
            num_context_tokens=sum(row.request.num_computed_tokens for row in rows),
        )
        self._add_drafts(plan, rows, shape, max_tokens, reserve, works_ahead=works_ahead)
        step.shape = shape
        self._add_proposals(plan, sampled, shape, reserve)

    def _add_drafts(
        self,
        plan: SchedulerOutput,
        rows: Sequence[PlannedRow],
        shape: StepShape,
        most: int,
        reserve: Reserve,
        *,
        works_ahead: bool,
    ) -> None:
        chosen: list[PlannedRow] = []
        candidates: list[Candidate] = []
        for row in rows:
            request, draft = row.request, row.request.draft
            if draft is None or not row.decoding or request.num_pending_tokens > 1:
                continue
            row.draft = draft
            # The step's own token is planned already; each accepted draft is one more.
            limit = min(len(draft.token_ids), self._num_speculative_tokens, request.num_unplanned_tokens)
            if limit < 1:
                continue
            if draft.sampled:
                most -= self._verify(plan, row, min(limit, most), shape, reserve)
                continue
            chosen.append(row)
            candidates.append(
                Candidate(request_id=request.request_id, draft=draft, max_tokens=limit, num_tokens=request.num_tokens)
            )
        if not candidates or not most:
            return
        counts = self._choose(shape, candidates, most, works_ahead=works_ahead)
        for row, count in zip(chosen, counts, strict=True):
            self._verify(plan, row, count, shape, reserve)

    def _verify(self, plan: SchedulerOutput, row: PlannedRow, count: int, shape: StepShape, reserve: Reserve) -> int:
        """How many drafts there is room for, of `count`; they are in the plan then."""
        request, draft = row.request, row.draft
        assert draft is not None
        if count < 1:
            return 0
        computed = request.num_computed_tokens
        count = min(count, reserve(row, computed + count) - computed)
        if count < 1:
            return 0
        row.num_drafts = count
        request.num_computed_tokens += count
        request.num_pending_tokens += count
        request.num_verifying += count
        plan.num_scheduled_tokens[request.request_id] += count
        plan.draft_token_ids[request.request_id] = draft.token_ids[:count]
        shape.num_tokens += count
        shape.num_logits_rows += count
        shape.num_context_tokens += count
        return count

    def _add_proposals(
        self, plan: SchedulerOutput, rows: Sequence[PlannedRow], shape: StepShape, reserve: Reserve
    ) -> None:
        drafters: list[Drafter] = []
        asked: list[PlannedRow] = []
        most = self._num_speculative_tokens
        for row in rows:
            request = row.request
            num_tokens = len(request.token_ids)
            left = request.max_num_tokens - num_tokens - request.num_pending_tokens - 1
            if left < 1:
                continue
            asked.append(row)
            drafters.append(
                Drafter(
                    request_id=request.request_id,
                    max_tokens=left if left < most else most,
                    num_tokens=num_tokens,
                    num_draft_tokens=row.num_drafts,
                )
            )
        if not drafters:
            return
        for row, drafter, proposal in zip(
            asked, drafters, self._controller.choose_proposals(shape, drafters), strict=True
        ):
            if proposal is None:
                continue
            if not self._caching:
                plan.proposals[drafter.request_id] = proposal
                continue
            within = self._within_blocks(row, proposal, drafter.max_tokens, reserve)
            if within is not None:
                plan.proposals[row.request.request_id] = within

    def _within_blocks(
        self, row: PlannedRow, proposal: ProposalPlan, most: int, reserve: Reserve
    ) -> ProposalPlan | None:
        """The part of a proposal for which there are blocks, where a drafter writes ahead into them."""
        names = {proposal.drafter: proposal.max_tokens, proposal.fallback: proposal.fallback_max_tokens}
        ahead = max((count for name, count in names.items() if name in self._caching), default=0)
        if ahead < 1:
            return proposal
        # Whatever is accepted, its drafter may write that much behind it.
        known = row.request.num_planned_tokens
        room = reserve(row, known + min(ahead, most)) - known
        kept = [
            (name, min(count, room) if name in self._caching else count)
            for name, count in names.items()
            if name is not None and (room > 0 or name not in self._caching)
        ]
        if not kept:
            return None
        if room > 0:
            row.writes_ahead = True
            row.request.num_draftings += 1
        (first, count), *others = kept
        second, second_count = others[0] if others else (None, 0)
        return ProposalPlan(
            drafter=first, max_tokens=count, fallback=second, fallback_max_tokens=second_count, trust=proposal.trust
        )

    # ── results ──────────────────────────────────────────────────────────────────────────────────────────────────

    def observe(self, step: PlannedStep, rows: Sequence[PlannedRow], result: StepOutput, seconds: float | None) -> None:
        """A step has been read; `rows` are those of requests that are still there. `seconds`: how long it took, with
        drafting; None if nobody measured."""
        shape = step.shape
        for drafting in result.draftings:
            self._controller.observe_drafting(drafting)
        if seconds is None or shape is None:
            return
        emissions = []
        sampled = result.sampled_token_ids
        for row in rows:
            if not row.decoding:
                continue
            request = row.request
            token_ids = sampled.get(request.request_id)
            if token_ids:
                emissions.append(
                    Emission(
                        request_id=request.request_id,
                        drafter=row.drafter if row.num_drafts else None,
                        num_draft_tokens=row.num_drafts,
                        num_accepted_tokens=len(token_ids) - 1,
                        num_new_tokens=1 if len(token_ids) == 1 else request.num_kept(token_ids),
                        # Where steps are planned ahead, drafts come too late to be planned with, not to be judged.
                        draft=row.draft or request.draft,
                        new_token_ids=token_ids,
                    )
                )
        if emissions and len(emissions) == len(rows) == shape.num_requests:
            num_tokens = sum(emission.num_new_tokens for emission in emissions)
            self._pace.observe(shape.num_requests, num_tokens, seconds, ahead=step.ahead)
        spent = sum(drafting.seconds for drafting in result.draftings)
        self._controller.observe_step(shape, max(0.0, seconds - spent), emissions)

    def count(self, row: PlannedRow, num_accepted: int) -> None:
        """`num_accepted` drafts of the row came out: those that were accepted, up to the request's end."""
        usage = row.request.usage
        usage.num_steps += 1
        if row.num_drafts and row.drafter is not None:
            counts = usage.drafters.setdefault(row.drafter, DraftCounts())
            counts.num_drafts += 1
            counts.num_draft_tokens += row.num_drafts
            counts.num_accepted_tokens += num_accepted

    def usage(self, request: Request, *, finished: bool) -> SpeculationUsage | None:
        """What a request's output says of it. Nothing while there is nothing to say, except at the end."""
        usage = request.usage
        if not usage.drafters and not finished:
            return None
        return SpeculationUsage(
            num_steps=usage.num_steps,
            drafters={
                name: DraftCounts(
                    num_drafts=counts.num_drafts,
                    num_draft_tokens=counts.num_draft_tokens,
                    num_accepted_tokens=counts.num_accepted_tokens,
                )
                for name, counts in usage.drafters.items()
            },
            speedup=self._controller.speedup(request.request_id),
        )

    def add_stats(self, stats: EngineStats) -> None:
        stats.drafters, stats.decode_seconds, stats.plain_seconds = self._controller.take_stats()


def origins(row: PlannedRow, num_new_tokens: int, num_accepted: int) -> list[str] | None:
    """Who made each of a row's new tokens; None if the request does not ask."""
    wish = row.request.speculation
    if wish is None or not wish.include_origins:
        return None
    drafted = min(num_accepted, num_new_tokens)
    return [row.drafter or TARGET] * drafted + [TARGET] * (num_new_tokens - drafted)
