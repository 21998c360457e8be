"""The noise is the generator it says it is, has the law it should have, and depends on its key alone."""

from __future__ import annotations

import math

import pytest
import torch
from sampling_statistics import chi_square_limit

from sol.sampling import noise

SPLITMIX_FROM_1234567 = [
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
    16408922859458223821,
]
"""The published check values of SplitMix64."""

KEY_OF_3_1_9 = 0xF94B2A50B52370E5


def test_the_bits_are_splitmix64() -> None:
    bits = noise._bits(1234567, torch.arange(5)).tolist()
    assert [value % 2**64 for value in bits] == SPLITMIX_FROM_1234567


def test_a_token_has_the_same_noise_whichever_others_are_asked_for() -> None:
    key = noise.stream_key(seed=3, choice_index=1, position=9)
    whole = noise.gumbel(key, torch.arange(50_000))
    some = torch.tensor([49_999, 0, 7, 31_000])
    assert torch.equal(noise.gumbel(key, some), whole[some])
    assert whole.isfinite().all()


def test_the_extremes_of_the_bits_give_finite_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    extremes = torch.tensor([0, -1, 1 << 11, -1 << 11, -(1 << 40)])
    monkeypatch.setattr(noise, "_bits", lambda key, token_ids: extremes.clone())
    found = noise.gumbel(0, torch.arange(5))
    assert found.isfinite().all()
    assert found[0] == found.max()
    assert float(found[0]) == pytest.approx(54 * math.log(2))
    assert float(found.min()) == pytest.approx(-math.log(24 * math.log(2)))


def test_every_part_of_the_key_matters() -> None:
    keys = {
        noise.stream_key(seed, choice, position)
        for seed in (-(2**63), -1, 0, 1, 2**63 - 1)
        for choice in range(20)
        for position in range(200)
    }
    assert len(keys) == 5 * 20 * 200
    assert all(0 <= key < 2**64 for key in keys)


def test_the_law_is_gumbels() -> None:
    # Over token ids within a stream, and over streams for one token id.
    within = noise.gumbel(noise.stream_key(0, 0, 0), torch.arange(200_000))
    across = torch.cat([noise.gumbel(noise.stream_key(5, 0, t), torch.tensor([17])) for t in range(20_000)])
    for sample in (within, across):
        uniform = torch.exp(-torch.exp(-sample.double()))
        counts = torch.histc(uniform, bins=64, min=0.0, max=1.0)
        expected = sample.numel() / 64
        assert float(((counts - expected) ** 2 / expected).sum()) < chi_square_limit(63)
        assert abs(float(sample.mean()) - 0.5772) < 5 * math.pi / math.sqrt(6 * sample.numel())


def test_neighbouring_streams_are_uncorrelated() -> None:
    ids = torch.arange(100_000)
    base = noise.gumbel(noise.stream_key(1, 0, 0), ids)
    for other in ((2, 0, 0), (1, 1, 0), (1, 0, 1)):
        pair = torch.stack([base, noise.gumbel(noise.stream_key(*other), ids)])
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 5 / math.sqrt(ids.numel())


def test_keys_of_all_purposes_are_distinct_and_the_target_s_own_are_as_before() -> None:
    own = {noise.stream_key(seed, choice, t) for seed in (0, 7) for choice in range(4) for t in range(100)}
    others = {
        noise.slot_key(seed, choice, start, slot, purpose)
        for seed in (0, 7)
        for choice in range(4)
        for start in range(50)
        for slot in range(10)
        for purpose in noise.Purpose
    }
    assert len(others) == 2 * 4 * 50 * 10 * 3
    assert not own & others
    # A seeded request's text is a promise: it is the same in the next release.
    assert noise.stream_key(3, 1, 9) == KEY_OF_3_1_9


def test_uniform_numbers_are_uniform_and_independent_of_each_other() -> None:
    others = {
        "slot": (0, 0, 1, noise.Purpose.ACCEPT),
        "start": (0, 1, 0, noise.Purpose.ACCEPT),
        "purpose": (0, 0, 0, noise.Purpose.RECOVER),
        "choice": (1, 0, 0, noise.Purpose.ACCEPT),
    }
    draws = 8000

    def numbers(choice: int, start: int, slot: int, purpose: noise.Purpose) -> torch.Tensor:
        found = [noise.uniform(noise.slot_key(seed, choice, start, slot, purpose)) for seed in range(draws)]
        return torch.tensor(found, dtype=torch.float64)

    base = numbers(0, 0, 0, noise.Purpose.ACCEPT)
    assert 0.0 <= float(base.min()) < float(base.max()) < 1.0
    for what, key in others.items():
        both = (base * 8).long() * 8 + (numbers(*key) * 8).long()
        counts = torch.bincount(both, minlength=64).double()
        expected = draws / 64
        assert float(((counts - expected) ** 2 / expected).sum()) < chi_square_limit(63), what


def test_the_extremes_of_the_bits_give_numbers_below_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for bits, wanted in ((0, 0.0), (2**64 - 1, 1 - 2.0**-53)):
        monkeypatch.setattr(noise, "_mix", lambda value, bits=bits: bits)
        assert noise.uniform(0) == wanted
