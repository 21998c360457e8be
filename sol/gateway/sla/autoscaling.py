"""What somebody who starts and stops engines needs to know of a model: `GET /autoscaling`.

Use of the device says nothing, since an engine that batches always computes. What counts is how much of what the
engines take well is taken, who waits for it, and whether promises are kept.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from sol.gateway.gateway import Gateway

_UTILISATION: Final = 0.8
"""What engines are to be used at: the rest takes up bursts while more are started."""


class ModelLoad(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    num_engines: int
    num_askable: int
    """Those that requests go to."""
    in_flight: int
    """Requests that these work on, all models' of theirs."""
    credits: int | None
    """How many they take well, as far as is known; None: nothing has limited them yet."""
    waiting: dict[str, int]
    """Requests that wait here, by class."""
    wait_seconds: float
    """How long the next of those has waited that are realtime or interactive."""
    utilisation: float | None
    """in_flight and waiting over credits."""
    kv_usage: float | None
    """Mean share of the KV caches in use; None: no engine says."""
    burn_rate: float
    """Of the worst of its service levels, in the fast window."""
    signals_missing: list[str]
    """Engines that should say how they are and did not lately: their absence is itself an alarm."""
    desired_engines: int | None
    """How many it would take; None: nothing is known yet to tell it from."""


def model_load(gateway: Gateway, model: str) -> ModelLoad:
    """`model` by its own name."""
    now = time.monotonic()
    pool = gateway.fleet.pools[model]
    askable = pool.askable(now).engines
    dispatcher = gateway.queue.dispatchers[model]
    waiting = dispatcher.num_waiting(model)
    fresh = [signals for engine in askable if (signals := engine.fresh_signals(now)) is not None]
    usages = [signals.kv_usage for signals in fresh if signals.kv_usage is not None]
    total = gateway.queue.capacity.total(model)
    credits_ = None if math.isinf(total) else int(total)
    in_flight = sum(engine.in_flight for engine in askable)
    demand = in_flight + sum(waiting.values())
    burn_rate = gateway.monitor.burn_rate(model)
    return ModelLoad(
        model=model,
        num_engines=len(pool.engines),
        num_askable=len(askable),
        in_flight=in_flight,
        credits=credits_,
        waiting=waiting,
        wait_seconds=max(dispatcher.longest_wait(now, name, model) for name in ("realtime", "interactive")),
        utilisation=demand / credits_ if credits_ else None,
        kv_usage=sum(usages) / len(usages) if usages else None,
        burn_rate=burn_rate,
        signals_missing=[
            engine.name for engine in pool.engines
            if engine.has_metrics and engine.fresh_signals(now) is None
        ],
        desired_engines=desired_engines(len(askable), demand, credits_, burn_rate, usages),
    )  # fmt: skip


def desired_engines(
    num_engines: int, demand: int, credits_: int | None, burn_rate: float, kv_usages: Sequence[float]
) -> int | None:
    """So many that all who are here or wait fit in, with room to spare; at least one more while promises are broken,
    and no fewer while KV caches are nearly full."""
    if not credits_ or not num_engines:
        return num_engines + 1 if burn_rate > 1 and num_engines else None
    wanted = max(1, math.ceil(demand / (credits_ / num_engines * _UTILISATION)))
    if burn_rate > 1:
        wanted = max(wanted, num_engines + 1)
    if kv_usages and sum(kv_usages) / len(kv_usages) > _UTILISATION:
        wanted = max(wanted, num_engines)
    return wanted
