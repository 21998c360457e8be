"""Is what the measuring tools say true? `sol bench`, `sol compare` and `sol tune` against what is known, and against
other people's tools.

    python benchmarks/measure.py [--quick] [--only PART …] [--json FILE]

laws         every percentile over HTTP against a simulated server's own record of the same requests
stalls       a client that stands still for a second, and a server that does
streams      2,000 streams and 10,000 events a second on one core
verdicts     `sol compare` on the virtual clock: a server with itself, and with one that is 5% slower
tuning       `sol tune` on the simulated server, against the whole grid
speculation  `sol compare` starts SmolLM2 without and with speculation: the speed-up, and no text may differ
tools        the same load by `vllm bench serve` and GuideLLM; locust, wrk and lm-evaluation-harness get their answers
             (those that `make rivals` has prepared; the others are left out, and it is said)

The client is pinned to one core and the server to another. Wall-clock bars want a machine that does nothing else.
`--quick` runs the last two only where they are named with --only: they start engines and tools, which takes minutes.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from common import Report, arguments
from measure_agreement import measure_tools
from measure_client import measure_streams
from measure_compare import measure_speculation, measure_verdicts
from measure_laws import measure_percentiles, measure_stalls
from measure_servers import Cores
from measure_tune import measure_tuning

PARTS: dict[str, Callable[[Report, Path, Cores], None]] = {
    "laws": measure_percentiles,
    "stalls": measure_stalls,
    "streams": measure_streams,
    "verdicts": measure_verdicts,
    "tuning": measure_tuning,
    "speculation": measure_speculation,
    "tools": measure_tools,
}
LONG = ("speculation", "tools")


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), metavar="PART", help="some of: " + ", ".join(PARTS))
    args = parser.parse_args()
    report = Report("measure", args.quick)
    cores = Cores.of_this_machine()
    chosen = args.only or [name for name in PARTS if not (args.quick and name in LONG)]
    with tempfile.TemporaryDirectory() as directory:
        for name, measure in PARTS.items():
            if name in chosen:
                print(f"{name} …", file=sys.stderr, flush=True)
                report.section()
                measure(report, Path(directory), cores)
    return report.finish(args.json)


if __name__ == "__main__":
    sys.exit(main())
