"""What is known of an engine: how it is started, where it says that it is ready, and what its metrics are called."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from sol.engines.commands import ServerCommand, command_from_text
from sol.engines.service import free_port
from sol.engines.signals import MetricNames, Signals
from sol.engines.spec import EngineSpec, SpeculationSpec
from sol.errors import ConfigError
from sol.listening import listening_url

Words = list[str]


class Driver:
    """One engine. A subclass says what differs; all are stateless.

    An option of a spec is either in `flags`, or has a method of its own named `_NAME(value, spec)` that returns words
    of the command line, or is refused: nothing that a user asked for is left out in silence.
    """

    name: ClassVar[str]
    """As in gateway.yaml."""
    title: ClassVar[str]
    """As in a sentence."""
    program: ClassVar[tuple[str, ...]] = ()
    host_flag: ClassVar[str] = "--host"
    port_flag: ClassVar[str] = "--port"
    always: ClassVar[tuple[str, ...]] = ()
    """Flags that the engine needs in order to have the routes below."""
    flags: ClassVar[Mapping[str, str]] = {}
    """Options that are a flag and its value."""
    choices: ClassVar[Mapping[str, Collection[str]]] = {}
    """Values that an option may have, where there are few."""
    remedies: ClassVar[Mapping[str, str]] = {}
    """What to do instead of an option that is refused."""
    methods: ClassVar[Collection[str]] = ()
    """Of speculation."""

    health_path: ClassVar[str] = "/health"
    """Answers 200 while the server is there. Whether its engine makes progress, `Signals` show better."""
    ready_path: ClassVar[str] = "/health"
    """Answers 200 once the model is loaded and requests may come."""
    metrics_path: ClassVar[str | None] = "/metrics"
    drains: ClassVar[bool] = False
    """Whether SIGTERM lets admitted requests finish. Where it does not, whoever stops the engine has to wait first."""
    metric_names: ClassVar[MetricNames] = MetricNames()

    def signals(self, text: str, now: float) -> Signals:
        """What a page at `metrics_path` says. `now` is when it was read."""
        return self.metric_names.read(text, now)

    def command(
        self, spec: EngineSpec, *, host: str = "127.0.0.1", port: int | None = None, directory: Path | None = None
    ) -> ServerCommand:
        """The engine's command line for `spec`, listening on `host` and `port` (None: a free one).

        `directory` is where an engine that takes a file of options finds it (None: a new one for temporary files).
        Raises `ConfigError` for an option that this engine does not have, or not with this value.
        """
        if spec.command is not None:
            command = command_from_text(spec.command, port=port, host=host)
            if command.engine is None:
                command = replace(command, engine=self.name, ready_path=self.ready_path)
            return replace(command, env={**command.env, **spec.env})
        assert spec.model is not None
        chosen = port or free_port(host)
        words = [*(shlex.split(spec.program) if spec.program else self._program()), *self._model_words(spec.model)]
        words += [self.host_flag, host, self.port_flag, str(chosen), *self.always]
        words += self._options(spec)
        words += self._file(spec, chosen, directory)
        words += spec.extra_args
        return ServerCommand(
            argv=tuple(words),
            url=listening_url(host, chosen),
            engine=self.name,
            ready_path=self.ready_path,
            env={**self._environment(spec), **spec.env},
        )

    def _program(self) -> Words:
        return list(self.program)

    def _model_words(self, model: str) -> Words:
        return [model]

    def _options(self, spec: EngineSpec) -> Words:
        words: Words = []
        for name, value in spec.given().items():
            if name == "model":
                continue
            if name in self.choices and value not in self.choices[name]:
                allowed = ", ".join(sorted(self.choices[name]))
                raise ConfigError(f"{name} of {self.title} must be one of {allowed}, not {value!r}", param=name)
            own: Callable[[Any, EngineSpec], Words] | None = getattr(self, f"_{name}", None)
            if own is not None:
                words += own(value, spec)
            elif name in self.flags:
                words += [self.flags[name], str(value)]
            else:
                raise self.refusal(name, value)
        return words

    def refusal(self, name: str, value: object) -> ConfigError:
        remedy = self.remedies.get(name, "leave it out; what the engine's command line has for it goes into extra_args")
        return ConfigError(f"{self.title} has nothing for {name} (here {value!r}): {remedy}", param=name)

    def _environment(self, spec: EngineSpec) -> dict[str, str]:
        """Of the engine's process, beside what the spec says."""
        return {}

    def _file(self, spec: EngineSpec, port: int, directory: Path | None) -> Words:
        """Options that go into a file: writes it, and returns the words that name it."""
        return []

    def _speculation(self, value: SpeculationSpec | bool, spec: EngineSpec) -> Words:
        if isinstance(value, bool):
            return self._without_speculation()
        if not self.methods:
            raise self.refusal("speculation", value.method)
        if not set(value.method.split("+")) <= set(self.methods):
            raise ConfigError(
                f"speculation.method of {self.title} must be one of {', '.join(sorted(self.methods))}, not "
                f"{value.method!r}",
                param="speculation.method",
            )
        return self._speculate(value)

    def _without_speculation(self) -> Words:
        return []  # what an engine does that is not asked to speculate

    def _speculate(self, value: SpeculationSpec) -> Words:
        raise NotImplementedError

    def _no_options(self, value: SpeculationSpec) -> None:
        if value.options:
            name = f"speculation.options.{next(iter(value.options))}"
            raise ConfigError(f"{self.title} takes flags and no such keys as {name}: use extra_args", param=name)

    def _needs_draft_model(self, value: SpeculationSpec) -> None:
        if value.model is None:
            raise ConfigError(
                f"speculation.model is missing: {value.method} drafts with a model", param="speculation.model"
            )

    def _needs_model(self, value: SpeculationSpec, methods: Collection[str]) -> None:
        """That a drafter's model is there for `methods` and for no other."""
        if value.method in methods:
            self._needs_draft_model(value)
        elif value.model is not None:
            raise ConfigError(
                f"speculation.model {value.model!r} has no use: {value.method} drafts without one",
                param="speculation.model",
            )

    def _needs_number(self, value: SpeculationSpec) -> int:
        if value.num_speculative_tokens is None:
            raise ConfigError(
                f"speculation.num_speculative_tokens is missing: {self.title} has no default for it",
                param="speculation.num_speculative_tokens",
            )
        return value.num_speculative_tokens

    def _only_one(self, name: str, value: int, spec: EngineSpec) -> Words:
        """For engines that compute on one device."""
        if value > 1:
            raise self.refusal(name, value)
        return []
