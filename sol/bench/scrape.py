"""The server's own view, scraped alongside: queue, KV cache, acceptance, GPU.

Names are those of Sol, vLLM, SGLang, TGI, llama.cpp's server and NVIDIA's DCGM exporter, brought to one vocabulary.
Only lines with a wanted name are parsed: reading all of a large page would make the client late.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Mapping
from typing import Final

from sol.bench.endpoint import Endpoint
from sol.bench.http import Pool, fetch
from sol.bench.records import Stage

Series = dict[str, list[tuple[float, float]]]

_GAUGES: Final[Mapping[str, str]] = {
    "vllm:num_requests_running": "running",
    "sglang:num_running_reqs": "running",
    "tgi_batch_current_size": "running",
    "llamacpp:requests_processing": "running",
    "vllm:num_requests_waiting": "waiting",
    "sglang:num_queue_reqs": "waiting",
    "tgi_queue_size": "waiting",
    "llamacpp:requests_deferred": "waiting",
    "vllm:kv_cache_usage_perc": "kv_cache_usage",
    "vllm:gpu_cache_usage_perc": "kv_cache_usage",
    "sglang:token_usage": "kv_cache_usage",
    "llamacpp:kv_cache_usage_ratio": "kv_cache_usage",
    "sglang:spec_accept_length": "mean_acceptance_length",
    "DCGM_FI_DEV_GPU_UTIL": "gpu_utilization",
    "DCGM_FI_DEV_FB_USED": "gpu_memory_mib",
    "DCGM_FI_DEV_POWER_USAGE": "gpu_power_watts",
}
_COUNTERS: Final[Mapping[str, str]] = {
    "vllm:num_preemptions_total": "preemptions",
    "vllm:prefix_cache_queries_total": "prefix_cache_queries",
    "vllm:prefix_cache_hits_total": "prefix_cache_hits",
    "vllm:generation_tokens_total": "generation_tokens",
    "sglang:generation_tokens_total": "generation_tokens",
    "llamacpp:tokens_predicted_total": "generation_tokens",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "sglang:prompt_tokens_total": "prompt_tokens",
    "llamacpp:prompt_tokens_total": "prompt_tokens",
    "vllm:spec_decode_num_drafts_total": "drafts",
    "vllm:spec_decode_num_draft_tokens_total": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted_tokens",
}
_SCALES: Final[Mapping[str, float]] = {"DCGM_FI_DEV_GPU_UTIL": 0.01}
"""Where a share is given in percent."""
_AVERAGED: Final = frozenset({"kv_cache_usage", "gpu_utilization", "mean_acceptance_length"})
"""Of several samples of one name (engines, GPUs) the mean; of all others the sum."""

_LINE: Final = re.compile(
    rb"^((?:" + b"|".join(re.escape(name.encode()) for name in (*_GAUGES, *_COUNTERS)) + rb"))(?:\{[^\n]*\})? +(\S+)",
    re.MULTILINE,
)
_SECONDS: Final = 5.0
_NVIDIA_SMI: Final = ("nvidia-smi", "--query-gpu=utilization.gpu,memory.used,power.draw",
                      "--format=csv,noheader,nounits")  # fmt: skip


def parse_metrics(content: bytes) -> dict[str, float]:
    """What is known in a page of Prometheus's text format, by our names."""
    found: dict[str, list[float]] = {}
    for name, number in _LINE.findall(content):
        text = name.decode()
        try:
            value = float(number) * _SCALES.get(text, 1.0)
        except ValueError:
            continue
        if math.isfinite(value):
            found.setdefault(_GAUGES.get(text) or _COUNTERS[text], []).append(value)
    return {name: sum(values) / len(values) if name in _AVERAGED else sum(values) for name, values in found.items()}


