"""Engines' metrics pages, recorded or in their documented form, read into signals."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sol.engines.drivers import DRIVERS, driver_named
from sol.engines.signals import MetricNames, Signals

DATA = Path(__file__).parent / "data"

PAGES = {
    "vllm": Signals(
        running=0, waiting=0, kv_usage=0, prefix_queries=10, prefix_hits=0, prefix_hit_rate=0, draft_tokens=0,
        accepted_tokens=0, generated_tokens=80, progress=80, read_at=5.0,
    ),
    "sglang": Signals(
        running=162, waiting=2826, kv_usage=0.28, prefix_queries=8128902, prefix_hit_rate=0.007507552643049313,
        read_at=5.0,
    ),
    "tgi": Signals(running=5, waiting=3, progress=901, read_at=5.0),
    "tensorrt-llm": Signals(
        running=7, waiting=2, kv_usage=0.62, prefix_hit_rate=0.25, draft_tokens=400, accepted_tokens=300,
        acceptance_rate=0.75, read_at=5.0,
    ),
    "llama.cpp": Signals(
        running=4, waiting=46, draft_tokens=200, accepted_tokens=50, acceptance_rate=0.25, progress=39303, read_at=5.0,
    ),
}  # fmt: skip


def page(name: str) -> str:
    return (DATA / f"{name.replace('-', '_').replace('.', '_')}.txt").read_text()


@pytest.mark.parametrize("name", PAGES)
def test_an_engine_s_page(name: str) -> None:
    signals = driver_named(name).signals(page(name), now=5.0)
    assert signals == PAGES[name]
    assert signals.age(7.5) == 2.5


@pytest.mark.parametrize("name", PAGES)
def test_the_pages_are_in_prometheus_s_format_and_its_own_parser_agrees(name: str) -> None:
    samples = {
        sample.name: sample.value
        for family in text_string_to_metric_families(page(name))
        for sample in family.samples
        if sample.value == sample.value
    }
    names, signals = driver_named(name).metric_names, driver_named(name).signals(page(name), now=0)
    for field in ("running", "waiting", "kv_usage", "generated_tokens", "draft_tokens"):
        expected = next((samples[known] for known in getattr(names, field) if known in samples), None)
        assert getattr(signals, field) == expected


def test_sol_has_vllm_s_names() -> None:
    assert driver_named("sol").metric_names == driver_named("vllm").metric_names


def test_ranks_that_share_their_requests_are_counted_once_and_others_are_added() -> None:
    text = "".join(
        f'sglang:num_running_reqs{{dp_rank="{dp}",model_name="a}}b",tp_rank="{tp}"}} {5 + dp}\n'
        f'sglang:token_usage{{dp_rank="{dp}",tp_rank="{tp}"}} 0.{dp + 1}\n'
        for dp in (0, 1)
        for tp in (0, 1)
    )
    signals = driver_named("sglang").signals(text, now=0)
    assert signals.running == 11
    assert signals.kv_usage == 0.2


def test_older_names_count_where_the_newer_are_not_there() -> None:
    vllm = driver_named("vllm")
    old = 'vllm:gpu_cache_usage_perc{model_name="m"} 0.5\n'
    assert vllm.signals(old, 0).kv_usage == 0.5
    assert vllm.signals(old + "vllm:kv_cache_usage_perc 0.25\n", 0).kv_usage == 0.25


def test_what_is_not_said_is_none_and_not_zero() -> None:
    for text in (
        "",
        "<html>502</html>",
        '[{"iter": 1}]',
        "vllm:num_requests_running NaN\n",
        "vllm:num_requests_running\n",
    ):
        assert driver_named("vllm").signals(text, 1.0) == Signals(read_at=1.0)
    text = "# vllm:num_requests_running 5\nx_vllm:num_requests_running 6\nvllm:num_requests_running_total 7\n"
    assert driver_named("vllm").signals(text, 1.0) == Signals(read_at=1.0)


def test_values_may_be_followed_by_a_time_and_labels_may_hold_quotes() -> None:
    text = 'vllm:num_requests_waiting{model_name="a \\"}\\" b"} 3 1700000000000\r\n'
    assert driver_named("vllm").signals(text, 0).waiting == 3


def test_an_endpoint_without_metrics_says_nothing() -> None:
    assert driver_named("openai").metrics_path is None
    assert MetricNames().read(page("vllm"), 2.0) == Signals(read_at=2.0)
    assert all(driver.metric_names.running for name, driver in DRIVERS.items() if name != "openai")
