"""Why this configuration: the search as one HTML file that needs nothing else."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final

from sol.bench.report import page, pairs, table
from sol.bench.slo import Clause
from sol.bench.svg import Series, plot
from sol.tune.space import Parameter
from sol.tune.trial import Outcome, Probe
from sol.tune.tuner import TuneResult

_MEANINGS: Final[Mapping[Outcome, str]] = {
    "finished": "measured with loads of every length",
    "stopped": "measured until it was clear that others do better",
    "misses": "misses the SLO at any rate",
    "crashed": "did not start, or died",
    "excluded": "never started",
    "interrupted": "broken off; tried again when the search goes on",
}


def to_html(result: TuneResult, document: Mapping[str, Any], *, title: str, start: str) -> str:
    """`document` is `sol.tune.output.to_json`'s; `start` is the file or the command of the best configuration."""
    best = result.best
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">{escape(document["created"])}, Sol {escape(document["sol_version"])}. '
        f"{escape(headline(result))}</p>",
    ]
    if result.interrupted:
        body.append('<p class="warn">The search was stopped before its end; --resume goes on with it.</p>')
    body += [f'<p class="warn">{escape(text)}</p>' for text in warnings(result)]
    if best is not None:
        body += ["<h2>The best</h2>", table(best_rows(result)), f"<pre>{escape(start)}</pre>"]
    body += [
        "<h2>How the search went</h2>",
        pairs(facts(result)),
        f'<div class="plots">{_progress_plot(result)}{_frontier_plots(result)}</div>',
        "<h2>What each parameter does</h2>",
        '<p class="soft">Of each value the best configuration that has it: all other parameters may differ.</p>',
        *(_parameter(result, parameter) for parameter in result.space.parameters),
        "<h2>What was left out, and why</h2>",
        *_left_out(result),
        "<h2>All trials</h2>",
        table(trial_rows(result)),
        "<h2>How it was searched</h2><details><summary>Options, space, definitions</summary><pre>",
        escape(json.dumps({name: document[name] for name in ("what", "options", "slo", "space", "definitions")},
                          indent=2, ensure_ascii=False)),
        "</pre></details>",
    ]  # fmt: skip
    return page(title, body)


def headline(result: TuneResult) -> str:
    """One sentence."""
    best = result.best
    if best is None or best.best is None:
        return f"No configuration met the SLO ({result.goal.slo.text}) in {result.num_started} trials."
    text = f"{best.best.goodput:.4g} good requests/s at the SLO ({result.goal.slo.text})"
    if (cost := result.goal.cost_per_million(best.best)) is not None:
        text += f", {cost:.4g} per million good tokens"
    if result.default is best:
        return f"{text}: the default configuration is the best of {result.num_started} trials."
    if result.gain is not None:
        return f"{text}: {result.gain:.2f} times the default configuration's, after {result.num_started} trials."
    return f"{text}, after {result.num_started} trials."


def warnings(result: TuneResult) -> list[str]:
    best = result.best
    if best is None or best.best is None:
        return []
    found = []
    if best.best.client_limited:
        found.append(
            "The client was the bottleneck in the best configuration's load: give it cores of its own, or the figures "
            "are the client's."
        )
    edges = [
        f"{parameter.name} {best.config[parameter.name]}"
        for parameter in result.space.parameters
        if parameter.is_ordered and len(parameter.values) > 2
        and best.config[parameter.name] in (parameter.values[0], parameter.values[-1])
    ]  # fmt: skip
    if edges:
        found.append(f"The best lies at the edge of what was tried: {', '.join(edges)}. Wider values may be better.")
    return found


def best_rows(result: TuneResult) -> list[list[str]]:
    """The best beside the default."""
    shown = [trial for trial in (result.best, result.default) if trial is not None]
    if result.best is result.default:
        shown = shown[:1]
    rows = [["", *("default" if trial is result.default and trial is not result.best else "best" for trial in shown)]]
    rows += [[p.name, *(_text(trial.config[p.name]) for trial in shown)] for p in result.space.parameters]
    probes = [trial.best for trial in shown]
    rows.append(["good requests/s", *(_number(probe.goodput if probe else None) for probe in probes)])
    rows.append(["good tokens/s", *(_number(probe.good_tokens_per_second if probe else None) for probe in probes)])
    if result.goal.price_per_hour is not None:
        costs = [result.goal.cost_per_million(probe) if probe else None for probe in probes]
        rows.append(["cost per million good tokens", *map(_number, costs)])
    rows += [[clause.text, *(_clause(clause, probe) for probe in probes)] for clause in result.goal.slo.clauses]
    if any(trial.kl is not None for trial in shown):
        rows.append(["KL, nats a token", *(_number(trial.kl) for trial in shown)])
    return rows


