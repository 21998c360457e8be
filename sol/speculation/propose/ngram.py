"""The drafter `ngram` (prompt lookup): what followed the latest earlier occurrence of the last few tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sol.errors import ConfigError
from sol.speculation.propose.protocol import Proposal, ProposalRow
from sol.speculation.propose.suffix_index import MAX_ORDER
from sol.speculation.propose.suffix_scores import LONGEST, TrackRecord, worth
from sol.speculation.propose.suffix_text import FollowedText, FollowedTexts, until_end

_MOST_VISITED: Final = 256
"""Other n-grams may share a slot with the one looked for. Nearly always few do, since tables have more slots than texts
have tokens; the bound is for texts made to be slow, in which an occurrence may be missed for it."""


class _Text(FollowedText):
    __slots__ = ("length", "place", "record")

    def __init__(self, orders: Sequence[int]) -> None:
        super().__init__(orders)
        self.place = -1
        """Behind the latest occurrence of the longest n-gram that occurred; -1: there is none."""
        self.length = 0
        """How many tokens before it equal the text's last ones, compared up to LONGEST"""
        self.record = TrackRecord()

    def look(self) -> None:
        index = self.index
        tokens, end = index.tokens, len(index.tokens)
        for level in range(len(index.orders) - 1, -1, -1):
            place = index.latest(level, index.hashes[level])
            if place < 0:
                continue
            order, earlier = index.orders[level], index.earlier[level]
            tail = tokens[end - order :]
            for _ in range(_MOST_VISITED):
                if tokens[place - order : place] == tail:
                    self._found(place, order)
                    return
                place = earlier[place]
                if place < 0:
                    break
        self.place, self.length = -1, 0

    def _found(self, place: int, known: int) -> None:
        tokens, end = self.index.tokens, len(self.index.tokens)
        if place == self.place + 1 and self.length:
            length = min(self.length + 1, max(LONGEST, known))
        else:
            length = known
            while length < LONGEST and length < place and tokens[place - length - 1] == tokens[end - length - 1]:
                length += 1
        self.place, self.length = place, length

    def follow(self, token: int) -> None:
        tokens = self.index.tokens
        if self.place >= 0:
            hit = tokens[self.place] == token
            self.record.record(self.length, worth(self.length, 1, 1.0), hit)
            if not hit:
                self.length = 0
        self.index.append(token)
        self.look()


class NgramProposer:
    """Prompt lookup: of the last `prompt_lookup_max` tokens, else of fewer down to `prompt_lookup_min`, the latest
    earlier occurrence in prompt and output, and what followed it. Where that runs to the end of the text, it repeats.

    Always as many drafts as asked for, where there is a match. Their scores are those of a lone match in
    `suffix_scores`, by the number of tokens before the occurrence that really match, corrected by how matches fared in
    this text. A token costs time and 12 to 20 bytes for every length from min to max.

    Not thread-safe. Raises `ConfigError` for lengths that cannot work.
    """

    name = "ngram"

    def __init__(self, *, prompt_lookup_min: int = 5, prompt_lookup_max: int = 5) -> None:
        if not 1 <= prompt_lookup_min <= prompt_lookup_max <= MAX_ORDER:
            raise ConfigError(
                f"prompt_lookup_min is {prompt_lookup_min} and prompt_lookup_max {prompt_lookup_max}: they must be "
                f"from 1 to {MAX_ORDER}, the first not above the second",
                param="speculative_config",
            )
        orders = range(prompt_lookup_min, prompt_lookup_max + 1)
        self._texts: FollowedTexts[_Text] = FollowedTexts(lambda: _Text(orders))

    @property
    def num_bytes(self) -> int:
        """Of the texts followed."""
        return self._texts.num_bytes

    def propose(self, rows: Sequence[ProposalRow]) -> list[Proposal]:
        """Nothing for a row without a match, or of whose prompt there is more than one call takes in."""
        return [
            Proposal(token_ids=[], scores=[]) if text is None else _continue(row, text)
            for row, text in zip(rows, self._texts.catch_up(rows), strict=True)
        ]

    def forget(self, request_ids: Sequence[str], *, finished: bool) -> None:
        """Frees what was kept, finished or not."""
        for request_id in request_ids:
            self._texts.pop(request_id)


def _continue(row: ProposalRow, text: _Text) -> Proposal:
    place, tokens, max_tokens = text.place, text.index.tokens, row.max_tokens
    if place < 0:
        return Proposal(token_ids=[], scores=[])
    drafts = tokens[place : place + max_tokens].tolist()
    period = len(drafts)
    while len(drafts) < max_tokens:  # the match runs to the end of the text: it repeats what is between
        drafts += drafts[len(drafts) - period : len(drafts) - period + max_tokens - len(drafts)]
    return until_end(row.sampling, drafts, text.record.lone_scores(text.length, max_tokens))