async def scrape(endpoint: Endpoint, path: str, pool: Pool, origin: float, series: Series, interval: float) -> None:
    """Read `path` of the endpoint every `interval` seconds until cancelled. A page that fails is left out; one that is
    not there ends it."""
    request = endpoint.get(path)
    due = pool.clock()
    while True:
        try:
            status, content = await fetch(pool, request, seconds=_SECONDS)
        except (OSError, TimeoutError):
            status, content = 0, b""
        if 400 <= status < 500:
            return
        now = pool.clock()
        if status == 200:
            for name, value in parse_metrics(content).items():
                series.setdefault(name, []).append((now - origin, value))
        due = max(due + interval, now)
        await asyncio.sleep(due - now)


async def watch_gpus(pool: Pool, origin: float, series: Series, interval: float) -> None:
    """This machine's NVIDIA GPUs, by `nvidia-smi`, until cancelled. Nothing where there is none."""
    try:
        process = await asyncio.create_subprocess_exec(
            *_NVIDIA_SMI, f"--loop-ms={max(100, round(interval * 1000))}",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
    except OSError:
        return
    assert process.stdout is not None
    names = ("gpu_utilization", "gpu_memory_mib", "gpu_power_watts")
    try:
        rows: list[list[float]] = []
        begun = 0.0
        while line := await process.stdout.readline():
            now = pool.clock() - origin
            # One line a GPU, all at once; the next round comes an interval later.
            if rows and now - begun > interval / 2:
                _add_gpus(series, names, begun, rows)
                rows = []
            begun = begun if rows else now
            try:
                utilization, memory, power = (float(part) for part in line.split(b","))
            except ValueError:  # "[N/A]", or a message
                continue
            rows.append([utilization / 100, memory, power])
        if rows:
            _add_gpus(series, names, begun, rows)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def _add_gpus(series: Series, names: tuple[str, ...], time: float, rows: list[list[float]]) -> None:
    for i, name in enumerate(names):
        total = sum(row[i] for row in rows)
        series.setdefault(name, []).append((time, total / len(rows) if name in _AVERAGED else total))


def window_means(series: Mapping[str, list[tuple[float, float]]], window: tuple[float, float]) -> dict[str, float]:
    """Means of gauges, growth of counters a second (`…_per_second`), and the rates that follow from them."""
    begin, end = window
    means: dict[str, float] = {}
    growth: dict[str, float] = {}
    counters = set(_COUNTERS.values())
    for name, samples in series.items():
        inside = [(time, value) for time, value in samples if begin <= time <= end]
        if name not in counters:
            if inside:
                means[name] = sum(value for _, value in inside) / len(inside)
        elif len(inside) > 1 and inside[-1][0] > inside[0][0]:
            growth[name] = inside[-1][1] - inside[0][1]
            means[f"{name}_per_second"] = growth[name] / (inside[-1][0] - inside[0][0])
    for name, above, below in (
        ("prefix_cache_hit_rate", "prefix_cache_hits", "prefix_cache_queries"),
        ("acceptance_rate", "accepted_tokens", "draft_tokens"),
    ):
        if growth.get(below):
            means[name] = growth.get(above, 0.0) / growth[below]
    if growth.get("drafts"):
        means["mean_acceptance_length"] = 1 + growth.get("accepted_tokens", 0.0) / growth["drafts"]
    return means


class Scraper:
    """The companion of a run (`sol.bench.run.measure`): scrapes until the run ends; `attach` gives the stage what it
    found."""

    def __init__(self, endpoint: Endpoint, *, path: str | None = "/metrics", gpus: bool, interval: float = 1.0) -> None:
        self._endpoint = endpoint
        self._path = path
        self._gpus = gpus
        self._interval = interval
        self._series: Series = {}

    async def __call__(self, pool: Pool, origin: float) -> None:
        works = []
        if self._path is not None:
            works.append(scrape(self._endpoint, self._path, pool, origin, self._series, self._interval))
        if self._gpus:
            works.append(watch_gpus(pool, origin, self._series, self._interval))
        await asyncio.gather(*works)

    def attach(self, stage: Stage) -> Stage:
        stage.server, self._series = self._series, {}
        return stage
