"""What came of a search, for programs: JSON with everything, and the file or the command that starts the best."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Mapping
from typing import Any, Final

from sol.engines.drivers import DRIVERS
from sol.tune.engines import Target
from sol.tune.space import Config
from sol.tune.trial import Trial
from sol.tune.tuner import TuneResult
from sol.version import __version__

FORMAT: Final = "sol-tune/1"


def to_json(result: TuneResult, *, what: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """`what` was tuned; `options` of the command. Times are seconds, rates a second."""
    return {
        "format": FORMAT,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "sol_version": __version__,
        "what": dict(what),
        "options": dict(options),
        "slo": {"given": result.goal.slo.text, "clauses": [clause.text for clause in result.goal.slo.clauses]},
        "space": result.space.describe(),
        "interrupted": result.interrupted,
        "seconds": result.seconds,
        "num_started": result.num_started,
        "best": None if result.best is None else result.best.number,
        "default": None if result.default is None else result.default.number,
        "gain": result.gain,
        "exclusions": list(result.exclusions),
        "trials": [trial_json(trial) for trial in result.trials],
        "definitions": {
            "score": "good requests a second at the greatest rate that meets the SLO"
            if result.goal.price_per_hour is None
            else "good output tokens at that rate for a unit of the price's currency",
            "kl": "nats a token from the lossless configuration, over the tokens that both list and all others as one",
        },
    }


def trial_json(trial: Trial) -> dict[str, Any]:
    return dataclasses.asdict(trial)


def to_yaml(options: Mapping[str, Any], comment: str) -> str:
    """A file for `--config` of `sol serve` (`serve_options`) or `sol simulate`. JSON values are YAML."""
    lines = [f"# {line}".rstrip() for line in comment.splitlines()]
    lines += [f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in options.items()]
    return "\n".join(lines) + "\n"


def command_line(target: Target, config: Config) -> str:
    """The engine's own command, at its usual port."""
    return DRIVERS[target.engine].command(target.spec(config), port=8000).text
