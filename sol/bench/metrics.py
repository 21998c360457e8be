"""From records to figures: `summarise(stage)` → `Summary`.

Definitions, all of successful requests that were due in the measured window:

- TTFT: from when the request was due to its first output; `ttfc` to the first that is no reasoning.
- E2E: from when it was due to its last output.
- TPOT: (E2E − TTFT) / (tokens − 1), as vLLM, SGLang and inference-perf have it; none for a single token.
- ITL: gaps between tokens, a chunk's gap spread over its tokens (`sol.bench.tokens`); `chunk` between chunks.
- Throughput: tokens that arrived within the window, whoever they belong to, by the window's length.

Errors count in no latency; they count as misses in the goodput. Requests that the client cancelled at the end count
nowhere but in their number.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sol.bench.client import Client, littles_law, watch_client
from sol.bench.records import RequestRecord, Stage
from sol.bench.scrape import window_means
from sol.bench.slo import Clause, Slo
from sol.bench.statistics import NOTHING, Estimate, Samples, mean, percentile, proportion, rate
from sol.bench.tokens import TokenTimes, num_output_tokens, token_times

PERCENTILES: Final = (50.0, 90.0, 95.0, 99.0)

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trim:
    """What is left out at both ends; None: a tenth of the load's time, at most 30 s, and a twentieth, at most 15 s.

    The end counts from when the load was no longer full, so that the last stragglers are out in any case.
    """

    warmup: float | None = None
    cooldown: float | None = None

    def window(self, stage: Stage) -> tuple[float, float]:
        """Seconds of the stage between which it is measured."""
        total = stage.load_seconds
        warmup = min(0.1 * total, 30.0) if self.warmup is None else self.warmup
        cooldown = min(0.05 * total, 15.0) if self.cooldown is None else self.cooldown
        return min(warmup, total), max(min(warmup, total), total - cooldown)


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Seconds, or tokens."""

    mean: Estimate = NOTHING
    percentiles: Mapping[str, Estimate]
    """By name: p50, p90, p95, p99."""
    smallest: float | None = None
    largest: float | None = None

    @property
    def n(self) -> int:
        return self.mean.n


@dataclass(frozen=True, slots=True, kw_only=True)
class ClauseResult:
    clause: Clause
    estimate: Estimate
    verdict: str
    """`met`, `missed`, or `uncertain` where the interval holds the bound or the samples are too few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SloResult:
    slo: Slo
    clauses: tuple[ClauseResult, ...]
    verdict: str
    """`missed` if any clause is, else `uncertain` if any is, else `met`."""
    attainment: Estimate
    """Share of requests that are good in every clause."""
    goodput: Estimate
    """Good requests a second."""
    good_tokens: Estimate
    """Output tokens of good requests, a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    window: tuple[float, float]
    num_requests: int
    """That were due in the window, those cancelled at the end included."""
    num_ok: int
    num_cancelled: int
    errors: Mapping[str, int]
    """By kind."""
    error_examples: Mapping[str, str]
    error_rate: Estimate
    latencies: Mapping[str, Distribution]
    """`ttft`, `ttfc`, `tpot`, `itl`, `chunk`, `e2e`, seconds; empty where not streamed."""
    input_tokens: Distribution
    output_tokens: Distribution
    requests_per_second: Estimate
    """Successful ones that ended in the window."""
    output_tokens_per_second: Estimate
    input_tokens_per_second: Estimate
    """Prompt tokens whose first output arrived in the window, found in a prefix cache or not."""
    tokens_per_chunk: float | None
    cached_share: float | None
    """Share of prompt tokens that the endpoint says it found in its prefix cache."""
    speculation: Mapping[str, float]
    """Sums of what `usage.speculation` says, and what follows; empty without."""
    client: Client
    little: Mapping[str, float | None]
    """See `littles_law`."""
    server: Mapping[str, float]
    """Means over the window of what was scraped, see `sol.bench.scrape`."""
    slo: SloResult | None


