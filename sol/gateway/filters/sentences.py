"""Sentences of English and Chinese texts: what a classifier of prompt injection is asked about, one by one.

An attack in one sentence of a long text would drown in the score of the whole. The rules are those of punctuation, as
no list of abbreviations is ever complete: a split too many costs one more sentence to look at, nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

_END: Final = re.compile(
    r"""
    [。！？!?…；]+ [”’"'」』）)\]]*      # Chinese stops need no space after them; exclamations rarely have none
    | \. [”’"')\]]* (?=\s)             # an English full stop, not that in 3.14 or example.com
    | \n\s*\n | \n (?=\s*(?:[-*•#]|\d+[.)])\s) | \r?\n
    """,
    re.VERBOSE,
)
_SPACE: Final = re.compile(r"\s")

MAX_CHARACTERS: Final = 1000
"""A sentence that is longer is looked at in overlapping windows of this length."""
OVERLAP: Final = 200


def sentences(text: str) -> Iterator[tuple[int, int]]:
    """Where the sentences of `text` begin and end, in order, without the white space around them."""
    start = 0
    for match in _END.finditer(text):
        yield from _windows(text, start, match.end())
        start = match.end()
    yield from _windows(text, start, len(text))


def _windows(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    while start < end and text[start].isspace():
        start += 1
    while end > start and text[end - 1].isspace():
        end -= 1
    while end - start > MAX_CHARACTERS:
        # At a space near the window's end, where there is one: a word cut in two is no word.
        spaces = [m.start() for m in _SPACE.finditer(text, start + MAX_CHARACTERS - 100, start + MAX_CHARACTERS)]
        cut = spaces[-1] if spaces else start + MAX_CHARACTERS
        yield start, cut
        start = cut - OVERLAP
    if start < end:
        yield start, end
