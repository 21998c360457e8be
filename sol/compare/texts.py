"""Do A and B say the same? Texts (or token ids, where both send them) of the same requests, side by side.

A text that differs is not yet a different model. Where two tokens are almost equally likely, sums in another order
decide, and one server answers the same request in two ways from one minute to the next. So each difference is judged:

- A is asked for the logprobs of its own answer. If B's token was as likely as A's but for a small gap, it is a *near
  tie*; if not, the difference is *real*. If A itself answers differently by now, it is a near tie, too.
- A is compared with itself, at another concurrency. Where logprobs cannot be had, B may differ from A as often as A
  from itself, and not more (Fisher's exact test).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from sol.compare.samples import Answer, Block, Round
from sol.compare.statistics import ALPHA, more_often

Kind = Literal["near tie", "real", "unknown"]
TextVerdict = Literal["same", "near ties", "differ", "not compared"]

_SNIPPET: Final = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDifference:
    place: int
    turn: int
    key: str
    position: int
    """Of the first token or character that differs, from 0."""
    length: int
    """Of A's answer, in the same unit."""
    a: str
    """A's text around it."""
    b: str
    kind: Kind = "unknown"
    gap: float | None = None
    """By how much A's own token was likelier to A than B's, in units of logits."""
    reason: str = ""
    """What the kind rests upon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """A against itself."""

    concurrency: int
    num_compared: int
    differences: Sequence[TextDifference]


@dataclass(frozen=True, slots=True, kw_only=True)
class Equivalence:
    num_compared: int
    unit: Literal["tokens", "characters"] = "characters"
    differences: Sequence[TextDifference] = field(default_factory=tuple)
    own: Own | None = None
    """None: A was not asked twice."""
    reason: str = ""
    """Why nothing was compared."""

    @property
    def num_kinds(self) -> dict[Kind, int]:
        counts: dict[Kind, int] = {"near tie": 0, "real": 0, "unknown": 0}
        for difference in self.differences:
            counts[difference.kind] += 1
        return counts

    @property
    def p_more_than_own(self) -> float | None:
        """How likely so many differences were, if B differed from A no more often than A from itself."""
        if self.own is None or not self.own.num_compared:
            return None
        return more_often(len(self.differences), self.num_compared, len(self.own.differences), self.own.num_compared)

    @property
    def verdict(self) -> TextVerdict:
        """A real difference is one however rare. Those that nobody could judge count as near ties only if A differs
        from itself, and about as often."""
        if not self.num_compared:
            return "not compared"
        if not self.differences:
            return "same"
        kinds, p = self.num_kinds, self.p_more_than_own
        if kinds["real"]:
            return "differ"
        if not kinds["unknown"]:
            return "near ties"
        noisy = self.own is not None and len(self.own.differences) > 0
        return "near ties" if noisy and p is not None and p > ALPHA else "differ"


def compare_texts(blocks: Sequence[Block]) -> Equivalence:
    """All answers that both sides gave, each conversation up to its first turn that differs."""
    matched = [match for block in blocks for pair in block.pairs for match in pair.matched()]
    return _compare(matched)


def compare_with_own(blocks: Sequence[Block], rounds: Sequence[Round], concurrency: int) -> Own:
    """A's answers of the blocks with those it gave to the same requests later."""
    later = {(answer.place, answer.turn): answer for one in rounds for answer in one.answers}
    matched = [
        (answer, again)
        for block in blocks
        for pair in block.pairs
        for answer in pair.a.answers
        if (again := later.get((answer.place, answer.turn))) is not None
    ]
    found = _compare(matched)
    return Own(concurrency=concurrency, num_compared=found.num_compared, differences=found.differences)


def judged(equivalence: Equivalence, judgements: dict[tuple[int, int], tuple[Kind, float | None, str]]) -> Equivalence:
    """With what was found out about differences, by (place, turn)."""
    differences = []
    for difference in equivalence.differences:
        found = judgements.get((difference.place, difference.turn))
        if found is not None:
            difference = replace(difference, kind=found[0], gap=found[1], reason=found[2])
        differences.append(difference)
    return replace(equivalence, differences=tuple(differences))


def common_prefix(first: Sequence[object], second: Sequence[object]) -> int | None:
    """Where they part; None if they are equal."""
    for position, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return position
    return None if len(first) == len(second) else min(len(first), len(second))


def _compare(matched: Sequence[tuple[Answer, Answer]]) -> Equivalence:
    known = [(ours, theirs) for ours, theirs in matched if ours.text is not None and theirs.text is not None]
    if not known:
        return Equivalence(num_compared=0, reason="no request was answered by both sides with its text kept")
    by_tokens = all(ours.token_ids and theirs.token_ids for ours, theirs in known)
    differences: list[TextDifference] = []
    parted: set[int] = set()
    num_compared = 0
    for ours, theirs in sorted(known, key=lambda match: (match[0].place, match[0].turn)):
        if ours.place in parted:  # its later turns answer something else
            continue
        num_compared += 1
        first, second = (
            (ours.token_ids or (), theirs.token_ids or ()) if by_tokens else (ours.text or "", theirs.text or "")
        )
        position = common_prefix(first, second)
        if position is not None:
            parted.add(ours.place)
            at = common_prefix(ours.text or "", theirs.text or "") or 0
            differences.append(
                TextDifference(
                    place=ours.place, turn=ours.turn, key=ours.key, position=position, length=len(first),
                    a=_around(ours.text or "", at), b=_around(theirs.text or "", at),
                )
            )  # fmt: skip
    return Equivalence(
        num_compared=num_compared, unit="tokens" if by_tokens else "characters", differences=tuple(differences)
    )


def _around(text: str, position: int) -> str:
    begin = max(0, position - _SNIPPET // 2)
    piece = text[begin : position + _SNIPPET]
    return ("…" if begin else "") + piece + ("…" if position + _SNIPPET < len(text) else "")
