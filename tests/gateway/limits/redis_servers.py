"""A Redis (or Valkey) of the test's own, on a socket in its directory; it can be stopped and started again."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

PROGRAM = shutil.which("valkey-server") or shutil.which("redis-server")
MISSING = "there is no redis-server or valkey-server: on Debian and Ubuntu, apt-get install redis-server"


class RedisServer:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self._port}/0"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        assert PROGRAM is not None
        arguments = ["--port", str(self._port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
                     "--dir", str(self._directory), "--daemonize", "no"]  # fmt: skip
        with (self._directory / "redis.log").open("ab") as log:
            self._process = subprocess.Popen([PROGRAM, *arguments], stdout=log, stderr=log)
        deadline = time.monotonic() + 20
        while True:
            try:
                with socket.create_connection(("127.0.0.1", self._port), timeout=1) as connection:
                    connection.sendall(b"PING\r\n")
                    if connection.recv(16).startswith(b"+PONG"):
                        return
            except OSError:
                pass
            assert self._process.poll() is None, (self._directory / "redis.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def stop(self) -> None:
        """Kill it: connections break, and what it knew is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """It takes connections and does not answer."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)
