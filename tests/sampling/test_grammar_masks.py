"""Masks against a fresh matcher that is asked about every token; what is sampled under them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_grammar import EOS, NUMBER, RECORD, VOCAB, WORDS, compiler, ids, text

from sol.errors import RequestError
from sol.grammar import Grammar
from sol.sampling.grammar import DEAD_END, GrammarState, grammar_state, masks, unpack_bits
from sol.sampling.processing import SamplingRow, continued, distribution
from sol.sampling.sampler import NOT_FINITE_MESSAGE, sample
from sol.sampling_params import SamplingParams
from sol.speculation.config import VerifyMethod
from sol.speculation.verify import VerifyRow, verify

COMPILER = compiler()
ALL = set(range(VOCAB))


def make_row(grammar: Grammar | None, output: Sequence[int] = (), **params: Any) -> SamplingRow:
    return SamplingRow(
        params=SamplingParams(grammar=grammar, **params),
        seed=3,
        choice_index=0,
        prompt_token_ids=[5],
        output_token_ids=list(output),
        eos_token_ids=[EOS],
        grammar=grammar_state(grammar, COMPILER.compile),
    )


def allowed_by(grammar: Grammar, output: Sequence[int]) -> set[int]:
    """The oracle: each token tried for itself."""
    found = set()
    for token in ALL:
        matcher = COMPILER.compile(grammar)
        assert not output or matcher.consume_tokens(list(output))
        if matcher.is_stopped():
            return {EOS}
        if matcher.consume_token(token):
            found.add(token)
    return found


def allowed(mask: Any) -> set[int]:
    assert isinstance(mask, torch.Tensor)
    assert (mask.shape, mask.dtype) == ((VOCAB,), torch.bool)
    return ALL - set(mask.nonzero().flatten().tolist())


def logits(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("grammar", [NUMBER, RECORD, WORDS], ids=["number", "record", "words"])
def test_masks_are_what_the_grammar_allows_behind_drafts_too(grammar: Grammar) -> None:
    rng = random.Random(5)
    row = make_row(grammar)
    for _ in range(16):
        output = list(row.output_token_ids)
        drafts: list[int] = []
        wanted = [allowed_by(grammar, output)]
        for _ in range(rng.randrange(4)):
            if not wanted[-1] - {EOS}:
                break
            drafts.append(rng.choice(sorted(wanted[-1] - {EOS})))
            wanted.append(allowed_by(grammar, [*output, *drafts]))
        if rng.random() < 0.4:  # a draft that is forbidden, and one behind it
            drafts += [rng.choice(sorted(ALL - wanted[-1])), 9]
            wanted += [ALL, ALL]
        (mask,) = masks(logits(1), [row], [drafts])
        assert isinstance(mask, torch.Tensor)
        assert [allowed(one) for one in mask] == wanted
        token = rng.choice(sorted(wanted[0]))
        if token == EOS:
            row = make_row(grammar)
        else:
            row.output_token_ids = [*output, token]


def test_rows_are_masked_at_once_and_those_without_a_grammar_not_at_all() -> None:
    plain = make_row(None)
    rows = [plain, make_row(NUMBER, ids("-1")), make_row(RECORD, ids('{"a"')), plain, make_row(NUMBER)]
    found = masks(logits(5), rows, [[3], ids("2"), [], [], ids("-")])
    assert found[0] is found[3] is None
    assert [len(one) for one in found if isinstance(one, torch.Tensor)] == [2, 1, 2]
    for row, drafts, mask in zip(rows, [[], ids("2"), [], [], ids("-")], found, strict=True):
        if row.params.grammar is not None and mask is not None:
            assert allowed(mask[-1]) == allowed_by(row.params.grammar, [*row.output_token_ids, *drafts])
    assert masks(logits(1), [make_row(None)], [[]]) == [None]


@pytest.mark.parametrize(
    ("params", "output", "ends"),
    [
        ({}, "12", True),
        ({"ignore_eos": True}, "12", False),
        ({"min_tokens": 3}, "12", False),
        ({"min_tokens": 2}, "12", True),
        ({"ignore_eos": True}, "1234567", True),  # nothing else is left
        ({"min_tokens": 16}, "1234567", True),
        ({"min_tokens": 3, "stop_token_ids": ids("5")}, "12", False),
    ],
)
def test_the_end_is_put_off_while_something_else_is_left(params: dict[str, Any], output: str, ends: bool) -> None:
    row = make_row(NUMBER, ids(output), **params)
    (mask,) = masks(logits(1), [row], [[]])
    assert isinstance(mask, torch.Tensor)
    assert (EOS in allowed(mask[0])) is ends
    assert (ids("5")[0] in allowed(mask[0])) is (len(output) < 7 and "stop_token_ids" not in params)


def test_min_tokens_counts_drafts() -> None:
    row = make_row(NUMBER, ids("1"), min_tokens=3)
    (mask,) = masks(logits(1), [row], [ids("23")])
    assert isinstance(mask, torch.Tensor)
    assert [EOS in allowed(one) for one in mask] == [False, False, True]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("grammar", [NUMBER, RECORD], ids=["number", "record"])
def test_what_is_sampled_is_in_the_grammar(grammar: Grammar, temperature: float) -> None:
    for seed in range(10):
        row = make_row(grammar, temperature=temperature, logprobs=2)
        row.seed = seed
        for place in range(60):
            raw = logits(2, 100 * seed + place)
            tokens = sample(raw, [row, make_row(None, temperature=0.0)])
            assert tokens[1].token_id == int(raw[1].argmax())
            assert tokens[0].logprobs is not None  # from the raw logits
            expected = float(raw[0].log_softmax(0)[tokens[0].token_id])
            assert tokens[0].logprobs.logprob == pytest.approx(expected, abs=1e-4)
            if tokens[0].token_id == EOS:
                break
            row.output_token_ids = [*row.output_token_ids, tokens[0].token_id]
        matcher = COMPILER.compile(grammar)
        assert matcher.consume_tokens(list(row.output_token_ids))
        assert matcher.is_accepting(), text(list(row.output_token_ids))


def steps(row: SamplingRow, raw: torch.Tensor) -> list[int]:
    """What plain decoding gives from the logits after each place, were they the same whatever came before."""
    found: list[int] = []
    for place in range(len(raw)):
        (token,) = sample(raw[place : place + 1], [replace(row, output_token_ids=[*row.output_token_ids, *found])])
        assert token.error is None
        found.append(token.token_id)
        if token.token_id == EOS:
            break
    return found


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.3, "top_p": 0.9}])
def test_coupled_verification_gives_what_plain_decoding_does(params: dict[str, Any]) -> None:
    rng = random.Random(1)
    for seed in range(15):
        raw = logits(5, seed)
        row = make_row(RECORD, ids('{"a":"'), **params)
        plain = steps(row, raw)
        drafts = [token if rng.random() < 0.7 else rng.randrange(VOCAB) for token in plain[:4]]
        agreed = next((i for i, (a, b) in enumerate(zip(drafts, plain, strict=False)) if a != b), len(drafts))
        fresh = make_row(RECORD, ids('{"a":"'), **params)
        (tokens,) = verify(raw[: len(drafts) + 1], [VerifyRow(fresh, drafts)], "coupled")
        assert [token.token_id for token in tokens] == plain[: agreed + 1]


@pytest.mark.parametrize("method", ["rejection", "block"])
@pytest.mark.parametrize("sampled", [True, False], ids=["sampled", "given"])
def test_rules_over_laws_keep_to_the_grammar(method: VerifyMethod, sampled: bool) -> None:
    rng = random.Random(2)
    probs = torch.full((3, VOCAB), 1.0 / VOCAB) if sampled else None
    accepted = 0
    for seed in range(40):
        row = make_row(NUMBER, ids("-"), temperature=1.0)
        row.seed = seed
        drafts = [rng.choice([*ids("123456789"), *ids("abc")]) for _ in range(3)]
        (tokens,) = verify(logits(4, seed), [VerifyRow(row, drafts, probs)], method)
        accepted += len(tokens) - 1
        output = [*ids("-"), *(token.token_id for token in tokens if token.token_id != EOS)]
        assert COMPILER.compile(NUMBER).validate_tokens(output) == len(output)
    assert accepted > 0


def test_the_law_is_the_models_own_over_what_is_allowed() -> None:
    raw, row = logits(1)[0], make_row(NUMBER, ids("-"), temperature=1.0)
    (mask,) = masks(raw.unsqueeze(0), [row], [[]])
    assert isinstance(mask, torch.Tensor)
    law = distribution(raw, continued(row, (), mask[0]))
    digits = ids("123456789")
    assert set(law.nonzero().flatten().tolist()) == set(digits)
    assert law[digits].tolist() == pytest.approx(raw[digits].double().softmax(0).tolist())


def test_an_output_outside_of_the_grammar_is_its_rows_error_alone() -> None:
    rows = [make_row(NUMBER, ids("x"), logprobs=0), make_row(NUMBER, ids("1"))]
    bad, good = sample(logits(2), rows)
    assert bad.token_id == -1
    assert "cannot be followed any further" in (bad.error or "")
    assert good.error is None
    drafted = [VerifyRow(rows[0], ids("1")), VerifyRow(rows[1], ids("x"))]
    (bad, *none), (other, *_) = verify(logits(4), drafted, "coupled")
    assert (none, bad.error is None, other.error) == ([], False, None)


def test_a_grammar_that_cannot_be_compiled_is_its_rows_error() -> None:
    def start() -> Any:
        raise RequestError("too large")

    row = replace(make_row(NUMBER), grammar=GrammarState(start))
    assert [token.error for token in sample(logits(1), [row])] == ["too large"]


def test_a_place_where_all_that_is_allowed_is_impossible_is_an_error() -> None:
    raw = logits(2)
    raw[:, ids("-123456789")] = -torch.inf
    (token,) = sample(raw[:1], [make_row(NUMBER)])
    assert token.error == DEAD_END
    (tokens,) = verify(raw[:1], [VerifyRow(make_row(NUMBER, temperature=0.0), [])], "coupled")
    assert [token.error for token in tokens] == [DEAD_END]
    raw[1] = torch.nan
    (tokens,) = verify(raw[1:], [VerifyRow(make_row(NUMBER), [])], "coupled")
    assert [token.error for token in tokens] == [NOT_FINITE_MESSAGE]


def test_how_many_drafts_are_allowed() -> None:
    state = grammar_state(NUMBER, COMPILER.compile)
    assert state is not None
    assert state.num_allowed([], ids("-12x3")) == 3
    assert state.num_allowed(ids("-1"), ids("23")) == 2
    assert state.num_allowed(ids("-1"), ids("x")) == 0
    assert state.num_allowed(ids("-1x"), ids("1")) == 0
    assert state.error is not None


def test_bits_are_unpacked_on_a_device_as_on_the_host() -> None:
    packed = torch.randint(0, 256, (3, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    found = unpack_bits(packed, 123)
    assert (found.shape, found.dtype) == ((3, 123), torch.bool)
    wanted = np.unpackbits(packed.numpy(), axis=1, count=123, bitorder="little")
    assert found.tolist() == wanted.astype(bool).tolist()
