"""Finds what several rules look for in a text: one pass of RE2 for all expressions, one of Aho-Corasick for all words.

Most texts hold nothing, and that is what must be cheap. RE2's set says which expressions match at all; only those are
searched again for where. Matches of one rule do not overlap: each begins at the first whole character after the one
before.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import ahocorasick
import re2

from sol.gateway.filters.expressions import (
    MAX_MEMORY,
    ExpressionError,
    bounded_prefixes,
    compile_expression,
    expression_options,
    normalise_pattern,
)
from sol.gateway.filters.normalise import View, folded
from sol.gateway.filters.pii import Validator


@dataclass(frozen=True, slots=True)
class Expression:
    """`label` says in decisions which of a rule's expressions it was."""

    pattern: str
    label: str
    case_sensitive: bool = False
    validator: Validator | None = None


@dataclass(frozen=True, slots=True)
class Search:
    """What one rule looks for."""

    expressions: tuple[Expression, ...] = ()
    words: tuple[str, ...] = ()
    whole_words: bool = True


class Match(NamedTuple):
    """`text[start:end]` is what rule number `rule` of the matcher found."""

    start: int
    end: int
    rule: int
    label: str


class _Compiled(NamedTuple):
    rule: int
    label: str
    regex: Any
    validator: Validator | None


class Matcher:
    """For any number of texts at once; it has no state. `streaming`: it is asked for `hold`, too.

    Raises `ExpressionError`, whose message names the expression.
    """

    def __init__(self, searches: Sequence[Search], *, streaming: bool = False) -> None:
        self._expressions: list[_Compiled] = []
        self._set: Any = None
        self._held: Any = None
        self._nothing: list[int] = []
        """What the set says of a text in which nothing is."""
        self._words: Any = None
        self._longest_word = 0
        self._first_characters: frozenset[str] = frozenset()
        self._add_expressions(searches, streaming)
        self._add_words(searches)

    def find(
        self,
        view: View,
        resume: Mapping[int, int] | None = None,
        failed: Callable[[int, Exception], None] | None = None,
    ) -> list[Match]:
        """All matches, by where they begin, then by rule. `resume`: where the last match of a rule ends.

        What one rule raises goes to `failed` with the rule's number, and the other rules' matches are found all the
        same.
        """
        matches: list[Match] = []
        if self._set is not None:
            for rule, expressions in self._matching(view).items():
                try:
                    matches += self._search(view, expressions, (resume or {}).get(rule, 0))
                except Exception as error:
                    if failed is None:
                        raise
                    failed(rule, error)
        if self._words is not None and not self._first_characters.isdisjoint(view.folded):
            matches += self._find_words(view, resume)
        if len(matches) > 1:
            matches.sort(key=_order)
        return matches

    def is_quiet(self, view: View) -> bool:
        """Whether nothing is found in it, and no match could begin in it: so it is with nearly all pieces of texts."""
        if self._set is not None and self._look(view) != self._nothing:
            return False
        if self._words is None or self._first_characters.isdisjoint(view.folded):
            return True
        text = view.folded
        return next(self._words.iter(text), None) is None and self._word_begins(view) == len(text)

    def hold(self, view: View) -> int:
        """Where in the text the earliest match begins that more text could make, or make longer; the text's length if
        there is none."""
        at = len(view.text)
        if self._held is not None and self._may_begin(view):
            held = self._held.search(view.data, view.data_lead)
            if held is not None:
                at = view.span(view.of_bytes(held.start()), len(view.plain))[0]
        if self._words is not None:
            start, end = self._word_begins(view), len(view.folded)
            if start < end:
                return min(at, view.folded_span(start, end)[0])
        return at

    def _word_begins(self, view: View) -> int:
        """Where in the folded view the earliest beginning of a word stands that reaches to its end; else its length."""
        text, first, match = view.folded, self._first_characters, self._words.match
        end = len(text)
        for start in range(max(view.folded_lead, end - self._longest_word), end):
            if text[start] in first and match(text[start:]):
                return start
        return end

    def _look(self, view: View) -> list[int]:
        """Which members of the set match somewhere: expressions by their numbers, then one that matches everything, and
        of streams one for beginnings at the end."""
        if view.found is None:
            view.found = sorted(self._set.Match(view.data))
        return view.found

    def _may_begin(self, view: View) -> bool:
        number = len(self._expressions)
        found = self._look(view)
        return number not in found or number + 1 in found

    def _matching(self, view: View) -> dict[int, list[_Compiled]]:
        """The expressions that match somewhere, by rule."""
        found = self._look(view)
        if found == self._nothing:
            return {}
        # One member matches everything: without it the set ran out of memory, and nothing is known.
        certain = len(self._expressions) in found
        rules: dict[int, list[_Compiled]] = {}
        for number in sorted(found) if certain else range(len(self._expressions)):
            if number < len(self._expressions):
                expression = self._expressions[number]
                rules.setdefault(expression.rule, []).append(expression)
        return rules

    def _search(self, view: View, expressions: list[_Compiled], resume: int) -> list[Match]:
        """The matches of one rule: again and again the first of all its expressions' next ones."""
        begin = view.to_bytes(resume) if resume else view.data_lead
        waiting = [(span, e) for e in expressions if (span := _next(view.data, e, begin))]
        matches = []
        while waiting:
            (first, last), chosen = min(waiting, key=_start)
            start, end = view.of_bytes(first), view.of_bytes(last)
            matches.append(Match(*view.span(start, end), chosen.rule, chosen.label))
            begin = view.whole(end, last)
            after = []
            for bounds, expression in waiting:
                following = bounds if bounds[0] >= begin else _next(view.data, expression, begin)
                if following:
                    after.append((following, expression))
            waiting = after
        return matches

    def _find_words(self, view: View, resume: Mapping[int, int] | None) -> list[Match]:
        text = view.folded
        lead = view.folded_lead
        found: list[tuple[int, int, int, str]] = []
        for last, entries in self._words.iter(text):
            for rule, length, label, whole in entries:
                start = last + 1 - length
                if start >= lead and (not whole or _stands_alone(text, start, last + 1)):
                    found.append((start, -length, rule, label))
        if not found:
            return []
        ends = dict(resume or {})
        matches = []
        for start, negative, rule, label in sorted(found):  # the longest of those that begin at one place
            span = view.folded_span(start, start - negative)
            if span[0] >= ends.get(rule, 0):
                ends[rule] = span[1]
                matches.append(Match(*span, rule, label))
        return matches

    def _add_expressions(self, searches: Sequence[Search], streaming: bool) -> None:
        flat = [(rule, expression) for rule, search in enumerate(searches) for expression in search.expressions]
        if not flat:
            return
        self._set = re2.Set.SearchSet(expression_options(max_memory=MAX_MEMORY))
        begun: list[str] = []
        for rule, expression in flat:
            pattern = normalise_pattern(expression.pattern)
            regex = compile_expression(pattern, case_sensitive=expression.case_sensitive)
            flag = "" if expression.case_sensitive else "(?i)"
            self._set.Add(flag + pattern)
            self._expressions.append(_Compiled(rule, expression.label, regex, expression.validator))
            if streaming:
                begin = bounded_prefixes(pattern)
                if begin.pattern is not None:
                    begun.append(f"(?:{flag}{begin.pattern})")
        self._set.Add("")
        self._nothing = [len(self._expressions)]
        if begun:
            held = f"(?:{'|'.join(begun)})\\z"
            self._held = compile_expression(held)
            self._set.Add(held)
        self._set.Compile()

    def _add_words(self, searches: Sequence[Search]) -> None:
        entries: dict[str, list[tuple[int, int, str, bool]]] = {}
        for rule, search in enumerate(searches):
            for number, word in enumerate(search.words):
                # A decomposed accent counts as absent in texts, so a word with one is looked for without it, too.
                for form in {folded(unicodedata.normalize("NFC", word)), folded(unicodedata.normalize("NFD", word))}:
                    if not form.strip():
                        raise ExpressionError(f"the word {word!r} is empty, or nothing of it can be seen")
                    entries.setdefault(form, []).append((rule, len(form), f"words[{number}]", search.whole_words))
        if not entries:
            return
        self._words = ahocorasick.Automaton()
        for form, values in entries.items():
            self._words.add_word(form, tuple(values))
        self._words.make_automaton()
        self._longest_word = max(map(len, entries))
        self._first_characters = frozenset(form[0] for form in entries)


