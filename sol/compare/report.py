"""The comparison as one HTML file that needs nothing else: no script, no font, no network."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from sol.bench.report import page, pairs, table
from sol.bench.svg import Series, cumulative, plot
from sol.compare.samples import Answer, Metric, latency, prompt_log_ratios
from sol.compare.session import Outcome
from sol.compare.summary_text import NAMES, difference_rows, facts, metric_rows, verdict_line, warnings
from sol.compare.verdict import Comparison


def to_html(outcome: Outcome, document: Mapping[str, Any]) -> str:
    """`document` is `sol.compare.result.to_json`'s of the same comparison."""
    comparison = outcome.comparison
    title = "sol compare: " + " against ".join(str(document["sides"][side]["name"]) for side in ("a", "b"))
    body = [
        f"<h1>{escape(verdict_line(outcome))}</h1>",
        f'<p class="soft">A: {escape(str(document["sides"]["a"]["name"]))}<br>B: '
        f"{escape(str(document['sides']['b']['name']))}<br>{escape(document['created'])}, Sol "
        f"{escape(document['sol_version'])}. Ratios are geometric means of B / A over the same prompts; intervals are "
        "of 95%, over blocks; a dash is what so few blocks do not say.</p>",
    ]
    body += [f'<p class="warn">{escape(text)}</p>' for text in warnings(outcome)]
    body += [table(metric_rows(comparison)), pairs(facts(outcome))]
    body.append(f'<div class="plots">{_plots(comparison)}</div>')
    if outcome.texts.differences:
        body += ["<h2>Where texts differ</h2>", table(difference_rows(outcome.texts, reasons=True))]
    if outcome.texts.own is not None and outcome.texts.own.differences:
        own = ", ".join(f"{one.key} at {one.position}" for one in outcome.texts.own.differences[:20])
        body.append(f'<p class="soft">A differs from itself in: {escape(own)}</p>')
    settings = {name: document[name] for name in ("sides", "data", "options", "plan", "client_machine",
                                                  "client_packages")}  # fmt: skip
    body.append(
        "<h2>How it was measured</h2><details><summary>Sides, data, options, machine of the client, versions"
        f"</summary><pre>{escape(json.dumps(settings, indent=2, ensure_ascii=False))}</pre></details>"
    )
    return page(title, body)


def _plots(comparison: Comparison) -> str:
    metric = comparison.plan.metric
    ratios = [(block.number + 1, value) for block in comparison.blocks
              if (value := block.log_ratio(metric)) is not None]  # fmt: skip
    shown: list[str] = []
    if ratios:
        numbers = [float(number) for number, _ in ratios]
        effect = comparison.primary
        lines = [Series("blocks", numbers, [100 * math.expm1(value) for _, value in ratios], points=True)]
        if len(numbers) > 1:
            bounds = [100 * (level - 1) for level in (effect.low, effect.high) if level is not None]
            lines += [Series("interval", [numbers[0], numbers[-1]], [bound, bound]) for bound in bounds]
        shown.append(plot(f"{NAMES[metric]}: B against A, by block", "block", "B / A - 1, %", lines))
    by_prompt: Metric = metric if metric != "throughput" else "e2e"
    every = [pair for block in comparison.blocks for pair in block.pairs]
    if logs := prompt_log_ratios(every, by_prompt):
        prompts = cumulative("prompts", [100 * math.expm1(value) for value in logs])
        title = f"{NAMES[by_prompt]}: B against A, by prompt"
        shown.append(plot(title, "B / A - 1, %", "% of prompts", [prompts], y_range=(0, 100)))
    for one in ("e2e", "ttft", "tpot"):
        sides = [
            [1000 * value for pair in every for answer in (pair.a if side == "A" else pair.b).answers
             if (value := _ok(answer, one)) is not None]
            for side in ("A", "B")
        ]  # fmt: skip
        if all(sides):
            shown.append(plot(NAMES[one], "ms, logarithmic", "% of requests",
                              [cumulative(name, values) for name, values in zip("AB", sides, strict=True)],
                              log_x=True, y_range=(0, 100)))  # fmt: skip
    rates = [
        Series(name, [float(i + 1) for i, _ in found], [value for _, value in found])
        for name, found in (("A", _rates(comparison, "a")), ("B", _rates(comparison, "b"))) if found
    ]  # fmt: skip
    shown.append(plot("Output by round", "round", "tokens/s", rates))
    return "\n".join(piece for piece in shown if piece)


def _rates(comparison: Comparison, side: str) -> Sequence[tuple[int, float]]:
    rounds = [pair.a if side == "a" else pair.b for block in comparison.blocks for pair in block.pairs]
    return [(i, one.throughput) for i, one in enumerate(rounds) if one.throughput is not None]


def _ok(answer: Answer, metric: str) -> float | None:
    return latency(answer, metric) if answer.ok else None  # type: ignore[arg-type]
