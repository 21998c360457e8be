"""The choice of an engine: the least expected time to first token, unless another has the prompt's prefix cached."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Collection

import msgspec

from sol.gateway.call import Call
from sol.gateway.errors import NoCapacityError
from sol.gateway.routing.affinity import ranked, seed_of
from sol.gateway.routing.config import RoutingConfig
from sol.gateway.routing.engine import Engine
from sol.gateway.routing.fleet import Fleet, Pool


class Choice(msgspec.Struct, frozen=True):
    engine: Engine
    rule: str
    """What decided: only_one, least_latency, prefix (its favourite), prefix_escape (the favourite was too busy)."""
    panic: bool


class EnginesFullError(NoCapacityError):
    """Those that may be asked, and were not yet, have all the requests that they may have."""


class Router:
    def __init__(self, fleet: Fleet, config: RoutingConfig) -> None:
        self._fleet = fleet
        self._affinity = config.affinity
        self._seeds = {engine.name: seed_of(engine.name) for engine in fleet}
        self._random = random.Random()  # noqa: S311  (breaks ties)

    def choose(self, call: Call, asked: Collection[Engine] = ()) -> Choice:
        """An engine that was not `asked` yet. Raises `UnknownModelError`, and `NoCapacityError` where none is left:
        `EnginesFullError` where that will change by itself."""
        pool, now = self._fleet.pool(call.model), time.monotonic()
        askable = pool.askable(now)
        engines = [engine for engine in askable.engines if engine not in asked and not engine.is_full]
        # The queue lets a call go when one of them has a place; another is asked only when that one has failed.
        engines = [engine for engine in engines if engine.has_credit] or engines
        engines = [engine for engine in engines if engine.has_prompt_room] or engines
        if call.only_engines is not None:
            wanted = [engine for engine in engines if engine.name in call.only_engines]
            # Sent elsewhere, the call is answered all the same: any of the model's engines gives the same answers.
            engines = wanted or engines
        if not engines:
            full = any(engine.is_full and engine not in asked for engine in askable.engines)
            what = "every engine has all the requests it may have" if full else "no engine can be reached"
            error = EnginesFullError if full else NoCapacityError
            raise error(f"{what} for the model {call.model!r:.200}; try again shortly", wait=1.0)
        if len(engines) == 1:
            return Choice(engines[0], "only_one", askable.panic)
        expected = self._expected(call, pool, engines, now)
        best = min(range(len(engines)), key=lambda index: (expected[index], self._random.random()))
        if self._affinity.enabled and call.prefix_key is not None:
            index, rule = self._with_prefix(call, call.prefix_key, engines, expected, best, now)
        else:
            index, rule = best, "least_latency"
        return Choice(engines[index], rule, askable.panic)

    def _expected(self, call: Call, pool: Pool, engines: list[Engine], now: float) -> list[float]:
        usual = pool.usual_seconds()
        return [engine.latency.expect(call.input_tokens, engine.load(now), now, usual) for engine in engines]

    def _with_prefix(
        self, call: Call, key: int, engines: list[Engine], expected: list[float], best: int, now: float
    ) -> tuple[int, str]:
        affinity = self._affinity
        total = sum(engine.in_flight for engine in engines) + 1
        most = max(affinity.free_requests, math.ceil(affinity.load_bound * total / len(engines)))
        slowest = affinity.latency_bound * expected[best]
        if call.ttft_target is not None:
            # A prefix is no reason to miss what the class is promised, if another engine can keep it.
            slowest = min(slowest, max(expected[best], call.arrived + call.ttft_target - now))
        for place, index in enumerate(ranked(key, [self._seeds[engine.name] for engine in engines])):
            if engines[index].in_flight < most and expected[index] <= slowest:
                return index, "prefix" if place == 0 else "prefix_escape"
        return best, "prefix_escape"
