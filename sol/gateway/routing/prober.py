"""Asks every engine, again and again, how it is: its health route, its metrics, and whether its work goes on."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from typing import TYPE_CHECKING, Final

import aiohttp

from sol.engines.drivers import DRIVERS
from sol.gateway.routing.engine import Engine
from sol.gateway.routing.fleet import Fleet

if TYPE_CHECKING:
    from sol.gateway.config import GatewayConfig

logger = logging.getLogger("sol.gateway")

_RARELY: Final = 30.0
"""Seconds between probes of an endpoint of which nothing is known: it may be far away, and count them."""
_MAX_METRICS_BYTES: Final = 8 * 2**20


class Prober:
    """One task an engine, so that one that does not answer delays nobody's probes but its own."""

    def __init__(self, fleet: Fleet, config: GatewayConfig) -> None:
        self._config = config.routing.health
        self._targets = [
            (
                fleet.engines[entry.name],
                entry.health_path or DRIVERS[entry.driver].health_path,
                entry.metrics_path or DRIVERS[entry.driver].metrics_path,
            )
            for entry in config.engines
            if entry.name in fleet.engines
        ]
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, session: aiohttp.ClientSession) -> None:
        for engine, health_path, metrics_path in self._targets:
            task = asyncio.create_task(self._watch(session, engine, health_path, metrics_path))
            self._tasks.append(task)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    async def _watch(
        self, session: aiohttp.ClientSession, engine: Engine, health_path: str, metrics_path: str | None
    ) -> None:
        interval = self._config.interval
        if engine.driver.name == "openai":
            interval = max(interval, _RARELY)
        while True:
            try:
                await self._probe(session, engine, health_path)
                if metrics_path is not None:
                    await self._scrape(session, engine, metrics_path)
                self._look_for_progress(engine)
            except Exception:  # whatever it was, an engine that nobody watches would be worse
                logger.exception("probing the engine %s failed", engine.name)
            # Not all engines of all gateways in the same moment.
            await asyncio.sleep(interval * random.uniform(0.9, 1.1))  # noqa: S311

    # Redirections are not followed: what they lead to is not the engine, and must not get its credentials.

    async def _probe(self, session: aiohttp.ClientSession, engine: Engine, path: str) -> None:
        was_well = engine.health.is_well
        try:
            async with asyncio.timeout(self._config.timeout):
                async with session.get(
                    engine.base_url + path, headers=engine.headers, allow_redirects=False
                ) as response:
                    if response.status < 500:  # 401 or 404: somebody is there, and says so
                        engine.health.probed("good")
                    else:
                        engine.health.probed("bad", f"{path} answers with status {response.status}")
        except TimeoutError:
            engine.health.probed("bad", f"{path} does not answer within {self._config.timeout:g} s")
        except aiohttp.ClientConnectorError as error:
            engine.health.probed("refused", f"cannot be reached ({error.os_error.strerror or 'no connection'})")
        except (aiohttp.ClientError, OSError) as error:
            engine.health.probed("bad", f"{path} fails ({type(error).__name__})")
        if was_well and not engine.health.is_well:
            logger.warning("engine %s is left out: %s", engine.name, engine.health.reason)
        elif engine.health.is_well and not was_well:
            logger.warning("engine %s is back", engine.name)

    async def _scrape(self, session: aiohttp.ClientSession, engine: Engine, path: str) -> None:
        """What cannot be had is not kept either: `Signals.age` tells how old the last is."""
        in_flight = engine.in_flight
        try:
            async with asyncio.timeout(self._config.timeout):
                async with session.get(
                    engine.base_url + path, headers=engine.headers, allow_redirects=False
                ) as response:
                    if response.status != 200:
                        return
                    text = await response.content.read(_MAX_METRICS_BYTES)
                    while not response.content.at_eof() and len(text) < _MAX_METRICS_BYTES:
                        text += await response.content.read(_MAX_METRICS_BYTES)
        except (TimeoutError, aiohttp.ClientError, OSError):
            return
        engine.scraped(engine.driver.signals(text.decode("utf-8", "replace"), time.monotonic()), in_flight)

    def _look_for_progress(self, engine: Engine) -> None:
        now = time.monotonic()
        if engine.is_stalled(now, self._config.stall_seconds):
            if engine.breaker.state(now) == "closed":
                logger.warning(
                    "engine %s hangs: it has %d open requests and made no progress for %g s",
                    engine.name, engine.in_flight, self._config.stall_seconds,
                )  # fmt: skip
            engine.breaker.open(now)
