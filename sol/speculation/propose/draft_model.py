"""A second, smaller checkpoint that drafts, with a KV cache of its own.

Its cache has as many blocks of as many tokens as the target's and is addressed by the same block tables, so that there
is no second allocator that could run full or disagree. What of a block is computed is `ComputedBlocks`' business.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sol.ops.program import Executor
from sol.sampling.processing import SamplingRow
from sol.speculation.config import DraftSampleMethod
from sol.speculation.propose.model_batch import Span
from sol.speculation.propose.model_blocks import ComputedBlocks, Context, Ints
from sol.speculation.propose.model_drafter import Candidate, ModelDrafter, SampleMany
from sol.speculation.propose.protocol import ProposalRow
from sol.speculation.propose.vocabulary import VocabularyMap


class DraftModelProposer(ModelDrafter):
    """Implements `Proposer`. The executor's KV cache is this drafter's alone, `num_blocks` of `block_size` tokens."""

    def __init__(
        self,
        executor: Executor,
        vocabulary: VocabularyMap,
        *,
        num_blocks: int,
        block_size: int,
        max_positions: int,
        max_num_tokens: int,
        sample_method: DraftSampleMethod = "coupled",
        device: torch.device | None = None,
        sample_many: SampleMany | None = None,
    ) -> None:
        super().__init__(
            executor,
            block_size=block_size,
            max_positions=max_positions,
            max_num_tokens=max_num_tokens,
            sample_method=sample_method,
            device=device,
            sample_many=sample_many,
        )
        self._vocabulary = vocabulary
        self._blocks = ComputedBlocks(num_blocks, block_size)
        self._contexts: dict[str, Context] = {}

    @property
    def name(self) -> str:
        return "draft_model"

    def forget(self, request_ids: Sequence[str], *, finished: bool) -> None:
        """What their blocks hold stays known: a preempted request may find some of them again, as others may."""
        for request_id in request_ids:
            self._contexts.pop(request_id, None)

    def _candidate(self, index: int, row: ProposalRow, limit: int) -> Candidate | None:
        context = self._context(row)
        if not context.readable:
            return None
        # The last token is computed anyway: its logits are wanted.
        start = self._blocks.num_valid(context, row.block_ids, row.num_tokens - 1)
        return Candidate(index, row, limit, start, context.tokens[start:])

    def _context(self, row: ProposalRow) -> Context:
        context = self._contexts.get(row.request_id)
        if context is None or len(context) > row.num_tokens:
            context = self._contexts[row.request_id] = Context(self._block_size)
        if len(context) < row.num_tokens:
            context.extend(self._read(_tokens_from(row.sampling, len(context))))
        return context

    def _read(self, token_ids: Sequence[int]) -> Ints:
        return self._vocabulary.read(np.array(token_ids, dtype=np.int64))

    def _to_target(self, logits: torch.Tensor) -> torch.Tensor:
        return self._vocabulary.to_target(logits)

    def _forward(self, spans: Sequence[Span]) -> torch.Tensor:
        # In this order a forward pass that fails half-way leaves blocks that are taken for shorter than they are.
        for span in spans:
            self._blocks.invalidate(span.block_ids, span.start, span.stop)
        logits = super()._forward(spans)
        for span in spans:
            self._blocks.record(span.block_ids, span.start, span.token_ids)
        return logits


def _tokens_from(row: SamplingRow, start: int) -> list[int]:
    """Prompt and output from token `start` on."""
    num_prompt = len(row.prompt_token_ids)
    prompt = row.prompt_token_ids[start:] if start < num_prompt else ()
    return [*prompt, *row.output_token_ids[max(0, start - num_prompt) :]]
