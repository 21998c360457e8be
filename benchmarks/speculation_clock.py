"""Does the controller ever cost time, and does it find the best setting? On a virtual clock, so the answer is exact.

    python benchmarks/speculation_clock.py [--quick] [--seed N …] [--work-ahead] [--table FILE …] [--fixed-from RESULT]

The real scheduler, controller and lookup drafters answer recorded texts (speculation_workloads.py); time passes by a
table of steps measured on a CPU or a GPU and by measured constants for lookups and for deciding
(speculation_engine.py). In every cell of workload × streams the controller has to reach 0.98 of plain decoding, and
0.98 of the best of the fixed settings: either lookup drafter with any number of tokens. Both are counted from the
moment at which as many answers are complete as there are streams: a controller starts once, knowing nothing, and a run
is short. `from_start_over_plain` has that part as well.

A cell is run with the texts of several seeds, and its tokens and seconds are added up: with those of one, the best of
so many settings is in part the luckiest one, and any change moves a cell by one or two hundredths. `by_seed` has the
ratios of each.

Nine tenths of the time go to fixed settings, which do not depend on the controller: while you work on that, take them
from an earlier result of the same tables, seeds and clock with `--fixed-from`.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from common import ROOT, Report, arguments
from speculation_engine import MOST_TOKENS_A_STEP, CostTable, Run, run
from speculation_workloads import WORKLOADS, exchanges

from sol.speculation.native import best_arithmetic
from sol.speculation.plan import FixedController, GoodputController, shapes_to_measure

NAME: Final = "speculation_clock"
RESULTS: Final = ROOT / "benchmarks" / "results"
TABLES: Final = ("cpu-verify-costs.json", "h200-verify-costs.json")
STREAMS: Final = (1, 2, 4, 8, 16, 32, 128, 256)
QUICK_STREAMS: Final = (1, 16, 128)
FIXED: Final = tuple((name, count) for name in ("suffix", "ngram") for count in (1, 2, 3, 5, 8, 12, 16))
QUICK_FIXED: Final = (("suffix", 3), ("suffix", 16))
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
        self._table, self.streams, self._work_ahead = table, streams, work_ahead
        self._exchanges = exchanges(workload, num_exchanges(streams), seed)

    def plain(self) -> Run:
        return self._run(None, ())

    def fixed(self, drafter: str, num_tokens: int) -> Run:
        return self._run(FixedController((drafter,), num_tokens), (drafter,))

    def goodput(self, drafters: tuple[str, ...] = DRAFTERS) -> Run:
        shapes = shapes_to_measure(
            max_num_seqs=self.streams,
            max_num_batched_tokens=MOST_TOKENS_A_STEP,
            max_model_len=2048,
            num_speculative_tokens=MOST_TOKENS,
        )
        measured = [(shape, self._table.seconds(shape)) for shape in shapes]
        return self._run(
            GoodputController(drafters, MOST_TOKENS, measured=measured, arithmetic=best_arithmetic()), drafters
        )

    def _run(self, controller: FixedController | GoodputController | None, drafters: tuple[str, ...]) -> Run:
        return run(
            self._exchanges,
            self.streams,
            self._table,
            controller,
            drafters,
            num_speculative_tokens=MOST_TOKENS,
            work_ahead=self._work_ahead,
        )


def together(runs: Sequence[Run]) -> float:
    """Tokens a second after the start."""
    tokens = sum(run.tokens - run.start.tokens for run in runs if run.start is not None)
    return tokens / sum(run.seconds - run.start.seconds for run in runs if run.start is not None)


def compare(
    cells: Sequence[Cell], settings: Sequence[tuple[str, int]], earlier: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The controller with plain decoding and with fixed settings (drafter, tokens), over one cell's texts of several
    seeds; the settings as `earlier` has them, if that is the same cell's row."""
    plain, goodput = [cell.plain() for cell in cells], [cell.goodput() for cell in cells]
    usual, reached = together(plain), together(goodput)
    if earlier is None:
        rates = {f"{name} {count}": together([cell.fixed(name, count) for cell in cells]) for name, count in settings}
        best = max(rates, key=lambda name: rates[name])
        fixed = {
            "best_fixed": best,
            "best_fixed_over_plain": rates[best] / usual,
            "worst_fixed_over_plain": min(rates.values()) / usual,
        }
    elif math.isclose(earlier["plain_tokens_per_s"], usual, rel_tol=1e-9):
        fixed = {name: earlier[name] for name in ("best_fixed", "best_fixed_over_plain", "worst_fixed_over_plain")}
    else:
        raise SystemExit(
            f"--fixed-from: {earlier['workload']} {earlier['streams']} decoded plainly at "
            f"{earlier['plain_tokens_per_s']} tokens a second, and now does at {usual}: tables, texts or the clock are "
            "not those of that result, so leave the option out"
        )
    return {
        "plain_tokens_per_s": usual,
        "over_plain": reached / usual,
        "over_best_fixed": reached / usual / max(fixed["best_fixed_over_plain"], 1.0),
        "from_start_over_plain": sum(run.tokens for run in goodput)
        / sum(run.seconds for run in goodput)
        * sum(run.seconds for run in plain)
        / sum(run.tokens for run in plain),
        "tokens_per_pass": sum(run.tokens for run in goodput)
        / sum(run.target_passes for run in goodput)
        / cells[0].streams,
        **fixed,
        "by_seed": [
            one.later_tokens_per_second / other.later_tokens_per_second
            for one, other in zip(goodput, plain, strict=True)
        ],
    }


