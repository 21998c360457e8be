"""A summary in words and numbers, for a terminal and for the head of the HTML report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from sol.bench.metrics import PERCENTILES, Distribution
from sol.bench.session import Measured, best
from sol.bench.statistics import Estimate

LATENCIES: Final = {
    "ttft": "TTFT",
    "ttfc": "TTFT, first content",
    "tpot": "TPOT",
    "itl": "ITL, tokens",
    "chunk": "ITL, chunks",
    "e2e": "E2E",
}
"""Figures of `Summary.latencies`, in the order in which they are shown."""


def milliseconds(estimate: Estimate, *, interval: bool = True) -> str:
    """`12.3 ms (11.9 to 12.8)`; a dash where there are too few samples."""
    return number(estimate, 1000.0, " ms", interval=interval)


def number(estimate: Estimate, factor: float = 1.0, unit: str = "", *, interval: bool = True) -> str:
    if estimate.value is None:
        return "–"
    text = f"{_digits(estimate.value * factor)}{unit}"
    if interval and estimate.low is not None and estimate.high is not None:
        text += f" ({_digits(estimate.low * factor)} to {_digits(estimate.high * factor)})"
    return text


def latency_rows(one: Measured, *, interval: bool = True) -> list[list[str]]:
    """A header and a row for each latency: mean and percentiles."""
    rows = [["", "mean", *(f"P{p:g}" for p in PERCENTILES), "largest"]]
    for name, title in LATENCIES.items():
        distribution = one.summary.latencies.get(name)
        if distribution is None or distribution.n == 0 or _same(name, one):
            continue
        rows.append([
            title,
            milliseconds(distribution.mean, interval=False),
            *(milliseconds(estimate, interval=interval) for estimate in distribution.percentiles.values()),
            "–" if distribution.largest is None else f"{_digits(1000 * distribution.largest)} ms",
        ])  # fmt: skip
    return rows


def facts(one: Measured) -> list[tuple[str, str]]:
    """What is not a latency: amounts, throughput, goodput, cost, the server's own figures."""
    summary, stage = one.summary, one.stage
    begin, end = summary.window
    rows = [
        ("requests", _requests(one)),
        ("window", f"{begin:.1f} s to {end:.1f} s of a load of {stage.load_seconds:.1f} s"),
        ("input", f"{_tokens(summary.input_tokens)}, {number(summary.input_tokens_per_second)} tokens/s"),
        ("output", f"{_tokens(summary.output_tokens)}, {number(summary.output_tokens_per_second)} tokens/s"),
        ("throughput", f"{number(summary.requests_per_second)} requests/s"),
    ]
    asked = [record.key for record in stage.records if record.turn == 0]
    if len(set(asked)) < len(asked):
        rows.append(("prompts", f"{len(set(asked))} different ones; {len(asked) - len(set(asked))} were sent before, "
                     "and a prefix cache may know them"))  # fmt: skip
    if summary.cached_share:
        rows.append(("prefix cache", f"{summary.cached_share:.1%} of the prompt tokens"))
    if summary.tokens_per_chunk and summary.tokens_per_chunk > 1.001:
        rows.append(("a chunk", f"{summary.tokens_per_chunk:.2f} tokens on average"))
    if spec := summary.speculation:
        text = f"{spec['tokens_per_step']:.2f} tokens a step"
        if "acceptance_rate" in spec:
            text += f", {spec['acceptance_rate']:.1%} of the drafts accepted"
        rows.append(("speculation", text))
    if summary.slo is not None:
        rows.append(("SLO", f"{summary.slo.verdict}: " + ", ".join(
            f"{result.clause.text} {result.verdict}" for result in summary.slo.clauses)))  # fmt: skip
        rows.append(("goodput", f"{number(summary.slo.goodput)} requests/s, "
                     f"{number(summary.slo.attainment, 100, '%')} of the requests"))  # fmt: skip
    if one.cost is not None:
        text = (
            f"{number(one.cost.output)} for a million output tokens, {number(one.cost.total)} for a million in and out"
        )
        if one.cost.good.value is not None:
            text += f", {number(one.cost.good)} for a million good output tokens"
        rows.append(("cost", text))
    if (in_flight := summary.little["in_flight"]) is not None:
        expected = summary.little["expected"]
        rows.append(("in flight", f"{in_flight:.1f} requests; {expected:.1f} by Little's law, from rate and latency"))
    if server := _server(summary.server):
        rows.append(("server", server))
    rows.append(("client", _client(one)))
    return rows


