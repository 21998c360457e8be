"""The examples of README.md and docs/serve.md, run as they stand against a server as `make serve` starts it."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sol.models.source import ModelFiles

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "docs" / "serve.md"]
ADDRESS = "http://127.0.0.1:8000"


def python_examples() -> list[str]:
    return [code for page in PAGES for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)]


def curl_examples() -> list[str]:
    """Indented commands, with the lines that continue them."""
    found = []
    for page in PAGES:
        blocks = re.findall(r"^    curl .*\n(?:    .*\n)*", page.read_text(), re.MULTILINE)
        found += [re.sub(r"^    ", "", block, flags=re.MULTILINE) for block in blocks]
    return found


@pytest.fixture(scope="module")
def url(smollm2: ModelFiles) -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "sol", "serve", smollm2.name, "--port", "0", "--max-num-seqs", "4"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    ready = None
    while ready is None:
        line = process.stdout.readline()
        assert line, "the server ended"
        ready = re.search(r"is ready at (\S+) after", line)
    yield ready.group(1)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 0


def test_there_are_examples() -> None:
    assert len(python_examples()) >= 4
    assert len(curl_examples()) >= 3


@pytest.mark.parametrize("code", python_examples())
def test_python(url: str, code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code.replace(ADDRESS, url)], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout or "temperature=0" not in code


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
@pytest.mark.parametrize("command", curl_examples())
def test_curl(url: str, command: str) -> None:
    done = subprocess.run(
        command.replace(ADDRESS, url), shell=True, capture_output=True, text=True, timeout=200, check=False
    )
    if "data: " in done.stdout:
        assert done.stdout.rstrip().endswith("data: [DONE]")
    else:
        answer = json.loads(done.stdout)
        assert "error" not in answer
        assert "Paris" in done.stdout or "token_strs" in answer
