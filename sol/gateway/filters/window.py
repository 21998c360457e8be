"""One text of a stream: held back as far as it may be the beginning of a match, and no further."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from sol.gateway.filters.matcher import Match
from sol.gateway.filters.normalise import View
from sol.gateway.filters.rules import Failed, Hit, RuleSet


class Edit(NamedTuple):
    """`text[start:end]` becomes `replacement`; `hit`: where this is the beginning of what one acts on."""

    start: int
    end: int
    hit: Hit | None


def apply(text: str, edits: Iterable[Edit]) -> str:
    """Edits in order of their starts. Where some overlap, the first has its replacement and the others none."""
    parts = []
    done = 0
    for start, end, hit in edits:
        if start >= done:
            parts.append(text[done:start])
            if hit is not None:
                parts.append(hit.rule.replacement(hit.label))
        done = max(done, end)
    parts.append(text[done:])
    return "".join(parts)


def redactions(hits: Iterable[Hit]) -> list[Edit]:
    return [Edit(hit.start, hit.end, hit) for hit in hits if hit.rule.withholds and hit.rule.config.action == "redact"]


class Released(msgspec.Struct, frozen=True):
    text: str
    """May be passed on now."""
    hits: tuple[Hit, ...] = ()
    """Found since the last time; their places are those in the whole text."""
    rejected: Hit | None = None
    """Ends the text: `text` is what comes before it."""


class Window:
    """Gets a text in pieces. What it releases, joined, does not depend on where the text was cut.

    A match is final, and is acted on, once the text from its start to the end cannot be the beginning of a longer one.
    """

    def __init__(self, rules: RuleSet, numbers: frozenset[int], failed: Failed) -> None:
        self._rules = rules
        self._matcher = rules.matcher
        self._numbers = numbers
        self._failed = failed
        self._pending = ""
        self._before = ""
        self._offset = 0
        """Characters of the text before what is pending."""
        self._covered = 0
        """Of what is pending, the characters that belong to a match already replaced."""
        self._resume: dict[int, int] = {}
        """For rules whose last match ends in what is pending, where."""
        self._ended = False

    @property
    def pending(self) -> int:
        """Characters that are held back."""
        return len(self._pending)

    def feed(self, text: str, *, final: bool = False) -> Released:
        """`final`: nothing follows. After a rejection nothing is released any more."""
        if self._ended:
            return Released("")
        pending = self._pending + text
        if not pending:
            return Released("")
        view = View(pending, self._before)
        if not self._covered and self._matcher.is_quiet(view):  # nearly always
            self._advance(view, len(pending))
            return Released(pending)
        matches = self._matcher.find(view, self._resume, self._rule_failed)
        hold = len(pending) if final else self._matcher.hold(view)
        if not matches and not self._covered:
            self._advance(view, hold)
            return Released(pending[:hold])
        hits = list(self._act(pending, matches, hold))
        rejected = next((hit for hit in hits if hit.rule.withholds and hit.rule.config.action == "reject"), None)
        if rejected is not None:
            hits = hits[: hits.index(rejected) + 1]
        end = rejected.start - self._offset if rejected else hold
        edits = [Edit(0, self._covered, None)] if self._covered else []
        edits += [
            Edit(edit.start - self._offset, edit.end - self._offset, edit.hit)
            for edit in redactions(hits)
            if edit.start - self._offset < end
        ]
        covered = max((edit.end for edit in edits), default=0)
        released = apply(pending[: max(end, covered)], edits)
        self._covered = covered
        self._advance(view, hold)
        self._ended = rejected is not None
        return Released(released, tuple(hits), rejected)

    def _act(self, text: str, matches: list[Match], hold: int) -> Iterator[Hit]:
        for match in matches:
            if match.start < hold:
                self._resume[match.rule] = match.end
                if match.rule in self._numbers:
                    rule = self._rules.rules[match.rule]
                    start, end = self._offset + match.start, self._offset + match.end
                    yield Hit(rule, match.label, start, end, text[match.start : match.end])

    def _advance(self, view: View, hold: int) -> None:
        if hold:
            self._before = view.last_plain(hold)
            self._offset += hold
            self._covered = max(0, self._covered - hold)
            if self._resume:
                self._resume = {rule: end - hold for rule, end in self._resume.items() if end > hold}
        self._pending = view.text[hold:]

    def _rule_failed(self, number: int, error: Exception) -> None:
        if number in self._numbers:
            self._failed(self._rules.rules[number], error)
