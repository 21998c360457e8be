"""Comparing two endpoints, A and B: which one is faster, and whether they say the same.

    comparison = await compare(sampler, Plan(effect=0.05))
    comparison.verdict, comparison.primary.ratio, comparison.primary.low, comparison.primary.high

`samples` says what is measured, `verdict` (over `statistics`) what that means, `run` how much of it is taken. Blocks
come from two endpoints (`http`), from recorded runs (`recorded`, `imported`) or from a virtual clock (`virtual`).
"""

from sol.compare.run import Progress, compare
from sol.compare.samples import METRICS, Answer, Block, Metric, Pair, Round, Sampler
from sol.compare.verdict import Comparison, Effect, Failures, Plan, Verdict, judge

__all__ = [
    "METRICS", "Answer", "Block", "Comparison", "Effect", "Failures", "Metric", "Pair", "Plan", "Progress", "Round",
    "Sampler", "Verdict", "compare", "judge",
]  # fmt: skip
