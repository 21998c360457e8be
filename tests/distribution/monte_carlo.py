"""Generation through the real sampler, drafter and verifier, counted against the exact law."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from exact_law import Chain, Law, Prefix, make_row, token_ids
from sampling_statistics import chi_square_limit

from sol.sampling.drafting import draft_independent
from sol.sampling.processing import SamplingRow
from sol.speculation.config import VerifyMethod
from sol.speculation.verify import VerifyRow, verify

Drafting = Callable[[SamplingRow, int], tuple[list[int], torch.Tensor | None]]
"""From a request and a number of drafts to the drafts, and what they were sampled from."""

TAIL = 6.5
"""χ² may exceed its limit with probability 4e-11: Bonferroni's 1e-9 over some twenty-five comparisons."""


def make_rows(seeds: Sequence[int], choices: Sequence[int] = (0,), **params: Any) -> list[SamplingRow]:
    """One for each seed and choice; they share their parameters, and each has its own output."""
    row = make_row(**params)
    return [replace(row, seed=s, choice_index=c, output_token_ids=[]) for s in seeds for c in choices]


def sampled_by(drafter: Chain) -> Drafting:
    """A drafter that samples with noise of its own."""

    def draft(row: SamplingRow, count: int) -> tuple[list[int], torch.Tensor | None]:
        drafts: list[int] = []
        probs = []
        for _ in range(count):
            logits = drafter.logits([*row.output_token_ids, *drafts]).float()
            token, q = draft_independent(logits, row, drafts)
            assert q is not None
            drafts.append(token)
            probs.append(q)
        return drafts, torch.stack(probs) if probs else None

    return draft


def looked_up(vocabulary: int) -> Drafting:
    """A drafter whose drafts follow from what was emitted."""

    def draft(row: SamplingRow, count: int) -> tuple[list[int], torch.Tensor | None]:
        return [(sum(row.output_token_ids) + place) % vocabulary for place in range(count)], None

    return draft


def generate(
    target: Chain,
    draft: Drafting,
    rows: Sequence[SamplingRow],
    *,
    length: int,
    k: int,
    method: VerifyMethod,
    before_step: Callable[[int], None] = lambda start: None,
) -> list[Prefix]:
    """Each request's first `length` tokens, all in one ragged batch; no draft is made beyond them."""
    results: list[Prefix | None] = [None] * len(rows)
    held = [replace(row, output_token_ids=[]) for row in rows]
    for start in range(length):
        # Requests of one length at a time, so that a test can act on what a step starts from.
        group = [i for i, row in enumerate(held) if len(row.output_token_ids) == start]
        before_step(start)
        batch, logits = [], []
        for i in group:
            emitted = held[i].output_token_ids
            drafts, probs = draft(held[i], min(k, length - start - 1))
            batch.append(VerifyRow(held[i], drafts, probs))
            logits += [target.logits([*emitted, *drafts[:place]]) for place in range(len(drafts) + 1)]
        for i, tokens in zip(group, verify(torch.stack(logits).float(), batch, method) if group else [], strict=True):
            output = held[i].output_token_ids
            assert isinstance(output, list)
            output += token_ids(tokens)
            results[i] = tuple(output)
    assert all(path is not None and len(path) == length for path in results)
    return [path for path in results if path is not None]


def departure(paths: Sequence[Any], law: Law) -> str | None:
    """How the frequencies of `paths` contradict `law`: by χ², or by total variation; None if they do not."""
    draws = len(paths)
    counts = Counter(paths)
    impossible = [path for path in counts if law.get(path, 0.0) <= 0.0]
    if impossible:
        return f"{impossible[0]} is impossible"
    # Rare paths are counted together, as a χ² needs a few of each.
    cells = [(counts[path], mass * draws) for path, mass in law.items() if mass * draws >= 5]
    rest = (draws - sum(found for found, _ in cells), draws - sum(expected for _, expected in cells))
    if rest[1] >= 5:
        cells.append(rest)
    statistic = sum((found - expected) ** 2 / expected for found, expected in cells)
    if len(cells) > 1 and statistic > chi_square_limit(len(cells) - 1, TAIL):
        return f"χ² of {statistic:.0f} with {len(cells) - 1} degrees of freedom"
    distance = sum(abs(counts[path] / draws - mass) for path, mass in law.items()) / 2
    # Its expectation is at most half the sum of mean absolute deviations, and it lies so far above with probability δ.
    expected_distance = sum(math.sqrt(mass * (1 - mass) / (2 * math.pi * draws)) for mass in law.values())
    bound = expected_distance + math.sqrt(math.log(1e9) / (2 * draws))
    return f"total variation of {distance:.4f} > {bound:.4f}" if distance > bound else None
