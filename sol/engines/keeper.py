"""Servers that are kept running: started, started again with growing pauses when they die, and stopped at the end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from sol.engines.commands import ServerCommand
from sol.engines.service import Service, how_it_ended
from sol.errors import EngineStartError, SolError

_log = logging.getLogger("sol.engines")

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Before a restart, in seconds; twice as long each time."""
STEADY_SECONDS = 300.0
"""One that ran for so long died of something new: the pauses begin again with the first."""


class Keeper:
    """Keeps one server running on its one address. Its output is appended to the file `log` over all restarts."""

    def __init__(
        self,
        command: ServerCommand,
        *,
        name: str,
        log: Path | None = None,
        start_timeout: float = 600.0,
        first_pause: float = FIRST_PAUSE,
    ) -> None:
        self.command = command
        self.name = name
        self.num_restarts = 0
        """Attempts, also those that failed."""
        self._log_path = log
        self._start_timeout = start_timeout
        self._first_pause = first_pause
        self._service = self._new()
        self._keeping: asyncio.Task[None] | None = None

    @property
    def service(self) -> Service:
        """Of the last start."""
        return self._service

    async def start(self) -> None:
        """Start it and return when it is ready. Raises `EngineStartError` where the first start fails: what never ran
        is mended by its owner, not by trying again."""
        started = time.monotonic()
        where = f"; log: {self._log_path}" if self._log_path is not None else ""
        _log.info("starting %s: %s%s", self.name, self.command.text, where)
        await self._service.start(self._start_timeout)
        _log.info("%s is ready at %s after %.1f s", self.name, self.command.url, time.monotonic() - started)
        self._keeping = asyncio.create_task(self._keep())

    async def stop(self, grace: float = 10.0) -> None:
        """As `Service.stop`; it is not started again."""
        if self._keeping is not None:
            self._keeping.cancel()
            # The task's own end is not of interest; a cancellation of ours is.
            await asyncio.wait({self._keeping})
            self._keeping = None
        await self._service.stop(grace)

    def _new(self) -> Service:
        return self.command.service(name=self.name, log=self._log_path)

    async def _keep(self) -> None:
        pause = self._first_pause
        while True:
            ready_at = time.monotonic()
            code = await self._service.on_exit
            if time.monotonic() - ready_at >= STEADY_SECONDS:
                pause = self._first_pause
            reason = f"{self.name} has died ({how_it_ended(code)})"
            while True:
                _log.warning(
                    "%s; it is started again in %g s. Its last lines:\n%s", reason, pause, self._service.tail(5)
                )
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
                self.num_restarts += 1
                self._service = self._new()
                try:
                    await self._service.start(self._start_timeout)
                except SolError as error:  # also a log that cannot be written any more
                    problem = error.problem if isinstance(error, EngineStartError) else error.message
                    reason = f"{self.name} did not start: {problem}"
                except Exception as error:  # no more threads, say: an engine that nobody restarts would be worse
                    reason = f"{self.name} did not start: {type(error).__name__}: {error}"
                else:
                    _log.info("%s is ready again at %s", self.name, self.command.url)
                    break


def start_groups(keepers: Sequence[Keeper]) -> list[list[Keeper]]:
    """Those that may share a device, by `CUDA_VISIBLE_DEVICES` of their commands, in groups: an engine measures the
    memory that is free when it starts, so of those that share a device only one may start at a time."""
    groups: list[tuple[set[str] | None, list[Keeper]]] = []
    for keeper in keepers:
        devices = _devices(keeper)
        members = [keeper]
        apart = []
        for others, group in groups:
            if devices is None or others is None or devices & others:
                devices = None if devices is None or others is None else devices | others
                members = [*group, *members]
            else:
                apart.append((others, group))
        groups = [*apart, (devices, members)]
    order = {keeper: index for index, keeper in enumerate(keepers)}
    return sorted((sorted(group, key=order.__getitem__) for _, group in groups), key=lambda group: order[group[0]])


def _devices(keeper: Keeper) -> set[str] | None:
    """None: any."""
    text = keeper.command.env.get("CUDA_VISIBLE_DEVICES")
    return None if text is None else {part.strip() for part in text.split(",") if part.strip()}


async def start_all(keepers: Sequence[Keeper]) -> None:
    """Start them, those on different devices at once. Where one fails, what was started is stopped and its
    `EngineStartError` raised; likewise where this is cancelled."""

    async def one_after_another(group: Iterable[Keeper]) -> None:
        for keeper in group:
            await keeper.start()

    tasks = [asyncio.create_task(one_after_another(group)) for group in start_groups(keepers)]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await stop_all(keepers)
        raise


async def stop_all(keepers: Iterable[Keeper], grace: float = 10.0) -> None:
    """Stop them at once, and wait for all."""
    every = list(keepers)
    results = await asyncio.gather(*(keeper.stop(grace) for keeper in every), return_exceptions=True)
    for keeper, result in zip(every, results, strict=True):
        if isinstance(result, Exception):
            _log.warning("%s could not be stopped: %s: %s", keeper.name, type(result).__name__, result)
