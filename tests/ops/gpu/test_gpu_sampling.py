"""The sampling kernels give what their torch twin gives."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from sol.ops.gpu import sampling
from sol.sampling.batched import NOT_FINITE, SamplingParameters
from sol.sampling.batched import sample_rows as reference
from sol.sampling.processing import SamplingRow
from sol.sampling_params import SamplingParams

PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=3.0, top_k=5),
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=1.5, top_k=100_000),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=1.0, top_p=0.01),
    SamplingParams(temperature=2.0, min_p=0.1),
    SamplingParams(temperature=1.3, top_k=40, top_p=0.8, min_p=0.02),
    SamplingParams(temperature=9.0, top_k=300, top_p=0.5),
]


def sample(logits: torch.Tensor, params: list[SamplingParams], position: int) -> tuple[list[int], list[int], list[int]]:
    """What the kernels sample, what they leave as the rows' next inputs, and what the twin samples."""
    count = len(params)
    parameters = SamplingParameters.empty(count + 3, torch.device("cpu"))
    for index, wanted in enumerate(params):
        parameters.fill(index + 3, SamplingRow(wanted, index * 31, index, [1] * (index + 1), [], []))
    rows = torch.arange(3, count + 3)
    seq_lens = (torch.arange(count) + 1 + position).int()
    token_ids = torch.full((count,), -7)
    last = torch.full((count + 3,), -7)
    sampling.sample_rows(logits, rows, seq_lens, parameters.tensors(), token_ids, last)
    assert last[:3].tolist() == [-7] * 3
    return token_ids.tolist(), last[3:].tolist(), reference(logits, rows, seq_lens, parameters).tolist()


@pytest.mark.parametrize(("vocabulary", "position"), [(500, 0), (8200, 77)])
def test_parity(vocabulary: int, position: int) -> None:
    logits = torch.randn(len(PARAMS), vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * 3
    token_ids, last, wanted = sample(logits, PARAMS, position)
    assert token_ids == last == wanted


def test_tokens_that_a_drafter_does_not_have() -> None:
    logits = torch.randn(len(PARAMS), 500, generator=torch.Generator().manual_seed(2)) * 3
    logits[:, 200:] = -torch.inf
    token_ids, _, wanted = sample(logits, PARAMS, 1)
    assert token_ids == wanted
    assert max(wanted) < 200


@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_parity_where_the_likely_tokens_do_not_fit(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_CAPACITY", 32)
    monkeypatch.setattr(sampling, "_SCAN", 256)
    logits = torch.randn(len(PARAMS), 600, generator=torch.Generator().manual_seed(1)) * scale
    token_ids, last, wanted = sample(logits, PARAMS, 5)
    assert token_ids == last == wanted


def test_many_positions_of_one_row() -> None:
    logits = torch.randn(1, 700).expand(8, 700).contiguous()
    for position in range(0, 32, 8):
        token_ids, _, wanted = sample(logits, [SamplingParams(temperature=2.0, top_p=0.95)] * 8, position)
        assert token_ids == wanted


def test_rows_that_are_not_numbers() -> None:
    logits = torch.randn(6, 5000)
    logits[0, 4999], logits[1, 4], logits[2], logits[3, 4998] = torch.nan, torch.inf, -torch.inf, torch.nan
    logits[4, 5:] = -torch.inf
    params = [SamplingParams(temperature=t) for t in (0.0, 1.0, 1.0, 1.0, 1.0)]
    params.append(SamplingParams(temperature=1.0, top_k=3, top_p=0.5))
    token_ids, last, wanted = sample(logits, params, 3)
    assert token_ids == wanted
    assert token_ids[:4] == [NOT_FINITE] * 4
    assert last[:4] == [0] * 4
