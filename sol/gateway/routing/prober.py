"""Asks every engine, again and again, how it is: its health route, its metrics, and whether its work goes on."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from sol.engines.drivers import DRIVERS
from sol.gateway.routing.engine import Engine
from sol.gateway.routing.fleet import Fleet
from sol.gateway.upstream.errors import ConnectTimeoutError, UnreachableError, UpstreamHttpError
from sol.gateway.upstream.head import header_lines
from sol.gateway.upstream.pool import Origin, Upstreams

if TYPE_CHECKING:
    from sol.gateway.config import GatewayConfig

logger = logging.getLogger("sol.gateway")

_RARELY: Final = 30.0
"""Seconds between probes of an endpoint of which nothing is known: it may be far away, and count them."""
_MAX_METRICS_BYTES: Final = 8 * 2**20
_MAX_HEALTH_BYTES: Final = 2**16
_random: Final = random.Random()  # noqa: S311  (others' sequences are left alone)


@dataclass(frozen=True, slots=True)
class _Target:
    engine: Engine
    health_path: str
    metrics_path: str | None


class Prober:
    """One task an engine, so that one that does not answer delays nobody's probes but its own."""

    def __init__(self, fleet: Fleet, config: GatewayConfig) -> None:
        self._config = config.routing.health
        self._targets = [
            _Target(
                fleet.engines[entry.name],
                entry.health_path or DRIVERS[entry.driver].health_path,
                entry.metrics_path or DRIVERS[entry.driver].metrics_path,
            )
            for entry in config.engines
            if entry.name in fleet.engines
        ]
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, upstreams: Upstreams) -> None:
        for target in self._targets:
            origin = upstreams.origin(target.engine.base_url)
            self._tasks.append(asyncio.create_task(self._watch(origin, target)))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    async def _watch(self, origin: Origin, target: _Target) -> None:
        engine, lines = target.engine, header_lines(target.engine.headers)
        health = origin.opening("GET", target.health_path, lines)
        metrics = None if target.metrics_path is None else origin.opening("GET", target.metrics_path, lines)
        interval = self._config.interval
        if engine.driver.name == "openai":
            interval = max(interval, _RARELY)
        while True:
            try:
                await self._probe(origin, target, health)
                if metrics is not None:
                    await self._scrape(origin, engine, metrics)
                self._look_for_progress(engine)
            except Exception:  # whatever it was, an engine that nobody watches would be worse
                logger.exception("probing the engine %s failed", engine.name)
            # Not all engines of all gateways in the same moment.
            await asyncio.sleep(interval * _random.uniform(0.9, 1.1))

    async def _probe(self, origin: Origin, target: _Target, question: bytes) -> None:
        engine, path = target.engine, target.health_path
        was_well = engine.health.is_well
        try:
            async with asyncio.timeout(self._config.timeout):
                status, _ = await origin.get(question, max_bytes=_MAX_HEALTH_BYTES)
            if status < 500:  # 401 or 404: somebody is there, and says so
                engine.health.probed("good")
            else:
                engine.health.probed("bad", f"{path} answers with status {status}")
        except (TimeoutError, ConnectTimeoutError):
            engine.health.probed("bad", f"{path} does not answer within {self._config.timeout:g} s")
        except UnreachableError as error:
            engine.health.probed("refused", f"cannot be reached ({error})")
        except UpstreamHttpError as error:
            engine.health.probed("bad", f"{path} fails ({error})")
        if was_well and not engine.health.is_well:
            logger.warning("engine %s is left out: %s", engine.name, engine.health.reason)
        elif engine.health.is_well and not was_well:
            logger.warning("engine %s is back", engine.name)

    async def _scrape(self, origin: Origin, engine: Engine, question: bytes) -> None:
        """What cannot be had is not kept either: `Signals.age` tells how old the last is."""
        in_flight = engine.in_flight
        try:
            async with asyncio.timeout(self._config.timeout):
                status, body = await origin.get(question, max_bytes=_MAX_METRICS_BYTES)
        except (TimeoutError, UpstreamHttpError):
            return
        if status != 200:
            return
        text = body.decode("utf-8", "replace")
        engine.scraped(engine.driver.signals(text, time.monotonic()), in_flight)

    def _look_for_progress(self, engine: Engine) -> None:
        now = time.monotonic()
        if engine.is_stalled(now, self._config.stall_seconds):
            if engine.breaker.state(now) == "closed":
                logger.warning(
                    "engine %s hangs: it has %d open requests and made no progress for %g s",
                    engine.name, engine.in_flight, self._config.stall_seconds,
                )  # fmt: skip
            engine.breaker.open(now)
