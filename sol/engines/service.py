"""A server process that somebody started: wait until it is ready, see what it last said, stop it, leave nothing behind.

    async with Service(["sol", "serve", "--port", "9000"], url="http://127.0.0.1:9000") as service:
        ...

The server runs in a process group of its own, led by a guard (`sol/engines/guard.py`) that ends the group when we die,
even by SIGKILL. When the server's first process ends, whatever it left in the group is killed, too: a restart must
find the port and the GPU's memory free.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from sol.engines.secrets import without_secrets
from sol.errors import ConfigError, EngineStartError

_log = logging.getLogger("sol.engines")

_GUARD = Path(__file__).with_name("guard.py")
_TAIL_BYTES = 64 * 1024
_TAIL_LINES = 20
"""Of the log, in an error's message."""
_PROBE_SECONDS = 5.0
"""For one answer of the ready route; an engine that warms up may be slow to answer, so this is no failure."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 0.5
_GROUP_SECONDS = 2.0
"""How long killed processes may take to be gone before we stop looking."""
_KILL_SECONDS = 10.0
"""How long the kernel may take to end a process that was killed (one that waits for a device does not end)."""


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nobody listens on. Somebody else may take it before it is used: then the server that gets it
    says so at its start. Raises `ConfigError` for a host that is no address of this machine."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.bind(address)
            port: int = listener.getsockname()[1]
            return port
    except OSError as error:
        raise ConfigError(f"host {host!r} is not an address of this machine ({error})", param="host") from None


class Service:
    """One server process, started once.

    `command` is the program and its arguments (no shell). `url` is where it listens, `ready_path` what answers 200
    there once it takes requests. `env` is added to our environment. Its output goes to the file `log` (appended to), or
    without one into memory, of which the last 64 KiB are kept. `name` is what messages call it. `start_timeout` in
    seconds is what `async with` allows; loading a large model takes minutes.

    Safe to stop twice and from several tasks. `start`, `on_exit` and `stop` are for tasks of an event loop, any loop.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        url: str,
        ready_path: str = "/health",
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
        name: str = "",
        start_timeout: float = 600.0,
    ) -> None:
        if not command:
            raise ConfigError("command is empty; name the program to start", param="command")
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None or parts.port is None:
            raise ConfigError(f"url must be like http://127.0.0.1:8000, not {url!r}", param="url")
        if not ready_path.startswith("/"):
            raise ConfigError(f"ready_path must begin with a slash, not {ready_path!r}", param="ready_path")
        self.command = tuple(command)
        self.url = url.rstrip("/")
        self.ready_path = ready_path
        self.log = log
        self.name = name or Path(command[0]).name
        self.start_timeout = start_timeout
        self._env = dict(env or {})
        self._address = (parts.hostname, parts.port)
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._returncode: int | None = None
        self._gone = self._reaped = False
        self._lock = threading.Lock()
        self._waiters: set[asyncio.Future[int]] = set()
        self._output: collections.deque[bytes] = collections.deque()
        self._log_start = 0
        self._reader: threading.Thread | None = None

    async def __aenter__(self) -> Service:
        await self.start(self.start_timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    # ── what it is doing ─────────────────────────────────────────────────────────────────────────────────────────

    @property
    def pid(self) -> int | None:
        """Of the program itself; None before the start."""
        return None if self._process is None else self._process.pid

    @property
    def running(self) -> bool:
        """Started and not ended, ready or not."""
        return self._process is not None and not self._gone

    @property
    def returncode(self) -> int | None:
        """As in `subprocess`: negative is the number of the signal that killed it. None while it runs."""
        return self._returncode

    @property
    def on_exit(self) -> asyncio.Future[int]:
        """A future of the running loop for the return code, a new one for each reader (so that a reader that is
        cancelled takes it from nobody else). Done when all of the server's processes are gone."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[int] = loop.create_future()
        with self._lock:
            if self._gone:
                assert self._returncode is not None
                future.set_result(self._returncode)
            else:
                self._waiters.add(future)
                future.add_done_callback(self._forget)
        return future

    def tail(self, n: int = _TAIL_LINES) -> str:
        """The last `n` lines that it wrote since its start, at most 64 KiB."""
        if self.log is None:
            with self._lock:
                data = b"".join(self._output)
        else:
            try:
                with self.log.open("rb") as file:
                    end = file.seek(0, os.SEEK_END)
                    # A log that was truncated meanwhile (rotated) begins anew.
                    file.seek(max(end - _TAIL_BYTES, self._log_start if end >= self._log_start else 0))
                    data = file.read()
            except OSError:
                return ""
        lines = data.decode(errors="replace").splitlines()
        return "\n".join(lines[-n:] if n > 0 else [])

    # ── start ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def start(self, timeout: float = 600.0) -> None:  # noqa: ASYNC109  (what is left must be stopped first)
        """Start it and return when it is ready.

        Raises `EngineStartError` if it cannot be started, ends, or is not ready after `timeout` seconds; nothing of it
        is left then, nor when this is cancelled. Raises RuntimeError if it was started before.
        """
        if self._process is not None:
            raise RuntimeError(f"{self.name} was started already; a Service starts once")
        if await self._listens():
            raise self._failure(f"something else listens at {self.url} already; stop it, or choose another port")
        try:
            self._spawn()
            problem = await self._until_ready(timeout)
        except BaseException:
            self._kill()
            raise
        if problem is not None:
            error = self._failure(problem)
            await self.stop()
            raise error

    def _spawn(self) -> None:
        output: int | IO[bytes] = subprocess.PIPE
        with contextlib.ExitStack() as stack:
            if self.log is not None:
                try:
                    self.log.parent.mkdir(parents=True, exist_ok=True)
                    output = stack.enter_context(self.log.open("ab"))
                except OSError as error:
                    raise ConfigError(
                        f"log {str(self.log)!r} cannot be written: {error.strerror}", param="log"
                    ) from None
                self._log_start = output.seek(0, os.SEEK_END)
            # It runs before the server does, so there is no moment in which our death would leave the server alone.
            guard: subprocess.Popen[bytes] | None = None
            try:
                guard = subprocess.Popen(  # noqa: S603
                    [sys.executable, "-I", "-S", str(_GUARD), str(os.getpid())],
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0,
                )  # fmt: skip
                self._process = subprocess.Popen(  # noqa: S603  (the user's own command, no shell)
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **self._env},
                    process_group=guard.pid,
                )
            except (OSError, ValueError) as error:  # ValueError: a word or a variable that no process can have
                if guard is not None:
                    guard.kill()
                    guard.wait()
                reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
                raise self._failure(f"{self.command[0]} cannot be run: {reason}") from None
        self._guard = guard
        if self._process.stdout is not None:
            self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
            self._reader.start()
        threading.Thread(target=self._wait, name=f"wait for {self.name}", daemon=True).start()

    async def _until_ready(self, seconds: float) -> str | None:
        """None once it is ready, or what went wrong."""
        deadline = time.monotonic() + seconds
        pause = _FIRST_PAUSE
        answer = "nothing listened"
        exited: asyncio.Future[Any] = self.on_exit
        try:
            while (left := deadline - time.monotonic()) > 0:
                probe: asyncio.Future[Any] = asyncio.ensure_future(self._probe(min(left, _PROBE_SECONDS)))
                try:
                    await asyncio.wait({probe, exited}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    probe.cancel()
                    await asyncio.gather(probe, return_exceptions=True)
                if exited.done():
                    return f"it ended ({how_it_ended(exited.result())}) before it was ready"
                status = probe.result()
                if status == 200:
                    return None
                answer = "nothing answered" if status is None else f"{self.ready_path} still answered {status}"
                await asyncio.wait({exited}, timeout=min(pause, max(deadline - time.monotonic(), 0)))
                pause = min(pause * 1.5, _LONGEST_PAUSE)
            return f"it was not ready after {seconds:g} s: {answer} at {self.url}"
        finally:
            exited.cancel()

    async def _listens(self) -> bool:
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(*self._address), _PROBE_SECONDS)
        except (OSError, TimeoutError):
            return False
        writer.close()
        return True

    async def _probe(self, seconds: float) -> int | None:
        """The status of the ready route, or None."""
        host, port = self._address
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(seconds):
                reader, writer = await asyncio.open_connection(host, port)
                shown = f"[{host}]" if ":" in host else host
                writer.write(
                    f"GET {self.ready_path} HTTP/1.1\r\nHost: {shown}:{port}\r\nConnection: close\r\n\r\n".encode()
                )
                words = (await reader.readline()).split(None, 2)
                return int(words[1]) if len(words) > 1 and words[0].startswith(b"HTTP/") else None
        except (OSError, ValueError, TimeoutError):
            return None
        finally:
            if writer is not None:
                writer.close()

    def _failure(self, problem: str) -> EngineStartError:
        # What it wrote last may still be on its way through the pipe.
        if self._reader is not None and self._gone:
            self._reader.join(timeout=1.0)
        return EngineStartError(self.name, without_secrets(self.command), self._returncode, self.tail(), problem)

    # ── stop ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def stop(self, grace: float = 10.0) -> None:
        """SIGTERM to the server, and after `grace` seconds SIGKILL to all of its processes. Returns when they are gone;
        at once if it has ended or never ran. If this is cancelled, they are killed."""
        if not self.running:
            return
        assert self._process is not None
        exited = self.on_exit
        try:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            await asyncio.wait({exited}, timeout=grace)
        finally:
            if not exited.done():
                self._kill()
        done, _ = await asyncio.wait({exited}, timeout=_KILL_SECONDS)
        exited.cancel()
        if not done:
            _log.warning("%s (process %d) was killed, but the kernel has not ended it yet", self.name, self.pid)

    def _kill(self) -> None:
        with self._lock:
            # Until the guard is reaped, its number is nobody else's.
            if self._guard is not None and not self._reaped:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._guard.pid, signal.SIGKILL)

    # ── threads ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _read(self, pipe: IO[bytes]) -> None:
        kept = 0
        with pipe:
            while data := os.read(pipe.fileno(), 16384):
                kept += len(data)
                with self._lock:
                    self._output.append(data)
                    while kept - len(self._output[0]) >= _TAIL_BYTES:
                        kept -= len(self._output.popleft())

    def _wait(self) -> None:
        """Until the first process has ended; then the rest of its group is killed."""
        assert self._process is not None
        assert self._guard is not None
        code = self._process.wait()
        self._kill()
        with self._lock:
            self._reaped = True
        self._guard.wait()
        end = time.monotonic() + _GROUP_SECONDS
        while _is_alive(self._guard.pid) and time.monotonic() < end:
            time.sleep(0.01)
        if self._reader is not None:
            self._reader.join(timeout=1.0)
        with self._lock:
            self._returncode, self._gone = code, True
            waiters, self._waiters = self._waiters, set()
        for future in waiters:
            # A loop that was closed meanwhile has nobody who waits.
            with contextlib.suppress(RuntimeError):
                future.get_loop().call_soon_threadsafe(_settle, future, code)

    def _forget(self, future: asyncio.Future[Any]) -> None:
        with self._lock:
            self._waiters.discard(future)


def _is_alive(group: int) -> bool:
    """Whether a process group has a member that has not ended. Zombies have: where a container's first process reaps
    nobody, they stay for ever, and a signal to the group would still find them."""
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                stat = Path("/proc", name, "stat").read_bytes()
            except OSError:  # it has just gone
                continue
            state, _, group_id = stat.rpartition(b")")[2].split(None, 3)[:3]
            if int(group_id) == group and state not in (b"Z", b"X"):
                return True
    return False


def _settle(future: asyncio.Future[int], code: int) -> None:
    if not future.done():
        future.set_result(code)


def how_it_ended(returncode: int) -> str:
    """`exit code 1`, `killed by SIGKILL`."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"killed by signal {-returncode}"
