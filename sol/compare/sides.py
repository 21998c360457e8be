"""What A and B may be: an address, a command that starts a server, or a file of recorded results."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from sol.engines.commands import ServerCommand, command_from_text
from sol.engines.secrets import HIDDEN, command_text
from sol.engines.service import Service
from sol.errors import ConfigError, EngineStartError

_ASSIGNMENT: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")


@dataclass(frozen=True, slots=True, kw_only=True)
class SideText:
    """One side as it was written."""

    text: str
    kind: Literal["url", "command", "file"]

    @property
    def shown(self) -> str:
        """For reports, which more people read than the keys in a command are for."""
        if self.kind != "command":
            return self.text
        words, env = shlex.split(self.text), {}
        while words and _ASSIGNMENT.match(words[0]):
            name, _, value = words.pop(0).partition("=")
            env[name] = value
        shown = command_text(words, env)
        return shown if HIDDEN in shown else self.text


def parse_side(text: str, name: str) -> SideText:
    """Raises `ConfigError` for what is nothing of the three."""
    text = text.strip()
    if text.startswith(("http://", "https://")):
        return SideText(text=text, kind="url")
    if Path(text).is_file():
        return SideText(text=text, kind="file")
    if text and " " not in text:
        raise ConfigError(
            f"{name} is {text!r}: no address (http://…), no file that there is, and no command of several words",
            param=name,
        )
    command_from_text(text)  # what cannot be started is said before anything is
    return SideText(text=text, kind="command")


def check_kinds(a: SideText, b: SideText) -> None:
    """Raise `ConfigError` if one is recorded and the other is not."""
    if (a.kind == "file") != (b.kind == "file"):
        raise ConfigError(
            "one side is a recorded run and the other a server: record the server with sol bench first, or give two "
            "servers",
            param="b",
        )


@dataclass(frozen=True, slots=True)
class Running:
    """A side that can be asked."""

    url: str
    service: Service | None = None
    """Of a server that we started."""

    def farewell(self, name: str) -> str | None:
        """What to say of a server that ended while it was needed."""
        if self.service is None or self.service.running:
            return None
        said = self.service.tail(3)
        return f"{name} ended during the comparison (exit code {self.service.returncode})" + (said and f": {said}")


@contextlib.asynccontextmanager
async def started(
    sides: Sequence[SideText], *, log_prefix: Path | None, start_timeout: float, say: Callable[[str], None]
) -> AsyncIterator[list[Running]]:
    """One side or two, ready; those that are commands run until the end.

    Both are up at the same time, and only one of them ever has load. Raises `EngineStartError`; whatever had started
    is stopped then, too.
    """
    async with contextlib.AsyncExitStack() as stack:
        running: list[Running] = []
        commands: list[ServerCommand] = []
        for name, side in zip("AB", sides, strict=False):
            if side.kind == "url":
                running.append(Running(side.text))
                continue
            command = command_from_text(side.text)
            log = None if log_prefix is None else Path(f"{log_prefix}-{name.lower()}.log")
            say(f"starting {name}: {command.text}")
            service = command.service(log=log, name=name, start_timeout=start_timeout)
            try:
                await stack.enter_async_context(service)
            except EngineStartError as error:
                raise _explained(error, commands) from None
            commands.append(command)
            running.append(Running(command.url, service))
            say(f"{name} is ready at {command.url}")
        yield running


def _explained(error: EngineStartError, running: Sequence[ServerCommand]) -> EngineStartError:
    """With what is likely where another server holds memory already."""
    if not running:
        return error
    problem = (
        f"{error.problem}. A ({running[0].text}) was running beside it: if memory was short, give both less (sol and "
        "vllm: --gpu-memory-utilization), or record each with sol bench and compare the files"
    )
    return EngineStartError(error.name, error.command, error.returncode, error.tail, problem)
