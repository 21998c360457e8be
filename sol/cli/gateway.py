"""Example: sol gateway --config gateway.yaml --port 9000"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from sol.cli import gateway_keys
from sol.errors import ConfigError

if TYPE_CHECKING:
    from sol.gateway.config import GatewayConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_file_arguments(parser)
    text = "make, list and revoke the API keys in the file's database"
    keys = parser.add_subparsers(title="commands", metavar="COMMAND").add_parser(
        "keys", help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=gateway_keys.__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    gateway_keys.add_arguments(keys)


def add_file_arguments(parser: argparse.ArgumentParser) -> None:
    """Of every command that serves by a gateway's file."""
    parser.add_argument(
        "--config", type=Path, metavar="FILE",
        help="gateway.yaml: the engines, the models, who may use them and how (docs/gateway.md); required",
    )  # fmt: skip
    parser.add_argument("--host", help="address to listen on, instead of the file's server.host")
    parser.add_argument("--port", type=int, help="instead of the file's server.port; 0 takes a free one")
    parser.add_argument("--check", action="store_true", help="read the file, say what is wrong with it, and end")


def run(args: argparse.Namespace) -> int:
    config = chosen_config(args)
    from sol.gateway.gateway import Gateway
    from sol.gateway.observe.stage import set_up_logging
    from sol.gateway.serve import serve

    if args.check:
        Gateway(config)
        print(f"{args.config} is in order: {_summary(config)}")
        return 0
    set_up_logging(config.observe)

    def announce(url: str) -> None:
        print(f"the gateway is ready at {url}: {_summary(config)}", flush=True)

    return serve(config, on_ready=announce)


def chosen_config(args: argparse.Namespace) -> GatewayConfig:
    """The file's, with the flags above it. Raises `ConfigError` for values that cannot work."""
    from sol.gateway.config import read_config

    if args.config is None:  # not for argparse to require: `keys` takes it after its own words as well
        raise ConfigError("--config is missing: name the gateway.yaml to serve by", param="config")
    overrides = {name: getattr(args, name) for name in ("host", "port") if getattr(args, name) is not None}
    return read_config(args.config, {"server": overrides} if overrides else {})


def _summary(config: GatewayConfig) -> str:
    models = ", ".join(f"{model.name} on {' and '.join(model.engines)}" for model in config.models)
    return models + ("" if config.keys or config.database is not None else "; it asks for no key")
