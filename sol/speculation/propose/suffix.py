"""The drafter `suffix`: what followed the longest earlier occurrence of the last tokens, in this text or a past one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sol.errors import ConfigError
from sol.speculation.propose.protocol import Proposal, ProposalRow
from sol.speculation.propose.suffix_align import FIRST_COPIED, Alignment
from sol.speculation.propose.suffix_index import SEPARATOR
from sol.speculation.propose.suffix_match import ORDERS, Match, best, draft, find_matches
from sol.speculation.propose.suffix_memory import OutputMemory, TenantMemory
from sol.speculation.propose.suffix_scores import LONGEST, TrackRecord
from sol.speculation.propose.suffix_text import FollowedText, FollowedTexts, until_end
from sol.speculation.usage import expected_accepted

_SURE: Final = 6
"""A match of so many tokens is followed, instead of looking for others at every token."""
_MOST_FOLLOWED: Final = 4
"""Of such matches; of those that nothing is better than, one. A loop matches at every turn."""
_NEAR_CERTAIN: Final = 0.9
"""Where a text's own drafts promise this share of those asked for, memory is not asked."""


def _length(match: Match) -> int:
    return match[1]


class _Text(FollowedText):
    """A request's own text, with the matches of its end and how matches fared in it."""

    __slots__ = ("_depth", "_foreseen", "_length", "_worth", "alignment", "matches", "record", "remembered")

    def __init__(self, depth: int) -> None:
        super().__init__(ORDERS)
        self._depth = depth
        self.matches: list[Match] = []
        self.record = TrackRecord()
        self.alignment = Alignment(depth)
        self._foreseen, self._length, self._worth = SEPARATOR, 0, 0.0
        self.remembered: tuple[TenantMemory, int, int, int, float] | None = None
        """What its tenant's memory promised when it was last asked: memory, text length, token, match length, worth"""

    def look(self) -> None:
        self.matches = find_matches(self.index, self.index.tokens, self.index.hashes, self._depth)
        self._foreseen, self._length, self._worth = best(self.index.tokens, self.matches)
        if self._length >= FIRST_COPIED:
            self._align()

    def _align(self) -> None:
        """Follow the longest of the matches that the next token is foreseen from, if it says more than the source
        followed so far."""
        length, tokens = self._length, self.index.tokens
        if length > self.alignment.evidence:
            for place, reach in self.matches:
                if reach == length and tokens[place] == self._foreseen:
                    self.alignment.adopt(place, length)
                    return

    def follow(self, token: int) -> None:
        index, depth = self.index, self._depth
        tokens = index.tokens
        if self._foreseen != SEPARATOR:
            self.record.record(self._length, self._worth, token == self._foreseen)
        if self.remembered is not None:
            memory, count, foreseen, length, worth = self.remembered
            if count == len(tokens):
                memory.record.record(length, worth, token == foreseen)
            self.remembered = None
        alignment = self.alignment
        if alignment.source >= 0:
            alignment.follow(tokens, token)
        matches = self.matches
        if len(matches) == 1:
            place, length = matches[0]
            going_on = [(place + 1, length + 1 if length < depth else depth)] if tokens[place] == token else []
            longest = length if going_on else 0
        else:
            going_on, longest = [], 0
            for place, length in matches:
                if tokens[place] == token:
                    going_on.append((place + 1, length + 1 if length < depth else depth))
                    longest = length if length > longest else longest
        index.append(token)
        # What matches from here on matched before. Only while no match is long may the index know a longer one: of
        # frequent n-grams it shows the latest occurrences only.
        if longest >= _SURE:
            most = _MOST_FOLLOWED if longest < LONGEST else 1
            if len(going_on) > most:
                going_on = sorted(going_on, key=_length, reverse=True)[:most]
            self.matches = going_on
            self._foreseen, self._length, self._worth = best(tokens, going_on)
            if self._length > alignment.agreed:
                self._align()
        else:
            self.look()


