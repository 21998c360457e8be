"""Finds where a JSON value ends, in text that comes in pieces of any size."""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import Final

from sol.text.marked_text import WHITE


class Status(Enum):
    OPEN = auto()
    """More is needed."""
    DONE = auto()
    BROKEN = auto()
    """The next character cannot be there."""


_NUMBER: Final = {
    "-": {"0": "0", "1-9": "1"},
    "0": {".": ".", "e": "e"},
    "1": {"0": "1", "1-9": "1", ".": ".", "e": "e"},
    ".": {"0": "2", "1-9": "2"},
    "2": {"0": "2", "1-9": "2", "e": "e"},
    "e": {"+-": "+", "0": "3", "1-9": "3"},
    "+": {"0": "3", "1-9": "3"},
    "3": {"0": "3", "1-9": "3"},
}
"""A number's states, and where the classes of characters lead: behind a sign, a leading zero, other digits, the point,
digits behind it, the e, its sign, its digits."""
_NUMBER_ENDS: Final = "0123"
_CLASSES: Final = {
    **dict.fromkeys("123456789", "1-9"),
    **dict.fromkeys("+-", "+-"),
    **dict.fromkeys("eE", "e"),
    "0": "0",
    ".": ".",
}
_PLAIN: Final = re.compile(r'[^"\\\x00-\x1f]*')


class JsonScanner:
    """One JSON value (RFC 8259), which must begin with one of the characters `first`.

    `feed` takes text as far as it belongs to the value and returns how far that is; `status` then says why it stopped.
    `text` is what it has taken. Control characters inside of strings, which JSON forbids and models write, are taken
    as their escapes.
    """

    def __init__(self, first: str = '{["-0123456789tfn') -> None:
        self.status = Status.OPEN
        self._first = first
        self._pieces: list[str] = []
        self._stack: list[str] = []
        self._expects = "value"
        self._word = ""
        """What is left of true, false or null; of \\uXXXX, as many characters as hexadecimal digits are missing."""
        self._number = ""
        self._is_key = False
        self._begun = False

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def take(self) -> str:
        """`text` since it was last taken."""
        text, self._pieces = self.text, []
        return text

    def feed(self, text: str, start: int = 0) -> int:
        index = start
        while self.status is Status.OPEN and index < len(text):
            if self._expects == "string":
                end = _PLAIN.match(text, index).end()  # type: ignore[union-attr]  # it matches nothing, too
                if end > index:
                    self._pieces.append(text[index:end])
                    index = end
                    continue
            index += self._take(text[index])
        return index

    def _take(self, char: str) -> bool:
        """Whether the character belongs to the value; if not, and it has not ended, it is broken."""
        shown = char
        match self._expects:
            case "string":
                if char == '"':
                    self._expects = "colon" if self._is_key else self._after_value()
                elif char == "\\":
                    self._expects = "escape"
                else:
                    shown = f"\\u{ord(char):04x}"
            case "escape":
                if char == "u":
                    self._expects, self._word = "hex", "xxxx"
                elif char in '"\\/bfnrt':
                    self._expects = "string"
                else:
                    return self._break()
            case "hex":
                if char not in "0123456789abcdefABCDEF":
                    return self._break()
                self._word = self._word[1:]
                self._expects = "hex" if self._word else "string"
            case "word":
                if char != self._word[0]:
                    return self._break()
                self._word = self._word[1:]
                if not self._word:
                    self._expects = self._after_value()
            case "number":
                following = _NUMBER[self._number].get(_CLASSES.get(char, ""))
                if following is None:
                    if self._number not in _NUMBER_ENDS:
                        return self._break()
                    self._expects = self._after_value()
                    return False  # the character is looked at again, unless the number was all
                self._number = following
            case _:
                if char in WHITE:
                    if not self._begun:
                        return self._break()
                elif not self._take_structure(char):
                    return self._break()
        self._begun = True
        self._pieces.append(shown)
        return True

    def _take_structure(self, char: str) -> bool:
        expects = self._expects
        if expects in ("value", "value or end") and (self._begun or char in self._first):
            if char == "]" and expects == "value or end":
                self._stack.pop()
                self._expects = self._after_value()
                return True
            return self._begin_value(char)
        if char == '"' and expects in ("key", "key or end"):
            self._expects, self._is_key = "string", True
        elif char in "}]" and (expects == "after value" or (expects == "key or end" and char == "}")):
            if self._stack.pop() != ("{" if char == "}" else "["):
                return False
            self._expects = self._after_value()
        elif char == ":" and expects == "colon":
            self._expects = "value"
        elif char == "," and expects == "after value":
            self._expects = "key" if self._stack[-1] == "{" else "value"
        else:
            return False
        return True

    def _begin_value(self, char: str) -> bool:
        if char in "{[":
            self._stack.append(char)
            self._expects = "key or end" if char == "{" else "value or end"
        elif char == '"':
            self._expects, self._is_key = "string", False
        elif char in "-0123456789":
            self._expects, self._number = "number", "1" if char in "123456789" else char
        elif char in "tfn":
            self._expects, self._word = "word", {"t": "rue", "f": "alse", "n": "ull"}[char]
        else:
            return False
        return True

    def _after_value(self) -> str:
        if not self._stack:
            self.status = Status.DONE
        return "after value"

    def _break(self) -> bool:
        self.status = Status.BROKEN
        return False
