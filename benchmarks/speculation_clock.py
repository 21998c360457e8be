"""Does the controller ever cost time, and does it find the best setting? On a virtual clock, so the answer is exact.

    python benchmarks/speculation_clock.py [--quick] [--table FILE …]

The real scheduler, controller and lookup drafters answer recorded texts (speculation_workloads.py); time passes by a
table of steps measured on a CPU or a GPU and by measured constants for lookups (speculation_engine.py). In every cell
of workload × streams the controller has to reach 0.98 of plain decoding, and 0.98 of the best of the fixed settings:
either lookup drafter with any number of tokens.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from common import ROOT, Report, arguments
from speculation_engine import MOST_TOKENS_A_STEP, CostTable, Run, run
from speculation_workloads import WORKLOADS, exchanges

from sol.speculation.plan import FixedController, GoodputController, shapes_to_measure

RESULTS: Final = ROOT / "benchmarks" / "results"
TABLES: Final = ("cpu-verify-costs.json", "h200-verify-costs.json")
STREAMS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
QUICK_STREAMS: Final = (1, 8, 64)
FIXED_TOKENS: Final = (1, 2, 3, 5, 8, 12, 16)
QUICK_FIXED_TOKENS: Final = (3, 16)
DRAFTERS: Final = ("suffix",)
"""What the controller may use: what it uses by default"""
MOST_TOKENS: Final = 16
BOUND: Final = 0.98


def num_exchanges(streams: int) -> int:
    """Enough of them that what is learned once does not count for much, as in an engine that runs for long."""
    return max(2 * streams + 15, min(4 * streams, 3 * streams + 64))


class Cell:
    """One workload at one number of streams on one machine."""

    def __init__(self, table: CostTable, workload: str, streams: int, *, seed: int = 0, work_ahead: int = 0) -> None:
        self._table, self._streams, self._work_ahead = table, streams, work_ahead
        self._exchanges = exchanges(workload, num_exchanges(streams), seed)

    def plain(self) -> Run:
        return self._run(None, ())

    def fixed(self, drafter: str, num_tokens: int) -> Run:
        return self._run(FixedController((drafter,), num_tokens), (drafter,))

    def goodput(self, drafters: tuple[str, ...] = DRAFTERS) -> Run:
        shapes = shapes_to_measure(
            max_num_seqs=self._streams,
            max_num_batched_tokens=MOST_TOKENS_A_STEP,
            max_model_len=2048,
            num_speculative_tokens=MOST_TOKENS,
        )
        measured = [(shape, self._table.seconds(shape)) for shape in shapes]
        return self._run(GoodputController(drafters, MOST_TOKENS, measured=measured), drafters)

    def _run(self, controller: FixedController | GoodputController | None, drafters: tuple[str, ...]) -> Run:
        return run(
            self._exchanges,
            self._streams,
            self._table,
            controller,
            drafters,
            num_speculative_tokens=MOST_TOKENS,
            work_ahead=self._work_ahead,
        )


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE", help="instead of those in results/")
    args = parser.parse_args()
    report = Report("speculation_clock", args.quick)
    files = args.table or [RESULTS / name for name in TABLES if (RESULTS / name).exists()]
    worst = {"plain": 9.9, "best fixed": 9.9}
    for file in files:
        machine = file.name.partition("-")[0]
        table = CostTable(file)
        for workload in WORKLOADS:
            for streams in QUICK_STREAMS if args.quick else STREAMS:
                cell = Cell(table, workload, streams)
                plain, goodput = cell.plain(), cell.goodput()
                fixed = {
                    f"{drafter} {count}": cell.fixed(drafter, count).tokens_per_second
                    for drafter in ("suffix", "ngram")
                    for count in (QUICK_FIXED_TOKENS if args.quick else FIXED_TOKENS)
                }
                best = max(fixed, key=lambda name: fixed[name])
                reached = goodput.tokens_per_second
                ratios = {
                    "plain": reached / plain.tokens_per_second,
                    "best fixed": reached / max(fixed[best], plain.tokens_per_second),
                }
                report.row(
                    machine=machine,
                    workload=workload,
                    streams=streams,
                    plain_tokens_per_s=plain.tokens_per_second,
                    over_plain=ratios["plain"],
                    over_best_fixed=ratios["best fixed"],
                    tokens_per_pass=goodput.tokens / goodput.target_passes / streams,
                    best_fixed=best,
                    best_fixed_over_plain=fixed[best] / plain.tokens_per_second,
                    worst_fixed_over_plain=min(fixed.values()) / plain.tokens_per_second,
                )
                for against, ratio in ratios.items():
                    worst[against] = min(worst[against], ratio)
                    if ratio < BOUND:
                        report.at_least(f"{machine} {workload} {streams}: over {against}", ratio, BOUND)
                print(report.rows[-1], file=sys.stderr, flush=True)
    for against, ratio in worst.items():
        report.at_least(f"worst cell over {against}", ratio, BOUND)
    return report.finish(args.json)


if __name__ == "__main__":
    raise SystemExit(main())
