"""Where a copy goes on after an edit: an alignment of the output with the earlier text that it has been following."""

from __future__ import annotations

from array import array
from typing import Final

from sol.speculation.propose.suffix_match import continuation
from sol.speculation.propose.suffix_scores import Tally, TrackRecord

FIRST_COPIED: Final = 4
"""A match of so many tokens is taken for a copy, which may survive an edit."""
SETTLED: Final = 8
"""From so many tokens that agree after a break on, ordinary matches say as much as an alignment."""
_LEAST_CARRIED: Final = 2
"""With less behind it a lost copy is given up."""
_STRONG: Final = 12
"""A copy of so many tokens survives an edit more often than a shorter one."""
_WINDOW: Final = 8
"""How far behind the place where a copy ought to go on it is looked for, in tokens."""

_SUBSTITUTED, _DELETED, _FOUND, _LOST = range(4)
_RESUMES: Final = ((0.19, 0.46, 0.46), (0.28, 0.54, 0.64))
"""[copied at least _STRONG][_SUBSTITUTED, _DELETED or _FOUND]: how often the first token after a break is as foreseen.
_LOST is not drafted from: it is right in 7 of 100 cases."""
_GOES_ON: Final = (0.63, 0.80)
"""[copied at least _STRONG]: how often the next token agrees where one to SETTLED - 1 have agreed since the break; more
hardly matter."""


class Alignment:
    """The place in a text that its output has been copied from, followed across tokens that were changed.

    After a break the copy is assumed to go on behind the replaced token (a substitution); behind the one after, if
    that is what came instead (a deletion). Where the next token is another again, it is looked for close by: the
    replaced token itself after an insertion, a later one after a longer deletion.

    What is carried over a break halves with every token that the copy is lost for, so an alignment that leads nowhere
    ends after a few. Everything follows from the tokens alone.
    """

    __slots__ = ("_carried", "_depth", "_goes_on", "_how", "_replaced", "_resumes", "agreed", "source")

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self.source = -1
        """The place of the token that comes next if the copy goes on; -1: nothing is followed."""
        self.agreed = 0
        """How many tokens have agreed since the last break, or before it began to be followed"""
        self._carried = 0
        """What was known of the copy when it last broke: tokens that agreed, half of those before earlier breaks"""
        self._how = _SUBSTITUTED
        self._replaced = -1
        """The place of the first token of the source that did not come"""
        self._resumes = Tally()
        self._goes_on = Tally()

    @property
    def evidence(self) -> int:
        """Tokens: those of an ordinary match of more are better worth following."""
        return self.agreed + self._carried // 2 if self.source >= 0 else 0

    @property
    def is_fresh(self) -> bool:
        """After a break, and before ordinary matches say as much."""
        return self._carried > 0 and self.agreed < SETTLED and self.source >= 0

    def adopt(self, place: int, length: int) -> None:
        """Follow another source, whose last `length` tokens are those of the output."""
        self.source, self.agreed, self._carried = place, length, 0

    def follow(self, tokens: array[int], token: int) -> None:
        """`token` comes behind `tokens`. Only while something is followed (`source` is not -1)."""
        hit = tokens[self.source] == token
        if self._carried and self.agreed < SETTLED:
            if self.agreed:
                self._goes_on.record(_GOES_ON[self._is_strong], hit)
            elif self._how != _LOST:
                self._resumes.record(_RESUMES[self._is_strong][self._how], hit)
        if hit:
            self.source += 1
            self.agreed += 1
        else:
            self._break(tokens, token)

    def _break(self, tokens: array[int], token: int) -> None:
        place = self.source
        if self.agreed:
            self._carried = min(self.evidence, self._depth)
            self.agreed, self._replaced = 0, place
            deleted = place + 1 < len(tokens) and tokens[place + 1] == token
            self._how = _DELETED if deleted else _SUBSTITUTED
            self.source = place + 2 if deleted else place + 1
        else:
            self._carried //= 2
            try:
                self.source = tokens.index(token, self._replaced, place + _WINDOW) + 1
                self._how = _FOUND
            except ValueError:
                self.source = place + 1
                self._how = _LOST
        if self._carried < _LEAST_CARRIED:
            self.source = -1

    @property
    def _is_strong(self) -> bool:
        return self.agreed + self._carried >= _STRONG

    def draft(
        self, tokens: array[int], *, max_tokens: int, spec_factor: float, min_prob: float, record: TrackRecord
    ) -> tuple[list[int], list[float]]:
        """Drafts and their scores as the copy goes on, while the alignment `is_fresh`. Bounds as of an ordinary match
        of the tokens copied before the break."""
        if not self.agreed and self._how == _LOST:
            return [], []
        most = min(max_tokens, int(spec_factor * max(self._carried, min(self.agreed, self._depth))))
        drafts = continuation(tokens, self.source, (), most, cyclic=True)
        scores: list[float] = []
        if not self.agreed:
            scores.append(self._resumes.score(_RESUMES[self._is_strong][self._how]))
        growing = max(0, _STRONG - self._carried - self.agreed - len(scores))
        left = SETTLED - self.agreed - len(scores)
        scores += [self._goes_on.score(_GOES_ON[0])] * min(growing, left)
        scores += [self._goes_on.score(_GOES_ON[1])] * (left - growing)
        del scores[most:]
        scores += record.lone_scores(SETTLED, most - len(scores))
        product = 1.0
        for count, score in enumerate(scores):
            product *= score
            if product < min_prob:
                return drafts[:count], scores[:count]
        return drafts, scores
