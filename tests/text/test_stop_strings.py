from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from sol.text.stop_strings import StopStrings

TEXT = st.text("ab", max_size=30)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


def first_match(text: str, stops: list[str]) -> tuple[str, int] | None:
    """By trying every end."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return max(found, key=len), end
    return None


@settings(deadline=None, max_examples=400)
@given(TEXT, STOPS)
def test_finds_what_ends_first_and_of_these_the_longest(text: str, stops: list[str]) -> None:
    assert StopStrings(stops).feed(text) == first_match(text, stops)


@settings(deadline=None, max_examples=400)
@given(TEXT, STOPS)
def test_pending_is_the_longest_beginning_of_a_stop_string(text: str, stops: list[str]) -> None:
    automaton = StopStrings(stops)
    automaton.feed(text, stopping=False)
    beginnings = {stop[:length] for stop in stops for length in range(len(stop) + 1)}
    assert automaton.pending == max(len(beginning) for beginning in beginnings if text.endswith(beginning))


@settings(deadline=None, max_examples=400)
@given(TEXT, STOPS, st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_where_the_text_is_cut_makes_no_difference(text: str, stops: list[str], sizes: list[int]) -> None:
    automaton = StopStrings(stops)
    position = turn = 0
    found = None
    while position < len(text) and found is None:
        part = text[position : position + sizes[turn % len(sizes)]]
        match = automaton.feed(part)
        found = match and (match.stop, position + match.end)
        position += len(part)
        turn += 1
    assert found == first_match(text, stops)


def test_a_string_that_ends_while_not_stopping_does_not_count_but_may_begin_one_that_does() -> None:
    automaton = StopStrings(["ab", "abc"])
    assert automaton.feed("xab", stopping=False) is None
    assert automaton.feed("c") == ("abc", 1)


def test_forks_find_the_same_strings_each_in_its_own_text() -> None:
    automaton = StopStrings(["abc"])
    automaton.feed("ab")
    fork = automaton.fork()
    assert fork.pending == 0
    assert fork.feed("c") is None
    assert automaton.feed("c") == ("abc", 1)
    assert fork.feed("xabc") == ("abc", 4)
