"""Earlier occurrences of a text's last tokens, and the drafts that they vote for."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from math import prod
from typing import Final

from sol.speculation.propose.suffix_index import SEPARATOR, NgramIndex
from sol.speculation.propose.suffix_scores import TrackRecord, worth

ORDERS: Final = (2, 5)
"""Lengths of the n-grams that are indexed. The shortest is the shortest match."""
_MOST_MATCHES: Final = 8
"""The latest ones: bounds the time, and old ones say less."""
_MOST_VISITED: Final = 32
"""Occurrences of other n-grams in the same slot included, so that no text can be made to cost more."""

Match = tuple[int, int]
"""The place behind an earlier occurrence, and how many tokens before it equal the text's last ones."""


def find_matches(index: NgramIndex, text: array[int], hashes: Sequence[int], depth: int) -> list[Match]:
    """Where `index` has the last tokens of `text`, the latest first, compared over at most `depth` tokens.

    Only occurrences of the longest n-gram of `ORDERS` that has any. `hashes`: of the end of `text`, an order each.
    """
    tokens, end = index.tokens, len(text)
    for level in range(len(ORDERS) - 1, -1, -1):
        order = ORDERS[level]
        place = index.latest(level, hashes[level])
        if place < 0 or order > depth:
            continue
        tail = text[end - order :]
        earlier = index.earlier[level]
        found: list[Match] = []
        for _ in range(_MOST_VISITED):
            if tokens[place - order : place] == tail:
                found.append((place, _match_length(tokens, place, text, end, order, depth)))
                if len(found) == _MOST_MATCHES:
                    break
            place = earlier[place]
            if place < 0:
                break
        if found:
            return found
    return []


def _match_length(tokens: array[int], place: int, text: array[int], end: int, known: int, depth: int) -> int:
    most = min(depth, place, end)
    if most > known and tokens[place - most : place] == text[end - most : end]:
        return most
    while known < most and tokens[place - known - 1] == text[end - known - 1]:
        known += 1
    return known


def best(tokens: array[int], matches: Sequence[Match]) -> tuple[int, int, float]:
    """The token that follows most matches (each counts as the square of its length), the longest of its matches, and
    the table's word on it; (SEPARATOR, 0, 0.0) without matches. All places are before the text's end."""
    if len(matches) == 1:
        place, length = matches[0]
        return tokens[place], length, worth(length, 1, 1.0)
    if not matches:
        return SEPARATOR, 0, 0.0
    token, length, agreeing, share = _vote([tokens[place] for place, _ in matches], matches)
    return token, length, worth(length, agreeing, share)


def _vote(following: Sequence[int], matches: Sequence[Match]) -> tuple[int, int, int, float]:
    """→ token, its longest match, how many say so, their share of the weight. Of equals the latest wins."""
    weights: dict[int, int] = {}
    total = 0
    for token, (_, length) in zip(following, matches, strict=True):
        square = length * length
        weights[token] = weights.get(token, 0) + square
        total += square
    chosen = max(weights, key=weights.__getitem__)
    lengths = [length for token, (_, length) in zip(following, matches, strict=True) if token == chosen]
    return chosen, max(lengths), len(lengths), weights[chosen] / total


def draft(
    tokens: array[int],
    matches: Sequence[Match],
    *,
    max_tokens: int,
    spec_factor: float,
    min_prob: float,
    record: TrackRecord,
    cyclic: bool,
) -> tuple[list[int], list[float]]:
    """Drafts and their scores, as the matches continue: at each position the winner of the vote of those matches that
    agree with the drafts so far.

    It ends at `max_tokens`, at `spec_factor` times the length of the longest match that agrees, where the product of
    the scores falls below `min_prob`, and at a separator. `cyclic`: the matches are in the text that is continued, so
    behind its end the drafts themselves follow (a repetition whose period is the distance).
    """
    drafts: list[int] = []
    scores: list[float] = []
    count, ahead, product = len(tokens), 0, 1.0
    while len(matches) > 1 and ahead < max_tokens:
        following = []
        for place, _ in matches:
            place += ahead
            if place < count:
                following.append(tokens[place])
            else:
                following.append(drafts[place - count] if cyclic else SEPARATOR)
        token, length, agreeing, share = _vote(following, matches)
        if agreeing < len(matches):
            matches = [match for match, other in zip(matches, following, strict=True) if other == token]
        if token == SEPARATOR or ahead + 1 > spec_factor * length:
            return drafts, scores
        length += ahead
        score = record.score(length, worth(length, agreeing, share))
        product *= score
        if product < min_prob:
            return drafts, scores
        drafts.append(token)
        scores.append(score)
        ahead += 1
    if matches and ahead < max_tokens:
        place, length = matches[0]
        most = min(max_tokens, int(spec_factor * length))
        following = continuation(tokens, place, drafts, most, cyclic=cyclic)
        lone_scores = record.lone_scores(length + ahead, len(following))
        if product * prod(lone_scores) >= min_prob:
            return drafts + following, scores + lone_scores
        for token, score in zip(following, lone_scores, strict=True):
            product *= score
            if product < min_prob:
                break
            drafts.append(token)
            scores.append(score)
    return drafts, scores


def continuation(tokens: array[int], place: int, drafts: Sequence[int], most: int, *, cyclic: bool) -> list[int]:
    """What follows the drafts, so that there are `most` in all; less where a text ends."""
    ahead, count = len(drafts), len(tokens)
    following = tokens[place + ahead : place + most].tolist() if most > ahead else []
    if not cyclic:
        return following[: following.index(SEPARATOR)] if SEPARATOR in following else following
    if ahead + len(following) < most:
        all_ = [*drafts, *following]
        for offset in range(len(all_), most):
            all_.append(all_[place + offset - count])
        return all_[ahead:]
    return following
