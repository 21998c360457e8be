"""What drafters that compute a model have in common: the whole batch drafts together, one forward pass a position.

The first pass computes, of each request, the tokens that the drafter has not computed yet, the last one among them;
each later one a single token, the draft before it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch

from sol.ops.program import Executor
from sol.sampling.drafting import draft_coupled, draft_independent
from sol.sampling.processing import SamplingRow, adjust, continued
from sol.sampling.sampler import likeliest
from sol.sampling_params import SamplingParams
from sol.speculation.config import DraftSampleMethod
from sol.speculation.propose.model_batch import Span, ragged_batch
from sol.speculation.propose.model_blocks import Ints
from sol.speculation.propose.protocol import Proposal, ProposalRow

SampleMany: TypeAlias = Callable[[torch.Tensor, Sequence[SamplingRow], Sequence[int]], list[int]]


@dataclass(slots=True)
class Candidate:
    """A request that may get drafts."""

    index: int
    """Among the rows of the call"""
    row: ProposalRow
    limit: int
    """At most so many drafts"""
    start: int
    """The first position that the drafter has to compute"""
    token_ids: Ints
    """From there to the request's last token, in the drafter's ids"""
    drafts: list[int] = field(default_factory=list)
    """In the target's ids"""
    scores: list[float] = field(default_factory=list)
    probs: list[torch.Tensor] = field(default_factory=list)

    @property
    def proposal(self) -> Proposal:
        return Proposal(
            token_ids=self.drafts, scores=self.scores, probs=torch.stack(self.probs) if self.probs else None
        )


