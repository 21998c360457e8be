"""From blocks to a verdict: is B better than A, worse, or can that not be told?

One metric is declared before anything is measured, and it alone has a verdict. The others are shown with intervals
that hold for each by itself; if each had a verdict, four chances to be wrong would add up. (A correction for all four
would take the sample size of the one that is asked for.)

B differs from A where Student's interval of the mean log ratio of blocks leaves out 1 *and* Wilcoxon's signed-rank test
of the same blocks says p <= 0.05. The interval alone is too eager after a sample size was chosen from a pilot of the
same blocks; a rank test is not impressed by one block that met a stall. The bootstrap's interval stands beside them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from sol.compare.samples import METRICS, Block, Metric, block_log_ratios, latency
from sol.compare.statistics import (
    ALPHA,
    bootstrap_interval,
    detectable_effect,
    geometric_mean,
    mean_interval,
    more_often,
    required_blocks,
    sign_test,
    signed_rank,
)
from sol.errors import ConfigError

Verdict = Literal["better", "worse", "cannot tell"]

LEAST_BLOCKS: Final = 6
"""With five, no result of a signed-rank test is below 0.05."""
_FAILURES_ALPHA: Final = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be found out. Raises `ConfigError`."""

    metric: Metric = "e2e"
    """The one that has a verdict."""
    blocks: int = 10
    """How many; with an `effect`, of the pilot that says how many more there have to be."""
    effect: float | None = None
    """The relative difference to be found: 0.05 for 5%."""
    max_blocks: int = 200
    """The most that an `effect` may ask for."""

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise ConfigError(f"metric must be one of {', '.join(METRICS)}, not {self.metric!r}", param="metric")
        if not LEAST_BLOCKS <= self.blocks <= 100_000:
            raise ConfigError(
                f"blocks must be at least {LEAST_BLOCKS}, not {self.blocks}: fewer cannot tell anything apart",
                param="blocks",
            )
        if self.effect is not None and not 0.0001 <= self.effect <= 10:
            raise ConfigError(
                f"effect must be a relative difference from 0.01% to 1000%, not {self.effect:g}", param="effect"
            )
        if self.max_blocks < self.blocks:
            raise ConfigError(
                f"max_blocks is {self.max_blocks}, less than the {self.blocks} blocks to begin with; raise it or lower "
                "blocks",
                param="max_blocks",
            )

    def needed(self, blocks: Sequence[Block]) -> int:
        """How many blocks find the `effect`, as these say; not bounded by `max_blocks`."""
        values = block_log_ratios(blocks, self.metric)
        if self.effect is None or len(values) < 2:
            return len(blocks)
        return required_blocks(float(values.std(ddof=1)), self.effect, max(len(values), 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """B / A of one metric. None is what so few blocks do not say."""

    metric: Metric
    num_blocks: int
    ratio: float | None = None
    """The geometric mean over prompts, blocks of equal weight."""
    low: float | None = None
    high: float | None = None
    bootstrap_low: float | None = None
    bootstrap_high: float | None = None
    p_rank: float | None = None
    """Wilcoxon's signed-rank test of the blocks; Mann and Whitney's where prompts are not paired."""
    deviation: float | None = None
    """Standard deviation of the blocks' log ratios."""
    detectable: float | None = None
    """The relative difference that so many blocks find in 85 of 100 cases."""
    a: float | None = None
    b: float | None = None
    """Geometric means of each side: seconds, or tokens a second."""

    @property
    def differs(self) -> bool:
        return (
            self.num_blocks >= LEAST_BLOCKS
            and self.low is not None
            and self.high is not None
            and not self.low <= 1 <= self.high
            and self.p_rank is not None
            and self.p_rank <= ALPHA
        )

    @property
    def verdict(self) -> Verdict:
        """For the metric that was declared; the others' would add up to more errors than were agreed upon."""
        if not self.differs or self.ratio is None:
            return "cannot tell"
        return "better" if (self.ratio > 1) == (self.metric == "throughput") else "worse"

    def within(self, effect: float) -> bool:
        """Whether any difference is smaller than that, with 95%."""
        if self.low is None or self.high is None or self.num_blocks < LEAST_BLOCKS:
            return False
        return 1 / (1 + effect) < self.low and self.high < 1 + effect

    def blocks_for(self, effect: float) -> int | None:
        """How many blocks would find such a difference."""
        if self.deviation is None or self.num_blocks < 2:
            return None
        return required_blocks(self.deviation, effect, self.num_blocks) if self.deviation > 0 else LEAST_BLOCKS


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """Requests that failed, of those that both sides were asked; where it is not known which these are, of all."""

    num_requests: int = 0
    """Of each side."""
    num_requests_b: int | None = None
    """Of B, where requests are not paired: `num_requests` are A's then."""
    both: int = 0
    only_a: int = 0
    only_b: int = 0
    kinds_a: Mapping[str, int] = field(default_factory=dict)
    kinds_b: Mapping[str, int] = field(default_factory=dict)
    examples: Mapping[str, str] = field(default_factory=dict)

    @property
    def p(self) -> float:
        """McNemar's exact test; Fisher's where requests are not paired."""
        if self.num_requests_b is None:
            return sign_test(self.only_a, self.only_b)
        return min(1.0, 2 * more_often(self.failed_b, self.num_requests_b, self.failed_a, self.num_requests))

    @property
    def failed_a(self) -> int:
        return sum(self.kinds_a.values())

    @property
    def failed_b(self) -> int:
        return sum(self.kinds_b.values())

    @property
    def worse(self) -> bool:
        """Whether B fails more often; at 1%, beside the 5% of the metric."""
        more = self.only_b > self.only_a or self.num_requests_b is not None
        return more and self.p <= _FAILURES_ALPHA


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How fast A and B are."""

    plan: Plan
    blocks: Sequence[Block]
    announced: int | None
    """Blocks that the pilot said would find the effect; None without one, or before the pilot was over."""
    interrupted: bool
    effects: Mapping[Metric, Effect]
    """Of metrics that there are: an endpoint that does not stream has no TTFT."""
    failures: Failures
    paired: bool = True
    """Whether both sides were asked the same."""

    @property
    def primary(self) -> Effect:
        """The declared metric's."""
        return self.effects.get(self.plan.metric) or Effect(metric=self.plan.metric, num_blocks=0)

    @property
    def verdict(self) -> Verdict:
        """B's, seen from A. A side that fails more often is worse, however fast it fails."""
        return "worse" if self.failures.worse else self.primary.verdict


def judge(
    blocks: Sequence[Block], plan: Plan, *, announced: int | None = None, interrupted: bool = False
) -> Comparison:
    """The comparison that these blocks are."""
    found = ((metric, effect_of(blocks, metric)) for metric in METRICS)
    return Comparison(
        plan=plan,
        blocks=blocks,
        announced=announced,
        interrupted=interrupted,
        effects={metric: effect for metric, effect in found if effect.num_blocks},
        failures=count_failures(blocks),
    )


def effect_of(blocks: Sequence[Block], metric: Metric) -> Effect:
    values = block_log_ratios(blocks, metric)
    n = len(values)
    if not n:
        return Effect(metric=metric, num_blocks=0)
    interval, resampled = mean_interval(values), bootstrap_interval(values)
    deviation = float(values.std(ddof=1)) if n > 1 else None
    a, b = (_side(blocks, metric, side) for side in ("a", "b"))
    return Effect(
        metric=metric,
        num_blocks=n,
        ratio=math.exp(float(values.mean())),
        low=None if interval is None else _exp(interval[0]),
        high=None if interval is None else _exp(interval[1]),
        bootstrap_low=None if resampled is None else _exp(resampled[0]),
        bootstrap_high=None if resampled is None else _exp(resampled[1]),
        p_rank=signed_rank(values),
        deviation=deviation,
        detectable=None if deviation is None else detectable_effect(deviation, n),
        a=a,
        b=b,
    )


def count_failures(blocks: Sequence[Block]) -> Failures:
    kinds: tuple[dict[str, int], dict[str, int]] = ({}, {})
    examples: dict[str, str] = {}
    total = both = only_a = only_b = 0
    for ours, theirs in (matched for block in blocks for pair in block.pairs for matched in pair.matched()):
        total += 1
        both += not ours.ok and not theirs.ok
        only_a += not ours.ok and theirs.ok
        only_b += ours.ok and not theirs.ok
        for answer, counts in ((ours, kinds[0]), (theirs, kinds[1])):
            if answer.error is not None:
                counts[answer.error] = counts.get(answer.error, 0) + 1
                examples.setdefault(answer.error, answer.message or "")
    return Failures(
        num_requests=total, both=both, only_a=only_a, only_b=only_b, kinds_a=kinds[0], kinds_b=kinds[1],
        examples=examples,
    )  # fmt: skip


def _side(blocks: Sequence[Block], metric: Metric, side: Literal["a", "b"]) -> float | None:
    rounds = [pair.a if side == "a" else pair.b for block in blocks for pair in block.pairs]
    if metric == "throughput":
        return geometric_mean([one.throughput or 0.0 for one in rounds])
    answers = (answer for one in rounds for answer in one.answers if answer.ok)
    return geometric_mean([latency(answer, metric) or 0.0 for answer in answers])


def _exp(value: float) -> float:
    return math.exp(min(700.0, value))
