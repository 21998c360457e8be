"""What the parts of measure.py share: a simulated server on a core of its own, and `sol bench` on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import ROOT, ask, free_port, server, tail, wait_until_ready

MODEL = "simulated"


@dataclass(frozen=True, slots=True)
class Cores:
    """Who computes where: what serves on one core, what measures on another, so that neither waits for the other.

    `serving` and `measuring` are None where this process may use one core alone.
    """

    serving: int | None
    measuring: int | None

    @classmethod
    def of_this_machine(cls) -> Cores:
        usable = sorted(os.sched_getaffinity(0))
        return cls(usable[0], usable[1]) if len(usable) > 1 else cls(None, None)


def pinned(core: int | None) -> Callable[[], None] | None:
    """What a child process calls before it begins, to stay on that core."""
    return None if core is None else lambda: os.sched_setaffinity(0, {core})


@dataclass(frozen=True, slots=True)
class Served:
    port: int
    process_id: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=30) as response:
            return json.load(response)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return ask(self.port, path, body, timeout=30)

    def records(self, number: int) -> list[dict[str, Any]]:
        """The last requests as the simulated engine knows them, in the order in which they arrived."""
        found: list[dict[str, Any]] = self.get("/simulate/requests")["requests"][-number:]
        return sorted(found, key=lambda record: record["arrival_time"])


@contextmanager
def simulated(*flags: str, core: int | None = None) -> Iterator[Served]:
    """`sol simulate` with these flags."""
    with serving([sys.executable, "-m", "sol", "simulate", *flags], core=core) as found:
        yield found


@contextmanager
def serving(command: Sequence[str], *, core: int | None = None, timeout: float = 300) -> Iterator[Served]:
    """A command that serves, with `--port` added to it, until it is ready; ended afterwards."""
    port = free_port()
    with (
        tempfile.NamedTemporaryFile(suffix=".log") as log,
        server([*command, "--port", str(port)], log, cwd=ROOT, preexec_fn=pinned(core)) as process,
    ):
        wait_until_ready(process, port, log, timeout)
        yield Served(port, process.pid)


def start_bench(url: str, *flags: str, prefix: Path, core: int | None = None) -> subprocess.Popen[bytes]:
    """`sol bench`, begun: its JSON will be at `prefix`.json, and what it prints at `prefix`.log."""
    command = [
        sys.executable,
        "-m",
        "sol",
        "bench",
        url,
        "--quiet",
        "--format",
        "json",
        "--output",
        str(prefix),
        *flags,
    ]
    with open(prefix.with_suffix(".log"), "wb") as log:
        return subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=pinned(core)
        )


def finish_bench(process: subprocess.Popen[bytes], prefix: Path, timeout: float) -> dict[str, Any]:
    """The document that it wrote. Raises `RuntimeError` with its words if it wrote none."""
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    result = prefix.with_suffix(".json")
    if not result.exists():
        with open(prefix.with_suffix(".log"), "rb") as log:
            raise RuntimeError(f"sol bench ended with code {process.returncode} and no result:\n{tail(log)}")
    document: dict[str, Any] = json.loads(result.read_text())
    return document


def bench(url: str, *flags: str, directory: Path, core: int | None = None, timeout: float = 300) -> dict[str, Any]:
    """One load of `sol bench`: its stage in the JSON document."""
    prefix = Path(tempfile.mkdtemp(dir=directory)) / "bench"
    document = finish_bench(start_bench(url, *flags, prefix=prefix, core=core), prefix, timeout)
    (stage,) = document["stages"]
    found: dict[str, Any] = stage
    return found


def requests_of(stage: dict[str, Any]) -> list[dict[str, Any]]:
    """Each request's own figures, in the order in which they were due."""
    columns = stage["requests"]["columns"]
    rows = [dict(zip(columns, row, strict=True)) for row in stage["requests"]["rows"]]
    return sorted(rows, key=lambda row: row["intended"])
