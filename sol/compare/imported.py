"""Results of other load generators, as they write them.

- `vllm bench serve --save-result --save-detailed`: one object with parallel lists over requests (vLLM's
  vllm/benchmarks/serve.py). E2E is TTFT plus all gaps.
- GuideLLM's benchmarks.json: `benchmarks[].requests.successful` and `.errored` (GuideLLM's
  src/guidellm/schemas/base/request_stats.py).
- AIPerf's profile_export.jsonl, a record a line, and profile_export_aiperf.json, which has totals alone (AIPerf's
  docs/tutorials/working-with-profile-exports.md and docs/reference/json-export-schema.md).

Seconds in, seconds out: what is in milliseconds says so by its name or its unit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from sol.compare.recorded import RecordedRun
from sol.compare.samples import Answer, Metric
from sol.errors import ConfigError

_SENT: Final = "when a request was sent"
_UNITS: Final = {"ms": 1e-3, "s": 1.0, "sec": 1.0, "us": 1e-6, "ns": 1e-9}


def read_foreign(path: Path, document: Any, text: str) -> list[RecordedRun]:
    """`document` is the file's JSON, or None where it is one value a line. Raises `ConfigError` for another form."""
    if document is None or (isinstance(document, dict) and "metrics" in document and "metadata" in document):
        return [_aiperf_records(path, text)]
    if isinstance(document, dict):
        if isinstance(document.get("benchmarks"), list):
            return list(_guidellm(path, document["benchmarks"]))
        if "total_input_tokens" in document and "duration" in document:
            return [_vllm(path, document)]
        if isinstance(document.get("request_latency"), dict):
            return [_aiperf_totals(path, document)]
    raise ConfigError(
        f"{path} is of no known form: it must be JSON of sol bench, of vllm bench serve (--save-result), of GuideLLM "
        "(benchmarks.json) or of AIPerf (profile_export.jsonl or profile_export_aiperf.json)",
        param="a",
    )


def _vllm(path: Path, document: Mapping[str, Any]) -> RecordedRun:
    totals = _vllm_totals(document)
    answers: list[Answer] = []
    inputs: list[int | None] = []
    if isinstance(document.get("ttfts"), list) and isinstance(document.get("itls"), list):
        size = len(document["ttfts"])
        texts = document.get("generated_texts") or [None] * size
        starts = document.get("start_times") or [0.0] * size
        rows = zip(starts, document["ttfts"], document["itls"], document["input_lens"], document["output_lens"],
                   texts, document["errors"], range(size), strict=True)  # fmt: skip
        # Lists are in the order of the prompts. Sorted by when they were sent, neighbours in the list are in time, too.
        for place, row in enumerate(sorted(rows, key=lambda row: row[0])):
            _, ttft, gaps, input_tokens, output_tokens, text, error, index = row
            failed = bool(error) or ttft <= 0
            tokens = int(output_tokens)
            inputs.append(int(input_tokens))
            answers.append(
                Answer(
                    key=f"{index}:{input_tokens}", place=place, ttft=None if failed else float(ttft),
                    e2e=None if failed else float(ttft) + sum(gaps), output_tokens=tokens,
                    tpot=sum(gaps) / (tokens - 1) if not failed and tokens > 1 else None,
                    error="failed" if failed else None, message=str(error) or None, text=None if failed else text,
                )
            )  # fmt: skip
    return RecordedRun(path=path, tool="vllm bench", name=str(document.get("label") or "vllm bench serve"),
                       answers=answers, input_tokens=inputs, totals=totals, counts_from=_SENT)  # fmt: skip


def _vllm_totals(document: Mapping[str, Any]) -> dict[Metric, float]:
    names: tuple[tuple[Metric, str, float], ...] = (
        ("ttft", "median_ttft_ms", 1e-3), ("tpot", "median_tpot_ms", 1e-3), ("e2e", "median_e2el_ms", 1e-3),
        ("throughput", "output_throughput", 1.0),
    )  # fmt: skip
    return {metric: float(document[name]) * factor for metric, name, factor in names if document.get(name)}


def _guidellm(path: Path, benchmarks: Sequence[Mapping[str, Any]]) -> Iterator[RecordedRun]:
    for number, benchmark in enumerate(benchmarks):
        requests = benchmark["requests"]
        rows: list[tuple[Any, str | None]] = [(row, None) for row in requests.get("successful") or ()]
        rows += [(row, "failed") for row in requests.get("errored") or ()]
        rows.sort(key=lambda item: float(item[0].get("request_start_time") or item[0].get("start_time") or 0.0))
        answers, inputs = [], []
        for place, (row, error) in enumerate(rows):
            gap = row.get("inter_token_latency_ms")
            inputs.append(row.get("prompt_tokens"))
            answers.append(
                Answer(
                    key=_prompt_key(row), place=place, e2e=row.get("request_latency") if error is None else None,
                    ttft=_seconds(row.get("time_to_first_token_ms")) if error is None else None,
                    # GuideLLM's time_per_output_token includes TTFT; its ITL is what others call TPOT.
                    tpot=_seconds(gap) if error is None else None, output_tokens=int(row.get("output_tokens") or 0),
                    error=error, message=None if error is None else _why(row),
                    text=row.get("output") if error is None else None,
                )
            )  # fmt: skip
        yield RecordedRun(path=path, tool="GuideLLM", name=_strategy(benchmark, number), answers=answers,
                          input_tokens=inputs, counts_from=_SENT)  # fmt: skip


