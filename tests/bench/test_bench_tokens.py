"""Chunks are not tokens."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sol.bench.records import RequestRecord
from sol.bench.tokens import num_output_tokens, token_times


def record(times: list[float], counts: list[int], characters: list[int], total: int | None = None) -> RequestRecord:
    return RequestRecord(
        0, "", 0, 0.0, times=array("d", times), counts=array("l", counts), characters=array("l", characters),
        num_chunks=len(times), completion_tokens=total,
    )  # fmt: skip


def test_a_chunks_gap_is_spread_over_its_tokens() -> None:
    found = token_times(record([1.0, 1.03, 1.05], [2, 3, 1], [8, 12, 4]), "segments")
    np.testing.assert_allclose(found.token_gaps(), [0.01, 0.01, 0.01, 0.02])
    np.testing.assert_allclose(found.chunk_gaps(), [0.03, 0.02])
    assert found.num_tokens == 6


def test_a_chunk_without_a_token_of_its_own_does_not_shorten_the_gap() -> None:
    found = token_times(record([1.0, 1.01, 1.04], [1, 0, 2], [4, 1, 8]), "segments")
    np.testing.assert_allclose(found.token_gaps(), [0.02, 0.02])


def test_one_token_a_chunk_is_not_guessed_at() -> None:
    found = token_times(record([1.0, 2.0, 3.0], [0, 0, 0], [1, 30, 1], 3), "estimated")
    assert found.counts.tolist() == [1, 1, 1]
    # The end token shows nothing, and counts in the endpoint's total.
    assert token_times(record([1.0, 2.0, 3.0], [0, 0, 0], [1, 30, 1], 4), "estimated").counts.tolist() == [1, 1, 2]


def test_several_tokens_a_chunk_are_shared_out_by_characters() -> None:
    found = token_times(record([1.0, 2.0, 3.0], [0, 0, 0], [4, 40, 4], 12), "estimated")
    assert found.counts.tolist() == [2, 8, 2]


def test_an_endpoint_that_says_nothing_has_a_token_a_chunk() -> None:
    silent = record([1.0, 2.0], [0, 0], [4, 9])
    assert token_times(silent, "chunks").counts.tolist() == [1, 1]
    assert num_output_tokens(silent, "chunks") == 2
    silent.num_chunks = 5  # one read brought four of them
    assert token_times(silent, "chunks").num_tokens == 5


@given(st.lists(st.integers(0, 400), min_size=1, max_size=40), st.integers(0, 500))
def test_estimates_add_up_to_the_total(characters: list[int], total: int) -> None:
    n = len(characters)
    found = token_times(record([float(i) for i in range(n)], [0] * n, characters, total), "estimated")
    assert found.num_tokens == total
    assert found.counts.min() >= (1 if total >= n else 0)
    assert len(found.token_gaps()) == max(0, total - int(found.counts[0]))


@pytest.mark.parametrize("counting", ["segments", "estimated", "chunks"])
def test_nothing_arrived(counting: str) -> None:
    found = token_times(record([], [], []), counting)  # type: ignore[arg-type]
    assert found.num_tokens == 0
    assert len(found.token_gaps()) == len(found.chunk_gaps()) == 0
