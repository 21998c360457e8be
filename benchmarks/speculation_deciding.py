"""What deciding about drafts takes on this machine: the host's time for each step, beside what computes.

    python benchmarks/speculation_deciding.py [--quick] [--json FILE]

Cells of speculation_clock.py, timed while the controller is asked and told, and while the books of a fixed setting are
kept. Medians over steps, so that other work of the machine counts little. The virtual clock charges its constants
(speculation_engine.py) for it; the last column is what they give for the same steps. Aims: 60 µs a step with one
request, and 1 ms with 256.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import speculation_clock
from common import Report, arguments
from speculation_clock import MOST_TOKENS, MOST_TOKENS_A_STEP, RESULTS, num_exchanges
from speculation_engine import CONTROLLER_DRAFT, CONTROLLER_ROW, CONTROLLER_STEP, FIXED_ROW, FIXED_STEP, CostTable, run
from speculation_workloads import exchanges

from sol.engine.types import DrafterStats, Drafting, ProposalPlan, SpeculationParams
from sol.speculation.native import best_arithmetic
from sol.speculation.plan import (
    Candidate,
    Controller,
    Drafter,
    Emission,
    FixedController,
    GoodputController,
    StepShape,
    shapes_to_measure,
)


class Timed:
    """A controller, and the seconds in it."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._seconds = 0.0
        self.steps: list[float] = []
        """Seconds of each that decoded"""
        self.rows = self.drafts = 0
        """Requests that decoded in them; those with drafts at hand"""

    def _call(self, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        try:
            return method(*arguments, **options)
        finally:
            self._seconds += time.perf_counter() - begin

    def add(self, request_id: str, wish: SpeculationParams | None) -> None:
        self._controller.add(request_id, wish)

    def remove(self, request_id: str) -> None:
        self._controller.remove(request_id)

    def choose_drafts(self, shape: StepShape, candidates: Sequence[Candidate], *, max_tokens: int) -> list[int]:
        self.drafts += len(candidates)
        return self._call(self._controller.choose_drafts, shape, candidates, max_tokens=max_tokens)  # type: ignore[no-any-return]

    def choose_proposals(self, shape: StepShape, rows: Sequence[Drafter]) -> list[ProposalPlan | None]:
        return self._call(self._controller.choose_proposals, shape, rows)  # type: ignore[no-any-return]

    def observe_step(self, shape: StepShape, seconds: float, emissions: Sequence[Emission]) -> None:
        self._call(self._controller.observe_step, shape, seconds, emissions)
        if emissions:
            self.rows += len(emissions)
            self.steps.append(self._seconds)
            self._seconds = 0.0

    def observe_drafting(self, drafting: Drafting) -> None:
        self._call(self._controller.observe_drafting, drafting)

    def speedup(self, request_id: str) -> float | None:
        return self._call(self._controller.speedup, request_id)  # type: ignore[no-any-return]

    def take_stats(self) -> tuple[dict[str, DrafterStats], float, float]:
        return self._call(self._controller.take_stats)  # type: ignore[no-any-return]


def measure(table: CostTable, workload: str, streams: int, *, fixed: bool) -> Timed:
    controller: Controller
    if fixed:
        controller = FixedController(("suffix",), MOST_TOKENS)
    else:
        shapes = shapes_to_measure(
            max_num_seqs=streams,
            max_num_batched_tokens=MOST_TOKENS_A_STEP,
            max_model_len=2048,
            num_speculative_tokens=MOST_TOKENS,
        )
        measured = [(shape, table.seconds(shape)) for shape in shapes]
        controller = GoodputController(("suffix",), MOST_TOKENS, measured=measured, arithmetic=best_arithmetic())
    timed = Timed(controller)
    run(exchanges(workload, num_exchanges(streams), 0), streams, table, timed, ("suffix",), MOST_TOKENS)
    return timed


def main() -> int:
    parser = arguments(__doc__ or "")
    args = parser.parse_args()
    report = Report("speculation_deciding", args.quick)
    table = CostTable(RESULTS / speculation_clock.TABLES[1])
    found = {}
    for streams in (1, 32) if args.quick else (1, 8, 32, 128, 256):
        for workload in ("chat", "copy"):
            for fixed in (False, True):
                timed = measure(table, workload, streams, fixed=fixed)
                per_step, steps = statistics.median(timed.steps), len(timed.steps)
                rows, drafts = timed.rows / steps, timed.drafts / steps
                if fixed:
                    charged = FIXED_STEP + FIXED_ROW * rows
                else:
                    charged = CONTROLLER_STEP + CONTROLLER_ROW * rows + CONTROLLER_DRAFT * drafts
                    found[workload, streams] = per_step
                report.row(
                    workload=workload,
                    streams=streams,
                    setting="fixed" if fixed else "controller",
                    rows_a_step=rows,
                    with_drafts=drafts,
                    microseconds_a_step=1e6 * per_step,
                    microseconds_charged=1e6 * charged,
                )
    for workload in ("chat", "copy"):
        report.at_most(f"microseconds a step, {workload}, 1 request", 1e6 * found[workload, 1], 60)
        if not args.quick:
            report.at_most(f"microseconds a step, {workload}, 256 requests", 1e6 * found[workload, 256], 1000)
    return report.finish(args.json)


if __name__ == "__main__":
    sys.exit(main())
