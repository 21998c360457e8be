"""Objectives, and what servers say of themselves."""

from __future__ import annotations

import pytest

from sol.bench.scrape import parse_metrics, window_means
from sol.bench.slo import PRESETS, parse_slo
from sol.errors import ConfigError


def test_clauses() -> None:
    slo = parse_slo(" ttft_p95 < 500ms, tpot_p99<=0.03s,e2e<20s, tps_p90>30, error_rate<1% ")
    assert [(c.metric, c.p, c.bound) for c in slo.clauses] == [
        ("ttft", 0.95, 0.5), ("tpot", 0.99, 0.03), ("e2e", 0.95, 20.0), ("tps", 0.9, 30.0), ("error_rate", None, 0.01)
    ]  # fmt: skip
    assert [clause.metric for clause in slo.of_requests] == ["ttft", "tpot", "e2e", "tps"]
    assert slo.clauses[0].holds(0.499)
    assert not slo.clauses[0].holds(0.5)
    assert slo.clauses[3].holds(31)


def test_every_preset_is_valid() -> None:
    assert all(parse_slo(name).clauses for name in PRESETS)
    assert parse_slo("mlperf-llama-3.1-8b-interactive").clauses == parse_slo("ttft_p99<500ms,tpot_p99<30ms").clauses


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "slo must be like"),
        ("ttft<", "slo must be like"),
        ("latency_p95<1s", "slo must be like"),
        ("ttft_p95<500", None),
        ("ttft_p95<5parsecs", "the unit of 'ttft_p95<5parsecs' must be us or µs or ms or s"),
        ("ttft_p95>500ms", "from the wrong side"),
        ("tps<30", "from the wrong side"),
        ("ttft_p0<5ms", "a percentile between 0 and 100"),
        ("ttft<0ms", "a bound above 0"),
        ("error_rate_p95<1%", "error_rate none"),
        ("tpot<1..2s", "a bound above 0"),
    ],
)
def test_what_is_no_objective_is_refused(text: str, says: str | None) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_slo(text)


def test_metrics_of_several_engines_have_one_vocabulary() -> None:
    page = b"""# HELP vllm:num_requests_running Requests
vllm:num_requests_running{model_name="a, \\"b\\" }"} 3.0
vllm:num_requests_running{model_name="b"} 4.0
vllm:num_requests_running_total 99
sglang:num_queue_reqs{x="y"} 2
vllm:kv_cache_usage_perc 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.75
DCGM_FI_DEV_GPU_UTIL{gpu="0"} 80
vllm:spec_decode_num_drafts_total 1e3
vllm:prompt_tokens_total NaN?
something_else 7
"""
    assert parse_metrics(page) == {
        "running": 7.0, "waiting": 2.0, "kv_cache_usage": 0.5, "gpu_utilization": 0.8, "drafts": 1000.0
    }  # fmt: skip


def test_gauges_are_averaged_and_counters_grow() -> None:
    series = {
        "running": [(0.0, 100.0), (1.0, 2.0), (2.0, 4.0)],
        "draft_tokens": [(0.0, 0.0), (1.0, 100.0), (3.0, 500.0)],
        "accepted_tokens": [(1.0, 50.0), (3.0, 250.0)],
        "drafts": [(1.0, 0.0), (3.0, 100.0)],
        "preemptions": [(1.0, 5.0)],
    }
    means = window_means(series, (0.5, 3.0))
    assert means["running"] == 3.0
    assert means["draft_tokens_per_second"] == 200.0
    assert means["acceptance_rate"] == 0.5
    assert means["mean_acceptance_length"] == 3.0
    assert "preemptions_per_second" not in means  # one sample says nothing of growth
