"""A PostgreSQL of the test's own; it can be stopped and started again."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def _find() -> Path | None:
    """The directory of the newest PostgreSQL's programs: Debian does not put them on the path."""
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    if versions:
        return versions[-1].parent
    initdb = shutil.which("initdb")
    return Path(initdb).resolve().parent if initdb else None


PROGRAMS = _find()
MISSING = "there is no PostgreSQL: on Debian and Ubuntu, apt-get install postgresql"


def _somebody() -> Mapping[str, Any]:
    """PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        try:
            user = pwd.getpwnam(name)
        except KeyError:
            continue
        return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    return {}


class PostgresServer:
    def __init__(self, directory: Path) -> None:
        assert PROGRAMS is not None
        self._as = _somebody()
        self._directory = directory
        if self._as:
            os.chown(directory, self._as["user"], self._as["group"])
        subprocess.run(
            [PROGRAMS / "initdb", "-D", directory / "data", "-U", "sol", "-A", "trust", "--no-sync", "--locale=C",
             "-E", "UTF8"],
            check=True, capture_output=True, cwd=directory, **self._as,
        )  # fmt: skip
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.url = f"postgresql://sol@127.0.0.1:{self._port}/postgres"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        assert PROGRAMS is not None
        self._process = subprocess.Popen(
            [PROGRAMS / "postgres", "-D", self._directory / "data", "-p", str(self._port), "-h", "127.0.0.1",
             "-k", str(self._directory), "-F", "-c", "shared_buffers=16MB", "-c", "autovacuum=off"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=self._directory, **self._as,
        )  # fmt: skip
        deadline = time.monotonic() + 30
        ready = [PROGRAMS / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(self._port), "-U", "sol"]
        while subprocess.run(ready, check=False).returncode != 0:
            assert self._process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)  # at once: connections break
            self._process.wait()
            self._process = None