def _why(row: Mapping[str, Any]) -> str:
    info = row.get("info")
    return str(row.get("error") or (info.get("error") if isinstance(info, dict) else None) or "")


def _strategy(benchmark: Mapping[str, Any], number: int) -> str:
    """Like `0 (constant)`: GuideLLM has named it at several places."""
    for holder in (benchmark.get("config"), benchmark.get("args"), benchmark.get("scheduler")):
        strategy = holder.get("strategy") if isinstance(holder, dict) else None
        if isinstance(strategy, dict) and strategy.get("type_"):
            return f"{number} ({strategy['type_']})"
    return str(number)


def _prompt_key(row: Mapping[str, Any]) -> str:
    """What was asked, without what differs from run to run (the model's name, ids). Empty for a request that failed
    before GuideLLM wrote down what it was."""
    asked: Any = row.get("prompt")
    if asked is None and isinstance(row.get("request_args"), str):
        try:
            found = json.loads(row["request_args"])
            body = found.get("body") or found.get("payload") or found
            asked = body.get("messages") or body.get("prompt")
        except (ValueError, AttributeError):
            asked = row["request_args"]
    if asked is None:
        return ""
    return hashlib.blake2b(json.dumps(asked, sort_keys=True).encode(), digest_size=12).hexdigest()


def _aiperf_records(path: Path, text: str) -> RecordedRun:
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                row = json.loads(line)
                rows.append((row["metadata"], row.get("metrics") or {}, row.get("error")))
            except (ValueError, KeyError, TypeError, AttributeError) as wrong:
                raise ConfigError(
                    f"{path}, line {number} is no record of AIPerf's ({type(wrong).__name__}: {wrong}): it has "
                    "metadata, metrics and error",
                    param="a",
                ) from None
    rows = [row for row in rows if row[0].get("benchmark_phase", "profiling") == "profiling"]
    rows.sort(key=lambda row: int(row[0].get("request_start_ns") or 0))
    answers, inputs = [], []
    for place, (metadata, metrics, error) in enumerate(rows):
        size = _value(metrics, "input_sequence_length")
        inputs.append(None if size is None else int(size))
        answers.append(
            Answer(
                key=str(metadata.get("conversation_id") or metadata.get("session_num")), place=place,
                turn=int(metadata.get("turn_index") or 0), e2e=_value(metrics, "request_latency"),
                ttft=_value(metrics, "time_to_first_token"), tpot=_value(metrics, "inter_token_latency"),
                output_tokens=int(_value(metrics, "output_sequence_length") or 0),
                error=None if error is None else str(error.get("type") or "failed"),
                message=None if error is None else str(error.get("message") or ""),
            )
        )  # fmt: skip
    return RecordedRun(path=path, tool="AIPerf", name="profile", answers=answers, input_tokens=inputs,
                       counts_from=_SENT)  # fmt: skip


def _aiperf_totals(path: Path, document: Mapping[str, Any]) -> RecordedRun:
    names: tuple[tuple[Metric, str], ...] = (
        ("e2e", "request_latency"), ("ttft", "time_to_first_token"), ("tpot", "inter_token_latency"),
    )  # fmt: skip
    totals: dict[Metric, float] = {}
    for metric, name in names:
        entry = document.get(name)
        if isinstance(entry, dict) and entry.get("p50") is not None:
            totals[metric] = float(entry["p50"]) * _UNITS.get(str(entry.get("unit")), 1e-3)
    rate = document.get("output_token_throughput")
    if isinstance(rate, dict) and rate.get("avg"):
        totals["throughput"] = float(rate["avg"])
    return RecordedRun(path=path, tool="AIPerf", name="profile", answers=(), totals=totals, counts_from=_SENT)


def _value(metrics: Mapping[str, Any], name: str) -> float | None:
    """In seconds where it has a unit of time."""
    entry = metrics.get(name)
    if not isinstance(entry, dict) or not isinstance(entry.get("value"), (int, float)):
        return None
    return float(entry["value"]) * _UNITS.get(str(entry.get("unit")), 1.0)


def _seconds(milliseconds: Any) -> float | None:
    return None if milliseconds is None else float(milliseconds) / 1000
