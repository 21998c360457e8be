"""The measurement as one HTML file that needs nothing else: no script, no font, no network."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final

import numpy as np

from sol.bench.load import ClosedLoop
from sol.bench.metrics import e2e, tpot, ttft
from sol.bench.session import Measured, best
from sol.bench.summary_text import facts, latency_rows, overview_rows, warnings
from sol.bench.svg import Series, cumulative, plot
from sol.bench.tokens import num_output_tokens, token_times

_STYLE: Final = """
:root { --ink: #1c1e21; --soft: #646a73; --rule: #dcdfe4; --paper: #fff; --warn: #8a4b00; --warn-paper: #fff4e0;
  --c0: #1f6feb; --c1: #d9541e; --c2: #2a9d55; --c3: #8250df; --c4: #b08800; --c5: #c2255c; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --soft: #9aa2ad; --rule: #3a3f47; --paper: #16181c;
  --warn: #ffc46b; --warn-paper: #33270f; --c0: #6aa5ff; --c1: #ff8f5e; --c2: #5fd08a; --c3: #b794f6; --c4: #e0b93c;
  --c5: #ff7aa8; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1180px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
.soft { color: var(--soft); }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; }
td, th { padding: .25rem .8rem .25rem 0; text-align: left; border-bottom: 1px solid var(--rule); white-space: nowrap;
  font-variant-numeric: tabular-nums; } td.wrap { white-space: normal; }
.warn { background: var(--warn-paper); color: var(--warn); padding: .5rem .8rem; margin: .4rem 0; border-radius: 4px; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(420px, 100%), 1fr)); gap: 1rem; }
svg { width: 100%; height: auto; font: 12px system-ui, sans-serif; }
svg text { fill: var(--soft); } svg .title { fill: var(--ink); font-weight: 600; }
svg .grid { stroke: var(--rule); stroke-width: 1; } svg polyline { fill: none; stroke-width: 1.8; }
svg .c0 { stroke: var(--c0); } svg .c1 { stroke: var(--c1); } svg .c2 { stroke: var(--c2); }
svg .c3 { stroke: var(--c3); } svg .c4 { stroke: var(--c4); } svg .c5 { stroke: var(--c5); }
svg .c0.dot { fill: var(--c0); } svg .c1.dot { fill: var(--c1); } svg .c2.dot { fill: var(--c2); }
svg .c3.dot { fill: var(--c3); } svg .c4.dot { fill: var(--c4); } svg .c5.dot { fill: var(--c5); }
svg .dot { stroke: none; fill-opacity: .65; }
svg .l0 { fill: var(--c0); } svg .l1 { fill: var(--c1); } svg .l2 { fill: var(--c2); }
svg .l3 { fill: var(--c3); } svg .l4 { fill: var(--c4); } svg .l5 { fill: var(--c5); }
pre { overflow-x: auto; font-size: 13px; } summary { cursor: pointer; }
"""

_TIME_BINS: Final = 60


def to_html(measured: Sequence[Measured], document: Mapping[str, Any]) -> str:
    """`document` is `sol.bench.result.to_json`'s of the same measurement."""
    endpoint = document["endpoint"]
    title = f"sol bench: {endpoint['model']} at {endpoint['url']}"
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">{escape(document["created"])}, Sol {escape(document["sol_version"])}. Latencies count from '
        "when a request was due; intervals are of 95%; a dash means too few samples.</p>",
    ]
    if len(measured) > 1:
        body.append(table(overview_rows(measured)))
        if best(measured) is not None:
            body.append(f'<p class="soft">* {_best_means(measured)}</p>')
        body.append(f'<div class="plots">{_overview_plots(measured)}</div>')
    for one in measured:
        body.append(f"<h2>{escape(one.load.name)}</h2>")
        body += [f'<p class="warn">{escape(text)}</p>' for text in warnings(one)]
        body.append(table(latency_rows(one)))
        body.append(pairs(facts(one)))
        body.append(f'<div class="plots">{_plots(one)}</div>')
    settings = {
        name: document[name]
        for name in ("endpoint", "data", "options", "seed", "definitions", "client_machine", "client_packages")
    }
    body.append(
        "<h2>How it was measured</h2><details><summary>Endpoint, data, options, machine of the client, versions"
        f"</summary><pre>{escape(json.dumps(settings, indent=2, ensure_ascii=False))}</pre></details>"
    )
    return page(title, body)


