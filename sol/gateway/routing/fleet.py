"""All engines, by the models they serve; and which of a model's engines may be asked now."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from sol.errors import UnknownModelError
from sol.gateway.routing.engine import Engine

if TYPE_CHECKING:
    from sol.gateway.config import GatewayConfig


class Askable(msgspec.Struct, frozen=True):
    engines: list[Engine]
    panic: bool
    """More than may be left out look ill, so that being ill was not held against those that listen."""


class Pool:
    """The engines of one model."""

    def __init__(self, model: str, engines: Sequence[Engine], max_ejected: float) -> None:
        self.model = model
        self.engines = tuple(engines)
        self._most_out = math.floor(max_ejected * len(engines))

    def askable(self, now: float) -> Askable:
        """Empty only where all may be left out (a `max_ejected` of 1). Half-open breakers let one call at a time
        through."""
        well = [engine for engine in self.engines if engine.is_well(now)]
        if len(self.engines) - len(well) <= self._most_out:
            return Askable(well, panic=False)
        listening = [engine for engine in self.engines if engine.health.is_listening]
        return Askable(listening or list(self.engines), panic=True)

    def usual_seconds(self) -> float | None:
        """The mean time to first token of its engines; None: there were none yet."""
        times = [value for engine in self.engines if (value := engine.latency.typical()) is not None]
        return sum(times) / len(times) if times else None


class Fleet:
    def __init__(self, config: GatewayConfig) -> None:
        """Engines without a url are not in it: somebody starts them first, and says where they are."""
        routing = config.routing
        self.engines = {entry.name: Engine(entry, routing) for entry in config.engines if entry.url is not None}
        self.pools: dict[str, Pool] = {}
        self.canonical: dict[str, str] = {}
        """Of each name and alias of a model, its name."""
        for model in config.models:
            engines = [self.engines[name] for name in model.engines if name in self.engines]
            self.pools[model.name] = Pool(model.name, engines, routing.health.max_ejected)
            self.canonical.update(dict.fromkeys((model.name, *model.aliases), model.name))

    def pool(self, model: str) -> Pool:
        """By name or alias. Raises `UnknownModelError`."""
        name = self.canonical.get(model)
        if name is None:
            raise UnknownModelError(
                f"there is no model {model!r:.200} here; there are {', '.join(self.pools)}", param="model"
            )
        return self.pools[name]

    def __iter__(self) -> Iterator[Engine]:
        return iter(self.engines.values())
