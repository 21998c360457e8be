"""Which token comes next: a pure function of a row's logits, its parameters, its seed and its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from sol.engine.types import TokenLogprobs
from sol.sampling.grammar import DEAD_END, masks
from sol.sampling.noise import gumbel, stream_key
from sol.sampling.processing import SamplingRow, adjust, candidates, continued

NOT_FINITE_MESSAGE: Final = "the model's logits are not finite: its weights or its dtype overflow"
NOTHING: Final = -1
"""In place of a token id"""


@dataclass(frozen=True, slots=True)
class SampledToken:
    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    """Why there is none: the model gave no finite logits for this row, or its grammar came to an end that is none."""


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
    """logits [S, V] float32, one row a request → one token each. `logits` is not changed."""
    errors: dict[int, str] = {}
    if any(row.grammar is not None for row in rows):
        rows = list(rows)
        for index, mask in enumerate(masks(logits, rows, [()] * len(rows))):
            if isinstance(mask, str):
                errors[index] = mask
            elif mask is not None:
                rows[index] = continued(rows[index], (), mask[0])
    token_ids, finite = likeliest(logits)
    for index, row in enumerate(rows):
        if not finite[index]:
            errors[index] = NOT_FINITE_MESSAGE
        elif index not in errors and (row.changes_logits or not row.params.greedy):
            token_ids[index] = sample_row(logits[index], row)
            if token_ids[index] == NOTHING:
                errors[index] = DEAD_END if row.grammar is not None else NOT_FINITE_MESSAGE
    asking = [i for i, row in enumerate(rows) if row.params.logprobs is not None and i not in errors]
    logprobs: dict[int, TokenLogprobs] = {}
    if asking:
        chosen, counts = [token_ids[i] for i in asking], [rows[i].params.logprobs or 0 for i in asking]
        logprobs = dict(zip(asking, token_logprobs(logits[asking], chosen, counts), strict=True))
    return [
        SampledToken(token_id=token_id, logprobs=logprobs.get(index))
        if index not in errors
        else SampledToken(token_id=NOTHING, error=errors[index])
        for index, token_id in enumerate(token_ids)
    ]


def likeliest(logits: torch.Tensor) -> tuple[list[int], list[bool]]:
    """Each row's greatest logit, the first of equals, and whether it is finite: a NaN anywhere is a row's greatest."""
    if logits.device.type == "cpu":  # numpy's is vectorised: a tenth of the time
        values = logits.numpy()
        ids = values.argmax(axis=-1)
        return ids.tolist(), np.isfinite(values[np.arange(len(ids)), ids]).tolist()
    best, best_ids = logits.max(dim=-1)
    return best_ids.tolist(), best.isfinite().tolist()


def sample_row(logits: torch.Tensor, row: SamplingRow) -> int:
    """[V] raw logits, the greatest of which must be finite → the token of output index `len(row.output_token_ids)`, or
    `NOTHING` if all that may be sampled has a probability of 0."""
    if row.changes_logits:
        logits = adjust(logits, row)
        if row.params.greedy:
            (token_id,), (finite,) = likeliest(logits.unsqueeze(0))
            return token_id if finite else NOTHING
    elif row.params.greedy:
        return likeliest(logits.unsqueeze(0))[0][0]
    ids, scores = candidates(logits, row.params)
    key = stream_key(row.seed, row.choice_index, len(row.output_token_ids))
    if ids is None:
        ids = torch.arange(scores.shape[0], device=scores.device)
    (place,), (finite,) = likeliest((scores + gumbel(key, ids)).unsqueeze(0))
    return int(ids[place]) if finite else NOTHING


def sample_law(law: torch.Tensor, key: int) -> int:
    """A token by its probability in `law` [V], which need not be normalised but must not be 0 everywhere."""
    ids = law.nonzero().flatten()
    scores = law[ids].log().to(torch.float32) + gumbel(key, ids)
    return int(ids[likeliest(scores.unsqueeze(0))[0][0]])


def token_logprobs(raw: torch.Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """Raw logits [N, V], before bias, penalties and temperature as in vLLM → those of a token each.

    `counts` says how many of the likeliest tokens each wants beside its own.
    """
    return measure_logprobs(raw, token_ids, counts)()


def measure_logprobs(
    raw: torch.Tensor, token_ids: Sequence[int], counts: Sequence[int]
) -> Callable[[], list[TokenLogprobs]]:
    """`token_logprobs`, in two parts: a device computes now, and whoever calls what is returned waits for it."""
    total = raw.logsumexp(-1, keepdim=True)
    chosen = raw.gather(-1, torch.tensor(token_ids, device=raw.device).unsqueeze(-1))
    ranks = (raw > chosen).sum(-1) + 1
    top, top_ids = raw.topk(min(max(counts), raw.shape[-1]))
    logprobs, top_logprobs = (chosen - total).flatten(), top - total

    def read() -> list[TokenLogprobs]:
        return [
            TokenLogprobs(logprob=logprob, rank=rank, top=list(zip(ids[:count], values[:count], strict=True)))
            for logprob, rank, values, ids, count in zip(
                logprobs.tolist(), ranks.tolist(), top_logprobs.tolist(), top_ids.tolist(), counts, strict=True
            )
        ]

    return read
