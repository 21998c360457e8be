"""How engines are chosen, watched and left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from sol.gateway.filters.expressions import ExpressionError, compile_expression
from sol.gateway.section import Section

Seconds = Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1, max_length=200)]


class HealthConfig(Section):
    """Probes, and what follows from them. Two different numbers make a hysteresis: an engine that flaps stays out."""

    interval: Seconds = 2.0
    timeout: Seconds = 2.0
    unhealthy_after: int = Field(default=3, ge=1)
    """Failed probes in a row."""
    healthy_after: int = Field(default=2, ge=1)
    """Good probes in a row that bring an engine back."""
    stall_seconds: Seconds = 30.0
    """An engine that has work and makes no progress for so long hangs, whatever its health route says: its streams
    bring nothing, and its counters of tokens stand still."""
    max_ejected: float = Field(default=0.5, ge=0, le=1, allow_inf_nan=False)
    """Share of a model's engines that may be left out. When more look ill, what looks is at fault rather than they, and
    those that listen are asked all the same."""


class BreakerConfig(Section):
    """Transport faults, 5xx and time-outs open it; a client's mistakes and its leaving do not count."""

    consecutive_failures: int = Field(default=5, ge=1)
    error_rate: float = Field(default=0.5, gt=0, le=1, allow_inf_nan=False)
    window: Seconds = 30.0
    min_requests: int = Field(default=20, ge=1)
    """In the window, before the rate says anything."""
    cooldown: Seconds = 5.0
    """How long it stays open the first time; twice as long each time after, up to …"""
    max_cooldown: Seconds = 60.0


class AffinityConfig(Section):
    """Requests that begin alike go to one engine, whose prefix cache has that beginning, while it is not too busy."""

    enabled: bool = True
    prefix_chars: int = Field(default=1024, ge=16)
    """How much of a prompt's beginning is compared; shorter prompts have no favourite engine."""
    load_bound: float = Field(default=1.25, ge=1, allow_inf_nan=False)
    """An engine with more than so many times the mean of open requests is passed over."""
    free_requests: int = Field(default=8, ge=0)
    """Open requests up to which an engine is never too busy for its prefixes."""
    latency_bound: float = Field(default=3.0, ge=1, allow_inf_nan=False)
    """An engine is passed over if its expected latency is so many times the best one's."""


class TaskRule(Section):
    """Recognises calls by what all its conditions say."""

    models: tuple[Name, ...] = ()
    headers: dict[str, str] = Field(default_factory=dict)
    """Values that headers must have."""
    contains: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Any of these in the texts of the request."""
    pattern: str | None = Field(default=None, min_length=1)
    """A regular expression, in RE2's syntax, that finds something in one of the texts."""
    min_input_tokens: int | None = Field(default=None, ge=0)
    max_input_tokens: int | None = Field(default=None, ge=0)

    @field_validator("headers")
    @classmethod
    def _lower(cls, headers: Mapping[str, str]) -> dict[str, str]:
        return {name.lower(): value for name, value in headers.items()}

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        if pattern is not None:
            try:
                compile_expression(pattern)
            except ExpressionError as error:
                raise ValueError(f"is not a regular expression: {error}") from None
        return pattern

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self == TaskRule.model_construct():
            raise ValueError("a rule without a condition would fit every request; give one, or leave it out")
        return self


class TaskConfig(Section):
    """A kind of work, and where it goes."""

    name: Name
    when: tuple[TaskRule, ...] = ()
    """Any of these; none: only by the header, or by the classifier."""
    engines: tuple[Name, ...] = ()
    """The call goes to one of these, while one of them can be asked; none: to any of the model's."""
    drafters: tuple[Name, ...] = ()
    """Who drafts, in Sol's engines; of several, the one with the best measured speedup for this task."""
    explore: float = Field(default=0.05, ge=0, le=1, allow_inf_nan=False)
    """Share of the calls that go to another of the drafters, so that what was measured stays true."""

    @model_validator(mode="after")
    def _does_something(self) -> Self:
        if not self.engines and not self.drafters:
            raise ValueError("needs engines, or drafters: without either it changes nothing")
        return self


class RoutingConfig(Section):
    health: HealthConfig = Field(default_factory=HealthConfig)
    breaker: BreakerConfig = Field(default_factory=BreakerConfig)
    affinity: AffinityConfig = Field(default_factory=AffinityConfig)
    tasks: tuple[TaskConfig, ...] = ()
    """The first that fits is taken."""
    task_header: Annotated[str, Field(min_length=1)] = "x-sol-task"
    """A client that names a task in it decides for itself."""
    classifier: str | None = Field(default=None, pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """`module:function`: given a call's text, the name of its task or None. Asked where no rule fits, in one of four
    threads."""
    classifier_budget: Seconds = 1.0
    """How long an answer of it is waited for; a call whose task it does not name in time has none."""
    signal_age: Seconds = 10.0
    """How old what an engine said of its queue may be; older figures are not used."""

    @model_validator(mode="after")
    def _tasks_differ(self) -> Self:
        names = [task.name for task in self.tasks]
        if len(set(names)) < len(names):
            raise ValueError("tasks: names must differ")
        if self.classifier is not None and not self.tasks:
            raise ValueError("classifier: there are no tasks that it could name")
        return self
