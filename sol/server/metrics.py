"""Prometheus metrics: vLLM's names, labels, units and buckets, so that dashboards and autoscalers move over unchanged.

What vLLM has no name for is `sol:*`. One instance a server, with a registry of its own. No label value comes from a
client: `model_name` is the first served name, codes are Sol's own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from sol.engine.types import EngineInfo, EngineStats
from sol.server.gpu_metrics import GpuMetrics
from sol.server.speculation_metrics import SpeculationMetrics

# fmt: off
_FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)
_TOKEN_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)
_REQUEST_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)
_ITERATION_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# fmt: on

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Prometheus's text format, in the version every scraper reads."""


class Timeline:
    """When things happened to one choice, in monotonic seconds; what its latency metrics are made of."""

    __slots__ = ("arrival", "first_token", "last_token", "num_tokens", "scheduled")

    def __init__(self, arrival: float) -> None:
        self.arrival = arrival
        self.scheduled = 0.0
        self.first_token = 0.0
        """As the engine saw it."""
        self.last_token = 0.0
        """As this process saw it; 0 before the first."""
        self.num_tokens = 0


class Metrics:
    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._model_name = model_name
        gauge, counter, histogram = self._gauge, self._counter, self._histogram
        self._running = gauge("vllm:num_requests_running", "Requests in the engine's batch.")
        self._waiting = gauge("vllm:num_requests_waiting", "Requests that wait for a place in the batch.")
        self._kv_cache_usage = gauge("vllm:kv_cache_usage_perc", "Share of the KV cache in use; 1 is all of it.")
        self._cache_queries = counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._cache_hits = counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._preemptions = counter("vllm:num_preemptions", "Requests whose KV cache was given up, to be recomputed.")
        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens processed.")
        self._generation_tokens = counter("vllm:generation_tokens", "Tokens generated.")
        self._iteration_tokens = histogram(
            "vllm:iteration_tokens_total", "Tokens computed in one engine step.", _ITERATION_BUCKETS
        )
        self._time_to_first_token = histogram(
            "vllm:time_to_first_token_seconds", "From a request's arrival to its first token.", _FIRST_TOKEN_BUCKETS
        )
        self._inter_token = histogram(
            "vllm:inter_token_latency_seconds", "Between the steps that gave a request tokens.", _TOKEN_BUCKETS
        )
        self._time_per_output_token = histogram(
            "vllm:request_time_per_output_token_seconds", "A request's mean time a token, without the first.",
            _TOKEN_BUCKETS,
        )  # fmt: skip
        self._e2e = histogram(
            "vllm:e2e_request_latency_seconds", "From a request's arrival to its last token.", _REQUEST_BUCKETS
        )
        self._queue = histogram(
            "vllm:request_queue_time_seconds", "From arrival to a place in the batch.", _REQUEST_BUCKETS
        )
        self._prefill = histogram(
            "vllm:request_prefill_time_seconds", "From a place in the batch to the first token.", _REQUEST_BUCKETS
        )
        self._decode = histogram(
            "vllm:request_decode_time_seconds", "From the first token to the last.", _REQUEST_BUCKETS
        )
        self._finished = self._counter_family(
            "vllm:request_success", "Requests that ended, by finished_reason.", "finished_reason"
        )
        for reason in ("stop", "length", "abort", "error"):
            self._finished.labels(model_name, reason)
        self._errors = self._counter_family(
            "sol:request_errors", "HTTP requests answered with an error, by status and code.", "status", "code"
        )
        self._alive = gauge("sol:engine_alive", "1 while the engine is loaded, alive and making progress.")
        self._speculation: SpeculationMetrics | None = None
        self._gpu: GpuMetrics | None = None

    def set_engine(self, info: EngineInfo) -> None:
        """The engine is there. One that speculates adds metrics, and so does one on a GPU."""
        if info.gpu_uuid is not None and self._gpu is None:
            self._gpu = GpuMetrics(self.registry, self._model_name, info.gpu_uuid)
        if info.drafters and self._speculation is None:  # not again when the engine is started again
            self._speculation = SpeculationMetrics(
                self.registry, self._model_name, info.drafters, info.num_speculative_tokens
            )

    def close(self) -> None:
        """Nothing is read any more; what was can still be rendered."""
        if self._gpu is not None:
            self._gpu.close()

    def set_alive(self, alive: bool) -> None:
        self._alive.set(float(alive))

    def observe_stats(self, stats: EngineStats) -> None:
        """What the engine said after a step."""
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._kv_cache_usage.set(stats.kv_cache_usage)
        for metric, amount in (
            (self._cache_queries, stats.prefix_cache_queries),
            (self._cache_hits, stats.prefix_cache_hits),
            (self._preemptions, stats.num_preemptions),
            (self._prompt_tokens, stats.num_prompt_tokens),
            (self._generation_tokens, stats.num_generated_tokens),
        ):
            if amount:
                metric.inc(amount)
        if stats.iteration_tokens:
            self._iteration_tokens.observe(stats.iteration_tokens)
        if self._speculation is not None:
            self._speculation.observe(stats)

    def observe_tokens(self, timeline: Timeline, num_tokens: int, num_steps: int, now: float | None = None) -> None:
        """`num_tokens` of a choice arrived just now, which `num_steps` steps of the engine had made.

        As in vLLM, the inter-token latency is a step's: the tokens of one step come together, and count once. Several
        steps at once are what a slow client or a busy process let pile up.
        """
        now = time.monotonic() if now is None else now
        if timeline.last_token == 0.0:
            self._time_to_first_token.observe(now - timeline.arrival)
        else:
            gap = (now - timeline.last_token) / num_steps
            for _ in range(num_steps):
                self._inter_token.observe(gap)
        timeline.last_token = now
        timeline.num_tokens += num_tokens

    def observe_finished(self, timeline: Timeline, reason: str) -> None:
        """A choice ended: stop, length, abort (its client left, or the server stops) or error."""
        self._finished.labels(self._model_name, reason).inc()
        if reason not in ("stop", "length"):
            return
        last = timeline.last_token or time.monotonic()
        self._e2e.observe(last - timeline.arrival)
        if timeline.scheduled:
            self._queue.observe(max(0.0, timeline.scheduled - timeline.arrival))
            if timeline.first_token:
                self._prefill.observe(max(0.0, timeline.first_token - timeline.scheduled))
        if timeline.first_token:
            decode = max(0.0, last - timeline.first_token)
            self._decode.observe(decode)
            if timeline.num_tokens > 1:
                self._time_per_output_token.observe(decode / (timeline.num_tokens - 1))

    def count_error(self, status: int, code: str | None) -> None:
        self._errors.labels(self._model_name, str(status), code or "none").inc()

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, ("model_name",), registry=self.registry).labels(self._model_name)

    def _counter(self, name: str, text: str) -> Counter:
        return self._counter_family(name, text).labels(self._model_name)

    def _counter_family(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, ("model_name", *labels), registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        family = Histogram(name, text, ("model_name",), buckets=buckets, registry=self.registry)
        return family.labels(self._model_name)