def warnings(one: Measured) -> list[str]:
    """What a reader must know before believing the figures."""
    summary, found = one.summary, []
    if summary.client.limited:
        found.append("client_limited: the client was a bottleneck: " + "; ".join(summary.client.reasons))
    if one.stage.interrupted:
        found.append("interrupted: the figures are of what was measured until then")
    if summary.num_cancelled:
        found.append(
            f"{summary.num_cancelled} requests of the window were cancelled at the end; they were the slowest, so the "
            "tails are too short: let them finish with a longer --drain-timeout"
        )
    if not summary.num_requests:
        found.append(
            "no request was due in the measured window: give a longer load, or a shorter --warmup or --cooldown"
        )
    elif not summary.num_ok:
        found.append("no request succeeded")
    for kind, count in summary.errors.items():
        found.append(f"{count} × {kind}: {summary.error_examples.get(kind, '')}")
    ratio = summary.little.get("ratio")
    if ratio is not None and not 0.9 <= ratio <= 1.1:
        found.append(
            f"Little's law does not hold within 10%: {summary.little['in_flight']:.1f} requests were in flight, the "
            f"latencies say {summary.little['expected']:.1f}; the load was not steady in the window"
        )
    if one.stage.counting == "chunks" and summary.latencies.get("itl") is not None:
        found.append("the endpoint does not say how many tokens a chunk holds; each counts as one token")
    elif one.stage.counting == "estimated" and (summary.tokens_per_chunk or 1) > 1.05:
        found.append(
            "the endpoint gives the number of tokens at the end only; which chunk brought how many is estimated by "
            "their characters"
        )
    return found


def overview_rows(measured: Sequence[Measured]) -> list[list[str]]:
    """A header and a row for each load."""
    rows = [["load", "requests/s", "tokens/s", "TTFT P50", "TTFT P95", "TPOT P50", "TPOT P95", "goodput", "errors"]]
    chosen = best(measured)
    for one in measured:
        summary = one.summary

        def figure(name: str, p: str, one: Measured = one) -> str:
            distribution = one.summary.latencies.get(name)
            return "–" if distribution is None else milliseconds(distribution.percentiles[p], interval=False)

        rows.append([
            one.load.name + (" *" if one is chosen and len(measured) > 1 else ""),
            number(summary.requests_per_second, interval=False),
            number(summary.output_tokens_per_second, interval=False),
            figure("ttft", "p50"), figure("ttft", "p95"), figure("tpot", "p50"), figure("tpot", "p95"),
            "–" if summary.slo is None else number(summary.slo.goodput, interval=False),
            str(sum(summary.errors.values())),
        ])  # fmt: skip
    return rows


def _same(name: str, one: Measured) -> bool:
    """Whether a figure says nothing that another does not: no reasoning, no chunk of several tokens."""
    latencies = one.summary.latencies
    other = {"ttfc": "ttft", "chunk": "itl"}.get(name)
    return other is not None and other in latencies and latencies[name].percentiles == latencies[other].percentiles


def _requests(one: Measured) -> str:
    summary = one.summary
    text = f"{summary.num_requests:,} due in the window, {summary.num_ok:,} succeeded"
    if failed := sum(summary.errors.values()):
        text += f", {failed:,} failed ({number(summary.error_rate, 100, '%')})"
    return text


def _tokens(distribution: Distribution) -> str:
    return f"{number(distribution.mean, interval=False)} tokens a request"


def _server(means: Mapping[str, float]) -> str:
    shown = (
        ("running", "{:.1f} running"),
        ("waiting", "{:.1f} waiting"),
        ("kv_cache_usage", "KV cache {:.1%}"),
        ("prefix_cache_hit_rate", "prefix cache hits {:.1%}"),
        ("acceptance_rate", "{:.1%} of drafts accepted"),
        ("mean_acceptance_length", "mean acceptance length {:.2f}"),
        ("preemptions_per_second", "{:.2f} preemptions/s"),
        ("gpu_utilization", "GPU {:.0%}"),
        ("gpu_memory_mib", "{:,.0f} MiB of GPU memory"),
        ("gpu_power_watts", "{:,.0f} W"),
    )
    return ", ".join(form.format(means[name]) for name, form in shown if name in means)


def _client(one: Measured) -> str:
    client = one.summary.client
    late = "–" if client.send_lag_p99 is None else f"{1000 * client.send_lag_p99:.1f} ms"
    return (
        f"{'limited' if client.limited else 'not limited'}: sent at most {late} late (P99), longest stall "
        f"{1000 * client.longest_stall:.0f} ms, {client.busy_share:.0%} of a core"
    )


def _digits(value: float) -> str:
    """Three significant digits or all those before the point."""
    if value == 0:
        return "0"
    magnitude = abs(value)
    if magnitude >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if magnitude >= 10 else f"{value:.2f}" if magnitude >= 0.1 else f"{value:.3g}"
