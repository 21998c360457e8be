"""A whole server: a port, an engine in a process of its own, routes over both, and an orderly end.

The port is bound before anything is loaded, so that a busy one is an error at once and probes get answers from the
first second. SIGTERM drains the server: `/ready` says 503, new work is turned away, open requests finish, for
`drain_timeout` seconds at most. Then, or at SIGINT, or at a second SIGTERM, it ends: no new connections, requests that
are still open end with an error event, the engine's process is gone before `serve` returns. One more signal waits for
nobody's last bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import uvicorn
import uvloop

from sol.engine.async_engine import AsyncEngine
from sol.engine.process import ProcessClient
from sol.engine.types import EngineInfo
from sol.errors import ConfigError
from sol.listening import bind_socket, listening_url
from sol.models.source import resolve_configured
from sol.server.background import run_in_background
from sol.server.config import ServerConfig
from sol.server.observe import Observer, RequestLog
from sol.server.routes import create_app
from sol.server.state import ServedModel, ServerState
from sol.server.supervisor import Supervisor
from sol.text.answer_format import TOOL_PARSERS, AnswerFormat
from sol.text.chat_template import ChatTemplate, load_chat_template
from sol.text.grammar import GrammarCompiler
from sol.text.tokenizer import Tokenizer, end_token_ids

if TYPE_CHECKING:
    from sol.server.traces import Tracer

logger = logging.getLogger("sol.server")

_BACKLOG = 2048
_KEEP_ALIVE_SECONDS = 75
"""Longer than the idle timeouts of common load balancers: the side that reuses a connection must be the first to give
it up, or it sends requests into a closing one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerReady:
    """What `serve` tells when the first request may come."""

    url: str
    """Where the server is reached from this machine, without a slash at the end."""
    model_names: tuple[str, ...]
    info: EngineInfo
    seconds: float
    """From the call of `serve` on."""


def serve(
    config: ServerConfig,
    *,
    on_listening: Callable[[str], None] | None = None,
    on_ready: Callable[[ServerReady], None] | None = None,
) -> int:
    """Serve until SIGINT or SIGTERM (in the main thread), then return the process's exit code: 0, or 1 if the engine
    was dead by then.

    `on_listening` is told the URL once the port is bound, `on_ready` everything once the model is loaded. Raises
    `ConfigError` for an address that cannot be bound, and whatever loading the model raises.
    """
    listener = bind_socket(config.host, config.port, backlog=_BACKLOG)
    with contextlib.closing(listener), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        url = listening_url(config.host, listener.getsockname()[1])
        if on_listening is not None:
            on_listening(url)
        return runner.run(_serve(config, listener, url, on_ready))


async def _serve(
    config: ServerConfig, listener: socket.socket, url: str, on_ready: Callable[[ServerReady], None] | None
) -> int:
    started = time.monotonic()
    state = ServerState(config)
    observers: list[Observer] = []
    if config.enable_log_requests:
        observers.append(RequestLog(state.decode, config.max_log_len))
    tracer = _tracer(config)
    if tracer is not None:
        observers.append(tracer)
    server = _HttpServer(
        uvicorn.Config(
            create_app(state, observers),
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            # uvicorn says int and takes any number
            timeout_graceful_shutdown=config.shutdown_timeout,  # type: ignore[arg-type]
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    loading = run_in_background(lambda: _load(config), lambda loaded: loaded.client.close(), name="model-loading")
    stopping = asyncio.create_task(state.stopping.wait())
    draining = asyncio.create_task(_drain(state))
    supervisor: Supervisor | None = None
    supervising: asyncio.Task[None] | None = None
    try:
        with _signals(state, server):
            first: list[asyncio.Future[Any]] = [serving, loading, stopping]
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                loaded = loading.result()
                served = loaded.served_by(AsyncEngine(loaded.client))
                supervisor = Supervisor(state, served, lambda: ProcessClient(config.engine))
                supervising = asyncio.create_task(supervisor.run())
                state.set_ready(served)
                if on_ready is not None:
                    seconds = time.monotonic() - started
                    ready = ServerReady(url=url, model_names=config.model_names, info=served.info, seconds=seconds)
                    on_ready(ready)
                await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
            state.drain()
            state.stopping.set()
            server.should_exit = True
            await serving
            return 0 if supervisor is None or supervisor.engine.dead is None else 1
    finally:
        state.stopping.set()
        server.should_exit = True
        loading.cancel()
        tasks = [task for task in (stopping, draining, supervising) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(serving, *tasks, return_exceptions=True)
        if supervisor is not None:
            supervisor.grammars.close()
            await asyncio.to_thread(supervisor.engine.close)
        await asyncio.to_thread(state.metrics.close)
        if tracer is not None:
            await asyncio.to_thread(tracer.close)


def _tracer(config: ServerConfig) -> Tracer | None:
    if config.otlp_traces_endpoint is None:
        return None
    from sol.server.traces import Tracer  # OpenTelemetry is there for those who want it

    return Tracer.to_endpoint(config.model_names[0], config.otlp_traces_endpoint)


async def _drain(state: ServerState) -> None:
    await state.draining.wait()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(state.wait_until_idle(), state.config.drain_timeout)
    if not state.stopping.is_set() and state.num_open:
        logger.warning("%d requests were open after %g s of draining", state.num_open, state.config.drain_timeout)
    state.stopping.set()


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers, which end by raising the signal again: the engine would still be open."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def _signals(state: ServerState, server: uvicorn.Server) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if state.stopping.is_set():
            server.force_exit = True
        state.drain()
        state.stopping.set()

    def drain() -> None:
        if state.draining.is_set() or not state.is_loaded:
            stop()
        else:
            state.drain()

    loop.add_signal_handler(signal.SIGINT, stop)
    loop.add_signal_handler(signal.SIGTERM, drain)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


@dataclass(slots=True, kw_only=True)
class _Loaded:
    client: ProcessClient
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    answers: AnswerFormat
    eos_token_ids: tuple[int, ...]
    longest_token: int
    """In bytes."""

    def served_by(self, engine: AsyncEngine) -> ServedModel:
        return ServedModel(
            engine=engine,
            info=engine.info,
            tokenizer=self.tokenizer,
            chat_template=self.chat_template,
            eos_token_ids=self.eos_token_ids,
            grammars=GrammarCompiler(lambda: (self.tokenizer, self.eos_token_ids), vocab_size=engine.info.vocab_size),
            answers=self.answers,
            max_prompt_chars=self.longest_token * engine.info.max_model_len,
        )


def _load(config: ServerConfig) -> _Loaded:
    files = resolve_configured(config.engine)
    tokenizer = Tokenizer.from_files(files)
    template = load_chat_template(files)
    answers = AnswerFormat.of(
        template,
        tokenizer,
        tool_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
        auto_tool_choice=config.enable_auto_tool_choice is not False,
    )
    if config.enable_auto_tool_choice and answers.tools is None:
        raise ConfigError(
            f"enable_auto_tool_choice needs to know how {config.engine.model!r} calls tools, which its chat template "
            f"does not show; add tool_call_parser, one of {', '.join(TOOL_PARSERS)}",
            param="tool_call_parser",
        )
    return _Loaded(
        tokenizer=tokenizer,
        chat_template=template,
        answers=answers,
        eos_token_ids=end_token_ids(files, tokenizer),
        longest_token=max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)),
        client=ProcessClient(config.engine),
    )
