"""Example: sol up --config gateway.yaml

starts the engines that have a `spec` in the file, each on its port, and then the gateway. Ctrl-C or SIGTERM stops the
gateway first, which lets requests end, and then the engines; whatever way this process ends, they end with it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from sol.cli import gateway
from sol.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    gateway.add_file_arguments(parser)
    parser.add_argument(
        "--log-dir", type=Path, default=Path("logs"), metavar="DIR",
        help="where each engine's output goes, appended to NAME.log (default: ./logs)",
    )  # fmt: skip
    parser.add_argument(
        "--start-timeout", type=float, default=1200.0, metavar="S",
        help="how long an engine may take until it is ready, in seconds (default: 1200)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    if not args.start_timeout > 0:
        raise ConfigError(
            f"--start-timeout must be more than 0 seconds, not {args.start_timeout}", param="start_timeout"
        )
    config = gateway.chosen_config(args)

    from sol.gateway.gateway import Gateway
    from sol.gateway.observe.stage import set_up_logging
    from sol.gateway.up import plan, up

    planned = plan(config, args.log_dir, start_timeout=args.start_timeout)
    if args.check:
        Gateway(planned.config)
        print(f"{args.config} is in order; these engines would be started:")
        for keeper in planned.keepers:
            print(f"{keeper.name}: {keeper.command.text}")
        return 0
    set_up_logging(config.observe)

    def announce(url: str) -> None:
        print(f"the gateway is ready at {url}", flush=True)

    return up(planned, on_ready=announce)
