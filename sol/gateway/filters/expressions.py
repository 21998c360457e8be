"""Regular expressions of RE2: checked, compiled, measured, and turned into an expression for the beginnings of matches.

RE2 does linear work in the length of the text, whatever the expression (Cox, "Regular expression matching in the
wild", 2010). What its Python binding cannot say is whether the end of a text may be the beginning of a match, which a
stream has to know before it lets that end go. So the expression is parsed here, into a tree from which one for its
prefixes is written.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from typing import Any, Final

import re2

from sol.gateway.filters.normalise import plain_character

MAX_MEMORY: Final = 64 * 2**20
"""Bytes for the program and the lazily built automaton of one expression; RE2 starts the automaton afresh there."""

MAX_WIDTH: Final = 10_000
"""Characters of the longest match that a stream may have to be held back for."""


class ExpressionError(ValueError):
    """`position` is that in the expression, in characters, where it can be told."""

    def __init__(self, message: str, position: int | None = None) -> None:
        super().__init__(message if position is None else f"{message} (at character {position})")
        self.position = position


def compile_expression(pattern: str, *, case_sensitive: bool = True, max_memory: int = MAX_MEMORY) -> Any:
    """Raises `ExpressionError`. The type is RE2's own, which has no annotations."""
    try:
        return re2.compile(pattern, expression_options(case_sensitive, max_memory))
    except re2.error as error:
        reason = error.args[0].decode(errors="replace") if error.args else "not an expression"
        fragment = reason.rpartition(": ")[2]
        position = pattern.find(fragment) if fragment and fragment != pattern else -1
        raise ExpressionError(f"RE2 cannot read it: {reason}", position if position >= 0 else None) from None


def expression_options(case_sensitive: bool = True, max_memory: int = MAX_MEMORY) -> Any:
    options = re2.Options()
    options.log_errors = False
    options.max_mem = max_memory
    options.case_sensitive = case_sensitive
    return options


def normalise_pattern(pattern: str) -> str:
    """The expression for texts in their plain view: literal characters that never occur in one are replaced.

    Raises `ExpressionError` for a character that is invisible, or that becomes several, which a class cannot hold.
    """
    pattern = unicodedata.normalize("NFC", pattern)
    if pattern.isascii():
        return pattern
    parts: list[str] = []
    for position, character in enumerate(pattern):
        replaced = plain_character(character)
        if replaced == character:
            parts.append(character)
        elif len(replaced) == 1:
            # A full-width bracket is a bracket of the text, not one of the expression.
            parts.append(re.escape(replaced))
        else:
            form = "is invisible and is removed from texts" if not replaced else f"stands as {replaced!r} in texts"
            raise ExpressionError(f"U+{ord(character):04X} {form}: write what is to be found", position)
    return "".join(parts)


@dataclass(frozen=True, slots=True)
class Prefixes:
    pattern: str | None
    """Matches whatever, not empty, a match may begin with, the whole match included; None where nothing can match."""
    width: int | None
    """Characters of the longest match; None: any number."""


def prefixes(pattern: str) -> Prefixes:
    """Of an expression that RE2 has accepted. Raises `ExpressionError` for `\\C`, which matches half a character."""
    try:
        tree = _Parser(pattern).parse()
        return Prefixes(tree.prefix(), tree.width())
    except RecursionError:
        raise ExpressionError("it nests too deeply") from None


def bounded_prefixes(pattern: str) -> Prefixes:
    """The same of one whose matches in a stream can be waited for. Raises `ExpressionError` if they are too long."""
    result = prefixes(pattern)
    if result.width is None or result.width > MAX_WIDTH:
        length = "of any length" if result.width is None else f"of {result.width} characters"
        raise ExpressionError(
            f"it can match a text {length}, and a stream would be held back that long: bound it (write {{1,64}} for +) "
            f"to {MAX_WIDTH} characters in all"
        )
    return result


class _Node:
    single = False
    """One character wide, so that its only prefix is itself."""

    def source(self) -> str:
        raise NotImplementedError

    def prefix(self) -> str | None:
        """As `Prefixes.pattern`: an expression that can stand anywhere."""
        raise NotImplementedError

    def width(self) -> int | None:
        raise NotImplementedError


@dataclass
class _Character(_Node):
    text: str
    single = True

    def source(self) -> str:
        return self.text

    def prefix(self) -> str | None:
        return self.text

    def width(self) -> int | None:
        return 1


@dataclass
class _Assertion(_Node):
    """Looks at the characters around, takes none."""

    text: str

    def source(self) -> str:
        return self.text

    def prefix(self) -> str | None:
        return None

    def width(self) -> int | None:
        return 0


@dataclass
class _Sequence(_Node):
    parts: list[_Node]

    def source(self) -> str:
        return "".join(part.source() for part in self.parts)

    def prefix(self) -> str | None:
        rest: str | None = None
        for part in reversed(self.parts):
            begun = part.prefix()
            if rest is None:
                rest = begun
            elif part.single:
                rest = f"{part.source()}(?:{rest})?"
            elif begun is None:
                rest = f"{part.source()}(?:{rest})"
            else:
                rest = f"(?:{begun}|{part.source()}(?:{rest}))"
        return rest

    def width(self) -> int | None:
        widths = [part.width() for part in self.parts]
        return None if None in widths else sum(width or 0 for width in widths)


