"""The requests a runner holds, and the ragged batch that a plan makes of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from sol.engine.types import CachedRequestData, NewRequestData, ProposalPlan, SchedulerOutput
from sol.ops import RaggedBatch
from sol.sampling.grammar import Grammars, grammar_state
from sol.sampling.processing import SamplingRow
from sol.sampling.prompt import PromptPart
from sol.speculation.propose import ProposalRow
from sol.speculation.verify import VerifyRow

_Ints = npt.NDArray[np.int64]


class HeldRequest:
    """Tokens and blocks of one request, kept between steps so that a plan need only say what changed."""

    __slots__ = (
        "_block_ids",
        "_num_blocks",
        "draft_probs",
        "num_computed_tokens",
        "output_token_ids",
        "prompt_token_ids",
        "row",
        "tenant",
    )

    def __init__(self, data: NewRequestData, grammars: Grammars | None = None) -> None:
        self.prompt_token_ids = np.array(data.token_ids[: data.num_prompt_tokens], dtype=np.int64)
        self.output_token_ids = data.token_ids[data.num_prompt_tokens :]
        self.num_computed_tokens = data.num_computed_tokens
        self._block_ids: _Ints = np.array(data.block_ids, dtype=np.int64)
        self._num_blocks = len(data.block_ids)
        self.draft_probs: torch.Tensor | None = None
        """[k, vocab_size]: what the drafts at hand were sampled from; None unless they were"""
        self.tenant = data.tenant
        self.row = SamplingRow(
            params=data.params,
            seed=data.seed,
            choice_index=data.choice_index,
            prompt_token_ids=data.token_ids[: data.num_prompt_tokens],
            output_token_ids=self.output_token_ids,
            eos_token_ids=data.eos_token_ids,
            grammar=grammar_state(data.params.grammar, grammars),
        )

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def block_ids(self) -> _Ints:
        return self._block_ids[: self._num_blocks]

    def update(self, data: CachedRequestData) -> None:
        self.num_computed_tokens = data.num_computed_tokens
        if data.new_block_ids:
            wanted = self._num_blocks + len(data.new_block_ids)
            if wanted > len(self._block_ids):
                self._block_ids = np.resize(self._block_ids, 2 * wanted)
            self._block_ids[self._num_blocks : wanted] = data.new_block_ids
            self._num_blocks = wanted

    def proposal_row(self, request_id: str, max_tokens: int) -> ProposalRow:
        return ProposalRow(
            request_id=request_id,
            sampling=self.row,
            max_tokens=max_tokens,
            block_ids=self.block_ids,
            num_computed_tokens=self.num_tokens - 1,
            tenant=self.tenant,
        )

    def prompt_part(self, request_id: str, count: int) -> PromptPart:
        start = self.num_computed_tokens + 1
        token_ids = self.prompt_token_ids[start : start + count].tolist()
        return PromptPart(request_id, token_ids, self.row.params.prompt_logprobs or 0)

    def tokens(self, start: int, stop: int) -> _Ints:
        prompt = self.prompt_token_ids
        if stop <= len(prompt):
            return prompt[start:stop]
        output = np.array(self.output_token_ids[max(0, start - len(prompt)) : stop - len(prompt)], dtype=np.int64)
        return output if start >= len(prompt) else np.concatenate([prompt[start:], output])


class InputBatch:
    """Not thread-safe. Order within a step is the plan's."""

    def __init__(self, block_size: int, device: torch.device, grammars: Grammars | None = None) -> None:
        self._block_size = block_size
        self._grammars = grammars
        self._device = device
        self._requests: dict[str, HeldRequest] = {}

    def apply(self, plan: SchedulerOutput) -> None:
        """Bring the held requests to where the plan says they are."""
        self.remove(plan.removed_request_ids)
        for new in plan.new_requests:
            if new.request_id in self._requests:
                raise RuntimeError(f"the plan adds {new.request_id!r}, which the runner holds already")
            self._requests[new.request_id] = HeldRequest(new, self._grammars)
        for cached in plan.cached_requests:
            self._requests[cached.request_id].update(cached)

    def remove(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._requests.pop(request_id, None)

    def build(self, plan: SchedulerOutput) -> tuple[RaggedBatch, list[str]]:
        """The step's tensors, and which requests have their last known token in it and so are to be sampled.

        Drafts come after that token. Each has a row of logits of its own, and all of a request's are consecutive.
        Rows of logits after prompt tokens come behind all of those, in the order of `plan.num_prompt_logprobs`.
        """
        tokens, positions, slots, tables = [], [], [], []
        query_lens, seq_lens, sampled = [], [], []
        logits_rows: list[int] = []
        prompt_rows: list[int] = []
        num_rows = 0
        for request_id, count in plan.num_scheduled_tokens.items():
            request = self._requests[request_id]
            start = request.num_computed_tokens
            stop = start + count
            span = np.arange(start, stop, dtype=np.int64)
            block_ids = request.block_ids
            drafts = plan.draft_token_ids.get(request_id)
            if drafts is None:
                tokens.append(request.tokens(start, stop))
            else:
                tokens += [request.tokens(start, stop - len(drafts)), np.array(drafts, dtype=np.int64)]
            positions.append(span)
            slots.append(block_ids[span // self._block_size] * self._block_size + span % self._block_size)
            tables.append(block_ids)
            query_lens.append(count)
            seq_lens.append(stop)
            prompt_rows += range(num_rows, num_rows + plan.num_prompt_logprobs.get(request_id, 0))
            num_rows += count
            num_drafts = 0 if drafts is None else len(drafts)
            if stop - num_drafts == request.num_tokens:
                logits_rows += range(num_rows - 1 - num_drafts, num_rows)
                sampled.append(request_id)
        table = np.zeros((len(tables), max(map(len, tables))), dtype=np.int64)
        for index, block_ids in enumerate(tables):
            table[index, : len(block_ids)] = block_ids
        batch = RaggedBatch(
            token_ids=self._tensor(np.concatenate(tokens)),
            positions=self._tensor(np.concatenate(positions)),
            slot_mapping=self._tensor(np.concatenate(slots)),
            block_table=self._tensor(table),
            query_lens=query_lens,
            seq_lens=seq_lens,
            logits_rows=self._tensor(np.array(logits_rows + prompt_rows, dtype=np.int64)),
        )
        return batch, sampled

    def prompt_parts(self, plan: SchedulerOutput) -> list[PromptPart]:
        """Of the requests in `plan.num_prompt_logprobs`, whose key order is the batch's."""
        return [self._requests[name].prompt_part(name, count) for name, count in plan.num_prompt_logprobs.items()]

    def sampling_rows(self, request_ids: Iterable[str]) -> list[SamplingRow]:
        return [self._requests[request_id].row for request_id in request_ids]

    def verify_rows(self, request_ids: Iterable[str], drafts: Mapping[str, list[int]]) -> list[VerifyRow]:
        rows = []
        for request_id in request_ids:
            held, draft = self._requests[request_id], drafts.get(request_id, ())
            probs, held.draft_probs = held.draft_probs, None
            rows.append(VerifyRow(held.row, draft, None if probs is None or not draft else probs[: len(draft)]))
        return rows

    def drop_draft_probs(self, request_ids: Iterable[str]) -> None:
        """Of drafts that are not verified: they are large, and no use any more."""
        for request_id in request_ids:
            self._requests[request_id].draft_probs = None

    def append(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Sampled tokens: the last one is the input of the request's next step."""
        self._requests[request_id].output_token_ids += token_ids

    def proposal_rows(self, plans: Mapping[str, ProposalPlan]) -> dict[str, ProposalRow]:
        """Of the requests that are to be drafted for, as they are after the step."""
        return {
            request_id: self._requests[request_id].proposal_row(request_id, plan.max_tokens)
            for request_id, plan in plans.items()
        }

    def set_draft_probs(self, request_id: str, probs: torch.Tensor | None) -> None:
        self._requests[request_id].draft_probs = probs

    def _tensor(self, values: _Ints) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)
