"""Programs as a person sees them: in a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Terminal:
    """A program in a pseudo-terminal."""

    def __init__(self, *words: str) -> None:
        self._master, slave = pty.openpty()
        environment = os.environ | {"TERM": "dumb", "NO_COLOR": "1", "COLUMNS": "200"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sol", *words], stdin=slave, stdout=slave, stderr=slave, env=environment,
            start_new_session=True, preexec_fn=_take_terminal,
        )  # fmt: skip
        os.close(slave)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def interrupt_until(self, pattern: str) -> None:
        """Press Ctrl-C, again if need be: readline misses one that comes while it is still drawing the prompt."""
        for _ in range(10):
            self.type("\x03")
            if self.comes(pattern, 2.0):
                return
        raise AssertionError(f"Ctrl-C is not heard: {self.seen!r}")

    def comes(self, pattern: str, seconds: float) -> bool:
        try:
            self.wait_for(pattern, seconds)
        except AssertionError:
            return False
        return True

    def wait_for(self, pattern: str, seconds: float = 60.0) -> str:
        """Read until `pattern` appears after what was waited for before; returns what came up to its end."""
        deadline = time.monotonic() + seconds
        while (match := re.search(pattern, self.seen)) is None:
            readable, _, _ = select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))
            assert readable, f"no {pattern!r} in {self.seen!r}"
            try:
                self.seen += os.read(self._master, 65536).decode(errors="replace")
            except OSError:
                raise AssertionError(f"the program ended: {self.seen}") from None
        before, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return before

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@contextmanager
def terminal(*words: str) -> Iterator[Terminal]:
    opened = Terminal(*words)
    try:
        yield opened
    finally:
        opened.close()
