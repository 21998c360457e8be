"""Examples: sol bench http://127.0.0.1:8000 --rate 5 --slo "ttft_p95<500ms,tpot_p95<30ms"
sol bench http://127.0.0.1:8000 --concurrency 1,4,16,64 --input-tokens 512 --output-tokens uniform:64:256
sol bench http://127.0.0.1:8000 --trace mooncake.jsonl --duration 600"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sol.cli.arguments import json_object, whole_number
from sol.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from sol.bench.data import Data
    from sol.bench.endpoint import Endpoint
    from sol.bench.options import BenchOptions
    from sol.bench.session import Measured

_FORMATS = ("json", "html", "csv")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="an OpenAI-compatible server: its root or its /v1")
    _add_endpoint(parser.add_argument_group("endpoint"))
    _add_load(parser.add_argument_group("load"))
    add_data_arguments(parser.add_argument_group("data"))
    _add_report(parser.add_argument_group("report"))


def _add_endpoint(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model", default="", metavar="NAME", help="default: the first that /v1/models lists")
    group.add_argument("--api-key", metavar="KEY", help="default: the environment variable OPENAI_API_KEY")
    group.add_argument("--header", action="append", default=[], metavar="NAME:VALUE", help="a header of every request")
    group.add_argument("--route", choices=("chat", "completions"), default="chat", help="default: chat")
    group.add_argument(
        "--stream", action=argparse.BooleanOptionalAction, default=True, help="without, only whole requests have a time"
    )
    group.add_argument(
        "--count-tokens", choices=("auto", "segments", "usage", "token_ids", "estimated", "chunks"), default="auto",
        help="how to know the tokens of a chunk (default: the best that the endpoint offers, found out by asking)",
    )  # fmt: skip
    group.add_argument(
        "--temperature", default="0", metavar="T", help='a number, or "default" to send none (default: 0)'
    )
    group.add_argument("--extra-body", type=json_object, default={}, metavar="JSON", help="fields of every request")
    group.add_argument(
        "--ignore-eos", action=argparse.BooleanOptionalAction, default=None,
        help="go on to the asked length whatever the model says (default: for synthetic data and traces)",
    )  # fmt: skip


def _add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--concurrency", type=_whole_numbers, metavar="N[,N…]", help="so many at a time, one load after another (8)"
    )
    group.add_argument("--rate", type=_numbers, metavar="R[,R…]", help="so many a second, one load after another")
    group.add_argument(
        "--arrivals", choices=("poisson", "constant", "burst"), help="how a --rate arrives (default: poisson)"
    )
    group.add_argument("--burst-size", type=whole_number, metavar="N", help="of --arrivals burst: so many at once")
    group.add_argument("--ramp-to", type=float, metavar="R", help="let --rate grow or fall to this one, evenly")
    group.add_argument("--sweep", action="store_true", help="1, 2, 4, … at a time, until more bring no more tokens")
    group.add_argument(
        "--trace", type=Path, metavar="FILE", help="replay arrivals and lengths: Mooncake's or BurstGPT's"
    )
    group.add_argument("--trace-speed", type=float, metavar="X", help="X times as fast (default: 1)")
    group.add_argument("--duration", type=float, metavar="SECONDS", help="of each load (default: 30, or its requests)")
    group.add_argument(
        "--num-requests", type=whole_number, metavar="N", help="of each load; conversations, if of several turns"
    )
    group.add_argument(
        "--warmup", type=float, metavar="SECONDS", help="left out at the beginning (default: a tenth, at most 30)"
    )
    group.add_argument(
        "--cooldown", type=float, metavar="SECONDS", help="left out before the load ends (default: a twentieth)"
    )
    group.add_argument("--request-timeout", type=float, default=600.0, metavar="SECONDS", help="default: 600")
    group.add_argument(
        "--drain-timeout", type=float, default=120.0, metavar="SECONDS",
        help="how long open requests may take at the end, before they are cancelled (default: 120)",
    )  # fmt: skip


def add_data_arguments(group: argparse._ArgumentGroup) -> None:
    """What is asked, for every command that sends a load: the fields of `BenchOptions` that choose the data."""
    group.add_argument(
        "--dataset", metavar="NAME|FILE",
        help="builtin (English and Chinese prompts), synthetic, or a file: ShareGPT's JSON, or JSON lines of "
        '{"prompt"}, {"messages"} or {"turns"} (default: builtin, or synthetic where lengths are given)',
    )  # fmt: skip
    group.add_argument("--tasks", type=words, metavar="NAME[,…]", help="of builtin: chat, code, extraction, summary")
    group.add_argument("--languages", type=words, metavar="NAME[,…]", help="of builtin: en, zh")
    group.add_argument(
        "--input-tokens", metavar="LENGTH",
        help="of synthetic: 128, uniform:64:256, normal:512:128 (mean, deviation) or lognormal:512:0.5 (median, sigma) "
        "(default: 256)",
    )  # fmt: skip
    group.add_argument(
        "--output-tokens", metavar="LENGTH", help="likewise, for all data (synthetic: 128; else its own)"
    )
    group.add_argument("--prefix-tokens", type=whole_number, metavar="N", help="of synthetic: so many are shared")
    group.add_argument("--num-prefixes", type=whole_number, metavar="N", help="among so many groups (default: 1)")
    group.add_argument("--turns", metavar="LENGTH", help="of synthetic: turns of a conversation (default: 1)")
    group.add_argument(
        "--turn-delay", type=float, metavar="SECONDS", help="between an answer and the next turn (default: 0)"
    )
    group.add_argument("--multi-turn", action="store_true", help="of files: all turns of a conversation, not its first")
    group.add_argument(
        "--seed", type=whole_number, default=0, metavar="N", help="of arrivals, prompts, lengths (default: 0)"
    )


def _add_report(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--slo", metavar="CLAUSES|PRESET",
        help='for instance "ttft_p95<500ms,tpot_p95<30ms" or mlperf-llama-3.1-8b-interactive; exit code 1 if missed',
    )  # fmt: skip
    group.add_argument(
        "--price-per-hour", type=float, metavar="X", help="of the machines behind the URL, for the cost of tokens"
    )
    group.add_argument("--metrics-path", metavar="PATH", help="where the server's metrics are (default: /metrics)")
    group.add_argument(
        "--scrape", action=argparse.BooleanOptionalAction, default=True, help="read the server's metrics alongside"
    )
    group.add_argument("--scrape-interval", type=float, default=1.0, metavar="SECONDS", help="default: 1")
    group.add_argument("--output", metavar="PREFIX", help="of the files (default: sol-bench- and the time)")
    group.add_argument(
        "--format", type=words, default=list(_FORMATS), metavar="NAME[,…]", help="json, html, csv (default: all)"
    )
    group.add_argument("--save-text", action="store_true", help="put the answers into the JSON file")
    group.add_argument("--save-timelines", action="store_true", help="put when each token came into the JSON file")
    group.add_argument("--quiet", action="store_true", help="no progress")


def run(args: argparse.Namespace) -> int:
    from sol.bench.options import BenchOptions

    names = {item.name for item in dataclasses.fields(BenchOptions) if item.init}
    given = {name: value for name, value in vars(args).items() if name in names}
    if not args.scrape and args.metrics_path is not None:
        raise ConfigError("--metrics-path has no effect with --no-scrape", param="metrics_path")
    given["metrics_path"] = (args.metrics_path or "/metrics") if args.scrape else None
    options = BenchOptions(**given)
    options.check_data()
    options.settings(gpus=False)
    files = writable_files(args, _FORMATS, "sol-bench")
    endpoint = _endpoint(args, options)

    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        endpoint, data, measured = runner.run(_measure(endpoint, options, quiet=args.quiet))
    if not measured:  # Ctrl-C before anything began
        return 130
    _write(files, measured, endpoint, data, options, args)

    from rich.console import Console

    _print(measured, Console(highlight=False, markup=False, soft_wrap=True), endpoint)
    for path in files.values():
        print(f"Written: {path}")
    return _exit_code(measured)


async def _measure(endpoint: Endpoint, options: BenchOptions, *, quiet: bool) -> tuple[Endpoint, Data, list[Measured]]:
    from sol.bench.endpoint import prepare
    from sol.bench.progress import show_progress
    from sol.bench.run import Stop
    from sol.bench.session import run_loads, sweep

    entries = options.read_trace()
    loads = options.loads(entries)
    endpoint = await prepare(endpoint)
    data = await options.data(endpoint, entries)
    _allow_connections(options)
    stop, watcher = Stop(), None if quiet else show_progress
    settings = options.settings(gpus=endpoint.is_local and options.metrics_path is not None)
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        if stop.is_set:  # a second Ctrl-C waits for nothing
            loop.remove_signal_handler(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        sys.stderr.write("\nStopping: what was measured so far is kept.\n")
        stop.set()

    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        if options.kind == "sweep":
            measured = await sweep(
                endpoint, data, settings, seconds=options.sweep_seconds(), num_conversations=options.num_requests,
                stop=stop, watcher=watcher,
            )  # fmt: skip
        else:
            measured = await run_loads(endpoint, loads, data, settings, stop=stop, watcher=watcher)
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    return endpoint, data, measured


def _endpoint(args: argparse.Namespace, options: BenchOptions) -> Endpoint:
    from sol.bench.endpoint import Endpoint

    body = parse_temperature(args.temperature)
    if options.ignores_eos:
        body["ignore_eos"] = True
    return Endpoint(
        url=args.url,
        model=args.model,
        route=args.route,
        stream=args.stream,
        api_key=args.api_key or os.environ.get("OPENAI_API_KEY") or None,
        headers=parse_headers(args.header),
        body={**body, **args.extra_body},
        counting=None if args.count_tokens == "auto" else args.count_tokens,
    )


def parse_headers(texts: Sequence[str]) -> dict[str, str]:
    """`--header`, given again and again."""
    headers = {}
    for text in texts:
        name, colon, value = text.partition(":")
        if not colon or not name.strip():
            raise ConfigError(f"--header must be NAME:VALUE, not {text!r}", param="header")
        headers[name.strip()] = value.strip()
    return headers


def parse_temperature(text: str) -> dict[str, Any]:
    """`--temperature`, as fields of a request."""
    if text == "default":
        return {}
    try:
        return {"temperature": float(text)}
    except ValueError:
        raise ConfigError(f'--temperature must be a number or "default", not {text!r}', param="temperature") from None


def _allow_connections(options: BenchOptions) -> None:
    """A connection is a file descriptor, of which shells often allow 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    wanted = max(options.concurrency or (0,)) + 64
    if hard != resource.RLIM_INFINITY and wanted > hard:
        raise ConfigError(
            f"concurrency {wanted - 64} needs as many open files, and this system allows {hard}; raise ulimit -n",
            param="concurrency",
        )


