"""How anyone talks to an engine, wherever it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sol.engine.core import EngineCore
from sol.engine.types import EngineInfo, EngineOutput, EngineRequest
from sol.errors import EngineDeadError


class EngineClient(Protocol):
    """`add` and `abort` may be called from any thread, `receive` from one at a time."""

    info: EngineInfo

    def add(self, requests: Sequence[EngineRequest]) -> None:
        """Hand requests to the engine; never blocks. Their ids must differ from those of all open requests.

        A request that cannot be answered gets an output with `finish_reason` "error". Raises `EngineDeadError` if
        the engine is known to be gone.
        """
        ...

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; never blocks. Each gets a last output with `finish_reason` "abort".

        Ids of requests that are not open are ignored: a request may end while its abort is on its way.
        """
        ...

    def receive(self) -> EngineOutput:
        """Block until something has happened. Raises `EngineDeadError` when the engine is gone or closed."""
        ...

    def close(self) -> None:
        """End the engine. Wakes a blocked `receive`. May be called again."""
        ...


class InProcessClient:
    """An engine in this process: `receive` runs a step of it, in the thread that calls."""

    def __init__(self, core: EngineCore) -> None:
        self.info = core.info
        self._core = core
        self._closed = False

    def add(self, requests: Sequence[EngineRequest]) -> None:
        self.check_alive()
        self._core.add(requests)

    def abort(self, request_ids: Sequence[str]) -> None:
        self._core.abort(request_ids)

    def receive(self) -> EngineOutput:
        """One step. Blocks while no request is open, until one is added or the client is closed."""
        self.check_alive()
        self._core.wait()
        self.check_alive()
        return self._core.step()

    def close(self) -> None:
        self._closed = True
        self._core.wake()

    def check_alive(self) -> None:
        """Raise `EngineDeadError` if the engine has failed or is closed."""
        if self._closed:
            raise EngineDeadError("the engine is closed")
        if self._core.dead is not None:
            raise self._core.dead
