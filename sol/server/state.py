"""What every route reads: the phase the server is in, the engine, the model's text side."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from sol.engine.async_engine import AsyncEngine
from sol.engine.types import EngineInfo
from sol.errors import EngineDeadError, EngineNotReadyError, QueueFullError, SolError, UnknownModelError
from sol.seeds import SeedSource
from sol.server.config import ServerConfig
from sol.server.metrics import Metrics
from sol.server.responses_store import ResponseStore
from sol.server.speculation_metrics import SpeculationLog
from sol.server.usages import Usages
from sol.text.answer_format import AnswerFormat
from sol.text.chat_template import ChatTemplate
from sol.text.grammar import GrammarCompiler
from sol.text.tokenizer import Tokenizer


@dataclass(slots=True, frozen=True)
class ServedModel:
    """A model that is loaded: the engine that computes it, and what turns text into its tokens and back."""

    engine: AsyncEngine
    info: EngineInfo
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    eos_token_ids: tuple[int, ...]
    grammars: GrammarCompiler
    answers: AnswerFormat
    """The forms in which it writes reasoning and tool calls."""
    max_prompt_chars: int
    """A text longer than this cannot fit into the context, whatever it says: it is refused before it is tokenized."""


class ServerState:
    """loading → ready → draining → stopping; dead when the engine is. Lives in the event loop's thread."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.metrics = Metrics(config.model_names[0])
        self.seeds = SeedSource(config.engine.seed)
        self.usages = Usages()
        self.created = int(time.time())
        self.stopping = asyncio.Event()
        """Set when the server stops: open requests end with an error, new ones are turned away."""
        self.draining = asyncio.Event()
        """Set when it is about to: new requests are turned away, open ones go on."""
        self.restarting = False
        """The engine is dead, and somebody is about to start it again."""
        self.responses = ResponseStore(config.max_stored_responses)
        self.num_open = 0
        """Requests for work that have not been answered, whole."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._reading: set[asyncio.Task[object]] = set()
        """Tasks that wait for the rest of a body."""
        self._served: ServedModel | None = None

    def set_ready(self, served: ServedModel) -> None:
        """The engine is there, for the first time or again."""
        self.restarting = False
        self.metrics.set_engine(served.info)
        served.engine.add_stats_listener(self.metrics.observe_stats)
        if served.info.drafters:
            log = SpeculationLog(asyncio.get_running_loop().call_later)
            served.engine.add_stats_listener(log.observe)
        self._served = served

    @contextlib.contextmanager
    def open_request(self) -> Iterator[None]:
        """While it is answered."""
        self.num_open += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_open -= 1
            if not self.num_open:
                self._idle.set()

    async def wait_until_idle(self) -> None:
        await self._idle.wait()

    @contextlib.contextmanager
    def reading_body(self) -> Iterator[None]:
        """While a body comes: a server that drains does not wait for the rest. Raises `EngineNotReadyError` then."""
        task = asyncio.current_task()
        assert task is not None
        self._reading.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if task in self._reading:
                raise
            task.uncancel()  # it was `drain`
            raise shutting_down() from None
        finally:
            self._reading.discard(task)

    def drain(self) -> None:
        """Turn new work away, and work of which only a part has come."""
        self.draining.set()
        reading, self._reading = self._reading, set()
        for task in reading:
            task.cancel()

    def check_queue(self) -> None:
        """Raise `QueueFullError` if as many requests wait as may."""
        model, most = self.model, self.config.max_queue_len
        # What the engine said last, and what it has been given: either may be the better account.
        waiting = max(model.engine.stats.num_waiting, model.engine.num_open - model.info.max_num_seqs)
        if waiting >= most:
            raise QueueFullError(f"{waiting} requests wait already, and at most {most} may; try again later")

    @property
    def is_loaded(self) -> bool:
        return self._served is not None

    @property
    def is_dead(self) -> bool:
        return self._served is not None and self._served.engine.dead is not None

    @property
    def model(self) -> ServedModel:
        """The loaded model, for a route that needs it. Raises the error that says why there is none to work with."""
        reason = self.why_not_ready()
        if reason is not None:
            raise reason
        assert self._served is not None
        return self._served

    def why_not_ready(self) -> SolError | None:
        """None when work is welcome."""
        if self.stopping.is_set() or self.draining.is_set():
            return shutting_down()
        if self._served is None:
            return EngineNotReadyError("the model is still loading; try again in a few seconds")
        if self.restarting:
            return EngineNotReadyError("the engine is being started again; try again in a few seconds")
        return self.why_not_alive()

    def why_not_alive(self) -> EngineDeadError | None:
        """None unless a restart is what would help."""
        if self._served is None or self.restarting:
            return None
        dead = self._served.engine.dead
        if dead is not None:
            return EngineDeadError(dead.message)  # its own: a raised exception collects the raiser's traceback
        stalled = self._served.engine.stalled_for()
        if stalled > self.config.stall_timeout:
            return EngineDeadError(
                f"the engine has made no progress for {stalled:.0f} s although requests are open; restart the server"
            )
        return None

    def decode(self, token_ids: list[int]) -> str:
        """The text of a prompt's tokens, for a log."""
        return "" if self._served is None else self._served.tokenizer.decode(token_ids, skip_special_tokens=False)

    def check_model_name(self, name: str | None) -> str:
        """The name a response carries. Raises `UnknownModelError`."""
        names = self.config.model_names
        if name is None:
            return names[0]
        if name not in names:
            raise UnknownModelError(
                f"the model {name[:200]!r} is not served here; use {' or '.join(map(repr, names))}", param="model"
            )
        return name


def shutting_down() -> EngineNotReadyError:
    return EngineNotReadyError("the server is shutting down")
