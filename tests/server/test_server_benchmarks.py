"""The mix of clients and the fuzzer as their users run them, for a short while."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "command",
    [["server_mix.py", "--quick", "--clients", "20", "--seconds", "10"], ["server_fuzz.py", "--quick"]],
    ids=["mix", "fuzz"],
)
def test_every_bar_holds(command: list[str], tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    name, *options = command
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / name), *options, "--json", str(result)],
        capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout[-6000:], done.stderr[-3000:])
    bars = json.loads(result.read_text())["bars"]
    assert len(bars) >= 4
    assert all(holds for _, _, holds in bars.values())
