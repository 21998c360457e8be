"""`sol bench` over HTTP against servers whose every latency is known.

What the engine says of each request (`/simulate/requests`) is the truth for TTFT, TPOT and E2E. For the gaps between
tokens it is the same requests once more on the virtual clock, which gives the same steps for the same arrivals.
Steps take 50 ms and more, so that the one or two milliseconds that HTTP itself takes stay below the bar.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from common import Report
from measure_servers import Cores, Served, bench, finish_bench, requests_of, simulated, start_bench

from sol.simulate import VirtualServer, profile

T = TypeVar("T")

TOLERANCE = 0.02
STALL_SECONDS = 1.0
RATE = 20
"""Requests a second in the runs with a stall."""

LAWS: Mapping[str, Any] = {
    "step_seconds": 0.05,
    "sequence_seconds": 0.0005,
    "prefill_token_seconds": 0.0001,
    "context_token_seconds": 1e-6,
    "max_num_seqs": 10,
    "enable_prefix_caching": False,
}
"""With the load below, requests wait for a place now and then: the tails are those of a queue."""


def flags_of(laws: Mapping[str, Any]) -> list[str]:
    flags = []
    for name, value in laws.items():
        flag = name.replace("_", "-")
        flags += ["--" + flag if value else "--no-" + flag] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return flags


def measure_percentiles(report: Report, directory: Path, cores: Cores) -> None:
    """Every percentile that is reported, against the truth."""
    seconds = 15 if report.quick else 60
    load = ["--input-tokens", "uniform:100:400", "--output-tokens", "uniform:8:40"]
    limited = []
    off: list[str] = []
    num_checked = 0

    def check(load_name: str, stage: dict[str, Any], truth: Mapping[str, Sequence[float]]) -> None:
        nonlocal num_checked
        limited.append(stage["summary"]["client"]["limited"])
        for metric, values in truth.items():
            for name, found in stage["summary"]["latencies"][metric]["percentiles"].items():
                if found["value"] is None:
                    continue
                true = float(np.quantile(values, float(name[1:]) / 100))
                error = found["value"] / true - 1
                inside = found["low"] is not None and found["low"] <= true <= found["high"]
                holds = abs(error) <= TOLERANCE or inside
                num_checked += 1
                if not holds:
                    off.append(f"{load_name} {metric} {name}")
                report.row(
                    load=load_name, metric=metric, percentile=name, true_ms=1000 * true,
                    reported_ms=1000 * found["value"], error=f"{error:+.2%}", inside_interval="yes" if inside else "no",
                    holds="yes" if holds else "NO",
                )  # fmt: skip

    with simulated(*flags_of(LAWS), core=cores.serving) as served:
        arrivals = ["--rate", "5", "--duration", str(seconds)]
        stage = bench(served.url, *arrivals, *load, directory=directory, core=cores.measuring)
        records = served.records(len(requests_of(stage)))
        gaps = [gap for own in _in_window(stage, _gaps_once_more(records)) for gap in own]
        check("5/s, poisson", stage, {**truth_of(_in_window(stage, records)), "itl": gaps, "chunk": gaps})

    speculating = {**LAWS, "num_speculative_tokens": 4, "noise": "lognormal", "max_num_seqs": 256}
    with simulated(*flags_of(speculating), core=cores.serving) as served:
        arrivals = ["--concurrency", "8", "--num-requests", str(seconds * 8)]
        stage = bench(served.url, *arrivals, *load, directory=directory, core=cores.measuring)
        records = served.records(len(requests_of(stage)))
        check("8 at a time, speculating", stage, truth_of(_in_window(stage, records)))

    report.at_least("percentiles_checked", num_checked, 25)
    report.at_most("percentiles_off_by_more_than_2%_and_their_interval", len(off), 0)
    report.at_most("client_limited_where_nothing_hinders_it", sum(limited), 0)


def measure_stalls(report: Report, directory: Path, cores: Cores) -> None:
    """A client that stands still for a second says so; a server that does shows it in the tail."""

    def stop_the_client(process_id: int, _: Served) -> None:
        os.kill(process_id, signal.SIGSTOP)
        time.sleep(STALL_SECONDS)
        os.kill(process_id, signal.SIGCONT)

    def stop_the_server(_: int, served: Served) -> None:
        served.post("/simulate/faults", {"kind": "stall", "seconds": STALL_SECONDS})

    for who, stop in (("client", stop_the_client), ("server", stop_the_server)):
        stage, records = _stalled_run(directory, cores, stop)
        rows = requests_of(stage)
        client, ttft = stage["summary"]["client"], stage["summary"]["latencies"]["ttft"]
        waited = sum(row["ttft"] > STALL_SECONDS / 2 for row in rows if row["ttft"] is not None)
        report.row(
            stalled=who, seconds=STALL_SECONDS, requests=len(rows), p50_ms=1000 * ttft["percentiles"]["p50"]["value"],
            p99_ms=1000 * ttft["percentiles"]["p99"]["value"], longest_ms=1000 * ttft["largest"],
            waited_half_of_it=waited, client_limited=client["limited"],
            longest_client_stall_ms=1000 * client["longest_stall"],
        )  # fmt: skip
        # Of the requests that were due in its first half, all waited for longer than that.
        expected = RATE * STALL_SECONDS / 2
        report.at_least(f"requests_in_the_tail_of_a_stalled_{who}", waited, expected - 2)
        if who == "client":
            report.at_least("a_stalled_client_says_client_limited", client["limited"], 1)
            report.at_least("longest_stall_of_the_client_s", client["longest_stall"], 0.9 * STALL_SECONDS)
        else:
            true = float(np.quantile([record["ttft_seconds"] for record in records], 0.99))
            error = ttft["percentiles"]["p99"]["value"] / true - 1
            report.at_most("error_of_p99_ttft_with_a_stalled_server", abs(error), TOLERANCE)
            report.at_least("longest_ttft_with_a_stalled_server_s", ttft["largest"], 0.95 * STALL_SECONDS)


def _stalled_run(
    directory: Path, cores: Cores, stop: Callable[[int, Served], None]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    prefix = directory / f"stalled-{stop.__name__}"
    load = ["--rate", str(RATE), "--arrivals", "constant", "--duration", "8", "--input-tokens", "100"]
    load += ["--output-tokens", "4", "--warmup", "0", "--cooldown", "0"]
    with simulated(*flags_of({**LAWS, "max_num_seqs": 256}), core=cores.serving) as served:
        process = start_bench(served.url, *load, prefix=prefix, core=cores.measuring)
        deadline = time.monotonic() + 60
        while len(served.get("/simulate/requests")["requests"]) < 2 * RATE:
            if process.poll() is not None or time.monotonic() > deadline:
                break  # what it says is in the error below
            time.sleep(0.1)
        stop(process.pid, served)
        (stage,) = finish_bench(process, prefix, 60)["stages"]
        return stage, served.records(len(requests_of(stage)))


def truth_of(records: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """TTFT, TPOT and E2E of these requests as the simulated engine knows them."""
    return {
        "ttft": [record["ttft_seconds"] for record in records],
        "tpot": [
            (record["e2e_seconds"] - record["ttft_seconds"]) / (record["completion_tokens"] - 1)
            for record in records
            if record["completion_tokens"] > 1
        ],
        "e2e": [record["e2e_seconds"] for record in records],
    }


def _in_window(stage: Mapping[str, Any], of_requests: Sequence[T]) -> list[T]:
    """Of what there is of each request, in the order of arrival: that of those which the report is about. The first
    requests of all are not: eight that come at once wait while the simulator, which is one process, reads them."""
    begin, end = stage["summary"]["window"]
    order = sorted(requests_of(stage), key=lambda row: row["sent"])
    return [one for row, one in zip(order, of_requests, strict=True) if begin <= row["intended"] <= end]


def _gaps_once_more(records: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """Between the tokens of each of the same requests on the virtual clock. Raises `RuntimeError` if it is another
    run."""
    server = VirtualServer(profile("h100-8b", **LAWS))
    begin = records[0]["arrival_time"]
    requests = [
        server.submit(
            record["arrival_time"] - begin,
            prompt_tokens=record["prompt_tokens"],
            output_tokens=record["completion_tokens"],
        )
        for record in records
    ]
    server.run()
    for request, record in zip(requests, records, strict=True):
        if abs(request.e2e - record["e2e_seconds"]) > 1e-6:
            raise RuntimeError(
                f"request {record['id']} took {record['e2e_seconds']:.6f} s, and {request.e2e:.6f} s on the virtual "
                "clock: the simulator on the real clock is another one"
            )
    return [[float(gap) for gap in np.diff(request.token_times)] for request in requests]