class ModelDrafter(ABC):
    """A `Proposer` on an executor of its own.

    `max_positions`: the drafter computes positions below it only, and drafts nothing for longer requests.
    `max_num_tokens`: of a forward pass; a request with more to catch up is caught up over several calls, and drafted
    for in the last of them.
    `sample_many` picks coupled drafts of many requests at once, from logits [S, V], their rows and how many tokens each
    has with its drafts; without it they are picked one by one.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        block_size: int,
        max_positions: int,
        max_num_tokens: int,
        sample_method: DraftSampleMethod = "coupled",
        device: torch.device | None = None,
        sample_many: SampleMany | None = None,
    ) -> None:
        self._sample_many = sample_many
        self._executor = executor
        self._block_size = block_size
        self._max_positions = max_positions
        self._max_num_tokens = max_num_tokens
        self._sample_method = sample_method
        self._device = device or torch.device("cpu")

    @property
    @abstractmethod
    def name(self) -> str: ...

    @abstractmethod
    def forget(self, request_ids: Sequence[str], *, finished: bool) -> None: ...

    @torch.inference_mode()
    def propose(self, rows: Sequence[ProposalRow]) -> list[Proposal]:
        """See `Proposer.propose`. A request whose logits are not finite gets the drafts before them; if that is so of
        all requests from the first draft on, the model is broken: `FloatingPointError`."""
        proposals = [Proposal(token_ids=[]) for _ in rows]
        candidates = []
        for index, row in enumerate(rows):
            # The last draft is not computed: the positions are those of the last token and the drafts before it.
            slots = min(len(row.block_ids) * self._block_size, self._max_positions)
            limit = min(row.max_tokens, slots - row.num_tokens + 1)
            found = self._candidate(index, row, limit) if limit > 0 else None
            if found is not None:
                candidates.append(found)
        spans, drafting = self._first_pass(candidates)
        while spans:
            logits = self._forward(spans)
            if not drafting:  # nobody is caught up
                break
            drafting = self._draft(logits, drafting)
            spans = [
                Span(
                    block_ids=candidate.row.block_ids,
                    start=candidate.row.num_tokens - 1 + len(candidate.drafts),
                    token_ids=self._read(candidate.drafts[-1:]),
                    wants_logits=True,
                )
                for candidate in drafting
            ]
        for candidate in candidates:
            if candidate.drafts:
                proposals[candidate.index] = candidate.proposal
        return proposals

    @torch.inference_mode()
    def run_worst_case(self, num_requests: int, num_blocks: int) -> None:
        """The largest forward pass there can be, and drafts for so many requests that sample, before anybody waits: it
        must fit, and first calls are slow. Nothing it writes is believed later. Raises `FloatingPointError`."""
        capacity = min(num_blocks * self._block_size, self._max_positions)
        first = min(self._max_num_tokens - num_requests + 1, capacity)
        counts = [first] + [1] * (num_requests - 1)
        logits, spans = self._blind_pass(counts, num_blocks, 0)
        sampling = SamplingRow(SamplingParams(), 0, 0, [0], [], [])
        rows = [
            ProposalRow(request_id="", sampling=sampling, max_tokens=1, block_ids=span.block_ids, num_computed_tokens=0)
            for span in spans
        ]
        self._draft(logits, [Candidate(i, row, 1, 0, spans[i].token_ids) for i, row in enumerate(rows)])

    @torch.inference_mode()
    def rehearse(self, counts: Sequence[int], num_blocks: int, *, context: int = 0) -> None:
        """A forward pass over so many tokens of each request, behind `context` others or as many as fit; nothing if it
        is larger than passes are. For kernels that are compiled at their first launch. What it writes is not believed
        later, and what it reads need not have been written."""
        capacity = min(num_blocks * self._block_size, self._max_positions)
        if sum(counts) <= self._max_num_tokens and max(counts) <= capacity:
            self._blind_pass(counts, num_blocks, min(context, capacity - max(counts)))

    def _blind_pass(self, counts: Sequence[int], num_blocks: int, context: int) -> tuple[torch.Tensor, list[Span]]:
        block_ids = np.arange(num_blocks, dtype=np.int64)
        spans = [Span(block_ids, context, np.zeros(count, dtype=np.int64), wants_logits=True) for count in counts]
        return self._executor.forward(ragged_batch(spans, self._block_size, self._device)), spans

    def trim(self) -> None:
        """Give back what only large passes need, until the next one."""
        trim = getattr(self._executor, "trim", None)
        if trim is not None:
            trim()

    @abstractmethod
    def _candidate(self, index: int, row: ProposalRow, limit: int) -> Candidate | None:
        """What there is to compute for a row; None if the drafter cannot draft for it."""

    def _read(self, token_ids: Sequence[int]) -> Ints:
        """The target's ids as the drafter's."""
        return np.array(token_ids, dtype=np.int64)

    def _to_target(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits of the drafter's tokens → of the target's."""
        return logits

    def _forward(self, spans: Sequence[Span]) -> torch.Tensor:
        return self._executor.forward(ragged_batch(spans, self._block_size, self._device))

    def _first_pass(self, candidates: Sequence[Candidate]) -> tuple[list[Span], list[Candidate]]:
        """The tokens to compute first, and the candidates that are caught up by that, in the order of their spans.

        Requests that were drafted for in the step before come first; the others get what is left of `max_num_tokens`,
        in the order of the batch. Where requests share blocks that have to be computed, the first one does it.
        """
        spans, caught_up = [], []
        writing: set[int] = set()
        left = self._max_num_tokens
        for candidate in sorted(candidates, key=lambda c: len(c.token_ids) > 2):
            size, block_ids = self._block_size, candidate.row.block_ids
            start, count = candidate.start, min(len(candidate.token_ids), left)
            for block in range(start // size, -(-(start + count) // size)):
                if int(block_ids[block]) in writing:
                    count = max(0, block * size - start)
                    break
            if count == 0:
                continue
            writing.update(block_ids[start // size : -(-(start + count) // size)].tolist())
            done = count == len(candidate.token_ids)
            spans.append(Span(block_ids, start, candidate.token_ids[:count], wants_logits=done))
            if done:
                caught_up.append(candidate)
            left -= count
        return spans, caught_up

    def _draft(self, logits: torch.Tensor, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Adds a draft to each candidate; those that want another one."""
        logits = self._to_target(logits)
        temperatures = [_temperature(candidate.row.sampling) for candidate in candidates]
        scaled = logits
        if any(temperature != 1.0 for temperature in temperatures):
            scaled = logits / torch.tensor(temperatures, device=logits.device).unsqueeze(1)
        totals = scaled.logsumexp(-1)
        likely, finite, chances = _look(logits, scaled, totals)
        if not any(finite) and not any(candidate.drafts for candidate in candidates):
            raise FloatingPointError(f"{self.name}: the logits are not finite: its weights or its dtype overflow")
        sampled = self._picked_at_once(logits, candidates, finite)
        others, going_on = [], []
        for place, candidate in enumerate(candidates):
            if not finite[place]:
                continue
            token_id, probs = sampled.get(place), None
            if token_id is None:
                token_id, probs = self._pick(logits[place], likely[place], candidate.row.sampling, candidate.drafts)
            candidate.drafts.append(token_id)
            candidate.scores.append(chances[place])
            if token_id != likely[place]:
                others.append((place, token_id, candidate))
            if probs is not None:
                candidate.probs.append(probs)
            # Where the verifier has to know how drafts were drawn, how many there are does not depend on them.
            ends = probs is None and _ends(candidate.row.sampling, token_id)
            if len(candidate.drafts) < candidate.limit and not ends:
                going_on.append(candidate)
        if others:
            places, token_ids, owners = zip(*others, strict=True)
            for candidate, chance in zip(owners, _chances(scaled, totals, places, token_ids).tolist(), strict=True):
                candidate.scores[-1] = chance
        return going_on

    def _picked_at_once(
        self, logits: torch.Tensor, candidates: Sequence[Candidate], finite: Sequence[bool]
    ) -> dict[int, int]:
        """By place: the drafts of requests that sample, and want nothing that is computed one by one."""
        if self._sample_many is None or self._sample_method != "coupled":
            return {}
        places = [
            place
            for place, candidate in enumerate(candidates)
            if finite[place]
            and not candidate.row.sampling.params.greedy
            and not continued(candidate.row.sampling, candidate.drafts).changes_logits
        ]
        if not places:
            return {}
        chosen = [candidates[place] for place in places]
        counts = [candidate.row.num_tokens + len(candidate.drafts) for candidate in chosen]
        token_ids = self._sample_many(logits[places], [candidate.row.sampling for candidate in chosen], counts)
        return {place: token_id for place, token_id in zip(places, token_ids, strict=True) if token_id >= 0}

    def _pick(
        self, logits: torch.Tensor, likely: int, row: SamplingRow, drafts: Sequence[int]
    ) -> tuple[int, torch.Tensor | None]:
        """From logits [V] of the target's tokens: the draft, and what it was drawn from if that was by chance."""
        ahead = continued(row, drafts)
        if row.params.greedy or self._sample_method == "greedy":
            if not ahead.changes_logits:
                return likely, None
            return likeliest(adjust(logits, ahead).unsqueeze(0))[0][0], None
        if self._sample_method == "independent":
            return draft_independent(logits, row, drafts)
        return draft_coupled(logits, row, drafts), None


def _look(
    logits: torch.Tensor, scaled: torch.Tensor, totals: torch.Tensor
) -> tuple[list[int], list[bool], list[float]]:
    """Each row's likeliest token, whether its logit is finite, and its probability. A device is asked once."""
    if logits.device.type == "cpu":  # numpy's is vectorised: a tenth of the time
        token_ids = torch.from_numpy(logits.numpy().argmax(axis=-1))
    else:
        token_ids = logits.argmax(dim=-1)
    places = torch.arange(logits.shape[0], device=logits.device)
    best, chances = logits[places, token_ids], _chances(scaled, totals, places, token_ids)
    ids, finite, likely = torch.stack([token_ids.double(), best.isfinite().double(), chances.double()]).tolist()
    return [int(token_id) for token_id in ids], [bool(one) for one in finite], likely


def _chances(
    scaled: torch.Tensor,
    totals: torch.Tensor,
    places: torch.Tensor | Sequence[int],
    token_ids: torch.Tensor | Sequence[int],
) -> torch.Tensor:
    """The probabilities of tokens in rows of logits whose logsumexp is `totals`."""
    places, token_ids = (torch.as_tensor(values, device=scaled.device) for values in (places, token_ids))
    return (scaled[places, token_ids] - totals[places]).exp().clamp(0.0, 1.0)


def _temperature(row: SamplingRow) -> float:
    return 1.0 if row.params.greedy else row.params.temperature


def _ends(row: SamplingRow, token_id: int) -> bool:
    """Whether nothing can come after the token."""
    params = row.params
    return token_id in params.stop_token_ids or (not params.ignore_eos and token_id in row.eos_token_ids)
