"""examples/: a client of two services works as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from running_server import start_server, tiny_options

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_client_compares_two_services(talking_llama: Path) -> None:
    names = {"served_model_names": ["plain", "fast"]}
    with start_server(**(tiny_options(talking_llama) | names)) as server:
        server.wait_until_ready()
        words = [f"{name}={server.url}" for name in ("plain", "fast")]
        done = subprocess.run(
            [sys.executable, EXAMPLES / "compare_latency.py", *words],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the same answer") == 9
    for name in ("plain", "fast"):
        assert re.search(rf"^ *{name}: median \d+\.\d+ s, \d+\.\d+ tokens/s$", done.stdout, re.MULTILINE)


def test_the_script_that_starts_them_is_one() -> None:
    script = EXAMPLES / "two_services.sh"
    assert subprocess.run(["sh", "-n", script], check=False).returncode == 0
    assert script.stat().st_mode & 0o111
