"""How far a search is: a line or two a trial, on stderr."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from sol.tune.space import Config
from sol.tune.trial import Probe, Trial
from sol.tune.tuner import Watcher


class Progress(Watcher):
    """`trials` of them at most; `loads`: a line for each load as well, where one takes minutes."""

    def __init__(self, trials: int, *, loads: bool, out: TextIO | None = None) -> None:
        self._trials, self._loads, self._out = trials, loads, sys.stderr if out is None else out
        self._began = time.monotonic()
        self._number = 0

    def on_begin(self, number: int, config: Config) -> None:
        self._number = number
        if self._loads:
            self._say(f"{self._place()} {describe(config)}")

    def on_probe(self, probe: Probe) -> None:
        if self._loads:
            name = f"{probe.rate:.3g}/s" if probe.rate else "one at a time"
            values = ", ".join(_value(text, value) for text, value in probe.clauses.items() if value is not None)
            verdict = "" if not probe.rate else ": meets the SLO" if probe.meets else ": misses the SLO"
            self._say(f"    {name}{verdict} ({values or 'too few for percentiles'}), {probe.seconds:.0f} s")

    def on_end(self, trial: Trial, best: Trial | None) -> None:
        if not trial.started:
            self._say(f"not started: {describe(trial.config)}: {trial.reason}")
            return
        head = "   " if self._loads else f"{self._place()} {describe(trial.config)}:"
        score = f"{trial.score:.4g}" if trial.score else "nothing"
        top = f", best {best.score:.4g}" if best is not None else ""
        reason = f" ({trial.reason})" if trial.reason else ""
        self._say(f"{head} {trial.outcome}{reason}, {score}{top}")

    def on_note(self, text: str) -> None:
        self._say(text)

    def _place(self) -> str:
        return f"[{self._number} of {self._trials}, {time.monotonic() - self._began:.0f} s]"

    def _say(self, text: str) -> None:
        self._out.write(f"{text}\n")
        self._out.flush()


def _value(clause: str, value: float) -> str:
    """Of a clause as an SLO writes it: "TTFT p95 < 500 ms"."""
    name = clause.partition(" <")[0].partition(" >")[0]
    return f"{name} {1000 * value:.4g} ms" if clause.endswith(" ms") else f"{name} {value:.4g}"


def describe(config: Config) -> str:
    return ", ".join(f"{name} {value}" for name, value in config.items())
