"""What a gateway adds to latency, and what a relayed chunk costs of the processor."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from common import Report
from gateway_servers import RULES, gateway
from measure_servers import Cores, Served, bench, simulated

SIMULATOR = ("--profile", "fast", "--step-seconds", "0.002")
"""Short steps: a request that reaches the engine half a millisecond later waits for the next step, and the shorter
that is the less of it is in the figures."""
CHUNKS = 64


@dataclass(frozen=True)
class LoadKind:
    name: str
    rate: int
    output_tokens: int
    flags: Sequence[str]
    metrics: Sequence[str]
    """Of `sol bench`."""


LOADS = (
    LoadKind("1 KB, no stream", 300, 8, ("--no-stream",), ("e2e",)),
    LoadKind(f"stream of {CHUNKS}", 60, CHUNKS, (), ("ttft", "e2e")),
)


def measure_latency(report: Report, directory: Path, cores: Cores) -> None:
    turns, seconds = (1, 4) if report.quick else (6, 20)
    prompts = directory / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": _prompt(number)}) + "\n" for number in range(500)))
    with simulated(*SIMULATOR, core=cores.measuring) as engine:
        limits = {"default_tenant": {"requests_per_minute": 10**9, "tokens_per_minute": 10**12}}
        with gateway(directory, {"a": engine}, cores.serving, filters=RULES, limits=limits) as front:
            process = psutil.Process(front.process_id)
            for load in LOADS:
                added: dict[tuple[str, str], list[float]] = {}
                costs: list[float] = []
                for turn in range(turns):
                    pair = {}
                    # Which is first changes, so that what grows or shrinks with time is in neither's favour.
                    for who in ("direct", "gateway") if turn % 2 == 0 else ("gateway", "direct"):
                        before, made = _cpu(process), _made(engine)
                        served = engine if who == "direct" else front
                        pair[who] = _stage(served, load, prompts, seconds, directory, cores)
                        if who == "gateway":
                            costs.append(1e6 * (_cpu(process) - before) / (_made(engine) - made))
                    _compare(report, load, turn, pair, costs[-1], added)
                _judge(report, load, added, costs)


def _stage(
    served: Served, load: LoadKind, prompts: Path, seconds: int, directory: Path, cores: Cores
) -> dict[str, Any]:
    return bench(
        served.url, "--rate", str(load.rate), "--duration", str(seconds), "--warmup", "1", "--no-scrape", "--dataset",
        str(prompts), "--output-tokens", str(load.output_tokens), "--ignore-eos", "--count-tokens", "chunks",
        *load.flags, directory=directory, core=cores.measuring,
    )  # fmt: skip


def _compare(
    report: Report,
    load: LoadKind,
    turn: int,
    pair: dict[str, Any],
    cost: float,
    added: dict[tuple[str, str], list[float]],
) -> None:
    summaries = {who: stage["summary"] for who, stage in pair.items()}
    limited = [who for who, summary in summaries.items() if summary["client"]["limited"]]
    errors = sum(sum(summary["errors"].values()) for summary in summaries.values())
    for metric in load.metrics:
        for percentile in ("p50", "p99"):
            found = {
                who: 1000 * summary["latencies"][metric]["percentiles"][percentile]["value"]
                for who, summary in summaries.items()
            }
            more = found["gateway"] - found["direct"]
            if not limited and not errors:
                added.setdefault((metric, percentile), []).append(more)
            report.row(
                load=load.name, turn=turn, metric=f"{metric} {percentile}", direct_ms=found["direct"],
                gateway_ms=found["gateway"], added_ms=more, cpu_us_a_token=cost, errors=errors,
                client_limited="; ".join(f"{who}: {', '.join(summaries[who]['client']['reasons'])}" for who in limited),
            )  # fmt: skip


def _judge(report: Report, load: LoadKind, added: dict[tuple[str, str], list[float]], costs: Sequence[float]) -> None:
    report.at_least(f"turns that count, {load.name}", max(map(len, added.values()), default=0), 1)
    for (metric, percentile), values in added.items():
        bound = 1.0 if percentile == "p50" else 5.0
        report.at_most(f"added ms, {load.name}, {metric} {percentile}", statistics.median(values), bound)
    if load.output_tokens == CHUNKS:
        # All that the gateway did meanwhile, its requests' own cost included.
        report.at_most("microseconds of CPU a relayed chunk", statistics.median(costs), 60)
    else:
        report.row(
            load=load.name,
            metric="CPU us a request",
            direct_ms="",
            gateway_ms=statistics.median(costs) * load.output_tokens,
        )


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _made(engine: Served) -> int:
    """Tokens, which are chunks: the simulator drafts nothing here."""
    made: int = engine.get("/simulate/state")["counters"]["num_generated_tokens"]
    return made


def _prompt(number: int) -> str:
    """About 900 characters, so that the request has about 1 KB."""
    draw = random.Random(number)
    words = ("river", "stone", "quiet", "seven", "letters", "winter", "garden", "market", "and", "of", "the", "under")
    text = f"{number}:"
    while len(text) < 880:
        text += " " + draw.choice(words)
    return text
