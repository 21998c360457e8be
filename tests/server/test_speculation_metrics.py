"""What `/metrics` and the log say of speculation."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from sol.engine.types import DrafterStats, EngineInfo, EngineStats
from sol.server import metrics
from sol.server.metrics import Metrics, Timeline
from sol.server.speculation_metrics import LOG_SECONDS, SpeculationLog


def info(*drafters: str) -> EngineInfo:
    return EngineInfo(
        model="m", device="cpu", dtype="float32", vocab_size=8, max_model_len=8, max_num_seqs=1,
        max_num_batched_tokens=8, block_size=4, num_blocks=4, weight_bytes=0, kv_cache_bytes=0, load_seconds=0.0,
        drafters=list(drafters), num_speculative_tokens=3 if drafters else 0,
    )  # fmt: skip


def step() -> EngineStats:
    """Two drafts of three and two tokens, of which two and none were accepted, and one of another drafter's."""
    return EngineStats(
        num_generated_tokens=5,
        drafters={
            "suffix": DrafterStats(
                num_drafts=2, num_draft_tokens=5, num_accepted_tokens=2, num_drafted_per_position=[2, 2, 1],
                num_accepted_per_position=[1, 1, 0], num_proposed_tokens=10, seconds=0.25,
            ),
            "draft_model": DrafterStats(
                num_drafts=1, num_draft_tokens=1, num_accepted_tokens=1, num_drafted_per_position=[1],
                num_accepted_per_position=[1], num_failures=1,
            ),
        },
        decode_seconds=1.0,
        plain_seconds=1.25,
    )  # fmt: skip


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, {"model_name": "m", **labels})


def test_an_engine_that_does_not_speculate_has_no_metrics_of_it() -> None:
    metrics = Metrics("m")
    metrics.set_engine(info())
    metrics.observe_stats(EngineStats())
    assert b"spec" not in metrics.render()


def test_all_metrics_are_there_before_the_first_draft() -> None:
    metrics = Metrics("m")
    metrics.set_engine(info("suffix"))
    text = metrics.render().decode()
    assert 'vllm:spec_decode_num_drafts_total{model_name="m"} 0.0' in text
    for position in "012":
        assert value(metrics, "vllm:spec_decode_num_accepted_tokens_per_pos_total", position=position) == 0
    assert value(metrics, "sol:speculation_failures_total", drafter="suffix") == 0
    assert value(metrics, "sol:speculation_plain_seconds_total") == 0


def test_counts_add_up_over_steps_and_drafters() -> None:
    metrics = Metrics("m")
    metrics.set_engine(info("suffix", "draft_model"))
    for _ in range(2):
        metrics.observe_stats(step())
    metrics.observe_stats(EngineStats())
    assert value(metrics, "vllm:spec_decode_num_drafts_total") == 6
    assert value(metrics, "vllm:spec_decode_num_draft_tokens_total") == 12
    assert value(metrics, "vllm:spec_decode_num_accepted_tokens_total") == 6
    per_position = [
        value(metrics, "vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(i)) for i in range(3)
    ]
    assert per_position == [4, 2, 0]
    assert value(metrics, "sol:speculation_drafts_total", drafter="suffix") == 4
    assert value(metrics, "sol:speculation_draft_tokens_total", drafter="suffix") == 10
    assert value(metrics, "sol:speculation_accepted_tokens_total", drafter="draft_model") == 2
    assert value(metrics, "sol:speculation_proposed_tokens_total", drafter="suffix") == 20
    assert value(metrics, "sol:speculation_failures_total", drafter="draft_model") == 2
    assert value(metrics, "sol:speculation_drafting_seconds_total", drafter="suffix") == 0.5
    assert value(metrics, "sol:speculation_draft_tokens_per_pos_total", drafter="suffix", position="2") == 2
    assert value(metrics, "sol:speculation_accepted_tokens_per_pos_total", drafter="suffix", position="1") == 2
    assert value(metrics, "sol:speculation_decode_seconds_total") == 2.0
    assert value(metrics, "sol:speculation_plain_seconds_total") == 2.5


def test_the_tokens_of_a_step_are_one_inter_token_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    measured, timeline = Metrics("m"), Timeline(99.0)
    name = "vllm:inter_token_latency_seconds"
    measured.observe_tokens(timeline, num_tokens=1, num_steps=1)
    now[0] += 0.5
    measured.observe_tokens(timeline, num_tokens=4, num_steps=1)
    assert (value(measured, f"{name}_count"), value(measured, f"{name}_sum")) == (1, 0.5)
    now[0] += 0.75
    measured.observe_tokens(timeline, num_tokens=7, num_steps=3)  # piled up while nobody took them
    assert (value(measured, f"{name}_count"), value(measured, f"{name}_sum")) == (4, 1.25)
    assert value(measured, f"{name}_bucket", le="0.3") == 3
    assert timeline.num_tokens == 12


class Clock:
    """The event loop's `call_later`, wound by hand."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def call_later(self, seconds: float, callback: Callable[[], None]) -> None:
        assert seconds == LOG_SECONDS
        self.waiting.append(callback)

    def pass_by(self) -> None:
        waiting, self.waiting = self.waiting, []
        for callback in waiting:
            callback()


def test_the_log_says_what_was_done_and_is_quiet_otherwise(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sol.server")
    clock = Clock()
    log = SpeculationLog(clock.call_later)
    log.observe(EngineStats(num_generated_tokens=100, decode_seconds=9.0, plain_seconds=9.0))
    assert not clock.waiting
    log.observe(step())
    log.observe(EngineStats(num_generated_tokens=1, decode_seconds=0.5, plain_seconds=0.25))
    log.observe(step())
    assert len(clock.waiting) == 1
    assert not caplog.messages
    clock.pass_by()
    assert caplog.messages == [
        "speculation: drafted 12 tokens in 6 drafts, accepted 6, mean acceptance length 2.00, 1.10 times as fast as "
        "plain decoding, by its estimate; suffix: 40.0% of 10 accepted, survival by position 0.50 0.50 0.00, drafts "
        "10.0 times as fast as the target decodes; draft_model: 100.0% of 2 accepted, survival by position 1.00, "
        "failed 2 times"
    ]
    log.observe(EngineStats(num_generated_tokens=1, decode_seconds=0.5, plain_seconds=0.25))
    assert not clock.waiting
    log.observe(step())
    clock.pass_by()
    assert len(caplog.messages) == 2
    assert "drafted 6 tokens" in caplog.messages[1]


def test_a_drafter_that_only_fails_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sol.server")
    clock = Clock()
    log = SpeculationLog(clock.call_later)
    log.observe(EngineStats(drafters={"draft_model": DrafterStats(num_failures=1)}))
    clock.pass_by()
    assert caplog.messages == [
        "speculation: drafted 0 tokens in 0 drafts, accepted 0; draft_model: no drafts verified, failed once"
    ]