def writable_files(args: argparse.Namespace, formats: Sequence[str], name: str) -> dict[str, Path]:
    """Where `--format` and `--output` want the report, by format; `name` begins the files' names by default. Raises
    `ConfigError` where nothing can be written: now, and not after an hour."""
    unknown = [one for one in args.format if one not in formats]
    if unknown or not args.format:
        raise ConfigError(f"--format must be some of {', '.join(formats)}, not {', '.join(unknown)}", param="format")
    for flag in ("save_text", "save_timelines"):
        if "json" not in args.format and getattr(args, flag, False):
            raise ConfigError(f"--{flag.replace('_', '-')} has no effect without --format json", param="format")
    prefix = args.output or f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    files = {one: Path(f"{prefix}.{one}") for one in args.format}
    for path in files.values():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            existed = path.exists()
            path.open("a").close()
            if not existed:
                path.unlink()
        except OSError as error:
            raise ConfigError(f"--output: {path} cannot be written ({error.strerror})", param="output") from None
    return files


def _write(
    files: dict[str, Path],
    measured: list[Measured],
    endpoint: Endpoint,
    data: Data,
    options: BenchOptions,
    args: argparse.Namespace,
) -> None:
    from sol.bench.report import to_html
    from sol.bench.result import to_csv, to_json
    from sol.cli.machine import inspect_machine, package_versions

    document = to_json(
        measured,
        endpoint=endpoint.describe(),
        data=data.describe(),
        options=options.describe(),
        machine=dataclasses.asdict(inspect_machine()),
        packages=package_versions(),
        seed=options.seed,
        keep_timelines=args.save_timelines,
        keep_text=args.save_text,
    )
    for name, path in files.items():
        if name == "json":
            text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
        else:
            text = to_html(measured, document) if name == "html" else to_csv(measured)
        path.write_text(text, encoding="utf-8")


