"""Drafts: coupled ones agree with the target as often as promised, independent ones have the law they say they have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sampling_statistics import chi_square_limit

from sol.sampling.drafting import draft_coupled, draft_independent
from sol.sampling.noise import gumbel, stream_key
from sol.sampling.processing import SamplingRow, continued, distribution
from sol.sampling.sampler import sample_law, sample_row
from sol.sampling_params import SamplingParams

VOCAB = 12


def make_row(seed: int = 0, output: list[int] | None = None, **params: Any) -> SamplingRow:
    return SamplingRow(
        params=SamplingParams(**params),
        seed=seed,
        choice_index=0,
        prompt_token_ids=[1],
        output_token_ids=output or [],
        eos_token_ids=[2],
    )


def random_logits(seed: int) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 1.5


def chi_square(tokens: list[int], law: torch.Tensor) -> tuple[float, int]:
    counts = torch.bincount(torch.tensor(tokens), minlength=law.numel()).double()
    assert float(counts[law == 0].sum()) == 0.0
    expected = law[law > 0] * len(tokens)
    return float(((counts[law > 0] - expected) ** 2 / expected).sum()), expected.numel() - 1


def test_a_coupled_drafter_with_the_target_s_logits_is_always_right() -> None:
    logits = random_logits(1)
    for seed in range(50):
        row = make_row(seed, [3, 4], top_p=0.9, presence_penalty=1.0, min_tokens=4)
        assert draft_coupled(logits, row, [5]) == sample_row(logits, continued(row, [5]))


def test_coupled_drafts_agree_as_often_as_promised() -> None:
    target, drafter, draws = random_logits(1), random_logits(1) + 0.4 * random_logits(2), 2000
    rows = [make_row(seed) for seed in range(draws)]
    p, q = distribution(target, rows[0]), distribution(drafter, rows[0])
    distance = float((p - q).abs().sum()) / 2
    agreed = sum(draft_coupled(drafter, row, []) == sample_row(target, row) for row in rows) / draws
    assert distance > 0.1  # a drafter that is right by itself would show nothing
    assert agreed > (1 - distance) / (1 + distance) - 3 / draws**0.5


@pytest.mark.parametrize("wish", [{}, {"temperature": 0.6, "top_k": 4}, {"top_p": 0.7, "logit_bias": {3: 1.0}}])
def test_independent_drafts_have_the_law_they_come_with(wish: dict[str, Any]) -> None:
    logits, tokens = random_logits(3), []
    for seed in range(3000):
        token, q = draft_independent(logits, make_row(seed, **wish), [])
        tokens.append(token)
    assert q is not None
    assert q.dtype == torch.float32
    torch.testing.assert_close(q.double(), distribution(logits, make_row(**wish)), atol=1e-7, rtol=1e-6)
    statistic, degrees = chi_square(tokens, q.double())
    assert statistic < chi_square_limit(degrees)


def test_independent_drafts_follow_the_drafts_before_them_and_are_not_the_target_s_tokens() -> None:
    logits = random_logits(4)
    row = make_row(1, [3], frequency_penalty=2.0)
    _, first = draft_independent(logits, row, [])
    _, after = draft_independent(logits, row, [5])
    assert first is not None
    assert after is not None
    assert float(after[5]) < float(first[5])
    rows = [make_row(seed) for seed in range(400)]
    law = distribution(logits, rows[0])
    by_chance = float((law**2).sum())
    # With the target's noise all would agree, with noise of their own only as many as do by chance.
    for drafts in ([], [7]):
        agreed = sum(draft_independent(logits, r, drafts)[0] == draft_coupled(logits, r, drafts) for r in rows) / 400
        assert abs(agreed - by_chance) < 5 * (by_chance / 400) ** 0.5


def test_greedy_drafts_are_the_likeliest_tokens_and_come_without_a_law() -> None:
    logits = random_logits(5)
    assert draft_independent(logits, make_row(temperature=0.0), []) == (int(logits.argmax()), None)


def test_sampling_from_a_law_needs_no_norm_and_never_takes_what_is_impossible() -> None:
    law = torch.tensor([0.0, 3.0, 1.0, 0.0, 4.0], dtype=torch.float64)
    tokens = [sample_law(law, stream_key(seed, 0, 0)) for seed in range(3000)]
    statistic, degrees = chi_square(tokens, law / law.sum())
    assert statistic < chi_square_limit(degrees)
    alone = torch.zeros(VOCAB, dtype=torch.float64)
    alone[7] = 1e-300
    assert sample_law(alone, 5) == 7
    key = stream_key(9, 0, 0)
    assert sample_law(law, key) == int((law.log().float() + gumbel(key, torch.arange(5))).argmax())