def earlier_rows(file: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    """By machine, seeds, workload and streams: those of a full result of this benchmark."""
    result = json.loads(file.read_text(encoding="utf-8"))
    if result.get("benchmark") != NAME or result.get("quick"):
        raise SystemExit(f"--fixed-from {file}: not a full result of {NAME}, which --json writes")
    return {(row["machine"], row["seeds"], row["workload"], row["streams"]): row for row in result["rows"]}


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE", help="instead of those in results/")
    parser.add_argument("--seed", type=int, nargs="+", metavar="N", default=[7, 8, 9], help="of texts (default: 7 8 9)")
    parser.add_argument("--work-ahead", action="store_true", help="plan a step before the one before has been read")
    parser.add_argument("--fixed-from", type=Path, metavar="RESULT", help="a full result that has the fixed settings")
    args = parser.parse_args()
    earlier = earlier_rows(args.fixed_from) if args.fixed_from else {}
    report = Report(NAME, args.quick)
    files = args.table or [RESULTS / name for name in TABLES if (RESULTS / name).exists()]
    worst = {"plain": 9.9, "best fixed": 9.9}
    numbers = args.seed[:1] if args.quick else args.seed
    seeds = " ".join(map(str, numbers))
    for file in files:
        machine = file.name.partition("-")[0]
        table = CostTable(file)
        for workload, streams in itertools.product(WORKLOADS, QUICK_STREAMS if args.quick else STREAMS):
            cells = [Cell(table, workload, streams, seed=n, work_ahead=int(args.work_ahead)) for n in numbers]
            known = earlier.get((machine, seeds, workload, streams))
            compared = compare(cells, QUICK_FIXED if args.quick else FIXED, known)
            report.row(machine=machine, seeds=seeds, workload=workload, streams=streams, **compared)
            print(report.rows[-1], file=sys.stderr, flush=True)
            for against in worst:
                ratio = compared[f"over_{against.replace(' ', '_')}"]
                worst[against] = min(worst[against], ratio)
                if ratio < BOUND:
                    report.at_least(f"{machine} {workload} {streams}: over {against}", ratio, BOUND)
    for against, ratio in worst.items():
        report.at_least(f"worst cell over {against}", ratio, BOUND)
    return report.finish(args.json)


if __name__ == "__main__":
    raise SystemExit(main())
