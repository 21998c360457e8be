"""What the gateway adds, and whether it keeps its books: in front of simulated engines, under load.

    python benchmarks/gateway.py [--quick] [--only PART …] [--json FILE]

latency  300 requests a second of 1 KB that are no streams, and 60 streams of 64 chunks a second, rule filters on: the
         same load by `sol bench` straight to the engine and through the gateway, in turns; processor time of a chunk
memory   200,000 requests of every kind, clients that leave and wrong ones among them: the resident memory stays flat
limits   200 clients at once against a limit of tokens a minute: never more than 1% over it, and no false 429
ledger   clients that leave, engines that fail and are killed, retries: what is recorded is what the engines say

The gateway is pinned to one core, the simulator and the client to another. Turns in which the client was the bottleneck
(`client_limited`) do not count. Wall-clock bars want a machine that does nothing else.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from common import Report, arguments
from gateway_accounts import measure_ledger, measure_limits
from gateway_latency import measure_latency
from gateway_memory import measure_memory
from measure_servers import Cores

PARTS: dict[str, Callable[[Report, Path, Cores], None]] = {
    "latency": measure_latency,
    "memory": measure_memory,
    "limits": measure_limits,
    "ledger": measure_ledger,
}


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), metavar="PART", help="some of: " + ", ".join(PARTS))
    args = parser.parse_args()
    report = Report("gateway", args.quick)
    cores = Cores.of_this_machine()
    with tempfile.TemporaryDirectory() as directory:
        for name, measure in PARTS.items():
            if args.only is None or name in args.only:
                print(f"{name} …", file=sys.stderr, flush=True)
                report.section()
                part = Path(directory) / name
                part.mkdir()
                measure(report, part, cores)
    return report.finish(args.json)


if __name__ == "__main__":
    sys.exit(main())