@dataclass
class _Choice(_Node):
    options: list[_Node]

    def source(self) -> str:
        return f"(?:{'|'.join(option.source() for option in self.options)})"

    def prefix(self) -> str | None:
        begun = [prefix for option in self.options if (prefix := option.prefix()) is not None]
        return f"(?:{'|'.join(begun)})" if begun else None

    def width(self) -> int | None:
        widths = [option.width() for option in self.options]
        return None if None in widths else max(width or 0 for width in widths)


@dataclass
class _Repeat(_Node):
    part: _Node
    least: int
    most: int | None

    def source(self) -> str:
        return self._times(self.least, self.most)

    def prefix(self) -> str | None:
        begun = self.part.prefix()
        if begun is None or self.most == 0:
            return None
        if self.part.single:
            return self._times(1, self.most)
        return f"{self._times(0, None if self.most is None else self.most - 1)}(?:{begun})"

    def width(self) -> int | None:
        width = self.part.width()
        if width == 0 or self.most == 0:
            return 0
        return None if width is None or self.most is None else width * self.most

    def _times(self, least: int, most: int | None) -> str:
        return f"(?:{self.part.source()}){{{least},{'' if most is None else most}}}"


_FLAGS: Final = re.compile(r"\?([imsU]*)(?:-([imsU]+))?([:)])")
_NAME: Final = re.compile(r"\?P?<\w+>")
_COUNT: Final = re.compile(r"\{(\d+)(,(\d*))?\}")
_ESCAPE: Final = re.compile(r"\\(?:[pP](?:\{\^?\w+\}|.)|x(?:\{[0-9A-Fa-f]+\}|[0-9A-Fa-f]{2})|[0-7]{1,3}|.)", re.DOTALL)


class _Parser:
    """RE2's syntax (https://github.com/google/re2/wiki/Syntax), of expressions that are known to be right."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0

    def parse(self) -> _Node:
        return self._choice("")

    def _choice(self, flags: str) -> _Node:
        options: list[_Node] = []
        parts: list[_Node] = []
        while self._at < len(self._pattern) and self._pattern[self._at] != ")":
            character = self._pattern[self._at]
            if character == "|":
                self._at += 1
                options.append(_Sequence(parts))
                parts = []
            elif character == "(":
                group = _FLAGS.match(self._pattern, self._at + 1)
                if group and group.group(3) == ")":  # flags for the rest of the group
                    self._at = group.end()
                    flags = _change(flags, group)
                else:
                    parts.append(self._repeated(self._group(flags, group)))
            elif self._pattern.startswith(r"\Q", self._at):
                end = self._pattern.find(r"\E", self._at)
                end = len(self._pattern) if end < 0 else end
                literal = self._pattern[self._at + 2 : end]
                self._at = end + 2
                characters: list[_Node] = [_Character(_flagged(re.escape(c), flags)) for c in literal]
                if characters:
                    characters[-1] = self._repeated(characters[-1])
                parts += characters
            else:
                parts.append(self._repeated(self._atom(flags)))
        options.append(_Sequence(parts))
        return _Choice(options) if len(options) > 1 else options[0]

    def _group(self, flags: str, group: re.Match[str] | None) -> _Node:
        if group:
            self._at = group.end()
            flags = _change(flags, group)
        else:
            name = _NAME.match(self._pattern, self._at + 1)
            self._at = name.end() if name else self._at + 1
        inner = self._choice(flags)
        self._at += 1
        return inner if isinstance(inner, _Choice) else _Choice([inner])

    def _atom(self, flags: str) -> _Node:
        start = self._at
        character = self._pattern[start]
        if character == "[":
            self._at = self._class_end(start)
        elif character == "\\":
            escape = _ESCAPE.match(self._pattern, start)
            assert escape is not None
            self._at = escape.end()
            if escape.group() in (r"\b", r"\B", r"\A", r"\z"):
                return _Assertion(escape.group())
            if escape.group() == r"\C":
                raise ExpressionError(r"\C matches a byte, which may be half a character; write . instead", start)
        else:
            self._at += 1
            if character in "^$":
                return _Assertion(_flagged(character, flags))
        text = self._pattern[start : self._at]
        return _Character(_flagged(re.escape(text) if text in ("{", "}") else text, flags))

    def _class_end(self, start: int) -> int:
        at = start + 1
        if self._pattern.startswith("^", at):
            at += 1
        first = True
        while first or self._pattern[at] != "]":
            first = False
            if self._pattern.startswith("[:", at) and ":]" in self._pattern[at:]:
                at = self._pattern.index(":]", at) + 2
            elif self._pattern[at] == "\\":
                escape = _ESCAPE.match(self._pattern, at)
                assert escape is not None
                at = escape.end()
            else:
                at += 1
        return at + 1

    def _repeated(self, node: _Node) -> _Node:
        while self._at < len(self._pattern):
            character = self._pattern[self._at]
            count = _COUNT.match(self._pattern, self._at)
            if character in "*+?":
                node = _Repeat(node, int(character == "+"), 1 if character == "?" else None)
                self._at += 1
            elif count:
                least = int(count.group(1))
                most = least if count.group(2) is None else int(count.group(3)) if count.group(3) else None
                node = _Repeat(node, least, most)
                self._at = count.end()
            else:
                break
            if self._pattern.startswith("?", self._at):  # prefers fewer; the same prefixes
                self._at += 1
        return node


def _change(flags: str, group: re.Match[str]) -> str:
    return "".join(sorted((set(flags) | set(group.group(1))) - set(group.group(2) or "")))


def _flagged(source: str, flags: str) -> str:
    """`U` only says which match is preferred, and prefixes are those of all."""
    wanted = flags.replace("U", "")
    return f"(?{wanted}:{source})" if wanted else source
