"""Verification against plain sampling, step by step: the same tokens, logprobs and errors, whatever was drafted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sol.engine.types import TokenLogprobs
from sol.sampling.processing import SamplingRow, continued, distribution
from sol.sampling.sampler import SampledToken, sample
from sol.sampling_params import SamplingParams
from sol.speculation.config import VerifyMethod
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
    models: list[Chain], rows: list[SamplingRow], texts: list[list[int]], kind: str, method: VerifyMethod = "coupled"
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
        for index, entry, tokens in zip(owners, batch, verify(given, batch, method), strict=True):
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
        assert_same(tokens, expected, wish)


def assert_same(tokens: list[SampledToken], expected: list[SampledToken], wish: object) -> None:
    assert [t.token_id for t in tokens] == [t.token_id for t in expected], wish
    for token, reference in zip(tokens, expected, strict=True):
        assert token.error is None
        assert_same_logprobs(token.logprobs, reference.logprobs)


def assert_same_logprobs(found: TokenLogprobs | None, wanted: TokenLogprobs | None) -> None:
    if wanted is None:
        assert found is None
        return
    assert found is not None
    assert found.rank == wanted.rank
    assert [i for i, _ in found.top] == [i for i, _ in wanted.top]
    assert [p for _, p in found.top] == pytest.approx([p for _, p in wanted.top], abs=1e-5)
    assert found.logprob == pytest.approx(wanted.logprob, abs=1e-5)


METHODS: list[VerifyMethod] = ["coupled", "rejection", "block"]


@pytest.mark.parametrize("method", METHODS)
def test_greedy_requests_have_the_tokens_of_plain_decoding_by_every_method(method: VerifyMethod) -> None:
    wishes = [wish for wish in WISHES if wish["temperature"] == 0.0]
    models = [Chain(seed) for seed in range(len(wishes))]
    wanted = [plain(model, make_row(wish)) for model, wish in zip(models, wishes, strict=True)]
    texts = [[token.token_id for token in tokens] for tokens in wanted]
    found = speculate(models, [make_row(wish) for wish in wishes], texts, "mixed", method)
    for wish, expected, tokens in zip(wishes, wanted, found, strict=True):
        assert_same(tokens, expected, wish)


@pytest.mark.parametrize("method", METHODS)
def test_requests_without_drafts_are_plain_decoding_by_every_method(method: VerifyMethod) -> None:
    models = [Chain(seed) for seed in range(len(WISHES))]
    wanted = [plain(model, make_row(wish)) for model, wish in zip(models, WISHES, strict=True)]
    found = speculate(models, [make_row(wish) for wish in WISHES], [[] for _ in WISHES], "none", method)
    for wish, expected, tokens in zip(WISHES, wanted, found, strict=True):
        assert_same(tokens, expected, wish)


@pytest.mark.parametrize("method", ["rejection", "block"])
@pytest.mark.parametrize("wish", [wish for wish in WISHES if wish["temperature"] > 0.0], ids=str)
def test_by_rule_no_token_is_emitted_that_plain_sampling_could_not(method: VerifyMethod, wish: dict[str, Any]) -> None:
    """Every parameter, with drafts that the target may hold impossible; and logprobs are those of the raw logits."""
    model, seen = Chain(5), set()
    for seed in range(40):
        row = make_row(wish, seed)
        drafts = [(seed * 7 + place * 11) % VOCAB for place in range(3)]
        if seed % 2:  # what the target itself holds likely
            drafts = [int(distribution(model.logits([3], 0)[0], row).argmax()), *drafts[1:]]
        logits = model.logits([3, *drafts], 0)
        probs = None if seed % 4 < 2 else torch.full((3, VOCAB), 1 / VOCAB)
        tokens = verify(logits, [VerifyRow(row, drafts, probs)], method)[0]
        seen.add(len(tokens))
        assert [t.token_id for t in tokens[:-1]] == drafts[: len(tokens) - 1]
        for place, token in enumerate(tokens):
            law = distribution(logits[place], continued(row, drafts[:place]))
            assert float(law[token.token_id]) > 0.0
            if row.params.logprobs is None:
                assert token.logprobs is None
                continue
            assert token.logprobs is not None
            assert token.logprobs.logprob == pytest.approx(
                float(logits[place].log_softmax(0)[token.token_id]), abs=1e-5
            )
            assert token.logprobs.rank == int((logits[place] > logits[place, token.token_id]).sum()) + 1
            assert len(token.logprobs.top) == row.params.logprobs
    assert {1, 2} <= seen


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_end_their_own_request_s_tokens(
    method: VerifyMethod, bad: float, temperature: float
) -> None:
    model, wish = Chain(6), {"temperature": temperature, "logprobs": 1}
    drafts = [token.token_id for token in plain(model, make_row(wish))][:3]
    good = model.logits([3, *drafts], 0)
    for place in range(4):
        broken = good.clone()
        broken[place, 9] = bad
        probs = torch.nn.functional.one_hot(torch.tensor(drafts), VOCAB).float()  # which accepts what p holds certain
        batch = [
            VerifyRow(make_row(wish), drafts),
            VerifyRow(make_row(wish), drafts, probs),
            VerifyRow(make_row(wish), []),
        ]
        first, second, neighbour = verify(torch.cat([broken, broken, good[:1]]), batch, method)
        assert [t.error for t in neighbour] == [None]
        for tokens in (first, second):
            if place == 0:
                assert [t.token_id for t in tokens] == [-1]
                assert tokens[0].error is not None
                assert "not finite" in tokens[0].error
                assert tokens[0].logprobs is None
                continue
            assert all(t.error is None for t in tokens)
            assert 1 <= len(tokens) <= place
            if method == "coupled" or temperature == 0.0:
                assert [t.token_id for t in tokens] == drafts[:place]


def test_a_row_s_tokens_do_not_depend_on_its_neighbours() -> None:
    generator = torch.Generator().manual_seed(0)
    for method in METHODS:
        batch, logits = [], []
        for index, wish in enumerate(WISHES):
            count = index % 4
            logits.append(torch.randn(count + 1, VOCAB, generator=generator))
            drafts = logits[-1].argmax(-1).tolist()[:count]
            probs = torch.rand(count, VOCAB, generator=generator).softmax(-1) if index % 3 else None
            batch.append(VerifyRow(make_row(wish, index, choice=index % 2), drafts, probs))
        together = verify(torch.cat(logits), batch, method)
        backwards = verify(torch.cat(logits[::-1]), batch[::-1], method)[::-1]
        for one, entry, tokens, mirrored in zip(logits, batch, together, backwards, strict=True):
            assert_same(tokens, verify(one, [entry], method)[0], entry)
            assert_same(tokens, mirrored, entry)


def test_an_empty_step_has_no_tokens() -> None:
    assert verify(torch.empty(0, VOCAB), [], "coupled") == []


def test_what_the_caller_should_have_seen_to_is_refused() -> None:
    row, logits = make_row({}), torch.zeros(3, VOCAB)
    for drafts, probs, named in [
        ([1], None, "logits"),
        ([1, VOCAB], None, "draft_token_ids"),
        ([-1, 1], None, "draft_token_ids"),
        ([1, 2], torch.full((1, VOCAB), 1 / VOCAB), "draft_probs"),
        ([1, 2], torch.full((2, VOCAB - 1), 1 / VOCAB), "draft_probs"),
        ([1, 2], torch.zeros(2, VOCAB), "draft_probs"),
        ([1, 2], torch.full((2, VOCAB), torch.nan), "draft_probs"),
    ]:
        with pytest.raises(ValueError, match=named):
            verify(logits, [VerifyRow(row, drafts, probs)], "rejection")


def test_a_continued_row_reads_like_a_longer_list() -> None:
    row = make_row({}, 1)
    row.output_token_ids = [4, 5, 6]
    longer, whole = continued(row, [7, 8]).output_token_ids, [4, 5, 6, 7, 8]
    assert list(longer) == [longer[i] for i in range(5)] == whole
    assert [longer[-1], longer[-4]] == [8, 5]
    assert [longer[1:4], longer[::-2], longer[9:]] == [whole[1:4], whole[::-2], []]
    assert len(longer) == 5
    with pytest.raises(IndexError):
        longer[5]
    assert continued(row, []) is row
    assert row.output_token_ids == [4, 5, 6]
