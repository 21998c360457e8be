"""The `sol` command: one module a subcommand, each with `add_arguments(parser)` and `run(args) -> exit code`.

Importing a subcommand's module costs nothing but the standard library; what a command needs (torch, the server,
rich) it imports when it runs, so that `sol --help` answers at once.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence

from sol import openmp
from sol.cli import bench, chat, compare, doctor, gateway, generate, pull, serve, simulate, tune, up, verify
from sol.errors import SolError
from sol.version import __version__

_COMMANDS = {
    "serve": (serve, "answer OpenAI-compatible requests over HTTP"),
    "generate": (generate, "complete prompts and print the text as it comes"),
    "chat": (chat, "talk to a model in the terminal"),
    "pull": (pull, "fetch a model and say where it is"),
    "bench": (bench, "measure any OpenAI-compatible server under load"),
    "compare": (compare, "find out which of two servers is faster, and whether they say the same"),
    "tune": (tune, "find the configuration of an engine that does the most within an SLO"),
    "verify": (verify, "check on a model that speculation does not change what it says"),
    "up": (up, "start the engines of a gateway's file on this machine, and the gateway in front of them"),
    "gateway": (gateway, "one front for any number of engines, with keys, limits, filters and routing"),
    "simulate": (simulate, "answer like a model server with latencies and faults of your choice, and no model"),
    "doctor": (doctor, "what this machine has, what Sol will use, what a model costs in memory"),
}

_SERVE_EXTRA = frozenset(
    {"httptools", "huggingface_hub", "msgspec", "prometheus_client", "pydantic", "rich", "starlette", "uvicorn",
     "uvloop", "yaml", "zmq"}
)  # fmt: skip
"""The import names of pyproject's `serve` extra."""

_GATEWAY_EXTRA = frozenset({"ahocorasick", "aiohappyeyeballs", "aiosqlite", "asyncpg", "re2", "redis", "sqlalchemy"})
"""Of its `gateway` extra, those that are not in `serve`."""

_EXTRAS = {"serve": _SERVE_EXTRA, "gateway": _GATEWAY_EXTRA, "tune": frozenset({"optuna"})}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sol",
        description="Large language models, faster and cheaper on the hardware you have.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"sol {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, (module, text) in _COMMANDS.items():
        command = commands.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=module.__doc__, allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 for a check that failed, 2 for what the user can mend."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if not hasattr(args, "run"):
        parser.print_help()
        return 2
    openmp.settle()
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except SolError as error:
        return _fail(error.message)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        extra = next((name for name, packages in _EXTRAS.items() if package in packages), None)
        if extra is None:
            raise
        return _fail(f'this command needs {package}, which is not installed: pip install "sol-inference[{extra}]"')
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of a pipe (`| head`) has left. Python would complain once more when it flushes at exit.
        _drop_output()
        return 141
    except OSError as error:
        # What standard output leads to is full or broken, which is not a defect of the command.
        if error.errno not in (errno.ENOSPC, errno.EIO, errno.EDQUOT) or error.filename is not None:
            raise
        _drop_output()
        return _fail(f"the output cannot be written: {error.strerror}")
    return code


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str) -> int:
    print(f"sol: error: {message}", file=sys.stderr)
    return 2
