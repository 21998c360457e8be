"""Texts in one form: what disguise leaves, and where it stood."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sol.gateway.filters.normalise import View, folded, plain

texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)


@pytest.mark.parametrize(
    "disguised",
    [
        "Secret",
        "ＳＥＣＲＥＴ",
        "s\u200be\u200dc\u2060r\ufeffe\u00adt",
        "𝐬𝐞𝐜𝐫𝐞𝐭",
        "ⓢⓔⓒⓡⓔⓣ",
        "s\u0336e\u0336cret",
        "se\x00cret",
        "s\U000e0061ecret",
        "ſecret",
        "se\u202ecret",
        "\ufe0fsecret",
    ],
)
def test_disguises_come_off(disguised: str) -> None:
    assert folded(disguised) == "secret"


def test_what_is_text_stays() -> None:
    for text in ("line\n\ttab", "हिन्दी", "한국어", "café", "你好。", "ελληνικά", "👩‍🚀"[0]):
        assert plain(text) == text


@given(texts, texts)
def test_a_text_has_the_same_form_in_pieces(first: str, second: str) -> None:
    assert plain(first + second) == plain(first) + plain(second)
    assert folded(first + second) == folded(first) + folded(second)


@given(texts)
def test_plain_characters_are_their_own_normal_form(text: str) -> None:
    assert all(unicodedata.is_normalized("NFKC", c) for c in plain(text))
    assert plain(plain(text)) == plain(text)


@given(texts, st.data())
def test_spans_lead_back_to_what_they_came_from(text: str, data: st.DataObject) -> None:
    before = data.draw(st.sampled_from(["", "a", "ß", "中"]))
    view = View(text, before)
    if len(view.plain) > len(before):
        start = data.draw(st.integers(len(before), len(view.plain) - 1))
        end = data.draw(st.integers(start + 1, len(view.plain)))
        first, last = view.span(start, end)
        assert view.plain[start:end] in plain(text[first:last])
        assert before + plain(text[:first]) == view.plain[: len(before + plain(text[:first]))]
        assert len(before + plain(text[:first])) <= start
        assert len(before + plain(text[:last])) >= end
    if len(view.folded) > view.folded_lead:
        start = data.draw(st.integers(view.folded_lead, len(view.folded) - 1))
        first, last = view.folded_span(start, start + 1)
        assert last == first + 1
        assert view.folded[start] in folded(text[first])


@given(texts, st.integers(0, 40))
def test_places_in_bytes_and_in_characters_are_the_same_places(text: str, at: int) -> None:
    view = View(text, "é")
    at = min(at, len(view.plain))
    position = len(view.plain[:at].encode())
    assert view.of_bytes(position) == at
    assert view.of_bytes(0) == 0
    assert view.to_bytes(0) == view.data_lead
    assert view.to_bytes(len(text)) == len(view.data)
