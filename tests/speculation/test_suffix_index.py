"""NgramIndex finds every earlier occurrence, however the text was put in; TrackRecord learns how matches fare."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lookup_texts import places, texts

from sol.speculation.propose.suffix_index import MAX_ORDER, SEPARATOR, NgramIndex
from sol.speculation.propose.suffix_scores import HIGHEST, LONG, TrackRecord, worth

ORDERS = (1, 2, 5)


def found(index: NgramIndex, level: int) -> list[int]:
    """The places of the text's last n-gram, those of other n-grams in the slot left out."""
    order, tail = index.orders[level], index.tokens[-index.orders[level] :]
    place, met = index.latest(level, index.hashes[level]), []
    while place >= 0:
        if index.tokens[place - order : place] == tail:
            met.append(place)
        place = index.earlier[level][place]
    return met


@given(texts, st.lists(st.sampled_from([1, 2, 23, 24, 70]), min_size=1, max_size=8), st.integers(0, 200))
def test_all_earlier_occurrences_are_found_latest_first(text: list[int], pieces: list[int], reserved: int) -> None:
    index = NgramIndex(ORDERS)
    index.reserve(reserved)
    turn = 0
    while len(index) < len(text):
        index.extend(text[len(index) : len(index) + pieces[turn % len(pieces)]])
        turn += 1
    for level, order in enumerate(ORDERS):
        assert found(index, level) == places(text, order)


@given(texts, texts, st.integers(0, 130))
def test_an_index_without_its_front_is_that_of_the_rest(text: list[int], more: list[int], count: int) -> None:
    index, rest = NgramIndex(ORDERS), NgramIndex(ORDERS)
    index.extend(text)
    index.drop_front(count)
    rest.extend(text[count:])
    for token in more:
        index.append(token)
        rest.append(token)
    assert index.tokens == rest.tokens
    assert [found(index, level) for level in range(3)] == [found(rest, level) for level in range(3)]


def test_large_token_ids_separators_and_long_orders_hash_alike_in_bulk_and_one_by_one() -> None:
    text = [2**31 - 1, SEPARATOR, 0, 151_935] * 40
    bulk, single = NgramIndex((3, MAX_ORDER)), NgramIndex((3, MAX_ORDER))
    bulk.extend(text)
    for token in text:
        single.append(token)
    assert bulk.hashes == single.hashes
    assert [found(bulk, level) for level in (0, 1)] == [found(single, level) for level in (0, 1)]
    assert found(bulk, 1) == places(text, MAX_ORDER)


def test_memory_is_28_bytes_a_token_at_most() -> None:
    index = NgramIndex((2, 5))
    for token in range(5000):
        index.append(token % 700)
    assert index.num_bytes <= 28 * 5000


def test_longer_matches_and_more_agreement_are_worth_more() -> None:
    for agreeing in (1, 2, 3):
        row = [worth(length, agreeing, 1.0) for length in range(1, 40)]
        assert row == sorted(row)
    assert worth(4, 1, 1.0) < worth(4, 2, 1.0) < worth(4, 3, 1.0) == worth(4, 7, 1.0)
    assert worth(4, 3, 0.5) == pytest.approx(0.5 * worth(4, 3, 1.0))


@given(st.lists(st.tuples(st.integers(1, 40), st.floats(0, 1), st.booleans()), max_size=60), st.integers(1, 40))
def test_scores_stay_probabilities_whatever_happened(happened: list[tuple[int, float, bool]], length: int) -> None:
    record = TrackRecord()
    for reach, promised, hit in happened:
        record.record(reach, promised, hit)
    lone = record.lone_scores(length, 50)
    assert all(0.0 <= score <= HIGHEST for score in lone)
    assert lone == [record.score(length + ahead, worth(length + ahead, 1, 1.0)) for ahead in range(50)]


def test_a_record_of_hits_raises_and_one_of_misses_lowers_scores_of_their_kind_of_match_only() -> None:
    record, before = TrackRecord(), TrackRecord()
    for _ in range(50):
        record.record(LONG, worth(LONG, 1, 1.0), True)
    assert record.score(20, worth(20, 1, 1.0)) > 0.98 > before.score(20, worth(20, 1, 1.0))
    assert record.lone_scores(2, 1) == before.lone_scores(2, 1)
    for _ in range(50):
        record.record(2, worth(2, 1, 1.0), False)
    assert record.lone_scores(2, 1)[0] < 0.1