class SuffixProposer:
    """Continues a request with what followed earlier occurrences of its last tokens.

    After SuffixDecoding (arXiv 2411.04975), with hash chains (`NgramIndex`) for its trees. A match is an earlier
    occurrence of at least the last `ORDERS[0]` tokens; the latest few are found and each is followed for as long as it
    goes on matching. At each position of a draft the matches that agree with it so far vote, and the winner's score is
    `worth(match length, how many agree, their share of the votes)`, corrected by the text's `TrackRecord`.

    Where a match of some length breaks off, the output is taken for an edited copy (`Alignment`): what follows the
    replaced token in the source is proposed at once, if it promises more accepted tokens than the matches do.

    The scores are probabilities. The tables are frequencies of hits, measured over about 150 000 tokens of Python's
    standard library (a quarter of each file as the prompt) and of English documentation, both in SmolLM2's tokens and
    weighted alike: a lone match of 2 tokens is right in 37 of 100 cases, one of 24 in 93. A text in which matches fare
    better or worse than that shows it soon: the probability of a miss is scaled by observed over expected misses in
    the output so far. So scores rise to 0.998 where an answer copies its prompt, and fall where matches mislead. On
    those texts, expected and real accepted tokens differ by 6 %; where outputs copy with random edits, by 1 to 6 %.

    `max_tree_depth`: tokens over which a match is compared (vLLM's bounds match and draft together; here a draft is
    read from the text and needs no tree). `max_spec_factor`: drafts are at most so many times as many as the tokens
    matched. `min_token_prob`: a draft ends where the product of its scores falls below. `max_cached_requests`: past
    outputs remembered for each tenant, 0 for none; `max_cached_tenant_tokens` and `max_cached_tokens` bound their
    tokens. Only a row with a tenant is continued from that tenant's outputs, where they promise more accepted tokens
    than its own text, and only its output is remembered, when it has finished.

    Not thread-safe. Raises `ConfigError` for a value that cannot work.
    """

    name = "suffix"

    def __init__(
        self,
        *,
        max_tree_depth: int = 24,
        max_cached_requests: int = 0,
        max_spec_factor: float = 1.0,
        min_token_prob: float = 0.1,
        max_cached_tenant_tokens: int = 65536,
        max_cached_tokens: int = 524288,
    ) -> None:
        checks = (
            ("suffix_decoding_max_tree_depth", max_tree_depth, max_tree_depth >= ORDERS[0], f"at least {ORDERS[0]}"),
            ("suffix_decoding_max_cached_requests", max_cached_requests, max_cached_requests >= 0, "at least 0"),
            ("suffix_decoding_max_spec_factor", max_spec_factor, max_spec_factor >= 0.0, "at least 0"),
            ("suffix_decoding_min_token_prob", min_token_prob, 0.0 <= min_token_prob <= 1.0, "from 0 to 1"),
            ("max_cached_tenant_tokens", max_cached_tenant_tokens, max_cached_tenant_tokens >= 0, "at least 0"),
            ("max_cached_tokens", max_cached_tokens, max_cached_tokens >= 0, "at least 0"),
        )
        for name, value, allowed, what in checks:
            if not allowed:
                raise ConfigError(f"{name} is {value}: it must be {what}", param="speculative_config")
        self._depth = max_tree_depth
        self._factor = max_spec_factor
        self._min_prob = min_token_prob
        self._texts: FollowedTexts[_Text] = FollowedTexts(lambda: _Text(max_tree_depth))
        self.memory = OutputMemory(
            max_requests=max_cached_requests,
            max_tenant_tokens=max_cached_tenant_tokens,
            max_tokens=max_cached_tokens,
        )

    @property
    def num_bytes(self) -> int:
        """Of the texts followed and the outputs remembered."""
        return self._texts.num_bytes + self.memory.num_bytes

    def propose(self, rows: Sequence[ProposalRow]) -> list[Proposal]:
        """Nothing for a row without a match, or of whose prompt there is more than one call takes in."""
        return [
            Proposal(token_ids=[], scores=[]) if text is None else self._continue(row, text)
            for row, text in zip(rows, self._texts.catch_up(rows), strict=True)
        ]

    def _continue(self, row: ProposalRow, text: _Text) -> Proposal:
        drafts, scores = draft(
            text.index.tokens,
            text.matches,
            max_tokens=row.max_tokens,
            spec_factor=self._factor,
            min_prob=self._min_prob,
            record=text.record,
            cyclic=True,
        )
        if text.alignment.is_fresh:
            others, their_scores = text.alignment.draft(
                text.index.tokens,
                max_tokens=row.max_tokens,
                spec_factor=self._factor,
                min_prob=self._min_prob,
                record=text.record,
            )
            if expected_accepted(their_scores) > expected_accepted(scores):
                drafts, scores = others, their_scores
        memory = self.memory.of(row.tenant) if row.tenant is not None else None
        own = expected_accepted(scores) if memory is not None else 0.0
        if memory is not None and own < _NEAR_CERTAIN * row.max_tokens:
            matches = find_matches(memory.index, text.index.tokens, text.index.hashes, self._depth)
            foreseen, length, worth = best(memory.index.tokens, matches)
            if foreseen != SEPARATOR:
                text.remembered = (memory, len(text.index.tokens), foreseen, length, worth)
            others, their_scores = draft(
                memory.index.tokens,
                matches,
                max_tokens=row.max_tokens,
                spec_factor=self._factor,
                min_prob=self._min_prob,
                record=memory.record,
                cyclic=False,
            )
            if expected_accepted(their_scores) > own:
                drafts, scores = others, their_scores
        return until_end(row.sampling, drafts, scores)

    def forget(self, request_ids: Sequence[str], *, finished: bool) -> None:
        """Frees what was kept. A finished output is remembered as far as `propose` saw it: without the last tokens."""
        for request_id in request_ids:
            text = self._texts.pop(request_id)
            if finished and text is not None and text.tenant is not None:
                self.memory.remember(text.tenant, text.output)
