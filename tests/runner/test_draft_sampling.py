"""Drafts that are picked at once are those that are picked one by one."""

from __future__ import annotations

import pytest
import torch

from sol.runner.draft_sampling import sample_drafts
from sol.sampling.drafting import draft_coupled
from sol.sampling.processing import SamplingRow
from sol.sampling_params import SamplingParams

VOCABULARY = 300
PARAMS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=20),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=1.5, top_k=200, top_p=0.95, min_p=0.02),
]


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("shared", [VOCABULARY, 150])
def test_at_once_as_one_by_one(num_drafts: int, shared: int) -> None:
    """`shared`: the tokens that the drafter has; it says nothing of the others."""
    generator = torch.Generator().manual_seed(shared)
    rows = [
        SamplingRow(params, 1000 * index + 5, index % 3, [1] * (index + 1), [2] * index, [])
        for index, params in enumerate(PARAMS * 6)
    ]
    logits = torch.randn(len(rows), VOCABULARY, generator=generator) * 3
    logits[:, shared:] = -torch.inf
    counts = [len(row.prompt_token_ids) + len(row.output_token_ids) + num_drafts for row in rows]
    wanted = [draft_coupled(row_logits, row, [3] * num_drafts) for row_logits, row in zip(logits, rows, strict=True)]
    assert sample_drafts(logits, rows, counts) == wanted
    assert len(set(wanted)) > 10


def test_logits_that_are_not_numbers() -> None:
    logits = torch.zeros(2, VOCABULARY)
    logits[1, 7] = torch.nan
    rows = [SamplingRow(SamplingParams(), 1, 0, [1], [], [])] * 2
    first, second = sample_drafts(logits, rows, [1, 1])
    assert 0 <= first < VOCABULARY
    assert second == -1
