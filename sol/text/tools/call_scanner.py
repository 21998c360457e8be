"""Reads a tool call that is written as one JSON object, in text that comes in pieces of any size."""

from __future__ import annotations

import json
from collections.abc import Container
from typing import Final

from sol.text.answer_parts import Arguments, CallBegin, Part
from sol.text.marked_text import WHITE
from sol.text.tools.json_scanner import JsonScanner, Status

_ARGUMENTS: Final = ("arguments", "parameters")
_KEYS: Final = {"name": '"', "type": '"', "id": '"', "arguments": "{", "parameters": "{"}
"""The keys of a call, and how their values begin."""


class CallScanner:
    """`{"name": …, "arguments": {…}}` (or `parameters`), in any order, perhaps with `type` and `id`.

    The call begins when its name, one of `names`, and the beginning of its arguments have been read; from then on its
    arguments come as they are written. What breaks before that was no call, and `text` is all that has been taken of
    it. A call without arguments passes `{}`. `index` is the call's among those of the answer.
    """

    def __init__(self, names: Container[str], index: int) -> None:
        self.status = Status.OPEN
        self.begun = False
        self._names = names
        self._index = index
        self._taken: list[str] = []
        self._expects = "{"
        self._value: JsonScanner | None = None
        self._key = ""
        self._seen: set[str] = set()
        self._name: str | None = None
        self._arguments: str | None = None
        """Written before the name was."""

    @property
    def text(self) -> str:
        return "".join(self._taken)

    def feed(self, text: str, start: int, parts: list[Part]) -> int:
        """Where it stopped in `text`, which it reads from `start` on. What came of it is appended to `parts`."""
        index = start
        while self.status is Status.OPEN and index < len(text):
            end = self._step(text, index, parts)
            if not self.begun:
                self._taken.append(text[index:end])
            index = end
        if self.begun:
            self._taken.clear()
        return index

    def _step(self, text: str, index: int, parts: list[Part]) -> int:
        if self._value is not None:
            return self._read_value(self._value, text, index, parts)
        char = text[index]
        if char in WHITE:
            return index + 1
        match self._expects, char:
            case "{", "{":
                self._expects = "key or end"
            case (("key" | "key or end"), '"'):
                self._value = JsonScanner('"')
                return index
            case ":", ":":
                self._expects = "value"
            case "value", _ if char == _KEYS[self._key]:
                self._value = JsonScanner(char)
                if self._key in _ARGUMENTS:
                    self._arguments = ""
                    self._begin(parts)
                return index
            case ", or end", ",":
                self._expects = "key"
            case ((", or end" | "key or end"), "}"):
                self._end(parts)
                return index + (self.status is Status.DONE)
            case _:
                self.status = Status.BROKEN
                return index
        return index + 1

    def _read_value(self, value: JsonScanner, text: str, index: int, parts: list[Part]) -> int:
        is_arguments = self._expects == "value" and self._key in _ARGUMENTS
        end = value.feed(text, index)
        if is_arguments and end > index:
            pieces = value.take()
            if self.begun:
                parts.append(Arguments(self._index, pieces))
            else:
                assert self._arguments is not None
                self._arguments += pieces
        if value.status is Status.BROKEN:
            self.status = Status.BROKEN
        elif value.status is Status.DONE:
            self._value = None
            if self._expects == "value":
                self._expects = ", or end"
                if self._key == "name":
                    self._name = json.loads(value.text)
                    if self._name not in self._names:
                        self.status = Status.BROKEN
                    self._begin(parts)
            else:
                self._expects = ":"
                self._key = json.loads(value.text)
                kind = "arguments" if self._key in _ARGUMENTS else self._key
                if self._key not in _KEYS or kind in self._seen:
                    self.status = Status.BROKEN
                self._seen.add(kind)
        return end

    def _begin(self, parts: list[Part]) -> None:
        """Once there are both name and arguments."""
        if self.status is Status.BROKEN or self._name is None or self._arguments is None:
            return
        self.begun = True
        parts.append(CallBegin(self._index, self._name))
        if self._arguments:
            parts.append(Arguments(self._index, self._arguments))

    def _end(self, parts: list[Part]) -> None:
        if not self.begun and self._name is not None:
            self._arguments = "{}"
            self._begin(parts)
        self.status = Status.DONE if self.begun else Status.BROKEN
