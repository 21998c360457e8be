"""The comparison as one JSON document: what the report shows, what was asked for, and every answer's figures.

Times are seconds, effects are ratios B / A; null is what could not be known.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping
from typing import Any, Final

from sol.bench.result import plain
from sol.compare.samples import Block, Round
from sol.compare.session import Outcome
from sol.compare.summary_text import verdict_line
from sol.version import __version__

FORMAT: Final = "sol-compare/1"

COLUMNS: Final = ("place", "key", "turn", "e2e", "ttft", "tpot", "output_tokens", "error", "message")


def to_json(
    outcome: Outcome,
    *,
    sides: Mapping[str, Mapping[str, Any]],
    data: Mapping[str, Any] | None,
    options: Mapping[str, Any],
    machine: Mapping[str, Any],
    packages: Mapping[str, Any],
    keep_text: bool = False,
) -> dict[str, Any]:
    """`sides` describes A and B, without secrets."""
    comparison = outcome.comparison
    document: dict[str, Any] = {
        "format": FORMAT,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "sol_version": __version__,
        "verdict": comparison.verdict,
        "texts_verdict": outcome.texts.verdict,
        "verdict_line": verdict_line(outcome),
        "exit_code": outcome.exit_code,
        "interrupted": outcome.interrupted,
        "sides": sides,
        "data": data,
        "options": options,
        "client_machine": machine,
        "client_packages": packages,
        "notes": list(outcome.notes),
        "plan": dataclasses.asdict(comparison.plan),
        "announced_blocks": comparison.announced,
        "paired": comparison.paired,
        "effects": {metric: dataclasses.asdict(effect) for metric, effect in comparison.effects.items()},
        "failures": dataclasses.asdict(comparison.failures),
        "texts": dataclasses.asdict(outcome.texts),
        "likelihoods": dataclasses.asdict(outcome.likelihoods),
        "blocks": [_block(block, keep_text) for block in comparison.blocks],
    }
    found: dict[str, Any] = plain(document)
    return found


def _block(block: Block, keep_text: bool) -> dict[str, Any]:
    return {
        "number": block.number,
        "pairs": [
            {"order": "AB" if pair.a_first else "BA", "a": _round(pair.a, keep_text), "b": _round(pair.b, keep_text)}
            for pair in block.pairs
        ],
    }


def _round(one: Round, keep_text: bool) -> dict[str, Any]:
    columns = (*COLUMNS, "text", "token_ids") if keep_text else COLUMNS
    rows = [[getattr(answer, name) for name in columns] for answer in one.answers]
    return {"seconds": one.seconds, "client_limited": one.client_limited, "columns": columns, "rows": rows}