def summarise(stage: Stage, *, trim: Trim | None = None, slo: Slo | None = None) -> Summary:
    window = (trim or Trim()).window(stage)
    begin, end = window
    due = [record for record in stage.records if begin <= record.intended <= end and begin < end]
    due.sort(key=lambda record: record.intended)
    judged = [record for record in due if not record.cancelled]
    good = [record for record in judged if record.ok]
    responses = {id(record): token_times(record, stage.counting) for record in stage.records if record.times}
    errors = Counter(record.error for record in judged if record.error is not None)
    error_rate = proportion([not record.ok for record in judged])
    latencies = _latencies(good, responses, stage)
    return Summary(
        window=window,
        num_requests=len(due),
        num_ok=len(good),
        num_cancelled=len(due) - len(judged),
        errors=dict(errors.most_common()),
        error_examples={record.error: record.message or "" for record in reversed(judged) if record.error is not None},
        error_rate=error_rate,
        latencies=latencies,
        input_tokens=_distribution(Samples.single([r.prompt_tokens for r in good if r.prompt_tokens is not None])),
        output_tokens=_distribution(Samples.single([num_output_tokens(r, stage.counting) for r in good])),
        **_throughputs(stage, responses, window),
        tokens_per_chunk=_tokens_per_chunk(good, responses),
        cached_share=_cached_share(good),
        speculation=_speculation(good),
        client=watch_client(stage, window, due),
        little=littles_law(stage, window),
        server=window_means(stage.server, window),
        slo=None if slo is None else _judge(slo, judged, responses, stage, window, error_rate),
    )


def judge(stage: Stage, slo: Slo, *, trim: Trim | None = None) -> SloResult:
    """What `summarise` says of the SLO, and nothing else: for those who measure many loads on a virtual clock."""
    window = (trim or Trim()).window(stage)
    begin, end = window
    due = [record for record in stage.records if begin <= record.intended <= end and begin < end]
    judged = sorted((record for record in due if not record.cancelled), key=lambda record: record.intended)
    responses = {id(record): token_times(record, stage.counting) for record in judged if record.times}
    return _judge(slo, judged, responses, stage, window, proportion([not record.ok for record in judged]))


def ttft(record: RequestRecord) -> float:
    return record.times[0] - record.intended


def e2e(record: RequestRecord) -> float:
    """To the last output; to the end of a response that was not streamed."""
    return (record.times[-1] if record.times else record.end) - record.intended


def tpot(record: RequestRecord, response: TokenTimes, num_tokens: int) -> float | None:
    if num_tokens < 2 or not len(response.times):
        return None
    return float(response.times[-1] - response.times[0]) / (num_tokens - 1)


def _latencies(good: list[RequestRecord], responses: Mapping[int, TokenTimes], stage: Stage) -> dict[str, Distribution]:
    whole = {"e2e": _distribution(Samples.single([e2e(record) for record in good]))}
    streamed = [record for record in good if record.streamed and record.times]
    if not streamed:
        return whole
    per_token = [
        value
        for record in streamed
        if (value := tpot(record, responses[id(record)], num_output_tokens(record, stage.counting))) is not None
    ]
    firsts = [record.first_content - record.intended for record in streamed if record.first_content is not None]
    return {
        "ttft": _distribution(Samples.single([ttft(record) for record in streamed])),
        "ttfc": _distribution(Samples.single(firsts)),
        "tpot": _distribution(Samples.single(per_token)),
        "itl": _distribution(Samples.grouped([responses[id(record)].token_gaps() for record in streamed])),
        "chunk": _distribution(Samples.grouped([responses[id(record)].chunk_gaps() for record in streamed])),
        **whole,
    }


def _distribution(samples: Samples) -> Distribution:
    values = samples.values
    return Distribution(
        mean=mean(samples),
        percentiles={f"p{p:g}": percentile(samples, p / 100) for p in PERCENTILES},
        smallest=float(values.min()) if len(values) else None,
        largest=float(values.max()) if len(values) else None,
    )


def _throughputs(stage: Stage, responses: Mapping[int, TokenTimes], window: tuple[float, float]) -> dict[str, Estimate]:
    begin, end = window
    arrived = [responses[id(record)] for record in stage.records if record.times]
    times = np.concatenate([response.times for response in arrived]) if arrived else np.zeros(0)
    counts = np.concatenate([response.counts for response in arrived]).astype(np.float64) if arrived else np.zeros(0)
    ended = np.array([record.end for record in stage.records if record.ok], dtype=np.float64)
    prompts = [(record.times[0], float(record.prompt_tokens)) for record in stage.records
               if record.times and record.prompt_tokens is not None]  # fmt: skip
    first, size = np.array(prompts).reshape(-1, 2).T
    return {
        "requests_per_second": rate(ended, np.ones(len(ended)), begin, end),
        "output_tokens_per_second": rate(times, counts, begin, end),
        "input_tokens_per_second": rate(first, size, begin, end),
    }


