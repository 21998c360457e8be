"""The same load by `sol bench`, `vllm bench serve` and GuideLLM, with definitions matched: do they say the same?

All send the same prompts to `/v1/completions`, as many at a time, and count everything from first to last request.
Answers have lengths that the prompts' file gives: the token that ends an answer by itself has no text, and GuideLLM
counts it without having seen it come. Still no two runs are the same: who asks a millisecond later finds another step
under way. Each tool's figures are therefore held against what the simulated engine
says of that tool's own requests, and what is compared is by how much each is off: the noise of the load falls out.
Contenders take turns, and the median over rounds counts.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import Report
from measure_laws import LAWS, TOLERANCE, flags_of, truth_of
from measure_servers import MODEL, Cores, Served, bench, requests_of, simulated
from measure_tools import PERCENTILES, RUN, Figures, Task, version, write_prompts

OURS = "sol bench"
COMPARED = ("vllm-bench", "guidellm")
OTHERS = ("locust", "wrk", "lm-eval")
METRICS = ("ttft", "tpot", "e2e")
CONCURRENCY = 8
LENGTHS = (6, 18)
"""Tokens of answers."""
STEPS: Mapping[str, Any] = {**LAWS, "step_seconds": 0.1, "noise": "lognormal"}
"""Long ones: the milliseconds that HTTP and a tool's own work take are to be small beside them."""


def measure_tools(report: Report, directory: Path, cores: Cores) -> None:
    rounds, number = (1, 64) if report.quick else (3, 240)
    present = [name for name in (*COMPARED, *OTHERS) if version(name) is not None]
    for name in (*COMPARED, *OTHERS):
        if name not in present:
            print(f"{name} is not there: python benchmarks/rivals.py prepares it", file=sys.stderr)
    report.versions |= {name: str(version(name)) for name in present}
    prompts = directory / "prompts.jsonl"
    write_prompts(prompts, number, lengths=LENGTHS)
    with simulated(*flags_of(STEPS), core=cores.serving) as served:
        task = Task(
            url=served.url, model=MODEL, prompts=prompts, num_requests=number, concurrency=CONCURRENCY, max_tokens=None,
            directory=directory, core=cores.measuring,
        )  # fmt: skip
        contenders = [OURS, *(name for name in COMPARED if name in present)]
        found: dict[str, list[tuple[Figures, Figures]]] = {name: [] for name in contenders}
        for turn in range(rounds):
            for name in contenders[turn % len(contenders) :] + contenders[: turn % len(contenders)]:
                print(f"  {name}, round {turn + 1}", file=sys.stderr, flush=True)
                own = dataclasses.replace(task, directory=_made(directory / f"{name.replace(' ', '-')}-{turn}"))
                figures = _sol(own, cores) if name == OURS else RUN[name](own)
                found[name].append((figures, _truth(served, number)))
        _compare(report, found)
        report.section()
        for name in (name for name in OTHERS if name in present):
            print(f"  {name}", file=sys.stderr, flush=True)
            figures = RUN[name](dataclasses.replace(task, directory=_made(directory / name), max_tokens=12))
            shown = ("requests", "errors", "requests_per_s", "ttft_p50", "ttft_p99", "e2e_p50", "e2e_p99")
            report.row(tool=version(name), **{key: figures.get(key, "") for key in shown})
            report.at_most(f"errors_of_{name}", figures["errors"], 0)
            report.at_least(f"requests_of_{name}", figures["requests"], 8)


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory


def _sol(task: Task, cores: Cores) -> Figures:
    """Its figures in the form of the others'."""
    load = ["--concurrency", str(task.concurrency), "--num-requests", str(task.num_requests)]
    load += ["--warmup", "0", "--cooldown", "0", "--route", "completions", "--no-scrape"]
    ours = task.directory / "prompts.jsonl"  # which holds no field that means nothing here
    lines = [json.loads(line) for line in task.prompts.read_text().splitlines()]
    ours.write_text("".join(json.dumps({key: line[key] for key in ("prompt", "max_tokens")}) + "\n" for line in lines))
    data = ["--dataset", str(ours), "--ignore-eos"]
    stage = bench(task.url, *load, *data, directory=task.directory, core=cores.measuring)
    rows = requests_of(stage)
    figures: Figures = {
        "requests": sum(row["error"] is None for row in rows),
        "errors": sum(row["error"] is not None for row in rows),
        "requests_per_s": len(rows) / stage["seconds"],
    }
    for metric in METRICS:
        latency = stage["summary"]["latencies"][metric]
        estimates = {"mean": latency["mean"], **latency["percentiles"]}
        figures |= {f"{metric}_{name}": e["value"] for name, e in estimates.items() if e["value"] is not None}
    return figures


def _truth(served: Served, number: int) -> Figures:
    """Of the last so many requests that ended as they should: what a tool asked to see whether the server is up, and
    what it broke off at its end, is left out."""
    records = [record for record in served.records(2 * number) if record["ended"] == "finished"][-number:]
    figures: Figures = {}
    for metric, values in truth_of(records).items():
        figures[f"{metric}_mean"] = float(np.mean(values))
        figures |= {f"{metric}_p{p}": float(np.quantile(values, p / 100)) for p in PERCENTILES}
    ends = [record["arrival_time"] + record["e2e_seconds"] for record in records]
    figures["requests_per_s"] = len(records) / (max(ends) - records[0]["arrival_time"])
    return figures


def _compare(report: Report, found: Mapping[str, Sequence[tuple[Figures, Figures]]]) -> None:
    beyond = {name: 0 for name in found if name != OURS}
    names = ("mean", *(f"p{p}" for p in PERCENTILES))
    for key in ["requests_per_s", *(f"{metric}_{name}" for metric in METRICS for name in names)]:
        if any(key not in figures for figures, _ in found[OURS]):
            continue  # too few samples
        unit = 1.0 if key == "requests_per_s" else 1000.0
        columns: dict[str, Any] = {}
        off = {}
        for name, runs in found.items():
            off[name] = statistics.median(figures[key] / true[key] - 1 for figures, true in runs)
            columns[name] = f"{unit * statistics.median(figures[key] for figures, _ in runs):.4g}"
            columns[f"{name} off"] = f"{off[name]:+.2%}"
        for name in beyond:
            beyond[name] += abs((1 + off[name]) / (1 + off[OURS]) - 1) > TOLERANCE
        report.row(figure=key if unit == 1 else f"{key}_ms", **columns)
    for name, count in beyond.items():
        report.at_most(f"figures_of_{name}_that_differ_by_more_than_2%", count, 0)
        report.at_most(f"errors_of_{name}", sum(figures["errors"] for figures, _ in found[name]), 0)
