"""The way of a call: a list of stages, each entered in its order and left in the reverse one, whatever happens between.

A stage is a policy. It lets a call pass, changes it, holds it back or refuses it, and when the call has ended it learns
how. Nothing else connects stages: each works without the others, and any subset of them is a pipeline.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, runtime_checkable

from sol.gateway.call import Call, Outcome
from sol.gateway.errors import CLIENT_CLOSED_REQUEST, error_status

logger = logging.getLogger("sol.gateway")


class Stage(Protocol):
    @property
    def name(self) -> str:
        """As in decisions, logs and metrics."""
        ...

    async def enter(self, call: Call) -> None:
        """Let the call pass, perhaps later, or raise a SolError to refuse it.

        It is cancelled when the client leaves.
        """
        ...

    async def leave(self, call: Call, outcome: Outcome) -> None:
        """Give back what `enter` took, and account for what became of the call.

        Called for every call for which `enter` was called, also where that raised or was cancelled half-way: what was
        not taken is not given back. May be called twice (where the first was cut off), and must not raise.
        """
        ...


@runtime_checkable
class Lasting(Protocol):
    """A stage that also has something to open before the first call and to close after the last one."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...


class Pipeline:
    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages = tuple(stages)

    async def start(self) -> None:
        """Open what stages need. Those already open are closed again where one fails."""
        opened: list[Lasting] = []
        try:
            for stage in self.stages:
                if isinstance(stage, Lasting):
                    await stage.start()
                    opened.append(stage)
        except BaseException:
            for lasting in reversed(opened):
                await lasting.close()
            raise

    async def close(self) -> None:
        for stage in reversed(self.stages):
            if isinstance(stage, Lasting):
                try:
                    await stage.close()
                except Exception:
                    logger.exception("closing the stage %s failed", stage.name)

    async def run(self, call: Call, work: Callable[[Call], Awaitable[Outcome]]) -> Outcome:
        """Take `call` through all stages, do `work`, and leave them.

        Raises what a stage or `work` raised, once every stage that was entered is left. Cancelled, it tells the stages
        of a client that left.
        """
        entered: list[Stage] = []
        trail = call.trail
        try:
            for stage in self.stages:
                entered.append(stage)
                trail.append((stage.name, time.monotonic()))
                await stage.enter(call)
            trail.append(("relay", time.monotonic()))
            outcome = await work(call)
        except asyncio.CancelledError:
            await self._leave(entered, call, self._outcome(call, CLIENT_CLOSED_REQUEST, client_left=True))
            raise
        except Exception as error:
            await self._leave(entered, call, self._outcome(call, error_status(error), error))
            raise
        await self._leave(entered, call, outcome)
        return outcome

    @staticmethod
    def _outcome(call: Call, status: int, error: Exception | None = None, *, client_left: bool = False) -> Outcome:
        return Outcome(
            status=status, error=error, usage=call.usage, first_byte_at=call.first_byte_at, client_left=client_left
        )

    async def _leave(self, entered: list[Stage], call: Call, outcome: Outcome) -> None:
        cancelled: asyncio.CancelledError | None = None
        for stage in reversed(entered):
            for _ in range(2):
                try:
                    await stage.leave(call, outcome)
                    break
                except asyncio.CancelledError as error:
                    cancelled = error  # the gateway is stopped by force; what the call holds is given back even so
                except Exception:
                    logger.exception("the stage %s failed to let go of a call", stage.name)
                    break
        if cancelled is not None:
            raise cancelled
