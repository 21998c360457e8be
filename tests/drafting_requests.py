"""Requests that are drafted for, and what a model drafts for them if it computes everything afresh: the oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from tiny_cpu import Paged, cpu_executor, random_tokens
from tiny_programs import VOCAB_SIZE, packed, random_program

from sol.ops import Program
from sol.ops.cpu.executor import CpuExecutor
from sol.sampling.processing import SamplingRow, continued
from sol.sampling.sampler import sample_row
from sol.sampling_params import SamplingParams
from sol.speculation.propose import Proposal, ProposalRow
from sol.speculation.propose.draft_model import DraftModelProposer
from sol.speculation.propose.vocabulary import VocabularyMap

BLOCK_SIZE = 4
NUM_BLOCKS = 64

GREEDY = SamplingParams(temperature=0.0, max_tokens=100)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=100)
PENALISED = SamplingParams(temperature=0.0, repetition_penalty=1.5, logit_bias={5: 2.0}, min_tokens=90, max_tokens=100)


def make_row(
    request_id: str,
    prompt: Sequence[int],
    output: Sequence[int] = (),
    *,
    blocks: Sequence[int],
    max_tokens: int = 4,
    params: SamplingParams = GREEDY,
    seed: int = 7,
    eos: Sequence[int] = (),
) -> ProposalRow:
    sampling = SamplingRow(
        params=params,
        seed=seed,
        choice_index=0,
        prompt_token_ids=list(prompt),
        output_token_ids=list(output),
        eos_token_ids=list(eos),
    )
    return ProposalRow(
        request_id=request_id,
        sampling=sampling,
        max_tokens=max_tokens,
        block_ids=np.array(blocks, dtype=np.int64),
        num_computed_tokens=len(prompt) + len(output) - 1,
    )


def with_output(row: ProposalRow, token_ids: Sequence[int], **changes: Any) -> ProposalRow:
    """The row after these tokens have been emitted."""
    sampling = row.sampling
    longer = dataclasses.replace(sampling, output_token_ids=[*sampling.output_token_ids, *token_ids])
    computed = row.num_tokens + len(token_ids) - 1
    return dataclasses.replace(row, sampling=longer, num_computed_tokens=computed, **changes)


def tokens_of(row: ProposalRow) -> list[int]:
    return [*row.sampling.prompt_token_ids, *row.sampling.output_token_ids]


def oracle(program: Program, row: ProposalRow, count: int | None = None) -> list[int]:
    """The tokens that plain decoding with `program` continues the row by, every one computed from the beginning."""
    drafts: list[int] = []
    with cpu_executor(program, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE) as executor:
        for _ in range(row.max_tokens if count is None else count):
            paged = Paged(executor, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
            logits = paged.step({0: tokens_of(row) + drafts})[-1]
            drafts.append(sample_row(logits, continued(row.sampling, drafts)))
    return drafts


@contextmanager
def draft_model(program: Program, **options: Any) -> Iterator[DraftModelProposer]:
    with cpu_executor(program, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE) as executor:
        yield proposer(executor, **options)


def proposer(executor: Any, **options: Any) -> DraftModelProposer:
    size = options.pop("vocab_size", VOCAB_SIZE)
    vocabulary = options.pop("vocabulary", None) or VocabularyMap.identity(size, size)
    values = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "max_positions": 2048, "max_num_tokens": 256}
    return DraftModelProposer(executor, vocabulary, **(values | options))


def one(proposer: Any, row: ProposalRow) -> Proposal:
    [proposal] = proposer.propose([row])
    return proposal  # type: ignore[no-any-return]


def program(**options: Any) -> Program:
    return packed(random_program(**options))


def prompt(count: int, seed: int = 0) -> list[int]:
    return random_tokens(count, seed=seed, vocab_size=VOCAB_SIZE)


class Counting:
    """An executor that remembers the tokens of its passes, and fails where it is told to."""

    def __init__(self, executor: CpuExecutor) -> None:
        self._executor = executor
        self.passes: list[list[int]] = []
        self.fail_in: int | None = None
        """The pass, counted from now on, in which to fail once half of its work is done"""

    def forward(self, batch: Any) -> torch.Tensor:
        logits = self._executor.forward(batch)
        self.passes.append(batch.query_lens)
        if self.fail_in is not None:
            self.fail_in -= 1
            if self.fail_in < 0:
                self.fail_in = None
                self._executor.kv_cache.fill_(0xFF)  # whatever it may have written
                raise MemoryError("no memory in the middle of a pass")
        return logits
