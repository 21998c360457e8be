"""Example: sol simulate --num-speculative-tokens 4 --fault '{"kind": "stall", "start": 10, "seconds": 1}'"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from sol.cli.arguments import json_object, whole_number
from sol.config import literal_choices

if TYPE_CHECKING:
    from sol.simulate.config import SimulateConfig
    from sol.simulate.server import SimulatedServer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from sol.simulate.laws import DEFAULT_PROFILE, PROFILES, EngineLaws, TextLaws

    # Flags that are not given are left out, so that a file's values and a profile's show through.
    absent: Any = argparse.SUPPRESS
    parser.add_argument(
        "--profile", choices=sorted(PROFILES), default=absent,
        help=f"round figures of a machine and a model, for all laws that no flag and no file gives (default: "
        f"{DEFAULT_PROFILE})",
    )  # fmt: skip
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML or JSON (.json) with options by their names")
    server = parser.add_argument_group("server")
    server.add_argument("--host", default=absent, help="address to listen on (default: 127.0.0.1, this machine only)")
    server.add_argument("--port", type=int, default=absent, help="0 takes a free one (default: 8000)")
    server.add_argument(
        "--control-port", type=int, default=absent, metavar="PORT",
        help="where /simulate/* answers whatever the faults do to --port (default: on --port alone)",
    )  # fmt: skip
    server.add_argument(
        "--served-model-name", nargs="+", action="extend", default=absent, metavar="NAME",
        help="what clients call the model; several may be given (default: simulated)",
    )  # fmt: skip
    server.add_argument(
        "--startup-seconds",
        type=float,
        default=absent,
        metavar="S",
        help="there, but not ready, for so long (default: 0)",
    )
    server.add_argument(
        "--drain-seconds", type=float, default=absent, metavar="S",
        help="how long open responses may go on after SIGTERM (default: 30)",
    )  # fmt: skip
    server.add_argument(
        "--fault", action="append", type=json_object, default=[], metavar="JSON",
        help="something that goes wrong; may be given again, and POST /simulate/faults sets more",
    )  # fmt: skip
    server.add_argument("--faults", type=Path, metavar="FILE", help="a YAML or JSON file with a list of them")
    _add_fields(parser.add_argument_group("engine", "Defaults are those of the profile h100-8b."), EngineLaws)
    _add_fields(parser.add_argument_group("text"), TextLaws)


def _add_fields(group: argparse._ArgumentGroup, options: type[Any]) -> None:
    hints = get_type_hints(options)
    for item in dataclasses.fields(options):
        hint, flag = hints[item.name], "--" + item.name.replace("_", "-")
        text = f"{item.metadata['help'].replace('%', '%%')} (default: {item.default})"
        choices = literal_choices(hint)
        if hint is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
        elif choices:
            group.add_argument(flag, choices=choices, default=argparse.SUPPRESS, help=text)
        else:
            reader = whole_number if hint is int else float
            group.add_argument(flag, type=reader, default=argparse.SUPPRESS, metavar="N", help=text)


def run(args: argparse.Namespace) -> int:
    config = chosen_config(args)

    from sol.simulate.server import serve

    def announce(server: SimulatedServer) -> None:
        name = config.served_model_names[0]
        body = json.dumps({"model": name, "prompt": "Once upon a time", "stream": True})
        print(f"{name} is simulated at {server.url}; faults are set at {server.control_url}/simulate/faults\n")
        print(f"curl -N {server.url}/v1/completions -H 'Content-Type: application/json' -d '{body}'", flush=True)

    return serve(config, on_ready=announce)


def chosen_config(args: argparse.Namespace) -> SimulateConfig:
    """Raises `ConfigError` for values that cannot work."""
    from sol.simulate.config import FILE_KEYS, read_faults, simulate_config

    given = {name: value for name, value in vars(args).items() if name in FILE_KEYS}
    extra = [*args.fault, *(read_faults(args.faults) if args.faults is not None else [])]
    given.pop("faults", None)
    return simulate_config(given, file=args.config, more_faults=extra)
