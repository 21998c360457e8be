"""From the target's logits after each draft to the tokens that are emitted.

`coupled`, the default, samples each position as plain decoding would: same parameters, same prefix, same noise. A draft
is right iff it is that token, so the text is the one that plain decoding gives, whatever was drafted.

`rejection` and `block` (`rules.py`) keep the law of the text instead of the text: what is accepted depends on the
drafts. Their noise has streams of its own; a request without drafts, the bonus token and greedy requests are as in
plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from sol.sampling.grammar import DEAD_END, Mask, masks
from sol.sampling.noise import Purpose, slot_key, uniform
from sol.sampling.processing import SamplingRow, continued, distribution
from sol.sampling.sampler import (
    NOT_FINITE_MESSAGE,
    NOTHING,
    SampledToken,
    likeliest,
    sample_law,
    sample_row,
    token_logprobs,
)
from sol.speculation.config import VerifyMethod
from sol.speculation.verify import rules

_RULES: Final = {"rejection": rules.rejection, "block": rules.block}


@dataclass(frozen=True, slots=True)
class VerifyRow:
    """A request that a step verifies drafts for, perhaps none."""

    row: SamplingRow
    """Its state before the drafts: `row.output_token_ids` are the tokens emitted so far."""
    draft_token_ids: Sequence[int]
    draft_probs: torch.Tensor | None = None
    """[k, V] float32: the distributions that the drafts were sampled from, over the target's vocabulary. None where the
    drafts are a function of what came before."""


def verify(logits: torch.Tensor, rows: Sequence[VerifyRow], method: VerifyMethod) -> list[list[SampledToken]]:
    """logits [S, V] float32, 1 + k consecutive rows for a request with k drafts → each request's tokens, in order.

    The first of a request's logits follow its last known token, the others one draft each. A request gets 1 to k + 1
    tokens: the accepted drafts, then the recovered or the bonus token. Where its first logits are not finite it gets a
    single one with `error`; where later ones are not, its tokens end before them. So does one whose grammar knows no
    next token. `logits` is not changed.

    ValueError for what whoever calls it should have seen to: another number of rows, drafts that are no tokens,
    `draft_probs` of another shape, or that hold a draft impossible.
    """
    _check(logits, rows)
    forbidden: Sequence[Mask | None] = [None] * len(rows)
    if any(entry.row.grammar is not None for entry in rows):
        # Before anybody waits for the device.
        forbidden = masks(logits, [entry.row for entry in rows], [entry.draft_token_ids for entry in rows])
    token_ids, finite = likeliest(logits)
    emitted: list[list[int]] = []
    errors: list[str] = []
    start = 0
    for entry, mask in zip(rows, forbidden, strict=True):
        drafts = entry.draft_token_ids
        stop = start + 1 + len(drafts)
        if not all(finite[start:stop]):
            drafts = drafts[: max(0, finite.index(False, start) - start - 1)]
        errors.append(NOT_FINITE_MESSAGE if mask is None else DEAD_END)
        if not finite[start]:
            emitted.append([])
            errors[-1] = NOT_FINITE_MESSAGE
        elif isinstance(mask, str):
            emitted.append([])
            errors[-1] = mask
        elif mask is None and entry.row.params.greedy and not entry.row.changes_logits:
            emitted.append(_agreeing(token_ids[start : start + 1 + len(drafts)], drafts))
        elif method == "coupled" or entry.row.params.greedy:
            emitted.append(_coupled(logits[start:stop], entry.row, drafts, mask))
        else:
            emitted.append(_by_rule(logits[start:stop], entry, drafts, mask, _RULES[method]))
        start = stop
    return _with_logprobs(logits, rows, emitted, errors)


def _agreeing(token_ids: list[int], drafts: Sequence[int]) -> list[int]:
    """The target's own tokens up to the first that its draft does not equal, that one included."""
    for place, draft in enumerate(drafts):
        if token_ids[place] != draft:
            return token_ids[: place + 1]
    return token_ids


def _coupled(logits: torch.Tensor, row: SamplingRow, drafts: Sequence[int], mask: torch.Tensor | None) -> list[int]:
    """As `_agreeing`, sampling one position after the other: none is sampled that cannot be emitted."""
    token_ids: list[int] = []
    for place in range(len(drafts) + 1):
        token_id = sample_row(logits[place], _at(place, row, drafts, mask))
        if token_id == NOTHING:
            break
        token_ids.append(token_id)
        if place < len(drafts) and token_id != drafts[place]:
            break
    return token_ids


def _at(place: int, row: SamplingRow, drafts: Sequence[int], mask: torch.Tensor | None) -> SamplingRow:
    return continued(row, drafts[:place], None if mask is None else mask[place])


def _by_rule(
    logits: torch.Tensor, entry: VerifyRow, drafts: Sequence[int], mask: torch.Tensor | None, rule: rules.Rule
) -> list[int]:
    """The drafts that the rule accepts, and the token after them."""
    row = entry.row
    first = len(row.output_token_ids)

    def target(place: int) -> torch.Tensor:
        return distribution(logits[place], _at(place, row, drafts, mask))

    def accept(slot: int, probability: float) -> bool:
        return uniform(slot_key(row.seed, row.choice_index, first, slot, Purpose.ACCEPT)) < probability

    accepted, recovered = rule(target, drafts, entry.draft_probs, accept)
    kept = list(drafts[:accepted])
    if recovered is None:
        token_id = sample_row(logits[accepted], _at(accepted, row, kept, mask))
        return kept if token_id == NOTHING else [*kept, token_id]
    return [*kept, sample_law(recovered, slot_key(row.seed, row.choice_index, first, accepted, Purpose.RECOVER))]


def _check(logits: torch.Tensor, rows: Sequence[VerifyRow]) -> None:
    needed = sum(1 + len(entry.draft_token_ids) for entry in rows)
    if logits.shape[0] != needed:
        raise ValueError(f"logits: {logits.shape[0]} rows were given, the requests and their drafts have {needed}")
    vocabulary = logits.shape[1]
    for entry in rows:
        drafts, probs = entry.draft_token_ids, entry.draft_probs
        if drafts and not 0 <= min(drafts) <= max(drafts) < vocabulary:
            raise ValueError(f"draft_token_ids: {list(drafts)} are not all from 0 to {vocabulary - 1}")
        if probs is not None and probs.shape != (len(drafts), vocabulary):
            raise ValueError(f"draft_probs: {tuple(probs.shape)} instead of {(len(drafts), vocabulary)}")


def _with_logprobs(
    logits: torch.Tensor, rows: Sequence[VerifyRow], emitted: Sequence[list[int]], errors: Sequence[str]
) -> list[list[SampledToken]]:
    """Each request's tokens, with logprobs where it wants them: all of a step's in one pass. Those without tokens have
    their error."""
    places: list[int] = []
    token_ids: list[int] = []
    counts: list[int] = []
    start = 0
    for entry, tokens in zip(rows, emitted, strict=True):
        if entry.row.params.logprobs is not None:
            places.extend(range(start, start + len(tokens)))
            token_ids.extend(tokens)
            counts.extend([entry.row.params.logprobs] * len(tokens))
        start += 1 + len(entry.draft_token_ids)
    found = iter(token_logprobs(logits[places], token_ids, counts) if places else ())
    return [
        [SampledToken(token, next(found) if entry.row.params.logprobs is not None else None) for token in tokens]
        if tokens
        else [SampledToken(NOTHING, error=error)]
        for entry, tokens, error in zip(rows, emitted, errors, strict=True)
    ]
