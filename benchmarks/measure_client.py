"""How much one core of the client bears: 2,000 streams with 10,000 events a second, the server on another core."""

from __future__ import annotations

from pathlib import Path

import psutil
from common import Report
from measure_servers import Cores, bench, simulated

STREAMS = 2000
EVENTS_PER_SECOND = 10_000
STEP_SECONDS = 0.9 * STREAMS / EVENTS_PER_SECOND
"""All streams get a chunk in each step, all in one instant: a server with continuous batching does that, and it is
harder than the same number spread out. A little shorter than needed, for the step that each request waits for."""


def measure_streams(report: Report, directory: Path, cores: Cores) -> None:
    seconds = 14 if report.quick else 40
    if cores.measuring is None:
        raise RuntimeError("this takes two cores, one for each side; this process may use one")
    flags = ["--profile", "fast", "--step-seconds", str(STEP_SECONDS), "--max-num-seqs", str(STREAMS)]
    load = ["--concurrency", str(STREAMS), "--duration", str(seconds), "--warmup", "4"]
    load += ["--input-tokens", "16", "--output-tokens", "uniform:20:60"]
    with simulated(*flags, core=cores.serving) as served:
        before = psutil.Process(served.process_id).cpu_times()
        stage = bench(
            served.url, *load, "--no-scrape", "--drain-timeout", "40", directory=directory, core=cores.measuring
        )
        after = psutil.Process(served.process_id).cpu_times()
    summary, client = stage["summary"], stage["summary"]["client"]
    # A chunk is a token here: the simulator drafts nothing.
    events = summary["output_tokens_per_second"]["value"] or 0.0
    report.row(
        streams=STREAMS, events_per_s=events, client_busy=client["busy_share"],
        server_busy=(after.user + after.system - before.user - before.system) / stage["seconds"],
        sent_late_p99_ms=1000 * (client["send_lag_p99"] or 0), loop_late_p99_ms=1000 * (client["loop_lag_p99"] or 0),
        longest_stall_ms=1000 * client["longest_stall"], stalled_share=client["stalled_share"],
        client_limited=client["limited"], reasons="; ".join(client["reasons"]),
    )  # fmt: skip
    in_flight = stage["summary"]["little"]["in_flight"] or 0
    report.at_least("streams_in_flight", in_flight, 0.98 * STREAMS)
    report.at_least("events_per_s", events, EVENTS_PER_SECOND)
    report.at_most("client_limited_with_2000_streams", client["limited"], 0)
    report.at_most("errors_with_2000_streams", sum(summary["errors"].values()), 0)