def _next(data: bytes, expression: _Compiled, position: int) -> tuple[int, int] | None:
    """The next match at or after `position`, in bytes, that is not empty and is what it looks like."""
    while (found := expression.regex.search(data, position)) is not None:
        start, end = found.span()
        if start == end:
            if end == len(data):
                return None
        elif expression.validator is None:
            return start, end
        else:
            text = data[start:end].decode()
            accepted = expression.validator(text, data[end : end + 4].decode(errors="ignore")[:1])
            if accepted:
                return start, start + len(text[:accepted].encode())
        position = start + 1
        while position < len(data) and data[position] & 0xC0 == 0x80:  # within a character
            position += 1
    return None


def _start(candidate: tuple[tuple[int, int], _Compiled]) -> int:
    return candidate[0][0]


def _order(match: Match) -> tuple[int, int, int]:
    return match.start, match.rule, -match.end


def _stands_alone(text: str, start: int, end: int) -> bool:
    """Whether no letter or digit touches the word's own. Scripts without spaces between words have no such borders."""
    before = start > 0 and _joins(text[start]) and _joins(text[start - 1])
    after = end < len(text) and _joins(text[end - 1]) and _joins(text[end])
    return not before and not after


def _joins(character: str) -> bool:
    if character.isascii():
        return character.isalnum()
    return character.isalnum() and not (
        "\u0e00" <= character <= "\u0eff"  # Thai, Lao
        or "\u1000" <= character <= "\u109f"  # Burmese
        or "\u1780" <= character <= "\u17ff"  # Khmer
        or "\u3040" <= character <= "\u30ff"  # kana
        or "\u3400" <= character <= "\u9fff"  # Chinese characters
        or "\uf900" <= character <= "\ufaff"
        or "\U00020000" <= character <= "\U0003ffff"
    )
