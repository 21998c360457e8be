"""Starting an engine again that has died or hangs.

The HTTP side survives its engine. Open requests fail, because what they had computed is gone; new ones are asked to
come back in a few seconds; the model is loaded again from files that the system still has in memory. An engine that
dies again and again is not one that a restart helps: after so many in ten minutes it stays dead, `/live` says so, and
whoever supervises the whole server decides.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable

from sol.engine.async_engine import AsyncEngine
from sol.engine.client import EngineClient
from sol.errors import SolError
from sol.server.background import run_in_background
from sol.server.state import ServedModel, ServerState

logger = logging.getLogger("sol.server")

WINDOW_SECONDS = 600.0
"""Restarts further back do not count."""
FIRST_PAUSE_SECONDS = 0.5
"""Before the first restart; doubled with each in the window."""
LONGEST_PAUSE_SECONDS = 30.0
_LOOK_SECONDS = 1.0
"""How often is looked whether the engine makes progress."""


class Supervisor:
    """`start` makes an engine like the one that died; it blocks, for as long as loading takes."""

    def __init__(self, state: ServerState, served: ServedModel, start: Callable[[], EngineClient]) -> None:
        self.engine = served.engine
        """The latest."""
        self.grammars = served.grammars
        self._state = state
        self._served = served
        self._start = start
        self._restarts: deque[float] = deque()
        """When they were, the oldest first."""

    async def run(self) -> None:
        """Watch the engine until it is dead for good. Cancel it to stop; `engine` is to be closed by whoever does."""
        while True:
            await self._wait_until_dead()
            if not self._may_restart():
                return
            self._state.restarting = True
            try:
                if not await self._restart():
                    return
            finally:
                self._state.restarting = False

    async def _wait_until_dead(self) -> None:
        dying = asyncio.ensure_future(self.engine.wait_until_dead())
        try:
            while not (await asyncio.wait([dying], timeout=_LOOK_SECONDS))[0]:
                if self._state.config.restart_engine and self.engine.stalled_for() > self._state.config.stall_timeout:
                    logger.error("the engine has made no progress for %.0f s; it is ended", self.engine.stalled_for())
                    await asyncio.to_thread(self.engine.close)
        finally:
            dying.cancel()

    def _may_restart(self) -> bool:
        now, limit = time.monotonic(), self._state.config.restart_engine
        while self._restarts and self._restarts[0] < now - WINDOW_SECONDS:
            self._restarts.popleft()
        if len(self._restarts) < limit:
            return True
        if limit:
            logger.error("the engine died %d times in ten minutes; it is not started again", limit + 1)
        return False

    async def _restart(self) -> bool:
        """Whether it succeeded, perhaps after several attempts."""
        await asyncio.to_thread(self.engine.close)
        while self._may_restart():
            pause = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** len(self._restarts))
            logger.warning("the engine is started again in %g s", pause)
            await asyncio.sleep(pause)
            self._restarts.append(time.monotonic())
            starting = run_in_background(self._start, lambda client: client.close(), name="engine-restart")
            try:
                client = await starting
            except SolError as error:
                logger.error("the engine could not be started again: %s", error.message)
                continue
            finally:
                starting.cancel()
            self.engine = AsyncEngine(client)
            self._served = dataclasses.replace(self._served, engine=self.engine, info=self.engine.info)
            self._state.set_ready(self._served)
            logger.warning("the engine is back")
            return True
        return False
