"""Sampling against plain definitions: which candidates, which law, which logprobs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_statistics import chi_square_limit

from sol.sampling.processing import SamplingRow, adjust, candidates
from sol.sampling.sampler import SampledToken, sample
from sol.sampling_params import SamplingParams

VOCAB = 40


def row(prompt: list[int] | None = None, output: list[int] | None = None, seed: int = 0, **params: Any) -> SamplingRow:
    return SamplingRow(
        params=SamplingParams(**params),
        seed=seed,
        choice_index=0,
        prompt_token_ids=prompt or [],
        output_token_ids=output or [],
        eos_token_ids=[2],
    )


def random_logits(seed: int, rows: int = 1, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def allowed_by_definition(logits: torch.Tensor, params: SamplingParams) -> set[int]:
    """min_p, then top_k, then top_p over what is left, one token at a time."""
    probabilities = torch.softmax(logits.double() / params.temperature, -1).tolist()
    order = sorted(range(len(probabilities)), key=lambda i: -probabilities[i])
    kept = [i for i in order if probabilities[i] >= params.min_p * probabilities[order[0]]]
    if params.top_k:
        kept = kept[: params.top_k]
    total, reached, result = sum(probabilities[i] for i in kept), 0.0, set()
    for i in kept:
        if params.top_p < 1.0 and reached >= params.top_p * total:
            break
        result.add(i)
        reached += probabilities[i]
    return result


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.2, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 39, 40, 1000]),
    top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 0.9, 1.0]),
)
def test_candidates_are_those_of_the_definition(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = random_logits(seed)[0]
    ids, scores = candidates(logits, params)
    found = set(range(VOCAB)) if ids is None else set(ids.tolist())
    assert found == allowed_by_definition(logits, params)
    torch.testing.assert_close(scores, logits[ids] / temperature if ids is not None else logits / temperature)


def test_a_top_p_cut_beyond_the_first_look_sorts_further() -> None:
    logits = torch.zeros(5000)
    for top_p, expected in ((0.5, 2500), (0.99, 4950), (0.01, 50)):
        ids, _ = candidates(logits, SamplingParams(top_p=top_p))
        assert ids is not None
        assert abs(len(ids) - expected) <= 1


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.5}, {"top_p": 0.8}, {"top_k": 4, "temperature": 2.0}, {"min_p": 0.1}]
)
def test_the_law_of_sampled_tokens(params: dict[str, Any]) -> None:
    logits = random_logits(1, vocab=12)
    wanted = SamplingParams(**params)
    allowed = sorted(allowed_by_definition(logits[0], wanted))
    law = torch.zeros(12, dtype=torch.double)
    law[allowed] = torch.softmax(logits[0, allowed].double() / wanted.temperature, -1)
    draws = 4000
    rows = [row(output=[0] * t, seed=s, **params) for s in range(draws // 8) for t in range(8)]
    tokens = torch.tensor([t.token_id for t in sample(logits.expand(draws, -1), rows)])
    counts = torch.bincount(tokens, minlength=12).double()
    assert counts[law == 0].sum() == 0
    # Rare tokens are counted together, as a χ² needs a few of each.
    common = law * draws >= 5
    expected = torch.cat([law[common], law[~common].sum().view(1)]) * draws
    found = torch.cat([counts[common], counts[~common].sum().view(1)])
    seen = expected > 0
    statistic = float(((found - expected)[seen] ** 2 / expected[seen]).sum())
    assert statistic < chi_square_limit(max(1, int(seen.sum()) - 1))


def test_a_token_depends_on_its_own_row_alone() -> None:
    rows = [
        row(temperature=0.0),
        row(seed=1),
        row(seed=2, top_p=0.7, output=[3, 4]),
        row(seed=3, top_k=3, logprobs=2, prompt=[1], repetition_penalty=1.3),
        row(seed=4, min_p=0.1, min_tokens=3, logprobs=0),
        row(temperature=0.0, presence_penalty=1.0, output=[5, 5]),
    ]
    logits = random_logits(9, rows=len(rows))
    before = logits.clone()
    together = sample(logits, rows)
    alone = [sample(logits[i : i + 1], [r])[0] for i, r in enumerate(rows)]
    backwards = sample(logits.flip(0), rows[::-1])[::-1]
    assert [t.token_id for t in together] == [t.token_id for t in alone] == [t.token_id for t in backwards]
    assert torch.equal(logits, before)


def test_greedy_is_the_likeliest_token_and_needs_no_seed() -> None:
    logits = random_logits(2, rows=3)
    tokens = sample(logits, [row(temperature=0.0, seed=s) for s in range(3)])
    assert [t.token_id for t in tokens] == logits.argmax(-1).tolist()


def test_penalties_follow_vllms_definitions() -> None:
    logits = random_logits(4)[0]
    prompt, output = [1, 2, 2, 7], [7, 9, 9, 9]
    got = adjust(
        logits,
        row(prompt, output, presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.5),
    )
    expected = logits.clone()
    for token in {*prompt, *output}:
        expected[token] = expected[token] / 1.5 if expected[token] > 0 else expected[token] * 1.5
    for token in set(output):
        expected[token] -= 0.5 + 0.25 * output.count(token)
    torch.testing.assert_close(got, expected)


def test_bias_and_min_tokens_bind_greedy_requests_too() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 2] = 9.0  # the end token
    logits[0, 5] = 8.0
    logits[0, 6] = 7.0
    greedy = {"temperature": 0.0}
    assert sample(logits, [row(**greedy)])[0].token_id == 2
    assert sample(logits, [row(min_tokens=1, **greedy)])[0].token_id == 5
    assert sample(logits, [row(min_tokens=1, stop_token_ids=[5], **greedy)])[0].token_id == 6
    assert sample(logits, [row(min_tokens=1, output=[4], **greedy)])[0].token_id == 2
    assert sample(logits, [row(logit_bias={9: 50.0, 2: -100.0}, **greedy)])[0].token_id == 9


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = random_logits(5, rows=3)
    rows = [
        row(logprobs=3, temperature=0.0),
        row(logprobs=None),
        row(logprobs=0, temperature=5.0, seed=8, logit_bias={0: 100.0}),
    ]
    tokens = sample(logits, rows)
    expected = torch.log_softmax(logits, -1)
    first, none, biased = (t.logprobs for t in tokens)
    assert none is None
    assert first is not None
    assert first.rank == 1
    values, ids = expected[0].topk(3)
    assert [t for t, _ in first.top] == ids.tolist()
    assert [p for _, p in first.top] == pytest.approx(values.tolist(), abs=1e-5)
    assert first.logprob == pytest.approx(first.top[0][1])
    assert biased is not None
    assert tokens[2].token_id == 0
    assert biased.top == []
    assert biased.logprob == pytest.approx(float(expected[2, 0]), abs=1e-5)
    assert biased.rank == int((expected[2] > expected[2, 0]).sum()) + 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_fail_their_own_row(bad: float) -> None:
    logits = random_logits(6, rows=3)
    logits[1, 3] = bad
    tokens: list[SampledToken] = sample(logits, [row(temperature=0.0), row(logprobs=1), row(temperature=0.0)])
    assert tokens[1].error is not None
    assert "not finite" in tokens[1].error
    assert [tokens[0].token_id, tokens[2].token_id] == logits[[0, 2]].argmax(-1).tolist()
    assert tokens[0].error is tokens[2].error is None
