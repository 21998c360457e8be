"""What every route reads: the phase the server is in, the engine, the model's text side."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from sol.engine.async_engine import AsyncEngine
from sol.engine.types import EngineInfo
from sol.errors import EngineDeadError, EngineNotReadyError, SolError, UnknownModelError
from sol.seeds import SeedSource
from sol.server.config import ServerConfig
from sol.server.metrics import Metrics
from sol.server.speculation_metrics import SpeculationLog
from sol.text.chat_template import ChatTemplate
from sol.text.tokenizer import Tokenizer


@dataclass(slots=True, frozen=True)
class ServedModel:
    """A model that is loaded: the engine that computes it, and what turns text into its tokens and back."""

    engine: AsyncEngine
    info: EngineInfo
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    eos_token_ids: tuple[int, ...]
    max_prompt_chars: int
    """A text longer than this cannot fit into the context, whatever it says: it is refused before it is tokenized."""


class ServerState:
    """loading → ready → stopping; dead when the engine is. Lives in the event loop's thread."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.metrics = Metrics(config.model_names[0])
        self.seeds = SeedSource(config.engine.seed)
        self.created = int(time.time())
        self.stopping = asyncio.Event()
        """Set when the server stops: open requests end with an error, new ones are turned away."""
        self._served: ServedModel | None = None

    def set_ready(self, served: ServedModel) -> None:
        self.metrics.set_engine(served.info)
        served.engine.add_stats_listener(self.metrics.observe_stats)
        if served.info.drafters:
            log = SpeculationLog(asyncio.get_running_loop().call_later)
            served.engine.add_stats_listener(log.observe)
        self._served = served

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
        if self.stopping.is_set():
            return shutting_down()
        if self._served is None:
            return EngineNotReadyError("the model is still loading; try again in a few seconds")
        return self.why_not_alive()

    def why_not_alive(self) -> EngineDeadError | None:
        """None unless a restart is what would help."""
        if self._served is None:
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