def _tokens_per_chunk(good: list[RequestRecord], responses: Mapping[int, TokenTimes]) -> float | None:
    chunks = sum(record.num_chunks for record in good if record.streamed)
    tokens = sum(responses[id(record)].num_tokens for record in good if record.streamed and record.times)
    return tokens / chunks if chunks else None


def _cached_share(good: list[RequestRecord]) -> float | None:
    told = [(record.cached_tokens, record.prompt_tokens) for record in good
            if record.cached_tokens is not None and record.prompt_tokens]  # fmt: skip
    return sum(cached for cached, _ in told) / sum(prompt for _, prompt in told) if told else None


def _speculation(good: list[RequestRecord]) -> dict[str, float]:
    names = ("steps", "drafts", "draft_tokens", "accepted_tokens")
    told = [record for record in good if record.speculation is not None]
    sums: dict[str, float] = dict.fromkeys(names, 0.0)
    tokens = 0
    for record in told:
        assert record.speculation is not None
        for name in names:
            value = record.speculation.get(name)
            sums[name] += value if isinstance(value, (int, float)) else 0
        tokens += record.completion_tokens or 0
    if not sums["steps"]:
        return {}
    sums["tokens_per_step"] = tokens / sums["steps"]
    if sums["drafts"]:
        sums["acceptance_rate"] = sums["accepted_tokens"] / max(1.0, sums["draft_tokens"])
        sums["mean_acceptance_length"] = 1 + sums["accepted_tokens"] / sums["drafts"]
    return sums


def _judge(
    slo: Slo,
    judged: list[RequestRecord],
    responses: Mapping[int, TokenTimes],
    stage: Stage,
    window: tuple[float, float],
    error_rate: Estimate,
) -> SloResult:
    values = {clause: [_value(clause, record, responses, stage) for record in judged] for clause in slo.of_requests}
    results = []
    for clause in slo.clauses:
        if clause.p is None:
            results.append(_result(clause, error_rate))
            continue
        own = Samples.single([value for value in values[clause] if value is not None and math.isfinite(value)])
        if clause.metric == "itl":
            told = [responses[id(record)].token_gaps() for record in judged if record.ok and record.times]
            own = Samples.grouped(told)
        # A bound from below looks at the slow end: 95% of requests above is the 5th percentile above.
        results.append(_result(clause, percentile(own, 1 - clause.p if clause.metric == "tps" else clause.p)))
    is_good = [
        record.ok and all(value is None or clause.holds(value) for clause in slo.of_requests
                          for value in [values[clause][i]])
        for i, record in enumerate(judged)
    ]  # fmt: skip
    times = np.array([record.intended for record in judged], dtype=np.float64)
    tokens = np.array([num_output_tokens(record, stage.counting) for record in judged], dtype=np.float64)
    weights = np.array(is_good, dtype=np.float64)
    verdicts = [result.verdict for result in results]
    return SloResult(
        slo=slo,
        clauses=tuple(results),
        verdict=next((name for name in ("missed", "uncertain") if name in verdicts), "met"),
        attainment=proportion(is_good),
        goodput=rate(times, weights, *window),
        good_tokens=rate(times, weights * tokens, *window),
    )


def _value(clause: Clause, record: RequestRecord, responses: Mapping[int, TokenTimes], stage: Stage) -> float | None:
    """A request's own figure; None where it has none: an answer of one token has no time a token."""
    if not record.ok:
        return None
    if clause.metric == "e2e":
        return e2e(record)
    if not record.streamed or not record.times:
        return math.nan  # cannot be known, so it is not met
    if clause.metric == "ttft":
        return ttft(record)
    response = responses[id(record)]
    if clause.metric == "itl":
        assert clause.p is not None
        gaps = response.token_gaps()
        return float(np.quantile(gaps, clause.p)) if len(gaps) else None
    value = tpot(record, response, num_output_tokens(record, stage.counting))
    if value is None or clause.metric == "tpot":
        return value
    return 1 / value if value > 0 else math.inf


def _result(clause: Clause, estimate: Estimate) -> ClauseResult:
    low, high = estimate.low, estimate.high
    if low is None or high is None or clause.holds(low) != clause.holds(high):
        verdict = "uncertain"
    else:
        verdict = "met" if clause.holds(low) else "missed"
    return ClauseResult(clause=clause, estimate=estimate, verdict=verdict)
