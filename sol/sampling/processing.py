"""From a row of raw logits to the candidates that may be sampled. Order and meaning are vLLM's:

logit bias, min_tokens and grammar → penalties → temperature → min_p → top_k → top_p.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, overload

import torch

from sol.sampling.grammar import GrammarState
from sol.sampling_params import SamplingParams

_FIRST_LOOK: Final = 256
"""How many of the likeliest tokens a top_p cut tries before it sorts the whole vocabulary."""


@dataclass(slots=True)
class SamplingRow:
    """What besides the logits decides a token."""

    params: SamplingParams
    seed: int
    choice_index: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    eos_token_ids: Sequence[int]
    grammar: GrammarState | None = None
    forbidden: torch.Tensor | None = None
    """[V] bool: what the grammar forbids here, once it has been asked"""

    @property
    def below_min_tokens(self) -> bool:
        return len(self.output_token_ids) < self.params.min_tokens

    @property
    def changes_logits(self) -> bool:
        params = self.params
        return self.forbidden is not None or self.below_min_tokens or bool(params.logit_bias) or params.penalised


class _Continued(Sequence[int]):
    """A long sequence and a short one after it, without a copy of either. Neither may change while this is in use."""

    __slots__ = ("_head", "_tail")

    def __init__(self, head: Sequence[int], tail: Sequence[int]) -> None:
        self._head, self._tail = head, tail

    def __len__(self) -> int:
        return len(self._head) + len(self._tail)

    def __iter__(self) -> Iterator[int]:
        return itertools.chain(self._head, self._tail)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        places = range(len(self))[index]  # as a list does: from the end where negative, IndexError beyond it
        return self._at(places) if isinstance(places, int) else [self._at(place) for place in places]

    def _at(self, place: int) -> int:
        length = len(self._head)
        return self._head[place] if place < length else self._tail[place - length]


def continued(row: SamplingRow, token_ids: Sequence[int], forbidden: torch.Tensor | None = None) -> SamplingRow:
    """`row` as it will be once `token_ids` have been emitted: what its next token is sampled with. `forbidden` [V] is
    what its grammar forbids there."""
    if token_ids:
        return replace(row, output_token_ids=_Continued(row.output_token_ids, token_ids), forbidden=forbidden)
    return row if forbidden is None else replace(row, forbidden=forbidden)


def adjust(logits: torch.Tensor, row: SamplingRow) -> torch.Tensor:
    """[V] → [V] in new memory: bias, forbidden ends and penalties, which apply to greedy requests too."""
    logits, params = logits.clone(), row.params
    if params.logit_bias:
        bias = torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype, device=logits.device)
        logits[_ids(params.logit_bias, logits)] += bias
    if row.below_min_tokens and row.forbidden is None:  # a grammar's mask has seen to it
        logits[_ids({*row.eos_token_ids, *params.stop_token_ids}, logits)] = -torch.inf
    if row.forbidden is not None:
        logits.masked_fill_(row.forbidden, -torch.inf)
    if params.repetition_penalty != 1.0:
        tokens = _ids({*row.prompt_token_ids, *row.output_token_ids}, logits)
        seen, penalty = logits[tokens], params.repetition_penalty
        logits[tokens] = torch.where(seen > 0, seen / penalty, seen * penalty)
    if (params.presence_penalty or params.frequency_penalty) and row.output_token_ids:
        tokens, counts = torch.unique(_ids(row.output_token_ids, logits), return_counts=True)
        logits[tokens] -= params.presence_penalty + params.frequency_penalty * counts.to(logits.dtype)
    return logits


def candidates(logits: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor | None, torch.Tensor]:
    """[V] → the token ids that may be sampled (None for all) and their logits over the temperature."""
    scaled = logits / params.temperature
    limit = scaled.shape[0] if params.top_k == 0 else min(params.top_k, scaled.shape[0])
    if params.min_p > 0.0:
        # p ≥ min_p · max p, said in logits; what it leaves is the head of the sorted row.
        threshold = scaled.max() + torch.log(torch.tensor(params.min_p))
        limit = min(limit, max(1, int((scaled >= threshold).sum())))
    if limit == scaled.shape[0] and params.top_p >= 1.0:
        return None, scaled
    if params.top_p >= 1.0:
        top, ids = scaled.topk(limit)
        return ids, top
    size = min(limit, _FIRST_LOOK)
    # top_p counts probability among what top_k and min_p left: all of it is known only if that is the whole row.
    total = scaled.logsumexp(0) if limit == scaled.shape[0] else scaled.topk(limit).values.logsumexp(0)
    while True:
        top, ids = scaled.topk(size)
        before = (top - total).exp().cumsum(0).roll(1)
        before[0] = 0.0
        kept = max(1, int((before < params.top_p).sum()))
        if kept < size or size == limit:
            return ids[:kept], top[:kept]
        size = min(limit, size * 16)


def distribution(logits: torch.Tensor, row: SamplingRow) -> torch.Tensor:
    """[V] raw logits → [V] float64: the probabilities that the row's next token is sampled by. Not for greedy rows."""
    if row.changes_logits:
        logits = adjust(logits, row)
    ids, scores = candidates(logits, row.params)
    probs = scores.to(torch.float64).softmax(0)
    return probs if ids is None else probs.new_zeros(logits.shape[0]).index_copy_(0, ids, probs)


def _ids(tokens: Iterable[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(list(tokens), dtype=torch.int64, device=like.device)
