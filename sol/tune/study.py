"""The memory of a search: every trial in a file, and who proposes the next one.

Proposals come from Optuna's TPE (Bergstra et al. 2011, "Algorithms for Hyper-Parameter Optimization"; multivariate as
in Falkner et al. 2018, BOHB) and, for it needs more trials than real servers allow, in between from a Gaussian process
(`surrogate`). Short loads are ended by Optuna's asynchronous successive halving (Li et al. 2020, "A System for
Massively Parallel Hyperparameter Tuning"). TPE draws from densities and knows no finite space: where it proposes what
is known already, the process does that as well.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import logging
import random
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Final

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.storages import BaseStorage, InMemoryStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from sol.errors import ConfigError
from sol.tune.space import Config, Space, key_of
from sol.tune.surrogate import most_promising
from sol.tune.trial import Probe, Trial

_NAME: Final = "sol-tune"
_FORMAT: Final = 1
_FACTOR: Final = 3
"""Of successive halving: a third goes on."""
_STARTUP: Final = 4
"""Trials before TPE models anything."""
_NEIGHBOURS_OF: Final = 5
"""Best configurations whose neighbours are looked at, where there are too many to look at all."""
_MOST_CANDIDATES: Final = 4000

optuna.logging.set_verbosity(optuna.logging.WARNING)
logging.getLogger("optuna").propagate = False


class Study:
    """`ask` for a configuration, `report` its score on a rung, `tell` what became of it."""

    def __init__(
        self,
        space: Space,
        *,
        settings: Mapping[str, Any],
        path: Path | None = None,
        resume: bool = False,
        seed: int = 0,
    ) -> None:
        """With a `path` everything is written there as it happens. `settings` is what scores depend on: a file with
        others is not gone on with.

        Raises `ConfigError` where the file exists and `resume` is false, the other way round, or does not fit.
        """
        self.space = space
        self.trials: list[Trial] = []
        self._known: dict[str, Trial] = {}
        self._retry: list[Config] = []
        self._asked: optuna.Trial | None = None
        self._claim = None if path is None else _claimed(path, resume)
        storage: BaseStorage = InMemoryStorage()
        with _quiet():
            if path is not None:
                storage = JournalStorage(JournalFileBackend(str(path)))
            self._study = optuna.create_study(
                study_name=_NAME, storage=storage, direction="maximize", load_if_exists=resume,
                pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=_FACTOR),
            )  # fmt: skip
        self._settings = json.loads(json.dumps({"format": _FORMAT, "space": space.describe(), **settings}))
        if resume:
            self._load(path)
        else:
            self._study.set_user_attr("settings", self._settings)
        offset = len(self._study.trials)
        self._random = random.Random(f"{seed}-{offset}")  # noqa: S311  (which neighbour is tried first)
        with _quiet():
            self._study.sampler = optuna.samplers.TPESampler(
                seed=seed + offset, multivariate=True, n_startup_trials=_STARTUP, warn_independent_sampling=False
            )

    @property
    def num_started(self) -> int:
        return sum(trial.started for trial in self.trials)

    def ranked(self) -> list[Trial]:
        """Those that have a score, the best first: longest loads before shorter ones, then by score."""
        scored = [trial for trial in self.trials if trial.best is not None and trial.score > 0]
        return sorted(scored, key=lambda trial: (trial.outcome == "finished", trial.score), reverse=True)

    def ask(self, *, first: Config | None = None, promising: bool = False) -> Config | None:
        """The next configuration, which nobody has tried: `first` if that is new, the most promising one if
        `promising`, else TPE's. None: there are no others."""
        if self._retry:
            return self._take(self._retry.pop(0))
        if first is not None and key_of(first) not in self._known:
            return self._take(first)
        if not promising:
            with _quiet():
                asked = self._study.ask(self._distributions())
            config = self.space.at([int(asked.params[parameter.name]) for parameter in self.space.parameters])
            if key_of(config) not in self._known:
                self._asked = asked
                return config
            asked.set_user_attr("repeats", self._known[key_of(config)].number)
            self._study.tell(asked, state=TrialState.FAIL)
        found = self._promising() or self._any()
        return None if found is None else self._take(found)

    def report(self, score: float, rung: int) -> bool:
        """Whether others did better on loads of this length, so that longer ones are not worth it."""
        assert self._asked is not None
        self._asked.report(score, step=_FACTOR**rung)
        return self._asked.should_prune()

    def tell(self, trial: Trial) -> None:
        """The end of the trial that was asked for last. Its number is set here."""
        assert self._asked is not None
        trial.number = self._asked.number
        self._asked.set_user_attr("trial", _to_json(trial))
        if trial.outcome == "interrupted":
            self._study.tell(self._asked, state=TrialState.FAIL)
        elif trial.outcome == "stopped":
            self._study.tell(self._asked, state=TrialState.PRUNED)
        else:
            self._study.tell(self._asked, trial.score)
        self._asked = None
        self._add(trial)

    def remember(self, name: str, value: Any) -> None:
        """Something else that a search that goes on should not measure again."""
        self._study.set_user_attr(name, value)

    def remembered(self, name: str) -> Any:
        return self._study.user_attrs.get(name)

    def close(self) -> None:
        """Somebody else may go on with the file."""
        if self._claim is not None:
            self._claim.close()

    def _take(self, config: Config) -> Config:
        place = self.space.place(config)
        names = [parameter.name for parameter in self.space.parameters]
        with _quiet():
            self._study.enqueue_trial(dict(zip(names, place, strict=True)))
            self._asked = self._study.ask(self._distributions())
        return config

    def _distributions(self) -> dict[str, BaseDistribution]:
        """Over places in the lists of values: of ordered parameters near ones are alike."""
        return {
            parameter.name: IntDistribution(0, len(parameter.values) - 1)
            if parameter.is_ordered
            else CategoricalDistribution(range(len(parameter.values)))
            for parameter in self.space.parameters
        }

    def _promising(self) -> Config | None:
        """None as long as there is nothing to go by, or when nothing is left."""
        told = [trial for trial in self._known.values() if trial.outcome != "excluded"]
        if not any(trial.score for trial in told):
            return None
        if self.space.size <= _MOST_CANDIDATES:
            candidates = [config for config in self.space if key_of(config) not in self._known]
        else:
            near = [
                config for trial in self.ranked()[:_NEIGHBOURS_OF] for config in self.space.neighbours(trial.config)
            ]
            drawn = [self._draw() for _ in range(_MOST_CANDIDATES)]
            candidates = [config for config in (*near, *drawn) if key_of(config) not in self._known]
        if not candidates:
            return None
        return most_promising(self.space, [t.config for t in told], [t.score for t in told], candidates)

    def _draw(self) -> Config:
        return self.space.at([self._random.randrange(len(parameter.values)) for parameter in self.space.parameters])

    def _any(self) -> Config | None:
        for _ in range(100):
            if key_of(config := self._draw()) not in self._known:
                return config
        return next((config for config in self.space if key_of(config) not in self._known), None)

    def _add(self, trial: Trial) -> None:
        self.trials.append(trial)
        if trial.outcome != "interrupted":
            self._known[key_of(trial.config)] = trial

    def _load(self, path: Path | None) -> None:
        theirs = self._study.user_attrs.get("settings")
        if theirs is None:  # it died before it had begun
            self._study.set_user_attr("settings", self._settings)
            return
        different = [name for name in {**theirs, **self._settings} if theirs.get(name) != self._settings.get(name)]
        if different:
            name = different[0]
            self.close()
            raise ConfigError(
                f"{path} was begun with {name} {json.dumps(theirs.get(name))}, not "
                f"{json.dumps(self._settings.get(name))}: give the same options, or begin a new study",
                param="resume",
            )
        for frozen in self._study.trials:
            stored = frozen.user_attrs.get("trial")
            if stored is not None:
                trial = _from_json(stored, self.space)
                self._add(trial)
                if trial.outcome == "interrupted":
                    self._retry.append(trial.config)
            elif frozen.state == TrialState.RUNNING:
                # Whoever ran it was killed. Its parameters are known, unless it was killed while it asked.
                self._study.tell(frozen.number, state=TrialState.FAIL)
                if (config := self._config(frozen)) is not None:
                    self._retry.append(config)
        done = set(self._known)
        fresh = {key_of(config): config for config in self._retry if key_of(config) not in done}
        self._retry = list(fresh.values())

    def _config(self, frozen: FrozenTrial) -> Config | None:
        names = [parameter.name for parameter in self.space.parameters]
        if set(frozen.params) != set(names):
            return None
        return self.space.at([int(frozen.params[name]) for name in names])


