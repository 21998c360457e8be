"""What engines take, from what the gateway knows of them: the dispatcher's `Capacity` over the fleet."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from sol.gateway.queue.credits import Credits
from sol.gateway.queue.fair import Waiter
from sol.gateway.routing.engine import Engine
from sol.gateway.routing.fleet import Fleet

if TYPE_CHECKING:
    from sol.gateway.config import GatewayConfig


class FleetCapacity:
    """An engine's places are its `max_in_flight`, and within that what was learned. The latter is told to the router as
    `Engine.credits`."""

    def __init__(self, fleet: Fleet, config: GatewayConfig) -> None:
        self._fleet = fleet
        self._signal_age = config.routing.signal_age
        self.credits: Mapping[str, Credits] = {
            entry.name: Credits(floor=config.queue.min_credits, initial=_most_at_once(entry.spec))
            for entry in config.engines
            if entry.name in fleet.engines
        }
        self._prompts_ahead = config.queue.prompts_ahead
        self._read_at: dict[str, float] = {}
        self._num_refused = dict.fromkeys(self.credits, 0)
        """Of each engine, those that its credits know of."""
        self._under_way: list[Waiter] = []
        """Granted, and not yet counted by an engine."""
        self._rivals: Mapping[str, frozenset[str]] = {
            model: frozenset(name for name, other in fleet.pools.items() if set(pool.engines) & set(other.engines))
            for model, pool in fleet.pools.items()
        }
        """Of each model those that have engines of its own, itself among them."""
        for name, credit in self.credits.items():
            fleet.engines[name].credits = credit.limit

    def total(self, model: str, *, besides: Collection[str] = ()) -> float:
        return sum(self._places(engine) for engine in self._askable(model) if engine.name not in besides)

    def free(self, model: str, *, patient: bool, besides: Collection[str] = ()) -> float:
        free = sum(
            max(0.0, self._places(engine) - engine.in_flight)
            for engine in self._askable(model)
            if (not patient or engine.has_prompt_room) and engine.name not in besides
        )
        if self._under_way and free < math.inf:
            free -= len(self._on_the_way(model))
        return max(0.0, free)

    def held(self, model: str, classes: Collection[str]) -> int:
        held = sum(engine.in_flight_by_class.get(name, 0) for engine in self._askable(model) for name in classes)
        if self._under_way:
            held += sum(each.class_name in classes for each in self._on_the_way(model))
        return held

    def granted(self, waiter: Waiter) -> None:
        self._under_way.append(waiter)

    def in_demand(self, model: str) -> None:
        for engine in self._askable(model):
            self.credits[engine.name].in_demand = True

    def look(self, now: float) -> None:
        """Learn from what the engines have done, and said, since the last look."""
        self._forget_begun()
        for name, credit in self.credits.items():
            engine = self._fleet.engines[name]
            credit.taken(engine.in_flight)
            credit.refused(engine.num_refused - self._num_refused[name])
            self._num_refused[name] = engine.num_refused
            engine.presume_begun(now)
            self.look_for_room(engine, now)
            signals = engine.signals
            if signals is not None and signals.age(now) <= self._signal_age:
                if self._read_at.get(name) == signals.read_at:
                    continue  # nothing new, and what it will say is worth more than a guess
                self._read_at[name] = signals.read_at
                credit.look(now, in_flight=engine.in_flight, running=signals.running, waiting=signals.waiting,
                            kv_usage=signals.kv_usage)  # fmt: skip
            else:
                credit.look(now, in_flight=engine.in_flight)
            engine.credits = credit.limit

    def look_for_room(self, engine: Engine, now: float) -> None:
        """Learn how many prompts may be before another one."""
        if engine.has_metrics:  # others are more than one engine, as a rule
            engine.prompt_room = engine.prompts.room(now, self._prompts_ahead)

    def _forget_begun(self) -> None:
        if self._under_way:
            self._under_way = [each for each in self._under_way if each.state == "granted" and not each.is_begun()]

    def _on_the_way(self, model: str) -> list[Waiter]:
        """To one of its engines, as far as can be told."""
        self._forget_begun()
        rivals = self._rivals[model]
        return [each for each in self._under_way if each.model in rivals]

    def _askable(self, model: str) -> list[Engine]:
        return self._fleet.pools[model].askable(time.monotonic()).engines

    @staticmethod
    def _places(engine: Engine) -> float:
        most = math.inf if engine.max_in_flight is None else engine.max_in_flight
        return most if engine.credits is None else min(most, engine.credits)


def _most_at_once(spec: Mapping[str, object] | None) -> int | None:
    """What an engine that is started here was told to take."""
    value = (spec or {}).get("max_num_seqs")
    return value if isinstance(value, int) else None
