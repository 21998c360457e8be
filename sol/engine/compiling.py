"""Requests that wait for their grammars: to compile one takes a millisecond to a second, which no step waits for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from sol.engine.types import EngineRequest
from sol.errors import RequestError
from sol.grammar import Grammar


class Grammars(Protocol):
    """Whoever compiles them, in threads of its own."""

    def is_compiled(self, grammar: Grammar) -> bool: ...

    def submit(self, grammar: Grammar) -> Future[None]:
        """The future raises `SolError` for what cannot be compiled."""
        ...


@dataclass(slots=True)
class Compiled:
    """A request's grammar is ready, or cannot be."""

    request: EngineRequest
    error: BaseException | None


class Compiling:
    """`tell` is called from whichever thread compiles; everything else belongs to the engine's."""

    def __init__(self, grammars: Grammars | None, tell: Callable[[Compiled], object]) -> None:
        self._grammars = grammars
        self._tell = tell
        self._held: dict[str, EngineRequest] = {}

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, request: EngineRequest) -> bool:
        """Whether the request has to wait for its grammar; `tell` hears when it need not any more. Raises
        `RequestError` if nobody here can compile one."""
        grammar = request.params.grammar
        if grammar is None:
            return False
        if self._grammars is None:
            raise _not_here()
        if self._grammars.is_compiled(grammar):
            return False
        self._held[request.request_id] = request
        future = self._grammars.submit(grammar)
        future.add_done_callback(lambda done: self._tell(Compiled(request, done.exception())))
        return True

    def check(self, grammar: Grammar) -> None:
        """Compile it now, if it is not, and wait. From any thread. Raises `SolError` for what cannot be compiled."""
        if self._grammars is None:
            raise _not_here()
        self._grammars.submit(grammar).result()

    def release(self, request_id: str) -> EngineRequest | None:
        """The request with this id, which waits no longer; None if there is none."""
        return self._held.pop(request_id, None)

    def release_all(self) -> list[EngineRequest]:
        held, self._held = list(self._held.values()), {}
        return held

    def is_held(self, request: EngineRequest) -> bool:
        """Whether it is this very request that waits under its id."""
        return self._held.get(request.request_id) is request


def _not_here() -> RequestError:
    return RequestError("grammar is not supported by this engine: it was made without a tokenizer", param="grammar")
