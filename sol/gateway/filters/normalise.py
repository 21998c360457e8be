"""What rules see of a text: code points in one form, nothing invisible, and the way back to where it stood.

Two views of a text exist. In the *plain* one each code point is replaced by its NFKC form (Unicode Standard Annex 15:
full-width letters, ligatures, circled digits become ordinary ones), and what cannot be seen is left out: zero-width
and bidirectional controls, soft hyphens, variation selectors, tags, control characters, and the combining marks that
are put on letters only to disguise them. The *folded* view is the plain one case-folded.

Each code point is replaced on its own, so that a text cut anywhere has the same form in pieces as in one: a stream can
be looked at as it comes. The price is that a letter and a combining accent do not become one code point: the accent
counts as absent.
"""

from __future__ import annotations

import unicodedata
from typing import Final

_KEPT_CONTROLS: Final = frozenset("\t\n\v\f\r")
_BLANK_LETTERS: Final = frozenset(map(chr, (0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x2800, 0x3164, 0xFFA0)))
"""Invisible though Unicode counts them as letters, marks or symbols: fillers, the grapheme joiner, blank Braille."""
_VARIATION_SELECTORS: Final = ((0x180B, 0x180F), (0xFE00, 0xFE0F), (0xE0100, 0xE01EF))
_DIACRITICAL_MARKS: Final = ((0x0300, 0x036F), (0x1AB0, 0x1AFF), (0x1DC0, 0x1DFF), (0x20D0, 0x20FF), (0xFE20, 0xFE2F))
"""Unicode's blocks of combining diacritical marks. Vowel signs of Indic scripts and the like are text, and stay."""


def _in(code: int, ranges: tuple[tuple[int, int], ...]) -> bool:
    return any(first <= code <= last for first, last in ranges)


def _invisible(character: str) -> bool:
    category = unicodedata.category(character)
    if category == "Cc":
        return character not in _KEPT_CONTROLS
    code = ord(character)
    return (
        category == "Cf"
        or character in _BLANK_LETTERS
        or _in(code, _VARIATION_SELECTORS)
        or _in(code, _DIACRITICAL_MARKS)
    )


def plain_character(character: str) -> str:
    """The plain view of one code point: of none to 18 code points."""
    if _invisible(character):
        return ""
    return "".join(c for c in unicodedata.normalize("NFKC", character) if not _invisible(c))


class _Table(dict[int, int | str]):
    """For `str.translate`; filled as code points are seen, those of the basic plane only, so that it stays small."""

    def __missing__(self, code: int) -> int | str:
        replaced = plain_character(chr(code))
        value: int | str = code if replaced == chr(code) else replaced
        if code < 0x10000:
            self[code] = value
        return value


_TABLE: Final = _Table()


def plain(text: str) -> str:
    return text.translate(_TABLE)


def folded(text: str) -> str:
    return text.translate(_TABLE).casefold()


class View:
    """A text, its two views, and where their characters come from.

    `before` is what the plain view of the text before this one ends with (one character, or none where nothing is
    before). It is context: word boundaries depend on it, nothing is ever found in it. Positions in a view count it,
    positions in the text do not.
    """

    __slots__ = (
        "_bytes_seen",
        "_characters_seen",
        "_data",
        "_folded",
        "_folded_starts",
        "_is_itself",
        "_starts",
        "found",
        "lead",
        "plain",
        "text",
    )

    def __init__(self, text: str, before: str = "") -> None:
        self.text = text
        self.lead = before
        self.plain = before + text.translate(_TABLE)
        self._is_itself = text.isascii() and len(self.plain) == len(before) + len(text)
        """ASCII of which nothing was left out."""
        self._folded: str | None = None
        self._data: bytes | None = None
        self._starts: list[int] | None = None
        self._folded_starts: list[int] | None = None
        self._bytes_seen = self._characters_seen = 0
        self.found: list[int] | None = None
        """For the matcher, which of its set matched."""

    @property
    def folded(self) -> str:
        if self._folded is None:
            self._folded = self.plain.casefold()
        return self._folded

    @property
    def folded_lead(self) -> int:
        """Characters of the folded view that are context."""
        return len(self.lead) if self.lead.isascii() else len(self.lead.casefold())

    @property
    def data(self) -> bytes:
        """The plain view in UTF-8, which is what RE2 reads."""
        if self._data is None:
            # Half of a surrogate pair, which JSON can hold and UTF-8 cannot, is no character of anybody's rule.
            self._data = self.plain.encode(errors="replace")
        return self._data

    @property
    def data_lead(self) -> int:
        return len(self.lead) if self.lead.isascii() else len(self.lead.encode(errors="replace"))

    def of_bytes(self, position: int) -> int:
        """The place in the plain view of a place in `data`. Fast for places that ascend."""
        if len(self.data) == len(self.plain):
            return position
        if position < self._bytes_seen:
            self._bytes_seen = self._characters_seen = 0
        self._characters_seen += len(self.data[self._bytes_seen : position].decode())
        self._bytes_seen = position
        return self._characters_seen

    def to_bytes(self, position: int) -> int:
        """The place in `data` where the character of the text at `position`, or the first visible one after, begins."""
        if self._is_itself:
            return self.data_lead + position
        return len((self.lead + self.text[:position].translate(_TABLE)).encode(errors="replace"))

    def whole(self, end: int, position: int) -> int:
        """`position`, the place in `data` of `plain[end]`, moved to where the next character of the text begins if that
        before it became several of which some follow."""
        starts = self._plain_starts()
        while end < len(starts) and starts[end] == starts[end - 1]:
            position += len(self.plain[end].encode(errors="replace"))
            end += 1
        return position

    def span(self, start: int, end: int) -> tuple[int, int]:
        """The part of the text that `plain[start:end]`, which is not empty, comes from."""
        if self._is_itself:
            return start - len(self.lead), end - len(self.lead)
        starts = self._plain_starts()
        return starts[start], starts[end - 1] + 1

    def folded_span(self, start: int, end: int) -> tuple[int, int]:
        if self._is_itself and self.lead.isascii():
            return start - len(self.lead), end - len(self.lead)
        if self._folded_starts is None:
            if len(self.folded) == len(self.plain):  # case folding never shortens, so no character became two
                self._folded_starts = self._plain_starts()
            else:
                pairs = zip(self.plain, self._plain_starts(), strict=True)
                self._folded_starts = [origin for c, origin in pairs for _ in c.casefold()]
        return self._folded_starts[start], self._folded_starts[end - 1] + 1

    def last_plain(self, end: int) -> str:
        """What the plain view of the text up to `end` ends with: the context of what follows."""
        text = self.text
        if end and self._is_itself:
            return text[end - 1]
        while end:
            end -= 1
            replaced = text[end].translate(_TABLE)
            if replaced:
                return replaced[-1]
        return self.lead

    def _plain_starts(self) -> list[int]:
        if self._starts is None:
            if self._is_itself:
                own = list(range(len(self.text)))
            else:
                own = [index for index, c in enumerate(self.text) for _ in plain(c)]
            self._starts = [-1] * len(self.lead) + own
        return self._starts