def page(title: str, body: Sequence[str]) -> str:
    """A whole document with the style of all reports; `body` is HTML."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width"><title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n'
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _plots(one: Measured) -> str:
    stage = one.stage
    begin, end = one.summary.window
    good = [record for record in stage.records if record.ok and record.times and begin <= record.intended <= end]
    streamed = [record for record in good if record.streamed]
    pieces = []
    if streamed:
        responses = [token_times(record, stage.counting) for record in streamed]
        firsts = [1000 * ttft(record) for record in streamed]
        pieces.append(plot("Time to first token", "ms, logarithmic", "% of requests", [cumulative("TTFT", firsts)],
                           log_x=True, y_range=(0, 100)))  # fmt: skip
        per_token = [
            1000 * value
            for record, response in zip(streamed, responses, strict=True)
            if (value := tpot(record, response, num_output_tokens(record, stage.counting))) is not None
        ]
        gaps = 1000 * np.concatenate([response.token_gaps() for response in responses])
        pieces.append(plot(
            "Time per output token", "ms, logarithmic", "%",
            [cumulative("TPOT, requests", per_token), cumulative("ITL, tokens", gaps.tolist())],
            log_x=True, y_range=(0, 100),
        ))  # fmt: skip
    whole = [1000 * e2e(record) for record in good]
    pieces.append(plot("Whole request", "ms, logarithmic", "% of requests", [cumulative("E2E", whole)], log_x=True,
                       y_range=(0, 100)))  # fmt: skip
    shown = [record for record in stage.records if record.ok and record.times]
    latency, name = (ttft, "TTFT") if any(record.streamed for record in shown) else (e2e, "E2E")
    pieces.append(plot(
        f"{name} over time (all requests)", "s, when due", "ms",
        [Series(name, [r.intended for r in shown], [1000 * latency(r) for r in shown], points=True)],
    ))  # fmt: skip
    pieces.append(_throughput_plot(one))
    beats = stage.heartbeats
    times = list(beats.due)
    in_flight = [Series("client", times, [float(count) for count in beats.in_flight])]
    for series, label in (("running", "server: running"), ("waiting", "server: waiting")):
        if samples := stage.server.get(series):
            in_flight.append(Series(label, [time for time, _ in samples], [value for _, value in samples]))
    pieces.append(plot("Requests in flight", "s", "requests", in_flight))
    pieces.append(plot("The client's own lag", "s", "ms", [Series("lag", times, [1000 * lag for lag in beats.lag])]))
    shares = [
        Series(label, [time for time, _ in samples], [100 * value for _, value in samples])
        for series, label in (("kv_cache_usage", "KV cache"), ("gpu_utilization", "GPU"))
        if (samples := stage.server.get(series))
    ]
    pieces.append(plot("The server's load", "s", "%", shares, y_range=(0, 100)))
    return "\n".join(piece for piece in pieces if piece)


def _throughput_plot(one: Measured) -> str:
    arrivals = [token_times(record, one.stage.counting) for record in one.stage.records if record.times]
    if not arrivals:
        return ""
    times = np.concatenate([response.times for response in arrivals])
    counts = np.concatenate([response.counts for response in arrivals])
    span = max(float(times.max()), 1e-9)
    sums, edges = np.histogram(times, bins=_TIME_BINS, range=(0, span), weights=counts)
    centers = ((edges[:-1] + edges[1:]) / 2).tolist()
    return plot("Output", "s", "tokens/s", [Series("tokens/s", centers, (sums / (span / _TIME_BINS)).tolist())])


def _overview_plots(measured: Sequence[Measured]) -> str:
    closed = all(isinstance(one.load, ClosedLoop) for one in measured)
    offered = [
        float(one.load.concurrency) if isinstance(one.load, ClosedLoop) else one.summary.num_requests
        / max(1e-9, one.summary.window[1] - one.summary.window[0])
        for one in measured
    ]  # fmt: skip
    label = "requests at a time" if closed else "requests/s offered"
    output = [one.summary.output_tokens_per_second.value or 0.0 for one in measured]
    pieces = [plot("Throughput", label, "tokens/s", [Series("output", offered, output)])]
    for name, title in (("ttft", "Time to first token"), ("tpot", "Time per output token")):
        lines = []
        for p in ("p50", "p95"):
            pairs = [
                (x, 1000 * value) for x, one in zip(offered, measured, strict=True)
                if name in one.summary.latencies
                and (value := one.summary.latencies[name].percentiles[p].value) is not None
            ]  # fmt: skip
            lines.append(Series(p.upper(), [x for x, _ in pairs], [y for _, y in pairs]))
        pieces.append(plot(title, label, "ms", lines))
    if measured[0].summary.slo is not None:
        goodput = [(one.summary.slo and one.summary.slo.goodput.value) or 0.0 for one in measured]
        pieces.append(plot("Goodput", label, "good requests/s", [Series("goodput", offered, goodput)]))
    return "\n".join(piece for piece in pieces if piece)


def _best_means(measured: Sequence[Measured]) -> str:
    if measured[0].summary.slo is None:
        return "the greatest throughput"
    return "the greatest goodput of those that do not miss the SLO"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Of texts; the first row is the head. Nothing for a head alone."""
    head, *rest = rows
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rest]
    return f"<table><tr>{cells}</tr>{''.join(lines)}</table>" if rest else ""


def pairs(rows: Sequence[tuple[str, str]]) -> str:
    """A table of names and texts."""
    lines = [f'<tr><th>{escape(name)}</th><td class="wrap">{escape(text)}</td></tr>' for name, text in rows]
    return f"<table>{''.join(lines)}</table>"
