"""Command lines that people write: `sol serve --speculation off`, `vllm serve org/model`, with or without a port.

What is known of an engine's command line here is where it listens; what else a flag means is the drivers' business.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sol.engines.secrets import command_text
from sol.engines.service import Service, free_port
from sol.errors import ConfigError
from sol.listening import listening_url

_LOOPBACK = "127.0.0.1"
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")


@dataclass(frozen=True, slots=True)
class Program:
    """How to recognise an engine's server in a command, and how it is told where to listen."""

    engine: str
    """A driver's name."""
    words: tuple[str, ...]
    """What follows one another in the command; the first is a program's file name, or `-m` of some Python."""
    host_flags: tuple[str, ...]
    port_flags: tuple[str, ...]
    """The first of each is what is added."""
    ready_path: str = "/health"


PROGRAMS = (
    Program("sol", ("sol", "serve"), ("--host",), ("--port",)),
    Program("sol", ("-m", "sol", "serve"), ("--host",), ("--port",)),
    Program("sol", ("sol", "simulate"), ("--host",), ("--port",)),
    Program("sol", ("-m", "sol", "simulate"), ("--host",), ("--port",)),
    Program("vllm", ("vllm", "serve"), ("--host",), ("--port",)),
    Program("vllm", ("-m", "vllm.entrypoints.openai.api_server"), ("--host",), ("--port",)),
    Program("sglang", ("-m", "sglang.launch_server"), ("--host",), ("--port",)),
    Program("sglang", ("sglang", "serve"), ("--host",), ("--port",)),
    Program("tgi", ("text-generation-launcher",), ("--hostname",), ("--port", "-p")),
    Program("tensorrt-llm", ("trtllm-serve",), ("--host",), ("--port",)),
    Program("llama.cpp", ("llama-server",), ("--host",), ("--port",)),
)


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """A server's command line, and where it will listen."""

    argv: tuple[str, ...]
    url: str
    """Without a slash at the end; for a server that listens on all addresses, how this machine reaches it."""
    engine: str | None
    """The driver's name, or None for a program that nobody here knows."""
    ready_path: str = "/health"
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """As one would type it, but for the values of keys."""
        return command_text(self.argv, self.env)

    def service(self, **options: Any) -> Service:
        """`Service` with these and with its other options (`log`, `name`, `start_timeout`)."""
        return Service(self.argv, url=self.url, ready_path=self.ready_path, env=self.env, **options)


def command_from_text(text: str, *, port: int | None = None, host: str | None = None) -> ServerCommand:
    """Split `text` as a shell would, without its expansions, and make it say where to listen.

    A port that is in the text stays. Otherwise `port` is used, or a free one, and `host` or 127.0.0.1, added as the
    engine's own flags. A program that is not in `PROGRAMS` needs `{port}` where its port goes (and `{host}`, if
    wanted). Leading `NAME=value` words become its environment, and programs such as `taskset -c 0` may stand before.

    Raises `ConfigError` for text that is no command, for one without a place for the port, for a port in the text
    that is none, and for two different ones.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"the command {text!r} cannot be split into words: {error}", param="command") from None
    env: dict[str, str] = {}
    while words and _ASSIGNMENT.match(words[0]):
        name, _, value = words.pop(0).partition("=")
        env[name] = value
    if not words:
        raise ConfigError(f"the command {text!r} names no program", param="command")
    found = find_program(words)
    if any("{port}" in word for word in words):
        chosen = port or free_port(host or _LOOPBACK)
        address = host or _LOOPBACK
        argv = [word.replace("{port}", str(chosen)).replace("{host}", address) for word in words]
        program = found[0] if found else None
        return ServerCommand(
            argv=_runnable(argv, program),
            url=listening_url(address, chosen),
            engine=program.engine if program else None,
            ready_path=program.ready_path if program else "/v1/models",
            env=env,
        )
    if found is None:
        known = ", ".join(dict.fromkeys(" ".join(program.words) for program in PROGRAMS))
        raise ConfigError(
            f"the command {text!r} starts no server whose flags are known ({known}); write {{port}} where "
            "its port goes",
            param="command",
        )
    program, start = found
    argv = list(words)
    given = _value(argv, start, program.port_flags)
    if given is not None and not (given.isascii() and given.isdecimal() and 0 < int(given) < 65536):
        raise ConfigError(
            f"{program.port_flags[0]} {given} in the command is no port to listen on: give 1 to 65535, or none for "
            "a free one",
            param="port",
        )
    if given is not None and port is not None and int(given) != port:
        raise ConfigError(f"the command says {program.port_flags[0]} {given}, but port {port} was wanted", param="port")
    bound = _value(argv, start, program.host_flags)
    if bound is not None and host is not None and bound != host:
        raise ConfigError(f"the command says {program.host_flags[0]} {bound}, but {host} was wanted", param="host")
    address = bound or host or _LOOPBACK
    if bound is None:
        argv += [program.host_flags[0], address]
    chosen = int(given) if given is not None else port or free_port(address)
    if given is None:
        argv += [program.port_flags[0], str(chosen)]
    return ServerCommand(
        argv=_runnable(argv, program),
        url=listening_url(address, chosen),
        engine=program.engine,
        ready_path=program.ready_path,
        env=env,
    )


def find_program(words: Sequence[str]) -> tuple[Program, int] | None:
    """Which server a command starts, and the index of the word after what told so."""
    for index in range(len(words)):
        for program in PROGRAMS:
            end = index + len(program.words)
            first, *rest = program.words
            if Path(words[index]).name == first and list(words[index + 1 : end]) == rest:
                return program, end
    return None


def _value(argv: Sequence[str], start: int, flags: Sequence[str]) -> str | None:
    """The last value that one of `flags` is given, as `--flag value` or `--flag=value`."""
    value = None
    for index, word in enumerate(argv[start:], start):
        name, equals, attached = word.partition("=")
        if name in flags:
            value = attached if equals else argv[index + 1] if index + 1 < len(argv) else ""
    return value


def _runnable(argv: Sequence[str], program: Program | None) -> tuple[str, ...]:
    """`sol` is found even where our environment's programs are not on the path: it is this very program."""
    if program is not None and program.words[0] == "sol" and shutil.which("sol") is None:
        index = next((i for i, word in enumerate(argv) if word == "sol"), None)
        if index is not None:
            return (*argv[:index], sys.executable, "-m", "sol", *argv[index + 1 :])
    return tuple(argv)
