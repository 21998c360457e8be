"""Figures against what is true: a simulated server on a virtual clock, seen by a client without lag."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest

from sol.bench import OpenLoop, RequestRecord, Stage, Summary, Trim, at_rate, parse_slo, summarise
from sol.bench.cost import cost
from sol.bench.records import CANCELLED
from sol.bench.session import Measured, best
from sol.bench.summary_text import warnings
from sol.simulate import SimulatedRequest, VirtualServer, profile

EVERYTHING = Trim(warmup=0, cooldown=0)


def record_of(index: int, request: SimulatedRequest) -> RequestRecord:
    times, counts = zip(*request.events(), strict=True)
    due = request.arrival_time
    assert request.finish_time is not None
    return RequestRecord(
        index, str(index), 0, due, started=due, connected=due, sent=due, first_content=times[0], end=times[-1],
        times=array("d", times), counts=array("l", counts), characters=array("l", [4 * n for n in counts]),
        num_chunks=len(times), prompt_tokens=request.prompt_tokens, completion_tokens=sum(counts), status=200,
        finish_reason="length",
    )  # fmt: skip


def virtual_run(load: OpenLoop, seed: int = 0, **laws: Any) -> tuple[list[SimulatedRequest], Stage]:
    server = VirtualServer(profile("h100-8b", seed=seed, **laws))
    rng = np.random.default_rng(seed)
    requests = [
        server.submit(at, prompt_tokens=int(rng.integers(50, 800)), output_tokens=int(rng.integers(2, 200)))
        for at in load.arrivals.tolist()
    ]
    server.run()
    stage = Stage(load=load.describe(), counting="segments", started_at=0.0)
    stage.records = [record_of(i, request) for i, request in enumerate(requests)]
    stage.load_seconds = float(load.arrivals[-1])
    stage.seconds = max(record.end for record in stage.records)
    return requests, stage


def value(summary: Summary, name: str, p: str) -> float:
    found = summary.latencies[name].percentiles[p].value
    assert found is not None
    return found


@pytest.mark.parametrize("drafts", [0, 4])
def test_every_percentile_is_the_simulators(drafts: int) -> None:
    requests, stage = virtual_run(at_rate(12, seconds=90, seed=1), num_speculative_tokens=drafts, noise="lognormal")
    summary = summarise(stage, trim=EVERYTHING)
    truth = {
        "ttft": [request.ttft for request in requests],
        "tpot": [request.tpot for request in requests],
        "e2e": [request.e2e for request in requests],
    }
    for name, values in truth.items():
        for p in (50, 90, 95, 99):
            assert value(summary, name, f"p{p}") == pytest.approx(np.quantile(values, p / 100), rel=1e-9), (name, p)
    assert summary.tokens_per_chunk == pytest.approx(
        sum(request.output_tokens for request in requests) / sum(len(request.events()) for request in requests)
    )
    # Spread over the tokens, gaps add up to the time from first token to last, whatever the chunks.
    gaps = summary.latencies["itl"]
    decoding = sum(request.e2e - request.ttft for request in requests)
    assert gaps.mean.value is not None
    assert gaps.mean.value * gaps.n == pytest.approx(decoding)


def test_intervals_hold_the_long_runs_percentiles() -> None:
    """The truth is that of twenty runs together, which none of them has seen."""
    runs = [virtual_run(at_rate(20, seconds=20, seed=seed), seed=seed) for seed in range(20)]
    for name, p in (("ttft", 90), ("tpot", 50), ("e2e", 90)):
        truth = float(np.quantile([getattr(r, name) for requests, _ in runs for r in requests], p / 100))
        held = 0
        for _, stage in runs:
            found = summarise(stage, trim=EVERYTHING).latencies[name].percentiles[f"p{p}"]
            assert found.low is not None
            assert found.high is not None
            held += found.low <= truth <= found.high
        assert held >= 17, name


def test_throughput_is_of_the_window_and_counts_tokens_of_whoever() -> None:
    requests, stage = virtual_run(at_rate(10, seconds=60, seed=2))
    summary = summarise(stage, trim=Trim(warmup=10, cooldown=5))
    begin, end = summary.window
    assert (begin, end) == (10, stage.load_seconds - 5)
    tokens = sum(n for request in requests for t, n in request.events() if begin <= t <= end)
    assert summary.output_tokens_per_second.value == pytest.approx(tokens / (end - begin))
    ended = sum(begin <= request.arrival_time + request.e2e <= end for request in requests)
    assert summary.requests_per_second.value == pytest.approx(ended / (end - begin))
    assert summary.num_requests == sum(begin <= request.arrival_time <= end for request in requests)


def test_goodput_misses_errors_and_forgives_what_the_client_cancelled() -> None:
    _, stage = virtual_run(at_rate(10, arrivals="constant", seconds=40))
    slow = sorted(stage.records, key=lambda record: record.times[0] - record.intended)[-40:]
    bound = slow[0].times[0] - slow[0].intended
    kept = [record for record in stage.records if record not in slow]
    kept[0].error = "http_500"
    kept[1].error = kept[2].error = CANCELLED
    summary = summarise(stage, trim=EVERYTHING, slo=parse_slo(f"ttft_p90<{bound * 1000:.9f}ms"))
    assert summary.slo is not None
    assert (summary.num_cancelled, summary.errors) == (2, {"http_500": 1})
    # 400 were due; 40 were slow, one failed, and the two that were cancelled are not asked.
    assert summary.slo.attainment.value == pytest.approx((400 - 40 - 3) / 398, abs=0.003)
    assert summary.slo.goodput.value == pytest.approx(357 / stage.load_seconds, rel=0.01)
    assert summary.error_rate.value == pytest.approx(1 / 398)


def test_an_slo_is_met_missed_or_uncertain() -> None:
    _, stage = virtual_run(at_rate(10, seconds=60, seed=4))
    middle = value(summarise(stage, trim=EVERYTHING), "ttft", "p95")
    verdicts = []
    for bound in (0.3 * middle, middle, 3 * middle):
        slo = summarise(stage, trim=EVERYTHING, slo=parse_slo(f"ttft_p95<{bound * 1e6:.6f}us")).slo
        assert slo is not None
        verdicts.append(slo.verdict)
    assert verdicts == ["missed", "uncertain", "met"]
    fast = summarise(stage, trim=EVERYTHING, slo=parse_slo("tps_p95>20,itl_p99<1s,error_rate<10%")).slo
    assert fast is not None
    assert [result.verdict for result in fast.clauses] == ["met", "met", "met"]


def test_cost_is_the_price_by_the_tokens() -> None:
    _, stage = virtual_run(at_rate(10, seconds=60, seed=5))
    summary = summarise(stage, trim=EVERYTHING)
    found = cost(summary, 7.2)
    assert found is not None
    rate = summary.output_tokens_per_second
    assert rate.value is not None
    assert found.output.value == pytest.approx(7.2 / 3600 / rate.value * 1e6)
    assert found.output.low is not None
    assert found.output.high is not None
    assert found.output.low < found.output.value < found.output.high
    assert found.total.value is not None
    assert found.total.value < found.output.value
    assert found.good.value is None
    assert cost(summary, None) is None


def test_nothing_to_report_is_no_error() -> None:
    stage = Stage(load={}, counting="chunks", started_at=0.0)
    summary = summarise(stage, slo=parse_slo("ttft<1s"))
    assert summary.num_requests == 0
    assert summary.output_tokens_per_second.value is None
    assert summary.slo is not None
    assert summary.slo.verdict == "uncertain"
    failed = RequestRecord(0, "", 0, 0.0, started=0.1, end=0.2, error="connect", message="refused")
    stage.records, stage.load_seconds, stage.seconds = [failed], 1.0, 1.0
    assert summarise(stage, trim=EVERYTHING).errors == {"connect": 1}


def measured(stage: Stage, load: OpenLoop, **options: Any) -> Measured:
    return Measured(load=load, stage=stage, summary=summarise(stage, **options), cost=None)


def test_readers_are_told_what_they_must_know() -> None:
    load = at_rate(10, seconds=60, seed=6)
    _, stage = virtual_run(load)
    assert warnings(measured(stage, load)) == []
    (outside,) = warnings(measured(stage, load, trim=Trim(warmup=1000)))
    assert "no request was due in the measured window" in outside
    stage.counting = "chunks"
    (counting,) = warnings(measured(stage, load))
    assert "each counts as one token" in counting
    stage.counting = "segments"
    for due in range(6000):
        stage.heartbeats.due.append(0.01 * due)
        stage.heartbeats.lag.append(0.3 if due == 3000 else 0.0)
        stage.heartbeats.in_flight.append(1000)
    for record in stage.records[300:310]:
        record.error, record.message = "http_429", "slow down"
    stage.records[400].error = CANCELLED
    limited, cancelled, failed, little = warnings(measured(stage, load))
    assert limited.startswith("client_limited: the client was a bottleneck: it stood still for 300 ms at once")
    assert cancelled.startswith("1 requests of the window were cancelled")
    assert failed == "10 × http_429: slow down"
    assert "Little's law does not hold" in little


def test_the_best_load_is_the_fastest_that_does_not_miss_the_slo() -> None:
    loads = [at_rate(rate, seconds=30, seed=7) for rate in (2, 8, 30)]
    runs = [(virtual_run(load)[1], load) for load in loads]
    fastest = best([measured(stage, load) for stage, load in runs])
    assert fastest is not None
    assert fastest.load is loads[2]
    slo = parse_slo("e2e_p50<1s")
    judged = [measured(stage, load, slo=slo) for stage, load in runs]
    assert [one.summary.slo.verdict for one in judged if one.summary.slo] == ["met", "met", "missed"]
    chosen = best(judged)
    assert chosen is not None
    assert chosen.load is loads[1]
    assert best([]) is None
