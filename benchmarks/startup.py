"""How long until Sol answers.

Always: `make serve` in this checkout, everything installed and the model cached, until the server is ready.
With --full also what a newcomer waits: a clone of the committed tree into an empty folder, `make serve` with an empty
model cache, until the first chat is answered; downloads included (what pip has in its own cache it does not download).

    python benchmarks/startup.py [--quick] [--full] [--json FILE]
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from common import ROOT, Report, arguments, chat, free_port, server, wait_until_ready

from sol.config import DEFAULT_MODEL

SECOND_START_SECONDS = 15.0
FIRST_CHAT_SECONDS = 360.0


def make_serve(checkout: Path, environment: Mapping[str, str], timeout: float) -> tuple[float, float]:
    """Seconds from `make serve` to ready and to the end of the first chat."""
    port = free_port()
    with tempfile.NamedTemporaryFile(prefix="sol-startup-", suffix=".log") as log:
        begin = time.perf_counter()
        command = ["make", "serve", f"PORT={port}"]
        with server(command, log, cwd=checkout, env=dict(environment)) as process:
            wait_until_ready(process, port, log, timeout)
            ready = time.perf_counter() - begin
            chat(port, DEFAULT_MODEL)
            return ready, time.perf_counter() - begin


def clean_clone() -> tuple[float, float]:
    with tempfile.TemporaryDirectory(prefix="sol-clone-") as folder:
        checkout = Path(folder, "sol")
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(checkout)], check=True)
        # This process may run in a virtual environment; the newcomer's shell does not.
        path = os.pathsep.join(p for p in os.environ["PATH"].split(os.pathsep) if Path(p) != Path(sys.prefix, "bin"))
        environment = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
        environment |= {"PATH": path, "SOL_CACHE": str(Path(folder, "cache"))}
        return make_serve(checkout, environment, 2 * FIRST_CHAT_SECONDS)


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--full", action="store_true", help="the newcomer's first start too")
    args = parser.parse_args()

    report = Report("startup", args.quick)
    make_serve(ROOT, os.environ, 2 * FIRST_CHAT_SECONDS)  # installs and fetches whatever is missing
    starts = [make_serve(ROOT, os.environ, 120.0) for _ in range(1 if args.quick else 5)]
    for ready, first_chat in starts:
        report.row(start="second", ready_s=round(ready, 2), first_chat_s=round(first_chat, 2))
    report.at_most("second_start_ready_s", statistics.median(ready for ready, _ in starts), SECOND_START_SECONDS)
    if args.full:
        ready, first_chat = clean_clone()
        report.row(start="clean clone", ready_s=round(ready, 2), first_chat_s=round(first_chat, 2))
        report.at_most("clean_clone_first_chat_s", first_chat, FIRST_CHAT_SECONDS)
    return report.finish(args.json)


if __name__ == "__main__":
    sys.exit(main())
