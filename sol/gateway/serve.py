"""A gateway as a process: a port, and an orderly end.

SIGTERM and SIGINT drain it: `/ready` says 503 and `/live` 200, new work gets 503, what was admitted goes on to its end
or for `drain_seconds`; what is left then is told that it ends, and the port is closed. A second signal waits for
nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Final

import uvicorn
import uvloop

from sol.gateway.app import GatewayApp
from sol.gateway.config import GatewayConfig
from sol.gateway.gateway import Gateway
from sol.listening import bind_socket, listening_url

_BACKLOG: Final = 4096
_KEEP_ALIVE_SECONDS: Final = 75
"""Longer than the idle timeouts of common load balancers, as in `sol serve`."""
_LAST_BYTES_SECONDS: Final = 5
_YOUNG_OBJECTS: Final = 20_000
"""Between two looks of the garbage collector at what is new. A call lets go of what it made, so nearly nothing is
found; at Python's own 700 it looks every few calls, at all that are open."""


def serve(config: GatewayConfig, *, on_ready: Callable[[str], None] | None = None) -> int:
    """Serve until SIGINT or SIGTERM (in the main thread); returns the process's exit code. `on_ready` is told the URL.

    Raises `ConfigError` for an address that cannot be bound, and for what cannot work.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config, on_ready))


async def _serve(config: GatewayConfig, on_ready: Callable[[str], None] | None) -> int:
    async with GatewayServer(config) as server:
        with _signals(server.stop):
            if on_ready is not None:
                on_ready(server.url)
            await server.stopped.wait()
    return 0


class GatewayServer:
    """A running gateway, from `async with` on; `stop` begins its end, which the block's end waits for."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self.gateway = Gateway(config)
        self.app = GatewayApp(self.gateway)
        self.stopped = asyncio.Event()
        """No call is open any more, or nobody waits for those that are."""

    async def __aenter__(self) -> GatewayServer:
        options = self._config.server
        self._listener = bind(options.host, options.port)
        try:
            self.url = listening_url(options.host, self._listener.getsockname()[1])
            await self.gateway.start()
        except BaseException:
            self._listener.close()
            raise
        self._server = _HttpServer(
            uvicorn.Config(
                self.app,
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
                timeout_graceful_shutdown=_LAST_BYTES_SECONDS,
            )
        )
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        self._draining: asyncio.Task[None] | None = None
        # What is there now stays: the collector need not look at it again and again while it holds up streams.
        gc.collect()
        gc.freeze()
        self._gc_threshold = gc.get_threshold()
        gc.set_threshold(_YOUNG_OBJECTS, *self._gc_threshold[1:])
        return self

    async def __aexit__(self, *_exception: object) -> None:
        self.gateway.draining = True
        if self._draining is not None:
            self._draining.cancel()
        await self.app.abort()
        self._server.should_exit = True
        try:
            await self._serving
        finally:
            gc.set_threshold(*self._gc_threshold)
            gc.unfreeze()
            await self.gateway.close()
            self._listener.close()

    def stop(self) -> None:
        """Drain; the second time, stop at once."""
        if self._draining is not None:
            self.stopped.set()
            return
        self.gateway.draining = True
        self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.server.drain_seconds):
                await self.app.drained()
        self.stopped.set()


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers, which would not let calls end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def _signals(stop: Callable[[], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises `ConfigError` for an address that cannot be had."""
    return bind_socket(host, port, backlog=_BACKLOG, host_field="server.host", port_field="server.port")