def _claimed(path: Path, resume: bool) -> IO[bytes]:
    """The file, locked as long as it is open: two searches that write to one would take each other's trials for theirs.

    A line that a full disk or a crash of the machine cut off is taken away, for the next one would be joined to it.
    """
    if resume and not path.exists():
        raise ConfigError(f"there is no {path} to go on with: leave --resume out, or correct --output", param="resume")
    if not resume and path.exists():
        raise ConfigError(
            f"{path} is there already: go on with it (--resume), or choose another --output", param="output"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror})", param="output") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigError(
            f"another search writes to {path}: wait until it has ended, or choose another --output", param="output"
        ) from None
    content = path.read_bytes()
    file.truncate(content.rfind(b"\n") + 1)
    return file


def _to_json(trial: Trial) -> dict[str, Any]:
    return dataclasses.asdict(trial)


def _from_json(data: Mapping[str, Any], space: Space) -> Trial:
    best = data["best"]
    # JSON has no tuples, and a space's own values are what `index` finds.
    config = {p.name: next(v for v in p.values if json.dumps(v) == json.dumps(data["config"][p.name]))
              for p in space.parameters}  # fmt: skip
    return Trial(**{
        **data,
        "config": config,
        "best": None if best is None else Probe(**best),
        "probes": [Probe(**probe) for probe in data["probes"]],
    })  # fmt: skip


class _quiet(warnings.catch_warnings):
    """Optuna warns of what it calls experimental: multivariate TPE, for one."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.simplefilter("ignore")
