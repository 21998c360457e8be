"""The simulated server as a process would have it: a port, connections, crashes, an orderly end.

    async with SimulatedServer(SimulateConfig(port=0)) as server:
        ...  # server.url

`in_thread` is the same without an event loop, and `serve` the same until SIGINT or SIGTERM. A server that is told to
stop says so (`/ready`, and 503 to new work), lets open responses end for `drain_seconds`, fails those that are left,
and is gone. A second signal waits for nobody.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final, Self

import uvloop

from sol.errors import EngineNotReadyError
from sol.listening import bind_socket, listening_url
from sol.simulate.config import SimulateConfig
from sol.simulate.http import Connection, Exchange
from sol.simulate.routes import Routes
from sol.simulate.service import Service

_BACKLOG: Final = 4096
_LAST_BYTES_SECONDS: Final = 5.0
"""For clients to take them, when the server has stopped."""


class SimulatedServer:
    """Raises `ConfigError` on entry for an address that cannot be bound."""

    def __init__(self, config: SimulateConfig) -> None:
        self._config = config
        self._stopped = False
        self._drained: asyncio.Event | None = None

    async def __aenter__(self) -> Self:
        config = self._config
        self.service = Service(config)
        self._routes = Routes(self.service, self._update)
        self._ports: list[_Port] = []
        try:
            self._port = self._open_port(config.port, "port", self._routes.handle)
            if config.control_port is not None:
                self._control = self._open_port(config.control_port, "control_port", self._routes.handle_control)
        except BaseException:
            self._close()
            raise
        self.url = listening_url(config.host, self._port.number)
        self.control_url = self.url if config.control_port is None else listening_url(config.host, self._control.number)
        """Where /simulate/* is."""
        self._timer: asyncio.TimerHandle | None = None
        self._crashed_for: float | None = None
        """Seconds that the process will start up for, while it is down."""
        now = time.monotonic()
        self.service.ready_at = now + config.startup_seconds
        self.service.faults.add(config.faults, now)
        self._update()
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.stop(0.0)

    async def stop(self, drain_seconds: float) -> None:
        """Let open responses end for so long, fail the rest, close. A second call hurries the first."""
        service = self.service
        if self._stopped:
            return
        if not service.stopping:
            service.stopping = True
            if service.num_open and drain_seconds:
                drained = self._drained = asyncio.Event()
                service.on_drained = drained.set
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(drained.wait(), drain_seconds)
        elif self._drained is not None:
            self._drained.set()
            return
        service.fail_all(EngineNotReadyError("the server is shutting down"))
        if self._timer is not None:
            self._timer.cancel()
        self._close()
        deadline = time.monotonic() + _LAST_BYTES_SECONDS
        for port in self._ports:
            await port.finish(deadline)
        self._stopped = True

    def _open_port(self, number: int, field: str, handle: Callable[[Exchange], None]) -> _Port:
        port = _Port(self._config.host, number, field, handle)
        self._ports.append(port)
        port.open()
        return port

    def _close(self) -> None:
        self.service.close()
        for port in self._ports:
            port.close()

    def _update(self) -> None:
        """Be what the faults say now: up, refusing, or down. Called when they change, by hand or by the clock."""
        service, port = self.service, self._port
        now = time.monotonic()
        for active in service.faults.all():
            if active.fault.kind == "crash" and active.start <= now and not active.begun:
                active.begun = True
                self._crashed_for = active.fault.startup_seconds
                port.close()
                service.crash()
                port.reset_all()
                port.reserve()
        down = service.faults.state("crash", now) or service.faults.state("refuse", now)
        if down is not None and port.is_open:
            port.close()
            port.reserve()
        elif down is None and not port.is_open:
            if self._crashed_for is not None:
                service.ready_at = now + self._crashed_for
                self._crashed_for = None
            port.open()
        service.faults_changed()
        if self._timer is not None:
            self._timer.cancel()
        change = service.faults.next_change(now)
        self._timer = None
        if change is not None and change - now < 1e9:
            self._timer = asyncio.get_running_loop().call_later(change - now, self._update)


class _Port:
    """A port that can be closed, held, and opened again."""

    def __init__(self, host: str, number: int, field: str, handle: Callable[[Exchange], None]) -> None:
        self._host = host
        self.number = number
        self._field = field
        self._handle = handle
        self._connections: set[Connection] = set()
        self._loop = asyncio.get_running_loop()
        self._socket: socket.socket | None = None
        self.is_open = False
        self._accepting: set[asyncio.Task[object]] = set()

    def open(self) -> None:
        if self._socket is None:
            self._bind()
        assert self._socket is not None
        self._socket.listen(_BACKLOG)
        self._loop.add_reader(self._socket, self._accept)
        self.is_open = True

    def close(self) -> None:
        """Refuse connections; those that are there stay."""
        if self._socket is not None:
            if self.is_open:
                self._loop.remove_reader(self._socket)
            self._socket.close()
        self._socket = None
        self.is_open = False

    def reserve(self) -> None:
        """Bind without listening: clients are refused as if nobody was there, and nobody else can take the port."""
        self._bind()

    def reset_all(self) -> None:
        for connection in list(self._connections):
            connection.reset()

    async def finish(self, deadline: float) -> None:
        """Close connections as their last bytes are taken; reset those whose clients have not by then."""
        for connection in list(self._connections):
            connection.close()
        if self._connections:
            closed = [connection.closed for connection in self._connections]
            await asyncio.wait(closed, timeout=max(0.0, deadline - time.monotonic()))
        self.reset_all()
        for task in self._accepting:
            task.cancel()

    def _bind(self) -> None:
        self._socket = bind_socket(self._host, self.number, port_field=self._field)
        self.number = self._socket.getsockname()[1]

    def _accept(self) -> None:
        # As many as have come, so that a burst of thousands costs one turn of the loop.
        while self._socket is not None:
            try:
                accepted, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    raise
                # No descriptors are left. Those who knock wait in the backlog until one is, and the loop does not spin.
                listener = self._socket
                self._loop.remove_reader(listener)
                self._loop.call_later(0.1, self._resume, listener)
                return
            accepted.setblocking(False)
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # for clients that vanish without a word
            task: asyncio.Task[object] = self._loop.create_task(
                self._loop.connect_accepted_socket(lambda: Connection(self._handle, self._connections), accepted)
            )
            self._accepting.add(task)
            task.add_done_callback(self._accepting.discard)

    def _resume(self, listener: socket.socket) -> None:
        if self._socket is listener and self.is_open:
            self._loop.add_reader(listener, self._accept)


@contextlib.contextmanager
def in_thread(config: SimulateConfig) -> Iterator[SimulatedServer]:
    """A running server for callers without an event loop, in a thread of its own. Raises `ConfigError`.

    Only `url` and `control_url` of what is yielded are the caller's: everything else lives in the other thread.
    """
    started: concurrent.futures.Future[tuple[SimulatedServer, asyncio.AbstractEventLoop, asyncio.Event]]
    started = concurrent.futures.Future()

    async def run() -> None:
        async with SimulatedServer(config) as server:
            done = asyncio.Event()
            started.set_result((server, asyncio.get_running_loop(), done))
            await done.wait()

    def main() -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(run())
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    thread = threading.Thread(target=main, name="sol-simulate", daemon=True)
    thread.start()
    server, loop, done = started.result()
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join()


def serve(config: SimulateConfig, *, on_ready: Callable[[SimulatedServer], None] | None = None) -> int:
    """Serve until SIGINT or SIGTERM, in the main thread; the process's exit code. Raises `ConfigError`."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config, on_ready))


async def _serve(config: SimulateConfig, on_ready: Callable[[SimulatedServer], None] | None) -> int:
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()
    async with SimulatedServer(config) as server:
        stopping: asyncio.Task[None] | None = None
        hurrying: list[asyncio.Task[None]] = []

        def stop() -> None:
            if asked.is_set() and not hurrying:
                hurrying.append(loop.create_task(server.stop(0.0)))
            asked.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop)
        try:
            if on_ready is not None:
                on_ready(server)
            await asked.wait()
            stopping = loop.create_task(server.stop(config.drain_seconds))
            await stopping
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
    return 0
