"""Text that goes on until a marker, in pieces of any size."""

from __future__ import annotations

from typing import Final, NamedTuple

WHITE: Final = " \t\r\n"
"""White space as JSON has it."""


class Piece(NamedTuple):
    text: str
    """Ready to be shown: what comes later cannot change it."""
    rest: str | None
    """What stands behind the marker; None while it has not come."""
    white: str = ""
    """White space before the marker, which is not in `text`."""


class TextUntil:
    """Finds `marker`, and gives the text before it as soon as it cannot be part of the marker any more.

    White space before the marker is left out: it belongs to the form, not to the text. So is white space at the
    beginning, with `strip_leading`. If the marker never comes, `finish` gives what was withheld. Where the pieces of
    the text were cut makes no difference, and the work is constant for each character.
    """

    def __init__(self, marker: str, *, strip_leading: bool = False) -> None:
        self._marker = marker
        self._strip_leading = strip_leading
        self._white: list[str] = []
        """White space that is left out if the marker follows."""
        self._partial = ""
        """What may be the beginning of the marker."""

    def feed(self, text: str) -> Piece:
        text, self._partial = self._partial + text, ""
        index = text.find(self._marker)
        if index >= 0:
            shown = self._show(text[:index])
            white, self._white = "".join(self._white), []
            return Piece(shown, text[index + len(self._marker) :], white)
        length = overlap(text, self._marker)
        if length:
            text, self._partial = text[:-length], text[-length:]
        return Piece(self._show(text), None)

    def finish(self) -> str:
        text = "".join(self._white) + self._partial
        self._white, self._partial = [], ""
        return text.lstrip(WHITE) if self._strip_leading else text

    def _show(self, text: str) -> str:
        """`text` without the white space at its end, which is kept, and behind that which was kept before."""
        if self._strip_leading:
            text = text.lstrip(WHITE)
            if not text:
                return ""
            self._strip_leading = False
        body = text.rstrip(WHITE)
        if not body:
            if text:
                self._white.append(text)
            return ""
        shown = "".join(self._white) + body
        self._white = [text[len(body) :]]
        return shown


def overlap(text: str, marker: str) -> int:
    """The length of the longest end of `text` that is a beginning of `marker`, but not all of it."""
    index = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while index >= 0:
        if marker.startswith(text[index:]):
            return len(text) - index
        index = text.find(marker[0], index + 1)
    return 0


class LeadingWhite:
    """White space that may turn out to be part of what follows it. Adding to it takes constant time a character."""

    def __init__(self, characters: str = WHITE) -> None:
        self._characters = characters
        self._pieces: list[str] = []

    def feed(self, text: str) -> str:
        """What follows the white space at the beginning of `text`."""
        body = text.lstrip(self._characters)
        if len(body) < len(text):
            self._pieces.append(text[: len(text) - len(body)])
        return body

    def take(self) -> str:
        """All of it, which is then forgotten."""
        text, self._pieces = "".join(self._pieces), []
        return text
