"""Sampling of many rows at once gives what the sampler gives one by one."""

from __future__ import annotations

import pytest
import torch

from sol.sampling.batched import NOT_FINITE, SamplingParameters, needs_host, sample_rows
from sol.sampling.noise import choice_key, gumbel, stream_key, stream_keys
from sol.sampling.processing import SamplingRow
from sol.sampling.sampler import sample
from sol.sampling_params import SamplingParams

VOCAB_SIZE = 1000

PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=3.0, top_k=5),
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=1.5, top_k=VOCAB_SIZE + 7),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=1.0, top_p=0.01),
    SamplingParams(temperature=4.0, top_p=0.97),
    SamplingParams(temperature=2.0, min_p=0.1),
    SamplingParams(temperature=1.0, min_p=1.0),
    SamplingParams(temperature=1.3, top_k=40, top_p=0.8, min_p=0.02),
    SamplingParams(temperature=9.0, top_k=300, top_p=0.5),
]


def make_row(params: SamplingParams, index: int, position: int) -> SamplingRow:
    return SamplingRow(
        params=params,
        seed=index * 77 - 5,
        choice_index=index % 3,
        prompt_token_ids=[1] * (index + 1),
        output_token_ids=[2] * position,
        eos_token_ids=[],
    )


def on_rows(rows: list[SamplingRow]) -> tuple[SamplingParameters, torch.Tensor, torch.Tensor]:
    """Parameters in which row i of the batch has entry i + 2; which they are; and the requests' lengths."""
    parameters = SamplingParameters.empty(len(rows) + 2, torch.device("cpu"))
    for index, row in enumerate(rows):
        parameters.fill(index + 2, row)
    lengths = [len(row.prompt_token_ids) + len(row.output_token_ids) for row in rows]
    return parameters, torch.arange(2, len(rows) + 2), torch.tensor(lengths, dtype=torch.int32)


def test_keys_of_many_are_the_keys_of_each() -> None:
    seeds, positions = [0, 5, -(2**63), 2**63 - 1, 123456789], [0, 1, 7, 4000, 131071]
    wanted = [stream_key(seed, 2, position) for seed, position in zip(seeds, positions, strict=True)]
    signed = torch.tensor([key - 2**64 if key >= 2**63 else key for key in wanted])
    bases = [choice_key(seed, 2) for seed in seeds]
    keys = stream_keys(torch.tensor([key - 2**64 if key >= 2**63 else key for key in bases]), torch.tensor(positions))
    assert torch.equal(keys, signed)
    ids = torch.arange(50)
    assert torch.equal(gumbel(keys.unsqueeze(1), ids), torch.stack([gumbel(key, ids) for key in wanted]))


@pytest.mark.parametrize("seed", range(4))
def test_tokens_are_the_sampler_s(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = [make_row(params, index, seed + index) for index, params in enumerate(PARAMS)]
    logits = torch.randn(len(rows), VOCAB_SIZE, generator=generator) * 3
    parameters, entries, lengths = on_rows(rows)
    wanted = [token.token_id for token in sample(logits, rows)]
    assert sample_rows(logits, entries, lengths, parameters).tolist() == wanted


def test_rows_that_are_not_numbers_are_marked() -> None:
    logits = torch.randn(5, VOCAB_SIZE)
    logits[0, 3], logits[1, 4], logits[2] = torch.nan, torch.inf, -torch.inf
    logits[3, 5:] = -torch.inf
    rows = [make_row(SamplingParams(temperature=t), i, 0) for i, t in enumerate((0.0, 1.0, 1.0, 1.0, 0.0))]
    parameters, entries, lengths = on_rows(rows)
    tokens = sample_rows(logits, entries, lengths, parameters).tolist()
    assert tokens[:3] == [NOT_FINITE] * 3
    assert tokens[3:] == [token.token_id for token in sample(logits, rows)][3:]
    assert tokens[3] < 5


def test_equal_logits_at_the_edge_of_top_k_all_stay() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 10:14] = 2.0
    seen = set()
    for position in range(100):
        parameters, entries, lengths = on_rows([make_row(SamplingParams(temperature=1.0, top_k=2), 0, position)])
        seen.add(int(sample_rows(logits, entries, lengths, parameters)))
    assert seen == {10, 11, 12, 13}


@pytest.mark.parametrize(
    ("params", "num_output_tokens", "wanted"),
    [
        (SamplingParams(), 0, False),
        (SamplingParams(top_k=3, top_p=0.5, min_p=0.1, seed=4), 0, False),
        (SamplingParams(min_tokens=3), 2, True),
        (SamplingParams(min_tokens=3), 3, False),
        (SamplingParams(logprobs=0), 0, True),
        (SamplingParams(logit_bias={3: 1.0}), 0, True),
        (SamplingParams(presence_penalty=0.1), 0, True),
        (SamplingParams(repetition_penalty=1.1), 0, True),
    ],
)
def test_what_needs_the_host(params: SamplingParams, num_output_tokens: int, wanted: bool) -> None:
    assert needs_host(make_row(params, 0, 0), num_output_tokens) is wanted
