"""The sections `classes` and `queue` of gateway.yaml."""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from sol.gateway.section import Section

ClassName = Literal["realtime", "interactive", "batch", "best_effort"]
CLASSES: Final[tuple[str, ...]] = ("realtime", "interactive", "batch", "best_effort")
"""From the most to the least urgent."""
RANK: Final = {name: rank for rank, name in enumerate(CLASSES)}

Share = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
Part = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=10**6)]
_Seconds = Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)]


class ClassOptions(Section):
    share: Share = 1.0
    """Of the engines' work, in tokens, against the shares of the other classes that want some at the same time."""
    max_in_flight: Part = 1.0
    """Share of the engines' credits that this class and the less urgent ones may hold together: what is left is there
    at once for those who are in more of a hurry."""
    max_waiting: Count = 1000
    """Requests for one model; more are refused with 503."""
    max_wait: _Seconds = 60.0
    """After which a request that no engine was found for is refused with 503."""
    preempt: Literal["never", "abort_and_retry"] = "never"
    """`abort_and_retry`: an engine's work on a request of this class that is no stream is given up and begun anew
    later, where a `realtime` request has waited for `queue.preempt_after`."""


class Realtime(ClassOptions):
    share: Share = 8.0
    max_wait: _Seconds = 10.0


class Interactive(ClassOptions):
    share: Share = 4.0


class Batch(ClassOptions):
    share: Share = 2.0
    max_in_flight: Part = 0.9
    max_waiting: Count = 10_000
    max_wait: _Seconds = 3600.0


class BestEffort(ClassOptions):
    share: Share = 1.0
    max_in_flight: Part = 0.8
    max_waiting: Count = 10_000
    max_wait: _Seconds = 600.0


class ClassesConfig(Section):
    """What is not given of a class is as it always is for this class."""

    default: ClassName = "interactive"
    """Of requests that ask for none, by keys that have no other."""
    realtime: Realtime = Field(default_factory=Realtime)
    interactive: Interactive = Field(default_factory=Interactive)
    batch: Batch = Field(default_factory=Batch)
    best_effort: BestEffort = Field(default_factory=BestEffort)

    @model_validator(mode="after")
    def _preempts_the_less_urgent(self) -> Self:
        for name in ("realtime", "interactive"):
            if self.of(name).preempt != "never":
                raise ValueError(f"{name}: preempt must be never: only batch and best_effort can be preempted")
        return self

    def of(self, name: str) -> ClassOptions:
        options: ClassOptions = getattr(self, name)
        return options


class QueueConfig(Section):
    enabled: bool = True
    """False: every request goes to an engine at once, which then has the queue."""
    ageing: _Seconds = 30.0
    """A class whose next request has waited for so long counts with twice its share, after twice as long with three
    times, up to the largest share of all."""
    placement: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = 1.0
    """How far short requests go before long ones of their class: a request that will take 3 s is placed as if it had
    come 3 s × this later. 0: first come, first served."""
    prompts_ahead: Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False)] = 0.1
    """Seconds of prompts that may wait in an engine, by the rate at which it has answered prompts: while there are
    more, it gets those of `realtime` requests only."""
    preempt_after: Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)] = 0.25
    """Seconds that a `realtime` request waits before others are preempted for it."""
    max_preemptions: Annotated[int, Field(ge=0, le=100)] = 2
    """Of one request; after that it is left alone."""
    max_waiting_bytes: Annotated[int, Field(ge=2**20)] = 512 * 2**20
    """Bodies of all that wait, together."""
    min_credits: Annotated[int, Field(ge=1)] = 4
    """What an engine gets at least, however busy it says it is."""
