"""Takes blocks until there are enough: a fixed number, or as many as a wanted effect needs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from sol.compare.samples import Block, Sampler
from sol.compare.verdict import Comparison, Plan, judge


class Stopping(Protocol):
    """`sol.bench.Stop`, or anything that says whether it was set."""

    @property
    def is_set(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Progress:
    """After each block."""

    comparison: Comparison
    """Of the blocks so far. To stop because it looks good already would undo its guarantee, and nothing here does."""
    total: int
    """Blocks that there will be."""


async def compare(
    sampler: Sampler,
    plan: Plan | None = None,
    *,
    stop: Stopping | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Comparison:
    """Blocks of `sampler`, judged; after `stop`, of those that were complete.

    With an effect to be found, `plan.blocks` are a pilot; its variance says how many blocks the effect takes
    (`Comparison.announced`), and the rest of them, up to `plan.max_blocks`, are run.
    """
    plan = plan or Plan()
    blocks: list[Block] = []
    total, announced, interrupted = plan.blocks, None, False
    while len(blocks) < total:
        block = None if stop is not None and stop.is_set else await sampler.block(len(blocks))
        if block is None:
            interrupted = True
            break
        blocks.append(block)
        if len(blocks) == plan.blocks and plan.effect is not None:
            announced = plan.needed(blocks)
            total = min(announced, plan.max_blocks)
        if on_progress is not None:
            on_progress(Progress(judge(blocks, plan, announced=announced), total))
        await asyncio.sleep(0)  # a sampler that never waits shall not keep the event loop for itself
    return judge(blocks, plan, announced=announced, interrupted=interrupted)
