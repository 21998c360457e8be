"""Verification against plain sampling, step by step: the same tokens, logprobs and errors, whatever was drafted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sol.sampling.processing import SamplingRow
from sol.sampling.sampler import SampledToken, sample
from sol.sampling_params import SamplingParams
from sol.speculation.verify import VerifyRow, verify

VOCAB = 50
LENGTH = 12

WISHES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.4},
    {"temperature": 3.0, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 2.0, "min_p": 0.2},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 0.0, "repetition_penalty": 1.8},
    {"temperature": 0.9, "presence_penalty": 2.0},
    {"temperature": 0.0, "frequency_penalty": 2.0},
    {"temperature": 0.8, "frequency_penalty": 0.7, "repetition_penalty": 1.2, "presence_penalty": -0.5, "top_k": 8},
    {"temperature": 0.0, "logit_bias": {3: 6.0, 4: 5.0, 7: -100.0}},
    {"temperature": 1.0, "logit_bias": {3: 4.0, 9: -100.0}},
    {"temperature": 0.0, "min_tokens": 7, "stop_token_ids": [5]},
    {"temperature": 1.0, "min_tokens": 7, "stop_token_ids": [5, 6]},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 1.0, "logprobs": 0},
    {"temperature": 0.7, "logprobs": 5, "top_k": 3, "presence_penalty": 1.0},
]


def make_row(wish: dict[str, Any], seed: int = 7, choice: int = 0) -> SamplingRow:
    return SamplingRow(
        params=SamplingParams(**wish),
        seed=seed,
        choice_index=choice,
        prompt_token_ids=[1, 2, 3, 3],
        output_token_ids=[],
        eos_token_ids=[2],
    )


class Chain:
    """A language model over few tokens: the logits that follow a token depend on it and on the place."""

    def __init__(self, seed: int) -> None:
        self._table = torch.randn(LENGTH + 20, VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2

    def logits(self, token_ids: list[int], start: int) -> torch.Tensor:
        """[len(token_ids), V]: what follows each of them, the first standing at `start`."""
        return torch.stack([self._table[start + place, token] for place, token in enumerate(token_ids)])


def plain(model: Chain, row: SamplingRow) -> list[SampledToken]:
    """Decoding without drafts, which leaves its tokens in `row`."""
    assert isinstance(row.output_token_ids, list)
    tokens, last = [], row.prompt_token_ids[-1]
    for place in range(LENGTH):
        tokens += sample(model.logits([last], place), [row])
        last = tokens[-1].token_id
        row.output_token_ids.append(last)
    return tokens


def drafts_for(kind: str, right: list[int], count: int, generator: torch.Generator) -> list[int]:
    """What a drafter might say where the target goes on with `right`."""
    drafts = [*right[:count], *[0] * (count - len(right))]
    if kind == "right":
        return drafts
    if kind == "wrong":
        return [(token + 1) % VOCAB for token in drafts]
    wrong = torch.rand(count, generator=generator) < 0.4
    return [(token + 1) % VOCAB if bad else token for token, bad in zip(drafts, wrong.tolist(), strict=True)]


def speculate(
    models: list[Chain], rows: list[SamplingRow], texts: list[list[int]], kind: str
) -> list[list[SampledToken]]:
    """All requests in one batch, with drafts of changing lengths, until the last has its tokens."""
    generator = torch.Generator().manual_seed(3)
    results: list[list[SampledToken]] = [[] for _ in rows]
    while any(len(tokens) < LENGTH for tokens in results):
        batch, logits, owners = [], [], []
        for index, row in enumerate(rows):
            done = len(results[index])
            if done >= LENGTH:
                continue
            assert isinstance(row.output_token_ids, list)
            count = 0 if kind == "none" else int(torch.randint(0, 6, (), generator=generator))
            drafts = drafts_for(kind, texts[index][done:], count, generator)
            last = (row.prompt_token_ids if not done else row.output_token_ids)[-1]
            logits.append(models[index].logits([last, *drafts], done))
            batch.append(VerifyRow(row, drafts))
            owners.append(index)
        given = torch.cat(logits)
        before = given.clone()
        for index, entry, tokens in zip(owners, batch, verify(given, batch, "coupled"), strict=True):
            assert 1 <= len(tokens) <= len(entry.draft_token_ids) + 1
            accepted = [t.token_id for t in tokens[:-1]]
            assert accepted == list(entry.draft_token_ids[: len(accepted)])
            results[index] += tokens
            rows[index].output_token_ids.extend(t.token_id for t in tokens)  # type: ignore[attr-defined]
        assert torch.equal(given, before)
    return [tokens[:LENGTH] for tokens in results]


@pytest.mark.parametrize("kind", ["none", "right", "wrong", "mixed"])
def test_every_parameter_gives_the_tokens_of_plain_decoding(kind: str) -> None:
    models = [Chain(seed) for seed in range(len(WISHES))]
    wanted = [plain(model, make_row(wish, seed)) for seed, (model, wish) in enumerate(zip(models, WISHES, strict=True))]
    texts = [[token.token_id for token in tokens] for tokens in wanted]
    found = speculate(models, [make_row(wish, seed) for seed, wish in enumerate(WISHES)], texts, kind)
    for wish, expected, tokens in zip(WISHES, wanted, found, strict=True):
        assert [t.token_id for t in tokens] == [t.token_id for t in expected], wish
        assert [t.error for t in tokens] == [None] * LENGTH
        for token, reference in zip(tokens, expected, strict=True):
            if reference.logprobs is None:
                assert token.logprobs is None
                continue
            assert token.logprobs is not None
            assert token.logprobs.rank == reference.logprobs.rank
            assert [i for i, _ in token.logprobs.top] == [i for i, _ in reference.logprobs.top]
            assert token.logprobs.logprob == pytest.approx(reference.logprobs.logprob, abs=1e-5)