def facts(result: TuneResult) -> list[tuple[str, str]]:
    counts = Counter(trial.outcome for trial in result.trials)
    told = [f"{counts[name]} {name} ({text})" for name, text in _MEANINGS.items() if counts[name]]
    return [
        ("configurations", f"{result.space.size:,} in the space, {result.num_started} started"),
        ("outcomes", "; ".join(told)),
        ("loads", f"{sum(len(trial.probes) for trial in result.trials):,}"),
        ("time of this run", f"{result.seconds:,.0f} s"),
    ]


def trial_rows(result: TuneResult) -> list[list[str]]:
    names = [parameter.name for parameter in result.space.parameters]
    rows = [["trial", *names, "outcome", "score", "rate", *(c.text for c in result.goal.slo.clauses), "why"]]
    rows += [
        [
            f"{trial.number}{' *' if trial is result.best else ''}",
            *(_text(trial.config[name]) for name in names),
            trial.outcome,
            _number(trial.score or None),
            _number(trial.best.rate if trial.best else None),
            *(_clause(clause, trial.best) for clause in result.goal.slo.clauses),
            trial.reason,
        ]
        for trial in result.trials
    ]
    return rows


def _progress_plot(result: TuneResult) -> str:
    started = [trial for trial in result.trials if trial.started]
    x = [float(number) for number in range(1, len(started) + 1)]
    best, climbing = 0.0, []
    for trial in started:
        best = max(best, trial.score if trial.outcome == "finished" else 0.0)
        climbing.append(best)
    return plot(
        "Scores in the order of trials", "trial", _unit(result),
        [Series("best so far", x, climbing), Series("trial", x, [trial.score for trial in started], points=True)],
    )  # fmt: skip


def _frontier_plots(result: TuneResult) -> str:
    """Of every load of every trial what it gave against what it cost in latency, and those that no other beats."""
    pieces = []
    for clause in result.goal.slo.of_requests:
        points = [
            (value * _factor(clause), probe.goodput)
            for trial in result.trials for probe in trial.probes
            if probe.rate and (value := probe.clauses.get(clause.text)) is not None
        ]  # fmt: skip
        frontier: list[tuple[float, float]] = []
        rising = sorted(points, reverse=clause.metric == "tps")
        for x, y in rising:
            if not frontier or y > frontier[-1][1]:
                frontier.append((x, y))
        frontier.sort()
        pieces.append(plot(
            f"Goodput against {clause.metric.upper()}: all loads and their frontier",
            "tokens/s" if clause.metric == "tps" else "ms, logarithmic", "good requests/s",
            [Series("frontier", *_columns(frontier)), Series("load", *_columns(points), points=True)],
            log_x=clause.metric != "tps",
        ))  # fmt: skip
    return "".join(pieces)


def _parameter(result: TuneResult, parameter: Parameter) -> str:
    rows, x, y = [[parameter.name, "trials", "best score"]], [], []
    for value in parameter.values:
        having = [trial for trial in result.trials if trial.started and trial.config[parameter.name] == value]
        scores = [trial.score for trial in having if trial.score]
        rows.append([_text(value), str(len(having)), _number(max(scores, default=None))])
        if scores and parameter.is_ordered:
            x.append(float(value))
            y.append(max(scores))
    drawn = ""
    if len(x) > 1:
        seen = [trial for trial in result.trials if trial.score]
        drawn = plot(
            parameter.name, "value, logarithmic" if min(x) > 0 else "value", _unit(result),
            [Series("best", x, y),
             Series("trial", [float(t.config[parameter.name]) for t in seen], [t.score for t in seen], points=True)],
            log_x=min(x) > 0,
        )  # fmt: skip
    return f'<div class="plots"><div>{table(rows)}</div>{drawn}</div>'


def _left_out(result: TuneResult) -> list[str]:
    parts = []
    excluded = [trial for trial in result.trials if trial.outcome == "excluded"]
    if excluded:
        counts = Counter(trial.reason for trial in excluded)
        parts.append(table([["never started because", "configurations"],
                            *([reason, str(count)] for reason, count in counts.most_common())]))  # fmt: skip
    if result.exclusions:
        parts.append(table([["learned from crashes: not started any more"], *([text] for text in result.exclusions)]))
    measured = {json.dumps(lossy): trial.kl for trial in result.trials
                if trial.kl is not None and (lossy := result.space.lossy_part(trial.config))}  # fmt: skip
    if measured:
        parts.append(table([["lossy choice", f"KL, nats a token (at most {result.goal.kl_bound:g})"],
                            *([name, _number(kl)] for name, kl in measured.items())]))  # fmt: skip
    return parts or ["<p>Nothing.</p>"]


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _unit(result: TuneResult) -> str:
    return "good requests/s" if result.goal.price_per_hour is None else "good tokens for 1 of the currency"


def _factor(clause: Clause) -> float:
    return 1.0 if clause.metric in ("tps", "error_rate") else 1000.0


def _clause(clause: Clause, probe: Probe | None) -> str:
    value = None if probe is None else probe.clauses.get(clause.text)
    if value is None:
        return "–"
    if clause.metric == "error_rate":
        return f"{value:.2%}"
    return f"{value * _factor(clause):.4g}" + ("" if clause.metric == "tps" else " ms")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
