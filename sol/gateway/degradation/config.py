"""The section `degradation` of gateway.yaml: a list of steps, the gentlest first."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from sol.gateway.queue.config import CLASSES, ClassName
from sol.gateway.section import Section

_Seconds = Annotated[float, Field(ge=0, le=86400, allow_inf_nan=False)]
_Level = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
_Name = Annotated[str, Field(min_length=1, max_length=200)]


class Pressure(Section):
    """Any of these is reason enough."""

    burn_rate: _Level | None = None
    """Of the model's service levels, the worst, within the fast window."""
    wait_seconds: _Level | None = None
    """How long the next `realtime` or `interactive` request has waited."""
    utilisation: _Level | None = None
    """Open requests and waiting ones, over the engines' credits."""
    kv_usage: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    """Share of the KV caches in use, of the engines that say so."""

    def signals(self) -> frozenset[str]:
        """The names of those that have a bound."""
        return frozenset(name for name in type(self).model_fields if getattr(self, name) is not None)

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if not self.signals():
            raise ValueError("needs burn_rate, wait_seconds, utilisation or kv_usage")
        return self


class Step(Section):
    """`drafts_off`: engines of ours decode without drafts; answers are the same.

    `max_tokens`: answers have no more than `max_tokens`. `model`: another model answers, `to`. `shed`: requests are
    refused with 503.
    """

    action: Literal["drafts_off", "max_tokens", "model", "shed"]
    classes: tuple[ClassName, ...] = ()
    """Whose requests; none named: of `shed` and `max_tokens` best_effort's, of the others everybody's."""
    models: tuple[_Name, ...] = ()
    """Requests for these; none named: for any."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    to: _Name | None = None
    when: Pressure = Field(default_factory=lambda: Pressure(burn_rate=2.0, wait_seconds=5.0))
    after: _Seconds = 10.0
    """How long that has to last before this step is taken."""
    recover_after: _Seconds = 60.0
    """How long all of it has to be below `recover_below` of its bounds before the step is taken back."""
    recover_below: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 0.7

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.max_tokens is not None) != (self.action == "max_tokens"):
            raise ValueError("max_tokens belongs to the action max_tokens, which needs it")
        if (self.to is not None) != (self.action == "model"):
            raise ValueError("to, the model that answers instead, belongs to the action model, which needs it")
        if self.action == "model" and not self.models:
            raise ValueError("models, those that are replaced, are missing")
        if self.to in self.models:
            raise ValueError(f"{self.to!r} would be replaced by itself")
        return self

    def applies(self, model: str, class_name: str) -> bool:
        """To a request for this model (by its own name) and of this class."""
        return (not self.models or model in self.models) and class_name in self.affected()

    def affected(self) -> tuple[str, ...]:
        if self.classes:
            return self.classes
        return ("best_effort",) if self.action in ("shed", "max_tokens") else CLASSES
