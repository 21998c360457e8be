"""The engine in a process of its own.

The parent starts the child, writes it a `wire.StartUp` over its stdin, and waits for `wire.Ready`. From then on they
talk over two ZeroMQ sockets, requests one way and outputs the other. Neither queue has a limit: the engine must never
wait for a slow reader, and `add` must never wait for the engine; what can pile up is bounded by the tokens of the open
requests. The sockets' files are gone as soon as both are connected, so that no way to die leaves them behind.

Each side learns of the other's death from the kernel, however it died: the parent from a process descriptor that it
polls together with the socket, the child from the end of its stdin.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import msgspec
import zmq

from sol import openmp
from sol.config import EngineConfig
from sol.engine import wire
from sol.engine.core import EngineCore
from sol.engine.types import EngineInfo, EngineOutput, EngineRequest
from sol.errors import ConfigError, EngineDeadError, SolError

ENGINE_COMMAND = (sys.executable, "-m", "sol.engine_process")

_RETRY_MS = 10
_LAST_WORDS_MS = 200
"""How long what a dead child sent may still be on its way through the socket."""
_ASK_SECONDS = 3.0
"""How long a child may take to finish its step when it is asked to end."""
_TERMINATE_SECONDS = 2.0
_GRAMMARS_MS = 2
"""How often an engine with nothing else to do looks whether a grammar is compiled."""
_FLUSH_MS = 2000
"""How long a child that ends waits for its last message to be taken."""
_MAX_SOCKET_PATH = 100
"""Linux allows 107 bytes."""
_STDIN, _STDERR = 0, 2

_Message = TypeVar("_Message", wire.Hello, wire.Ready, wire.Output)


# ── the parent's side ────────────────────────────────────────────────────────────────────────────────────────────


class ProcessClient:
    """An `EngineClient` whose engine runs in a child process.

    `command` must be a program that calls `run_engine`. The constructor returns when the engine is ready; it raises
    what the engine raised at start-up (a `SolError`), or `EngineDeadError` if the child ended without a word.
    """

    def __init__(self, config: EngineConfig, *, command: Sequence[str] = ENGINE_COMMAND) -> None:
        self._directory = tempfile.mkdtemp(prefix="sol-")  # mode 0700: nobody else reaches the sockets
        self._context: zmq.Context[Any] = zmq.Context()
        self._outputs = _socket(self._context, zmq.PULL)
        self._requests = _socket(self._context, zmq.PUSH)
        self._process: subprocess.Popen[bytes] | None = None
        self._exit_fd = -1
        self._closed = False
        self._closing = threading.Lock()
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        try:
            self.info = self._start(config, list(command))
        except BaseException:
            self._end(ask=False)
            raise

    @property
    def pid(self) -> int:
        """Of the engine's process."""
        return self._child.pid

    def add(self, requests: Sequence[EngineRequest]) -> None:
        frame = wire.encode_requests(requests)
        with self._sending:
            if self._closed or self._child.poll() is not None:
                raise self._death()
            self._requests.send(frame)

    def abort(self, request_ids: Sequence[str]) -> None:
        frame = wire.encode(wire.AbortRequests(list(request_ids)))
        with self._sending:
            if not self._closed and self._child.poll() is None:
                self._requests.send(frame)

    def receive(self) -> EngineOutput:
        return self._expect(wire.Output).output

    def close(self) -> None:
        """Ask the child to end, terminate it if it does not, kill it if it still does not. Takes seconds at worst."""
        self._end(ask=True)

    @property
    def _child(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    def _start(self, config: EngineConfig, command: list[str]) -> EngineInfo:
        output_path, input_path = (os.path.join(self._directory, name) for name in ("outputs", "requests"))
        if len(os.fsencode(input_path)) > _MAX_SOCKET_PATH:
            raise ConfigError(
                f"the directory for temporary files, {tempfile.gettempdir()}, has too long a path for a socket: set "
                "TMPDIR to a shorter one"
            )
        self._outputs.bind(f"ipc://{output_path}")
        # Ctrl-C in a terminal reaches the whole process group, but what it means is the parent's decision. The child
        # inherits the blocked signal, and so ignores it even before it has run a line.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            # Whatever the child or a library prints goes to stderr: stdout belongs to the parent's output.
            self._process = subprocess.Popen(  # noqa: S603
                command, stdin=subprocess.PIPE, stdout=_STDERR, env=openmp.ENVIRONMENT | os.environ
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._exit_fd = os.pidfd_open(self._process.pid)
        start_up = wire.StartUp(
            config=config,
            directory=self._directory,
            input_address=f"ipc://{input_path}",
            output_address=f"ipc://{output_path}",
        )
        self._tell(wire.encode_start_up(start_up))
        # The side that connects can always send: ZeroMQ queues what it sends, and tries again until its peer is there.
        self._requests.setsockopt(zmq.RECONNECT_IVL, _RETRY_MS)
        self._requests.connect(start_up.input_address)
        self._requests.send(wire.encode(wire.Hello()))
        self._expect(wire.Hello)
        shutil.rmtree(self._directory)
        return self._expect(wire.Ready).info

    def _expect(self, kind: type[_Message]) -> _Message:
        message = self._receive()
        if isinstance(message, wire.Failed):
            raise message.to_error()
        if not isinstance(message, kind):
            raise EngineDeadError(f"the engine sent {type(message).__name__} where {kind.__name__} was due")
        return message

    def _tell(self, data: bytes) -> None:
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the child is gone already; `_receive` says how
            self._child.stdin.write(data)
            self._child.stdin.flush()

    def _receive(self) -> wire.FromEngine:
        with self._receiving:
            if self._closed:
                raise self._death()
            poller = zmq.Poller()
            poller.register(self._outputs, zmq.POLLIN)
            poller.register(self._exit_fd, zmq.POLLIN)
            if self._outputs in dict(poller.poll()) or self._outputs.poll(_LAST_WORDS_MS):
                return wire.decode_from_engine(self._outputs.recv())
            raise self._death()

    def _death(self) -> EngineDeadError:
        if self._closed:
            return EngineDeadError("the engine is closed")
        code = self._child.wait()
        if code >= 0:
            return EngineDeadError(f"the engine's process ended with exit code {code}; its log says why")
        name = signal.Signals(-code).name
        hint = " (if nobody sent it, the system was out of memory)" if name == "SIGKILL" else ""
        return EngineDeadError(f"the engine's process was ended by {name}{hint}")

    def _end(self, *, ask: bool) -> None:
        with self._closing:
            if self._closed:
                return
            with self._sending:
                self._closed = True
                if ask and self._child.poll() is None:
                    self._requests.send(wire.encode(wire.Shutdown()))
            if self._process is not None:
                _end_process(self._process, ask_seconds=_ASK_SECONDS if ask else 0.0)
            with self._receiving:  # a blocked `receive` has been woken by the child's end
                self._context.destroy(linger=0)
                if self._exit_fd >= 0:
                    os.close(self._exit_fd)
            shutil.rmtree(self._directory, ignore_errors=True)


def _end_process(process: subprocess.Popen[bytes], *, ask_seconds: float) -> None:
    try:
        process.wait(ask_seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            process.wait(_TERMINATE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it never read its start-up message
        process.stdin.close()


def _socket(context: zmq.Context[Any], kind: int) -> zmq.Socket[Any]:
    socket: zmq.Socket[Any] = context.socket(kind)
    socket.set_hwm(0)
    socket.setsockopt(zmq.LINGER, 0)
    return socket


# ── the child's side ─────────────────────────────────────────────────────────────────────────────────────────────


def run_engine(build: Callable[[EngineConfig], EngineCore]) -> NoReturn:
    """The main program of an engine's process: build an engine as the parent wishes, run it, exit.

    Exit code 0 after a shutdown that was asked for, 1 if the engine could not be built or a step failed. SIGTERM keeps
    its default: there is nothing to save, so the process ends at once and without a word.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        start_up = wire.read_start_up(_STDIN)
    except EOFError as error:
        sys.exit(f"this program is an engine's process, which Sol starts itself: {error}")
    sys.exit(_run(start_up, build))


def _exit_with_parent(directory: str) -> None:
    # A thread, because the parent may die while a model loads or a step runs; `_exit`, because either may take long.
    while os.read(_STDIN, 1):
        pass
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)


def _run(start_up: wire.StartUp, build: Callable[[EngineConfig], EngineCore]) -> int:
    context: zmq.Context[Any] = zmq.Context()
    requests = _socket(context, zmq.PULL)
    outputs = _socket(context, zmq.PUSH)
    try:
        requests.bind(start_up.input_address)
        outputs.connect(start_up.output_address)
        watch = threading.Thread(target=_exit_with_parent, args=(start_up.directory,), name="parent-watch", daemon=True)
        watch.start()
        wire.decode_to_engine(requests.recv())  # Hello
        outputs.send(wire.encode(wire.Hello()))
        try:
            core = build(start_up.config)
        except Exception as error:
            if not isinstance(error, SolError):
                traceback.print_exc()
            outputs.send(wire.encode(wire.Failed.of(error)))
            return 1
        outputs.send(wire.encode(wire.Ready(core.info)))
        _serve(core, requests, outputs)
        return 0 if core.dead is None else 1
    finally:
        context.destroy(linger=_FLUSH_MS)


def _serve(core: EngineCore, requests: zmq.Socket[Any], outputs: zmq.Socket[Any]) -> None:
    """Steps until a shutdown is asked for or a step fails; sleeps while there is nothing to do."""
    while core.dead is None:
        while not core.has_work and not requests.poll(_GRAMMARS_MS if core.awaits_grammars else None):
            pass
        while requests.poll(0):
            if not _take_in(core, wire.decode_to_engine(requests.recv())):
                return
        outputs.send(wire.encode(wire.Output(core.step())))


def _take_in(core: EngineCore, message: wire.ToEngine) -> bool:
    """False if the engine is to end."""
    if isinstance(message, wire.Shutdown):
        return False
    if isinstance(message, wire.AbortRequests):
        core.abort(message.request_ids)
    elif isinstance(message, wire.AddRequests):
        for encoded in message.requests:
            try:
                core.add([wire.decode_request(encoded)])
            except (msgspec.ValidationError, SolError) as error:
                core.refuse(encoded.request_id, f"the request cannot be read: {error}")
    return True
