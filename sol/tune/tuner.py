"""The search: `await tune(runner, space, goal)` → `TuneResult`, and the whole grid for comparison."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from sol.errors import ConfigError
from sol.tune.constraints import Constraints
from sol.tune.loads import RateSearch, Rung, least_rate, rate_alone, rungs_of
from sol.tune.space import Config, Space, key_of
from sol.tune.study import Study
from sol.tune.trial import Goal, Probe, Runner, Trial, TrialCrash

DEFAULT_TRIALS: Final = 40
DEFAULT_REQUESTS: Final = 300
_EXPLORE: Final = 4
"""Trials before any looks where the ones before promise most; of those after them one in four is TPE's."""
_HOPELESS: Final = 3
"""Crashes after which a search in which nothing ever ran ends."""


class Watcher:
    """Told of what happens, as it happens. This one does nothing with it."""

    def on_begin(self, number: int, config: Config) -> None:
        """Trial `number` (of those that are started, from 1) begins."""

    def on_probe(self, probe: Probe) -> None: ...

    def on_end(self, trial: Trial, best: Trial | None) -> None:
        """`best` so far."""

    def on_note(self, text: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """How long and how thoroughly. Raises `ConfigError`."""

    trials: int = DEFAULT_TRIALS
    """Configurations to start, at most."""
    num_requests: int = DEFAULT_REQUESTS
    """Of the longest loads."""
    alone_requests: int = 8
    """One at a time, before any load."""
    tolerance: float = 0.01
    """To which part of itself the greatest rate is known in the end."""
    seed: int = 0
    path: Path | None = None
    """Where every trial is written as it ends; None: nowhere."""
    resume: bool = False
    """Go on with what is there."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What else scores depend on (model, load, machine): a search goes on only if it is the same."""

    def __post_init__(self) -> None:
        for name, least in (("trials", 1), ("num_requests", 1), ("alone_requests", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, not {getattr(self, name)}", param=name)
        if not 0 < self.tolerance <= 0.5:
            raise ConfigError(f"tolerance must be above 0 and at most 0.5, not {self.tolerance}", param="tolerance")
        if self.resume and self.path is None:
            raise ConfigError("resume needs the file of the search that is to go on", param="resume")


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    space: Space
    goal: Goal
    trials: Sequence[Trial]
    best: Trial | None
    """None: nothing meets the SLO."""
    default: Trial | None
    """The configuration that the engine would have chosen, where the search was told of it."""
    exclusions: Sequence[str]
    """What crashes taught."""
    interrupted: bool
    seconds: float

    @property
    def num_started(self) -> int:
        return sum(trial.started for trial in self.trials)

    @property
    def gain(self) -> float | None:
        """Score of the best over that of the default."""
        if self.best is None or self.default is None or not self.default.score:
            return None
        return self.best.score / self.default.score


async def tune(
    runner: Runner,
    space: Space,
    goal: Goal,
    *,
    search: Search | None = None,
    default: Config | None = None,
    stop: asyncio.Event | None = None,
    watcher: Watcher | None = None,
) -> TuneResult:
    """The best configuration of `space` that at most `search.trials` starts find.

    `default`, where given, is the first trial. After `stop` the trial under way is broken off and what there is is
    returned. Raises `ConfigError`.
    """
    tuner = _Tuner(runner, space, goal, search or Search(), default, stop or asyncio.Event(), watcher or Watcher())
    return await tuner.run()


class _Tuner:
    def __init__(
        self,
        runner: Runner,
        space: Space,
        goal: Goal,
        search: Search,
        default: Config | None,
        stop: asyncio.Event,
        watcher: Watcher,
    ) -> None:
        _check(runner, goal)
        if default is not None and default not in space:
            raise ConfigError(f"the default {dict(default)} is not in the space", param="space")
        self._runner, self._space, self._goal, self._search = runner, space, goal, search
        self._default, self._stop, self._watcher = default, stop, watcher
        self._rungs = rungs_of(search.num_requests, least=goal.least_requests, tolerance=search.tolerance)
        settings = {
            "slo": goal.slo.text, "price_per_hour": goal.price_per_hour, "kl_bound": goal.kl_bound,
            "allow_lossy": goal.allow_lossy, "num_requests": search.num_requests, **search.settings,
        }  # fmt: skip
        self._study = Study(space, settings=settings, path=search.path, resume=search.resume, seed=search.seed)
        self._constraints = Constraints(space)
        for trial in self._study.trials:
            self._learn(trial)
        self._divergences: dict[str, float | None] = dict(self._study.remembered("divergences") or {})

    async def run(self) -> TuneResult:
        try:
            return await self._run()
        finally:
            self._study.close()

    async def _run(self) -> TuneResult:
        began = time.monotonic()
        study, first = self._study, self._default
        while study.num_started < self._search.trials and not self._stop.is_set():
            config = study.ask(first=first, promising=study.num_started >= _EXPLORE and study.num_started % 4 > 0)
            first = None
            if config is None:
                self._watcher.on_note("every configuration was tried")
                break
            trial = await self._try(config)
            study.tell(trial)
            self._learn(trial)
            self._watcher.on_end(trial, self._best())
            if self._hopeless():
                self._watcher.on_note(f"the first {_HOPELESS} configurations all died: the engine does not run at all")
                break
        default = None if self._default is None else key_of(self._default)
        return TuneResult(
            space=self._space,
            goal=self._goal,
            trials=tuple(study.trials),
            best=self._best(),
            default=next((t for t in study.trials if key_of(t.config) == default and t.outcome != "interrupted"), None),
            exclusions=tuple(self._constraints.describe()),
            interrupted=self._stop.is_set(),
            seconds=time.monotonic() - began,
        )

    def _hopeless(self) -> bool:
        started = [trial for trial in self._study.trials if trial.started]
        return len(started) >= _HOPELESS and all(trial.outcome == "crashed" for trial in started)

    def _best(self) -> Trial | None:
        finished = [trial for trial in self._study.ranked() if trial.outcome == "finished"]
        return finished[0] if finished else None

    def _learn(self, trial: Trial) -> None:
        if trial.outcome == "crashed":
            self._constraints.add_crash(trial.config, trial.reason)
        elif trial.probes:
            self._constraints.add_success(trial.config)

    async def _try(self, config: Config) -> Trial:
        trial = Trial(number=-1, config=config, outcome="excluded")
        began = time.monotonic()
        trial.reason = self._excluded(config) or ""
        if trial.reason:
            return trial
        task = asyncio.ensure_future(self._judge(trial))
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait((task, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                task.cancel()
            await task
        except asyncio.CancelledError:
            if not self._stop.is_set():
                raise
            trial.outcome, trial.reason = "interrupted", "the search was stopped"
        except TrialCrash as crash:
            trial.outcome, trial.reason = "crashed", str(crash)
            trial.score, trial.best = 0.0, None
        finally:
            stopping.cancel()
            task.cancel()
            await asyncio.gather(task, stopping, return_exceptions=True)
        trial.seconds = time.monotonic() - began
        return trial

    async def _judge(self, trial: Trial) -> None:
        """Its answers, which takes servers as well, then its speed. Raises `TrialCrash`."""
        trial.kl, reason = await self._quality(trial.config)
        if reason is not None:
            trial.reason = reason
            return
        self._watcher.on_begin(self._study.num_started + 1, trial.config)
        await self._measure(trial)

    def _excluded(self, config: Config) -> str | None:
        reason = self._constraints.excludes(config) or self._runner.refuses(config)
        if reason is not None:
            return reason
        best, most = self._best(), self._runner.most(config)
        if best is not None and most < best.score:
            return f"at most {most:.3g} by the model of the machine, less than the {best.score:.3g} of the best"
        return None

    async def _quality(self, config: Config) -> tuple[float | None, str | None]:
        """Its divergence, and why that speaks against it."""
        lossy = self._space.lossy_part(config)
        if not lossy or self._goal.allow_lossy:
            return None, None
        key = key_of(lossy)
        if key not in self._divergences:
            self._watcher.on_note(f"measuring how far {_named(lossy)} moves the model's answers")
            try:
                self._divergences[key] = await self._runner.divergence(config)
            except TrialCrash as crash:
                self._constraints.add_crash(config, str(crash))
                return None, str(crash)
            self._study.remember("divergences", self._divergences)
        kl = self._divergences[key]
        if kl is None:
            return None, f"{_named(lossy)} changes answers and nothing here can measure how much (see --allow-lossy)"
        if kl > self._goal.kl_bound:
            return kl, f"{_named(lossy)} has a KL divergence of {kl:.3g} nats a token, above {self._goal.kl_bound:g}"
        return kl, None

    async def _measure(self, trial: Trial) -> None:
        """Fills `trial` in. Raises `TrialCrash`."""
        goal, study = self._goal, self._study
        trial.outcome = "misses"
        async with self._runner.start(trial.config) as running:
            search = RateSearch(running, goal, trial.probes, self._watcher.on_probe)
            alone = await search.alone(self._search.alone_requests)
            if not alone.meets and alone.attainment == 0:
                trial.reason = "no request meets the SLO, even one at a time"
                return
            best = self._best()
            beat = 0.0 if best is None else _rate_to_beat(best)
            start, factor = beat or 4 * rate_alone(alone), 2.0
            for number, rung in enumerate(self._rungs):
                found = await search.greatest(rung, start=start, factor=factor, least=least_rate(alone), beat=beat)
                if found is None:
                    trial.best, trial.score, trial.rung = None, 0.0, number
                    trial.reason = "it misses the SLO at the lowest rates"
                    return
                trial.best, trial.rung, trial.score = found, number, goal.score(found)
                start, factor = found.rate, 1 + 2 * rung.tolerance
                if number < len(self._rungs) - 1 and study.report(trial.score, number) and not self._close(trial, rung):
                    trial.outcome = "stopped"
                    trial.reason = f"others do better with {rung.num_requests} requests"
                    return
            assert trial.best is not None
            if trial.best.rate * (1 + self._rungs[-1].tolerance) < beat:
                trial.outcome, trial.reason = "stopped", "it misses the SLO at a rate that the best meets it at"
                return
            trial.outcome = "finished"

    def _close(self, trial: Trial, rung: Rung) -> bool:
        """Whether a load of this length cannot tell it from the best."""
        best = self._best()
        return best is not None and trial.score >= best.score * (1 - rung.tolerance)


async def exhaustive(runner: Runner, space: Space, goal: Goal, *, search: Search | None = None) -> Trial | None:
    """The best configuration of the whole grid, with loads of full length; None: nothing meets the SLO.

    A configuration that misses the SLO at the rate at which the best so far would have its score if every request were
    good cannot have a greater one, so most cost a single load.
    """
    search = search or Search()
    _check(runner, goal)
    rung = rungs_of(search.num_requests, least=goal.least_requests, tolerance=search.tolerance)[-1]
    best: Trial | None = None
    for number, config in enumerate(space):
        if runner.refuses(config) is not None:
            continue
        trial = Trial(number=number, config=config, outcome="misses")
        async with runner.start(config) as running:
            rates = RateSearch(running, goal, trial.probes, lambda probe: None)
            alone = await rates.alone(search.alone_requests)
            if best is None:
                found = await rates.greatest(rung, start=4 * rate_alone(alone), factor=2.0, least=least_rate(alone))
            else:
                least = _rate_to_beat(best)
                found = await rates.greatest(rung, start=least, factor=1 + 2 * rung.tolerance, least=least)
        if found is not None:
            trial.outcome, trial.best, trial.score = "finished", found, goal.score(found)
            if best is None or trial.score > best.score:
                best = trial
    return best


def _check(runner: Runner, goal: Goal) -> None:
    if runner.slo != goal.slo:
        raise ConfigError(
            f"the runner judges by {runner.slo.text}, and the goal is {goal.slo.text}: give both the same", param="slo"
        )


def _rate_to_beat(best: Trial) -> float:
    """At which another would have the score of `best` if all its requests were good."""
    assert best.best is not None
    return best.best.rate * best.best.attainment


def _named(lossy: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in lossy.items())
