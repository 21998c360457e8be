"""What every benchmark shares: its arguments, its table, its JSON and its exit code.

A benchmark prints its table and, last, one JSON object:

    {"benchmark", "date", "machine": {...}, "versions": {...}, "quick", "rows": [...],
     "bars": {name: [value, bound, holds]}}

and exits non-zero if a bar does not hold.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import platform
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from sol.cli.machine import inspect_machine, installed_version
from sol.version import __version__

ROOT = Path(__file__).resolve().parents[1]

PACKAGES = ("torch", "numpy", "transformers", "tokenizers", "safetensors", "starlette", "uvicorn", "pyzmq", "msgspec")


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="within a minute on two cores: fewer and shorter runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the JSON object here too")
    return parser


@dataclass
class Report:
    benchmark: str
    quick: bool
    rows: list[dict[str, Any]] = field(default_factory=list)
    bars: dict[str, tuple[float, float, bool]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    """Of what was measured beside Sol and its packages."""
    sections: list[int] = field(default_factory=list)
    """Rows from each of these numbers on are printed as a table of their own."""

    def section(self) -> None:
        """What follows has other columns."""
        self.sections.append(len(self.rows))

    def row(self, **columns: Any) -> None:
        self.rows.append(columns)

    def at_least(self, bar: str, value: float, bound: float) -> None:
        self.bars[bar] = (round(value, 4), bound, value >= bound)

    def more_than(self, bar: str, value: float, bound: float) -> None:
        self.bars[bar] = (round(value, 4), bound, value > bound)

    def at_most(self, bar: str, value: float, bound: float) -> None:
        self.bars[bar] = (round(value, 4), bound, value <= bound)

    def finish(self, file: Path | None) -> int:
        """Print the table and the JSON object; returns the exit code."""
        print(f"\n{self.benchmark}, {'quick' if self.quick else 'full'}")
        for begin, end in itertools.pairwise([0, *self.sections, len(self.rows)]):
            if begin:
                print()
            _print_table(self.rows[begin:end])
        bars = [
            {"bar": name, "value": value, "bound": bound, "holds": "yes" if holds else "NO"}
            for name, (value, bound, holds) in self.bars.items()
        ]
        print()
        _print_table(bars)
        text = json.dumps(self.as_json())
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text + "\n")
        print(f"\n{text}")
        return 0 if all(holds for _, _, holds in self.bars.values()) else 1

    def as_json(self) -> dict[str, Any]:
        machine = inspect_machine()
        versions = {"sol": __version__, "python": platform.python_version()}
        versions |= {name: version for name in PACKAGES if (version := installed_version(name)) is not None}
        return {
            "benchmark": self.benchmark,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": {
                "cpu": machine.cpu,
                "cores": machine.usable_cores,
                "memory_bytes": machine.memory_bytes,
                "os": machine.os,
                "instruction_sets": list(machine.instruction_sets),
            },
            "versions": versions | self.versions,
            "quick": self.quick,
            "rows": self.rows,
            "bars": self.bars,
        }


def _print_table(rows: Sequence[dict[str, Any]]) -> None:
    if not rows:
        return
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_cell(row.get(name, "")) for name in columns] for row in rows]
    widths = [max(map(len, [name, *column])) for name, column in zip(columns, zip(*cells, strict=True), strict=True)]
    for line in (columns, ["-" * width for width in widths], *cells):
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def server(command: Sequence[str], log: IO[bytes], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command that serves, in a process group of its own; ends the whole group afterwards."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, **options
    )
    try:
        yield process
    finally:
        for ending in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            if process.poll() is None:
                os.killpg(process.pid, ending)
                try:
                    process.wait(timeout=15)
                except subprocess.TimeoutExpired:
                    continue
            break


def wait_until_ready(process: subprocess.Popen[bytes], port: int, log: IO[bytes], timeout: float) -> None:
    """Raises `RuntimeError` with the log's end if the server ends, or is not ready in time."""
    deadline = time.perf_counter() + timeout
    while time.perf_counter() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with code {process.returncode}:\n{tail(log)}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    raise RuntimeError(f"the server was not ready within {timeout:.0f} s:\n{tail(log)}")


def tail(log: IO[bytes], characters: int = 4000) -> str:
    return Path(log.name).read_text(errors="replace")[-characters:]


def ask(port: int, path: str, body: dict[str, Any], timeout: float = 300.0) -> dict[str, Any]:
    """POST JSON, get JSON. Raises `urllib.error.HTTPError` for an error status."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=timeout) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


def chat(port: int, model: str, max_tokens: int = 16) -> str:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Name the capital of France."}],
        "max_tokens": max_tokens,
        "temperature": 0,
    }
    text: str = ask(port, "/v1/chat/completions", body)["choices"][0]["message"]["content"]
    if not text.strip():
        raise RuntimeError("the server answered a chat with no text")
    return text