def _print(measured: list[Measured], console: Console, endpoint: Endpoint) -> None:
    from sol.bench.summary_text import facts, latency_rows, overview_rows, warnings
    from sol.cli.doctor import section

    console.print(f"{endpoint.model} at {endpoint.url}\n", style="bold")
    for one in measured:
        section(console, one.load.name, facts(one))
        print_table(console, latency_rows(one, interval=False))
        for text in warnings(one):
            console.print(f"Note: {text}", style="yellow")
    if len(measured) > 1:
        console.print("\nAll loads (* the best)", style="bold")
        print_table(console, overview_rows(measured))


def print_table(console: Console, rows: list[list[str]]) -> None:
    """The first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        first, *rest = (cell.ljust(width) if i == 0 else cell.rjust(width)
                        for i, (cell, width) in enumerate(zip(row, widths, strict=True)))  # fmt: skip
        console.print("  " + "  ".join([first, *rest]))
    console.print()


def _exit_code(measured: list[Measured]) -> int:
    """130 after Ctrl-C, 1 if every load misses the SLO or no request succeeded."""
    if any(one.stage.interrupted for one in measured):
        return 130
    if not any(record.ok for one in measured for record in one.stage.records):
        return 1
    verdicts = [one.summary.slo.verdict for one in measured if one.summary.slo is not None]
    return 1 if verdicts and all(verdict == "missed" for verdict in verdicts) else 0


def _whole_numbers(text: str) -> list[int]:
    return [whole_number(part) for part in text.split(",")]


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number, and no list of them with commas") from None


def words(text: str) -> list[str]:
    """A flag's value with commas."""
    return [part.strip() for part in text.split(",") if part.strip()]
