"""What a comparison is made of: answers to the same prompts from two sides, A and B, in ABBA blocks.

A *round* sends one set of prompts to one side. A *pair* of rounds sends the same set to both. A *block* is two pairs
with different prompts, in the orders AB and BA: whatever drifts evenly, and whatever the first of a pair does for the
second (a prefix cache of a server that both sides are, a processor that has become warm), falls out of its mean.

A block is the unit of all statistics. Requests of a round shared a queue and a minute of the machine's life, so they
are no independent witnesses; blocks are as independent as what is measured on one machine can be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

Metric = Literal["e2e", "ttft", "tpot", "throughput"]

METRICS: Final[tuple[Metric, ...]] = ("e2e", "ttft", "tpot", "throughput")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One request. Seconds; None is what is not known of it."""

    key: str
    """What was asked; the same key means the same prompt. Empty where a recorded run does not say."""
    place: int
    """Which conversation of the data it was, from 0."""
    turn: int = 0
    e2e: float | None = None
    ttft: float | None = None
    tpot: float | None = None
    """All three as `sol.bench.metrics` defines them."""
    output_tokens: int = 0
    error: str | None = None
    """A kind, see `sol.bench.stream`."""
    message: str | None = None
    text: str | None = None
    token_ids: tuple[int, ...] | None = None

    @property
    def ok(self) -> bool:
        return self.error is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One set of prompts at one side."""

    answers: Sequence[Answer]
    seconds: float
    """From the first request to the end of the last response."""
    client_limited: str | None = None
    """Why the client was the bottleneck, if it was."""

    @property
    def throughput(self) -> float | None:
        """Output tokens a second of successful requests."""
        tokens = sum(answer.output_tokens for answer in self.answers if answer.ok)
        return tokens / self.seconds if tokens and self.seconds > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The same prompts at both sides."""

    a: Round
    b: Round
    a_first: bool

    def matched(self) -> list[tuple[Answer, Answer]]:
        """Answers to the same request, whatever became of them, in A's order."""
        theirs = {(answer.place, answer.turn): answer for answer in self.b.answers}
        found = ((answer, theirs.get((answer.place, answer.turn))) for answer in self.a.answers)
        return [(ours, other) for ours, other in found if other is not None]

    def log_ratio(self, metric: Metric) -> float | None:
        """The mean of log(B / A) over prompts that both sides answered; of the two rates for `throughput`."""
        if metric == "throughput":
            ours, theirs = self.a.throughput, self.b.throughput
            return None if ours is None or theirs is None else math.log(theirs / ours)
        ratios = prompt_log_ratios([self], metric)
        return float(np.mean(ratios)) if ratios else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Two pairs, one in each order."""

    number: int
    pairs: Sequence[Pair]

    def log_ratio(self, metric: Metric) -> float | None:
        """The mean of its pairs', each of the same weight; None if one of them has none."""
        values = [pair.log_ratio(metric) for pair in self.pairs]
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known and len(known) == len(values) else None


class Sampler(Protocol):
    """Where blocks come from: two endpoints, or two servers on a virtual clock."""

    async def block(self, number: int) -> Block | None:
        """The block with this number, from 0, with prompts of its own; None if it was stopped half-way."""
        ...


def prompt_log_ratios(pairs: Sequence[Pair], metric: Metric) -> list[float]:
    """log(B / A) of every prompt that both sides answered and that has this latency."""
    ratios = []
    for pair in pairs:
        for ours, theirs in pair.matched():
            first, second = latency(ours, metric), latency(theirs, metric)
            if ours.ok and theirs.ok and first and second and first > 0 and second > 0:
                ratios.append(math.log(second / first))
    return ratios


def block_log_ratios(blocks: Sequence[Block], metric: Metric) -> Floats:
    """One value for each block that has one."""
    values = [block.log_ratio(metric) for block in blocks]
    return np.array([value for value in values if value is not None], dtype=np.float64)


def latency(answer: Answer, metric: Metric) -> float | None:
    """Seconds; None for `throughput`, which no answer has by itself."""
    return {"e2e": answer.e2e, "ttft": answer.ttft, "tpot": answer.tpot}.get(metric)
