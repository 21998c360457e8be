"""The measurement as one JSON document, and its requests as a table.

`to_json` holds all that the report shows, all that was asked for, and each request's own figures, so that runs can be
compared later. Times are seconds. A figure with an interval is `{"value", "low", "high", "n", "n_effective"}`; null is
what could not be known.
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from sol.bench.metrics import e2e, tpot, ttft
from sol.bench.records import RequestRecord, Stage
from sol.bench.session import Measured
from sol.bench.tokens import num_output_tokens, token_times
from sol.version import __version__

FORMAT: Final = "sol-bench/1"

COLUMNS: Final = (
    "index", "key", "turn", "intended", "started", "connected", "sent", "ttft", "ttfc", "tpot", "e2e", "end",
    "input_tokens", "cached_tokens", "output_tokens", "chunks", "finish_reason", "status", "error", "message",
)  # fmt: skip
"""Of a request, in JSON and CSV. `ttft` to `e2e` are durations, the other times are moments of the stage."""

_SERIES_POINTS: Final = 2000


def to_json(
    measured: Sequence[Measured],
    *,
    endpoint: Mapping[str, Any],
    data: Mapping[str, Any],
    options: Mapping[str, Any],
    machine: Mapping[str, Any],
    packages: Mapping[str, Any],
    seed: int,
    keep_timelines: bool = False,
    keep_text: bool = False,
) -> dict[str, Any]:
    document: dict[str, Any] = {
        "format": FORMAT,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "sol_version": __version__,
        "endpoint": endpoint,
        "data": data,
        "options": options,
        "seed": seed,
        "client_machine": machine,
        "client_packages": packages,
        "interrupted": any(one.stage.interrupted for one in measured),
        "definitions": {
            "ttft": "first output - intended send time",
            "tpot": "(e2e - ttft) / (output tokens - 1)",
            "itl": "gaps between tokens; a chunk's gap is spread over its tokens",
            "e2e": "last output - intended send time",
        },
        "stages": [_stage(one, keep_timelines=keep_timelines, keep_text=keep_text) for one in measured],
    }
    found: dict[str, Any] = plain(document)
    return found


def to_csv(measured: Sequence[Measured]) -> str:
    """One line a request, the stage's number and load before its columns."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("stage", "load", *COLUMNS))
    for number, one in enumerate(measured):
        for record in one.stage.records:
            writer.writerow((number, one.load.name, *(_cell(value) for value in _row(record, one.stage))))
    return out.getvalue()


def _stage(one: Measured, *, keep_timelines: bool, keep_text: bool) -> dict[str, Any]:
    stage = one.stage
    requests: dict[str, Any] = {"columns": COLUMNS, "rows": [_row(record, stage) for record in stage.records]}
    if keep_timelines:
        requests["arrivals"] = [list(record.times) for record in stage.records]
        requests["arrival_tokens"] = [token_times(record, stage.counting).counts.tolist() for record in stage.records]
    if keep_text:
        requests["texts"] = [record.text for record in stage.records]
    summary = dataclasses.asdict(one.summary)
    if one.summary.slo is not None:
        summary["slo"]["text"] = one.summary.slo.slo.text
    return {
        "name": one.load.name,
        "load": stage.load,
        "counting": stage.counting,
        "started_at": stage.started_at,
        "load_seconds": stage.load_seconds,
        "seconds": stage.seconds,
        "interrupted": stage.interrupted,
        "summary": summary,
        "cost": None if one.cost is None else dataclasses.asdict(one.cost),
        "repeated_prompts": _repeated(stage),
        "server_series": stage.server,
        "client_series": _client_series(stage),
        "requests": requests,
    }


def _row(record: RequestRecord, stage: Stage) -> tuple[Any, ...]:
    response = token_times(record, stage.counting)
    streamed = record.streamed and len(record.times) > 0
    tokens = num_output_tokens(record, stage.counting)
    content = record.first_content
    return (
        record.index, record.key, record.turn, record.intended, record.started, record.connected, record.sent,
        ttft(record) if streamed else None,
        content - record.intended if streamed and content is not None else None,
        tpot(record, response, tokens) if streamed else None,
        e2e(record) if record.times else None,
        record.end, record.prompt_tokens, record.cached_tokens, tokens, record.num_chunks, record.finish_reason,
        record.status, record.error, record.message,
    )  # fmt: skip


def _repeated(stage: Stage) -> int:
    """Requests whose prompt was sent before in the same stage."""
    first_turns = [record.key for record in stage.records if record.turn == 0]
    return len(first_turns) - len(set(first_turns))


def _client_series(stage: Stage) -> dict[str, list[float]]:
    """Lag and requests in flight, thinned out: of each group of beats the longest lag and the last count."""
    due, lag = np.array(stage.heartbeats.due), np.array(stage.heartbeats.lag)
    in_flight = np.array(stage.heartbeats.in_flight)
    if not len(due):
        return {"time": [], "lag": [], "in_flight": []}
    edges = np.unique(np.linspace(0, len(due), min(len(due), _SERIES_POINTS) + 1).astype(int))[:-1]
    return {
        "time": due[edges].tolist(),
        "lag": np.maximum.reduceat(lag, edges).tolist(),
        "in_flight": in_flight[edges].tolist(),
    }


def _cell(value: Any) -> Any:
    return f"{value:.6f}" if isinstance(value, float) else value


def plain(value: Any) -> Any:
    """What JSON can hold: infinities are null, times have a precision that clocks have."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (float, np.floating)):
        number = float(value)
        return float(f"{number:.9g}") if math.isfinite(number) else None
    return int(value) if isinstance(value, np.integer) else value
