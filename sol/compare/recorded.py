"""Comparing runs that were recorded: `sol bench`'s JSON, and what other load generators write (`imported`).

Two runs were measured one after the other, so whatever else changed between them is in the difference. Requests are
paired by what was asked. Consecutive pairs, so many that they no longer resemble the next ones, are a block. Where the
runs did not ask the same, the sides are compared as two samples, and nothing can be said prompt by prompt.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from sol.bench.statistics import Samples, autocorrelation_time, effective_size
from sol.compare.samples import METRICS, Answer, Block, Metric, Pair, Round, latency, prompt_log_ratios
from sol.compare.statistics import ALPHA, rank_sum, student_quantile
from sol.compare.verdict import LEAST_BLOCKS, Comparison, Effect, Failures, Plan, judge
from sol.errors import ConfigError

_MOST_BLOCKS: Final = 30
_LATENCIES: Final[tuple[Metric, ...]] = ("e2e", "ttft", "tpot")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """One load of a file."""

    path: Path
    tool: str
    """Who wrote it: `sol bench`, `vllm bench`, `GuideLLM`, `AIPerf`."""
    name: str
    """Of the load."""
    answers: Sequence[Answer]
    """In the order in which they were due; `place` counts them. Empty where the file has totals alone."""
    input_tokens: Sequence[int | None] = ()
    """Of each answer."""
    totals: Mapping[Metric, float] = field(default_factory=dict)
    """What the file itself says: median latencies in seconds, output tokens a second."""
    counts_from: str = "when a request was due"
    """What its latencies count from."""


def read_run(path: Path, load: str | None = None) -> RecordedRun:
    """Raises `ConfigError` for a file that cannot be read or is of no known form, and for one with several loads of
    which `load` names none."""
    from sol.compare.imported import read_foreign

    text = _read(path)
    lines = text.lstrip()
    document: Any = None
    try:
        document = json.loads(text)
    except ValueError:
        if not lines.startswith("{"):
            raise ConfigError(f"{path} holds no JSON; give what sol bench wrote, or another tool's results",
                              param="a") from None  # fmt: skip
    try:
        if isinstance(document, dict) and str(document.get("format", "")).startswith("sol-bench/"):
            runs = _of_sol_bench(path, document)
        else:
            runs = read_foreign(path, document, text)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ConfigError(
            f"{path} looks like a result, but a part of it is not as it should be ({type(error).__name__}: {error})",
            param="a",
        ) from None
    return _chosen(path, runs, load)


def compare_runs(a: RecordedRun, b: RecordedRun, plan: Plan) -> tuple[Comparison, list[str]]:
    """The comparison, and what a reader must know of it."""
    if plan.metric == "throughput":
        raise ConfigError(
            "metric throughput is one number a run, and one number has no interval; compare e2e, ttft or tpot, or "
            "let sol compare measure both",
            param="metric",
        )
    if plan.effect is not None:
        raise ConfigError("an effect needs as many blocks as it takes; recorded runs have those they have",
                          param="effect")  # fmt: skip
    notes = ["the runs were recorded one after the other: whatever else changed between them is in the difference"]
    if a.counts_from != b.counts_from:
        notes.append(f"A's latencies count from {a.counts_from}, B's from {b.counts_from}")
    rates = [run.totals.get("throughput") for run in (a, b)]
    if rates[0] and rates[1]:
        notes.append(
            f"throughput was {rates[0]:,.0f} tokens/s in A and {rates[1]:,.0f} in B "
            f"({rates[1] / rates[0] - 1:+.1%}): one value a run, so no interval"
        )
    if not a.answers or not b.answers:
        lacking = " and ".join(name for name, run in (("A", a), ("B", b)) if not run.answers)
        notes.append(
            f"{lacking} has totals alone, no single requests: medians can be divided, but there are no intervals, no "
            "tests and no verdict (vllm bench writes requests with --save-detailed, AIPerf in profile_export.jsonl)"
        )
        return _of_totals(a, b, plan), notes
    pair = _paired(a, b)
    if pair is None:
        notes.append(
            "the runs did not ask the same, or do not say what they asked: they are compared as two samples; "
            "per-prompt differences, the signed-rank test and texts are not possible"
        )
        return _unpaired(a, b, plan), notes
    blocks = _blocks(pair, plan.metric)
    left = len(a.answers) + len(b.answers) - 2 * len(pair.a.answers)
    if left:
        notes.append(f"{left} requests of one run have no counterpart in the other and are left out")
    unnamed = sum(not one.key for side in (pair.a, pair.b) for one in side.answers)
    if unnamed:
        notes.append(f"{unnamed} failures do not say what was asked; they are taken for what the other run has an "
                     "answer to and this one has not")  # fmt: skip
    if len(blocks) < LEAST_BLOCKS:
        notes.append(f"the runs are too short: they give {len(blocks)} independent blocks, and a verdict takes "
                     f"{LEAST_BLOCKS}")  # fmt: skip
    return judge(blocks, plan), notes


def medians(answers: Sequence[Answer]) -> dict[Metric, float]:
    values = {metric: [v for one in answers if one.ok and (v := latency(one, metric)) is not None]
              for metric in _LATENCIES}  # fmt: skip
    return {metric: float(np.median(found)) for metric, found in values.items() if found}


def _paired(a: RecordedRun, b: RecordedRun) -> Pair | None:
    """By keys, the n-th time a key is asked with the n-th; else, for runs of one tool, by order, if the prompts'
    lengths agree."""
    ours, theirs = (dict(zip(_occurrences(run.answers), run.answers, strict=True)) for run in (a, b))
    found = [(ours[name], theirs[name]) for name in ours if name in theirs and name[0]]
    found += _by_elimination(
        [answer for name, answer in ours.items() if not name[0] or name not in theirs],
        [answer for name, answer in theirs.items() if not name[0] or name not in ours],
    )
    found.sort(key=lambda both: both[0].place)
    if 2 * len(found) < min(len(a.answers), len(b.answers)):
        known = len(a.input_tokens) == len(a.answers) and None not in a.input_tokens
        if a.tool != b.tool or not known or list(a.input_tokens) != list(b.input_tokens):
            return None
        found = list(zip(a.answers, b.answers, strict=True))
    return Pair(
        a=Round(answers=[one for one, _ in found], seconds=0.0),
        b=Round(answers=[replace(other, place=one.place, turn=one.turn) for one, other in found], seconds=0.0),
        a_first=True,
    )


def _by_elimination(ours: Sequence[Answer], theirs: Sequence[Answer]) -> list[tuple[Answer, Answer]]:
    """Failures that do not say what was asked (GuideLLM's), with what only the other run has an answer to: if the runs
    asked the same, they are those, in some order. What is left of both are requests that failed twice."""
    lost, their_lost = ([one for one in side if not one.key and not one.ok] for side in (ours, theirs))
    named, their_named = ([one for one in side if one.key] for side in (ours, theirs))
    found = [*zip(named, their_lost, strict=False), *zip(lost, their_named, strict=False)]
    return [*found, *zip(lost[len(their_named) :], their_lost[len(named) :], strict=False)]


def _occurrences(answers: Sequence[Answer]) -> list[tuple[str, int, int]]:
    seen: Counter[tuple[str, int]] = Counter()
    names = []
    for answer in answers:
        seen[answer.key, answer.turn] += 1
        names.append((answer.key, answer.turn, seen[answer.key, answer.turn]))
    return names


def _blocks(pair: Pair, metric: Metric) -> list[Block]:
    """Consecutive requests, at least four times as many a block as their differences remember."""
    ratios = np.array(prompt_log_ratios([pair], metric))
    varies = len(ratios) > 0 and float(ratios.std()) > 1e-9  # else what seems to be remembered is rounding
    memory = autocorrelation_time(ratios) if varies else 1.0
    size = len(pair.a.answers)
    number = max(1, min(_MOST_BLOCKS, int(size // math.ceil(4 * memory))))
    edges = np.linspace(0, size, number + 1).astype(int)
    return [
        Block(number=i, pairs=[Pair(a=_part(pair.a, begin, end), b=_part(pair.b, begin, end), a_first=True)])
        for i, (begin, end) in enumerate(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True))
        if end > begin
    ]


def _part(whole: Round, begin: int, end: int) -> Round:
    return Round(answers=whole.answers[begin:end], seconds=0.0)


def _unpaired(a: RecordedRun, b: RecordedRun, plan: Plan) -> Comparison:
    effects = {}
    for metric in _LATENCIES:
        logs = [
            np.array(
                [math.log(v) for one in run.answers if one.ok and (v := latency(one, metric)) is not None and v > 0]
            )
            for run in (a, b)
        ]
        if all(len(values) for values in logs):
            effects[metric] = _two_samples(metric, logs[0], logs[1])
    return Comparison(
        plan=plan, blocks=(), announced=None, interrupted=False, effects=effects, failures=_failures(a, b), paired=False
    )


def _two_samples(metric: Metric, first: np.ndarray[Any, Any], second: np.ndarray[Any, Any]) -> Effect:
    """Welch's interval over effective numbers of samples: neighbouring requests of a run resemble each other."""
    sizes = [effective_size(Samples.single(values), values) for values in (first, second)]
    shift = float(second.mean() - first.mean())
    a, b = float(np.exp(first.mean())), float(np.exp(second.mean()))
    count = int(min(sizes))
    if count < 2:
        return Effect(metric=metric, num_blocks=count or 1, ratio=math.exp(shift), a=a, b=b)
    parts = [float(values.var(ddof=1)) / size for values, size in zip((first, second), sizes, strict=True)]
    error = math.sqrt(sum(parts))
    spread = sum(part**2 / (size - 1) for part, size in zip(parts, sizes, strict=True))
    freedom = sum(parts) ** 2 / spread if spread > 0 else float(count)
    half = student_quantile(1 - ALPHA / 2, max(1.0, freedom)) * error
    means = [
        np.array([part.mean() for part in np.array_split(values, max(2, min(_MOST_BLOCKS, int(size)))) if len(part)])
        for values, size in zip((first, second), sizes, strict=True)
    ]
    return Effect(
        metric=metric, num_blocks=count, ratio=math.exp(shift), low=math.exp(shift - half),
        high=math.exp(shift + half), p_rank=rank_sum(means[0], means[1]), a=a, b=b,
    )  # fmt: skip


def _of_totals(a: RecordedRun, b: RecordedRun, plan: Plan) -> Comparison:
    first, second = ({**medians(run.answers), **run.totals} for run in (a, b))
    effects = {
        metric: Effect(metric=metric, num_blocks=1, ratio=second[metric] / first[metric], a=first[metric],
                       b=second[metric])
        for metric in METRICS if first.get(metric) and second.get(metric)
    }  # fmt: skip
    return Comparison(
        plan=plan, blocks=(), announced=None, interrupted=False, effects=effects, failures=_failures(a, b), paired=False
    )


def _failures(a: RecordedRun, b: RecordedRun) -> Failures:
    """By side alone: which requests are the same is not known."""
    kinds = [Counter(one.error for one in run.answers if one.error is not None) for run in (a, b)]
    examples = {one.error: one.message or "" for run in (a, b) for one in run.answers if one.error is not None}
    return Failures(
        num_requests=len(a.answers), num_requests_b=len(b.answers), kinds_a=dict(kinds[0]), kinds_b=dict(kinds[1]),
        examples=examples,
    )  # fmt: skip


def _of_sol_bench(path: Path, document: Mapping[str, Any]) -> list[RecordedRun]:
    runs = []
    for stage in document["stages"]:
        requests = stage["requests"]
        rows = [dict(zip(requests["columns"], row, strict=True)) for row in requests["rows"]]
        texts = requests.get("texts") or [None] * len(rows)
        begin, end = stage["summary"]["window"]
        kept = sorted(
            ((row, text) for row, text in zip(rows, texts, strict=True)
             if begin <= row["intended"] <= end and row["error"] != "cancelled"),
            key=lambda item: item[0]["intended"],
        )  # fmt: skip
        answers = [
            Answer(
                key=str(row["key"]), place=place, turn=int(row["turn"]), e2e=row["e2e"], ttft=row["ttft"],
                tpot=row["tpot"], output_tokens=row["output_tokens"] or 0, error=row["error"], message=row["message"],
                text=text if row["error"] is None else None,
            )
            for place, (row, text) in enumerate(kept)
        ]  # fmt: skip
        rate = stage["summary"]["output_tokens_per_second"]["value"]
        runs.append(
            RecordedRun(
                path=path, tool="sol bench", name=str(stage["name"]), answers=answers,
                input_tokens=[row["input_tokens"] for row, _ in kept],
                totals={"throughput": float(rate)} if rate else {},
            )
        )  # fmt: skip
    return runs


def _chosen(path: Path, runs: Sequence[RecordedRun], load: str | None) -> RecordedRun:
    names = [run.name for run in runs]
    if not runs:
        raise ConfigError(f"{path} has no load that was measured", param="a")
    if load is None:
        if len(runs) > 1:
            raise ConfigError(f"{path} has several loads; choose one with --load: {'; '.join(names)}", param="load")
        return runs[0]
    if load not in names:
        raise ConfigError(f"{path} has no load {load!r}; it has: {'; '.join(names)}", param="load")
    return runs[names.index(load)]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error})", param="a") from None
