"""How far a comparison is, on stderr."""

from __future__ import annotations

import asyncio
import sys
from typing import Final

from sol.bench.progress import show_round
from sol.bench.run import Tally
from sol.compare.run import Progress as Blocks
from sol.compare.summary_text import NAMES, announcement

_LONG_ROUND_SECONDS: Final = 10.0


class Progress:
    """Progress on stderr: the round that runs, and a line for each block."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self.measuring = False

    def say(self, text: str) -> None:
        if not self._quiet:
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()

    async def watch(self, name: str, tally: Tally) -> None:
        if self._quiet:
            return
        if not sys.stderr.isatty():  # lines that stay: a round that ends soon needs none
            await asyncio.sleep(_LONG_ROUND_SECONDS)
        await show_round(name, tally)

    def block(self, progress: Blocks) -> None:
        comparison = progress.comparison
        effect, plan = comparison.primary, comparison.plan
        done = len(comparison.blocks)
        text = f"block {done} of {progress.total}"
        if effect.ratio is not None:
            text += f": {NAMES[plan.metric]} of B / A {effect.ratio:.4g}"
            if effect.low is not None and effect.high is not None:
                text += f" ({effect.low:.4g} to {effect.high:.4g})"
        self.say(text)
        if done == plan.blocks and comparison.announced is not None:
            self.say(announcement(plan, comparison.announced, effect.deviation))
