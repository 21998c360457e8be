"""Expressions: what they are refused for, how wide they are, and what their matches begin with."""

from __future__ import annotations

import re

import pytest
import re2
from hypothesis import given
from hypothesis import strategies as st

from sol.gateway.filters.expressions import (
    ExpressionError,
    bounded_prefixes,
    compile_expression,
    normalise_pattern,
    prefixes,
)
from sol.gateway.filters.injection import SIGNS
from sol.gateway.filters.pii import ENTITIES

atoms = st.sampled_from(
    [
        "a",
        "b",
        "[ab]",
        "[^a]",
        ".",
        r"\d",
        "é",
        r"\.",
        r"[[:alpha:]]",
        r"[\]a]",
        r"\x61",
        "(?i:A)",
        r"\Qa.b\E",
        "{",
        r"\pL",
        "[]a]",
    ]
)
assertions = st.sampled_from([r"\b", r"\B", "(?m:^)", "(?m:$)", "$"])
counts = st.sampled_from(["", "?", "*", "+", "{2}", "{1,3}", "{0,2}?", "{2,}", "??"])


def _combine(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.lists(inner, min_size=1, max_size=4).map("".join),
        st.tuples(inner, inner).map(lambda two: f"(?:{two[0]}|{two[1]})"),
        st.tuples(inner, counts).map(lambda two: f"(?P<x{abs(hash(two)) % 10**9}>{two[0]}){two[1]}"),
        inner.map(lambda one: f"(?i){one}"),
    )


patterns = st.recursive(st.one_of(st.tuples(atoms, counts).map("".join), assertions), _combine, max_leaves=8)


@given(patterns, st.lists(st.text(st.sampled_from("aAbB1é. \n{"), max_size=12), min_size=1, max_size=8))
def test_every_beginning_of_a_match_is_recognised(pattern: str, texts: list[str]) -> None:
    try:
        expression = compile_expression(pattern)
    except ExpressionError:  # the strategy makes a few that are none
        return
    found = prefixes(pattern)
    begun = compile_expression(f"(?:{found.pattern})\\z") if found.pattern else None
    for text in texts:
        match = expression.search(text)
        if match is None or match.start() == match.end():
            continue
        start, end = match.span()
        for cut in range(start + 1, end + 1):
            assert begun is not None
            held = begun.search(text[:cut])
            assert held is not None
            assert held.start() <= start, (pattern, text, cut)
        if found.width is not None:
            assert end - start <= found.width


@given(
    st.recursive(
        st.tuples(st.sampled_from(["a", "[ab]", "."]), st.sampled_from(["", "?", "{2}", "{1,3}", "*"])).map("".join),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3).map("".join), st.tuples(inner, inner).map(lambda two: f"(?:{two[0]}|{two[1]})")
        ),
        max_leaves=6,
    )
)
def test_widths_are_those_that_pythons_parser_finds(pattern: str) -> None:
    from re import _parser  # type: ignore[attr-defined]

    _, most = _parser.parse(pattern).getwidth()
    width = prefixes(pattern).width
    assert width == (None if most >= 4_000_000_000 else most)


@pytest.mark.parametrize(
    ("pattern", "position"),
    [("ab(c", None), ("ab[z-a]", 3), ("x(?=y)", 1), (r"a\1", 1), ("ab**", 2)],
)
def test_a_wrong_expression_says_where(pattern: str, position: int | None) -> None:
    with pytest.raises(ExpressionError) as error:
        compile_expression(pattern)
    assert error.value.position == position


def test_literal_characters_are_those_of_normal_texts() -> None:
    assert normalise_pattern("，（a）") == re.escape(",") + r"\(a\)"
    assert normalise_pattern("e\u0301") == "é"
    with pytest.raises(ExpressionError, match="invisible"):
        normalise_pattern("a\u200bb")
    with pytest.raises(ExpressionError, match="ffi"):
        normalise_pattern("[\ufb03]")


def test_what_a_stream_would_wait_for_without_end_is_refused() -> None:
    with pytest.raises(ExpressionError, match="of any length"):
        bounded_prefixes(r"key=\w+")
    with pytest.raises(ExpressionError, match="of 100000 characters"):
        bounded_prefixes(".{1000}" * 100)
    with pytest.raises(ExpressionError, match="byte"):
        prefixes(r"a\C")
    assert bounded_prefixes(r"key=\w{1,64}\b").width == 68


def test_nothing_backtracks() -> None:
    """Catastrophic for an engine that does: this test would not end."""
    assert compile_expression("(a*)*(a|aa)+b").search("a" * 100_000) is None
    assert re2.compile("(x+x+)+y").search("x" * 100_000) is None


def test_built_in_expressions_fit_into_streams() -> None:
    for entity in ENTITIES.values():
        for expression in entity:
            compile_expression(expression.pattern)
            assert bounded_prefixes(expression.pattern).width
    for sign in SIGNS:
        compile_expression(sign.pattern)
