"""Drafters that compute run on the GPU's kernels as they are: what they draft there is what they draft anywhere."""

from __future__ import annotations

import pytest
import torch
from tiny_programs import VOCAB_SIZE, random_program, reference

pytest.importorskip("triton")

from drafting_requests import SAMPLED, make_row, prompt, proposer, with_output

from sol.ops import EagerExecutor, KVCache
from sol.ops.gpu.ops import GpuOps
from sol.speculation.propose.early_exit import EarlyExitProposer, first_layers
from sol.speculation.propose.model_batch import Span, ragged_batch

CPU = torch.device("cpu")
SIZE = 16


def test_a_draft_model() -> None:
    program = random_program(layers=1)
    expected = reference(program, block_size=SIZE)
    found = EagerExecutor(program, GpuOps(CPU), KVCache(torch.full_like(expected.kv_cache.data, torch.nan)))
    plain, triton = (proposer(executor, block_size=SIZE) for executor in (expected, found))
    rows = [
        make_row("a", prompt(18), blocks=range(3, 6), max_tokens=2),
        make_row("b", prompt(3, seed=1), blocks=range(8, 10), max_tokens=3, params=SAMPLED),
    ]
    for _ in range(2):
        drafts = [proposal.token_ids for proposal in plain.propose(rows)]
        assert [proposal.token_ids for proposal in triton.propose(rows)] == drafts
        rows = [with_output(row, [*tokens, 5]) for row, tokens in zip(rows, drafts, strict=True)]


def test_early_exit() -> None:
    target = reference(random_program(layers=2), block_size=SIZE)
    row = make_row("a", prompt(9), blocks=range(3, 6), max_tokens=3)
    tokens = torch.tensor(row.sampling.prompt_token_ids[:-1]).numpy()
    target.forward(ragged_batch([Span(row.block_ids, 0, tokens, wants_logits=True)], SIZE, CPU))
    short = first_layers(target.program, 1)
    drafts = []
    for ops in (target.ops, GpuOps(CPU)):
        early = EarlyExitProposer(
            EagerExecutor(short, ops, target.kv_cache), block_size=SIZE, max_positions=64, max_num_tokens=4
        )
        drafts.append([proposal.token_ids for proposal in early.propose([row])])
    assert drafts[0] == drafts[1]
    assert len(drafts[0][0]) == 3
    assert max(drafts[0][0]) < VOCAB_SIZE
