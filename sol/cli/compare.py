"""Examples: sol compare --a "sol serve --speculation off" --b "sol serve"
sol compare http://127.0.0.1:8000 http://127.0.0.1:8001 --effect 5%
sol compare http://127.0.0.1:8000 --a-body '{"speculation": {"enabled": false}}'
sol compare before.json after.json

Exit code: 0 B is not worse and says the same, 1 B is worse, 3 texts differ, 2 it cannot be compared, 130 Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from sol.cli.arguments import json_object, whole_number
from sol.cli.bench import add_data_arguments, parse_headers, parse_temperature, print_table, words, writable_files
from sol.errors import ConfigError

if TYPE_CHECKING:
    from sol.bench.endpoint import Endpoint
    from sol.bench.options import BenchOptions
    from sol.bench.run import Limits
    from sol.compare.http import RoundLoad
    from sol.compare.session import Checks, Outcome
    from sol.compare.sides import SideText
    from sol.compare.verdict import Plan

_FORMATS = ("json", "html")

_OF_SERVERS = (
    "model", "a_model", "b_model", "api_key", "a_api_key", "b_api_key", "header", "route", "temperature",
    "extra_body", "a_body", "b_body", "ignore_eos", "prompts", "concurrency", "rate", "arrivals", "blocks",
    "effect", "max_blocks", "self_prompts", "likelihood_prompts", "near_tie", "request_timeout",
    "start_timeout", "server_logs", "dataset", "tasks", "languages", "input_tokens", "output_tokens",
    "prefix_tokens", "num_prefixes", "turns", "turn_delay", "multi_turn", "send_seeds",
    "seed",
)  # fmt: skip
"""What has no meaning for recorded runs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    sides = parser.add_argument_group("sides")
    what = "an address, a command in quotes that starts a server, or a recorded result"
    sides.add_argument("a", nargs="?", metavar="A", help=what)
    sides.add_argument("b", nargs="?", metavar="B", help="likewise; without it A's server with another body")
    sides.add_argument("--a", dest="a_flag", metavar="A", help="the same as the first word")
    sides.add_argument("--b", dest="b_flag", metavar="B", help="the same as the second word")
    sides.add_argument("--load", metavar="NAME", help="of recorded results with several loads")
    sides.add_argument(
        "--start-timeout", type=float, default=600.0, metavar="SECONDS",
        help="until a server that is started must be ready (default: 600)",
    )  # fmt: skip
    sides.add_argument("--server-logs", type=Path, metavar="PREFIX", help="keep what started servers write")
    _add_requests(parser.add_argument_group("requests"))
    _add_blocks(parser.add_argument_group("blocks"))
    _add_texts(parser.add_argument_group("texts"))
    add_data_arguments(parser.add_argument_group("data"))
    report = parser.add_argument_group("report")
    report.add_argument("--output", metavar="PREFIX", help="of the files (default: sol-compare- and the time)")
    report.add_argument(
        "--format", type=words, default=list(_FORMATS), metavar="NAME[,…]", help="json, html (default: both)"
    )
    report.add_argument("--save-text", action="store_true", help="put the answers into the JSON file")
    report.add_argument("--quiet", action="store_true", help="no progress")


def _add_requests(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model", default="", metavar="NAME", help="default: the first that each lists")
    group.add_argument("--a-model", default="", metavar="NAME", help="of A alone")
    group.add_argument("--b-model", default="", metavar="NAME", help="of B alone")
    group.add_argument("--api-key", metavar="KEY", help="default: the environment variable OPENAI_API_KEY")
    group.add_argument("--a-api-key", metavar="KEY", help="of A alone")
    group.add_argument("--b-api-key", metavar="KEY", help="of B alone")
    group.add_argument("--header", action="append", default=[], metavar="NAME:VALUE", help="a header of every request")
    group.add_argument("--route", choices=("chat", "completions"), default="chat", help="default: chat")
    group.add_argument(
        "--temperature", default="0", metavar="T", help='a number, or "default" to send none (default: 0)'
    )
    group.add_argument("--extra-body", type=json_object, default={}, metavar="JSON", help="fields of every request")
    group.add_argument("--a-body", type=json_object, metavar="JSON", help="fields of A's requests")
    group.add_argument("--b-body", type=json_object, metavar="JSON", help="fields of B's requests")
    group.add_argument(
        "--send-seeds", action=argparse.BooleanOptionalAction, default=True,
        help="a seed with every request, the same for both",
    )  # fmt: skip
    group.add_argument(
        "--ignore-eos", action=argparse.BooleanOptionalAction, default=None,
        help="go on to the asked length whatever the model says (default: for synthetic data)",
    )  # fmt: skip
    group.add_argument("--request-timeout", type=float, default=600.0, metavar="SECONDS", help="default: 600")


def _add_blocks(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--metric", choices=("e2e", "ttft", "tpot", "throughput"), default="e2e",
        help="the one that has the verdict (default: e2e)",
    )  # fmt: skip
    group.add_argument(
        "--blocks", type=whole_number, default=10, metavar="N", help="default: 10; of the pilot, with --effect"
    )
    group.add_argument(
        "--effect", type=_share, metavar="PERCENT",
        help="find a difference of this size, like 5%%: a pilot says how many blocks that takes, and they are run",
    )  # fmt: skip
    group.add_argument(
        "--max-blocks", type=whole_number, default=200, metavar="N", help="the most for that (default: 200)"
    )
    group.add_argument(
        "--prompts", type=whole_number, default=8, metavar="N", help="of a round; a block has four (default: 8)"
    )
    group.add_argument("--concurrency", type=whole_number, metavar="N", help="so many at a time (default: 4)")
    group.add_argument("--rate", type=float, metavar="R", help="instead: so many a second")
    group.add_argument("--arrivals", choices=("poisson", "constant"), help="how a --rate arrives (default: poisson)")


def _add_texts(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--self-prompts", type=whole_number, default=16, metavar="N",
        help="ask A again, at another concurrency, and see whether it agrees with itself (default: 16; 0: do not)",
    )  # fmt: skip
    group.add_argument(
        "--likelihood-prompts", type=whole_number, default=8, metavar="N",
        help="answers whose logprobs both are asked for, where they offer it (default: 8; 0: none)",
    )  # fmt: skip
    group.add_argument(
        "--near-tie", type=float, default=0.3, metavar="LOGITS",
        help="the largest gap between two tokens that sums in another order may close (default: 0.3, bfloat16's)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    from sol.compare.sides import check_kinds, parse_side
    from sol.compare.verdict import Plan

    texts = [_given(args, "a"), _given(args, "b")]
    if texts[0] is None:
        raise ConfigError("there is nothing to compare: give A and B, as addresses, commands or files", param="a")
    if texts[1] is None:
        if args.a_body is None and args.b_body is None:
            raise ConfigError(
                "there is no B: give it, or --a-body or --b-body to compare two kinds of requests to one server",
                param="b",
            )
        texts[1] = texts[0]
    sides = [parse_side(text or "", name) for text, name in zip(texts, "ab", strict=True)]
    check_kinds(*sides)
    plan = Plan(metric=args.metric, blocks=args.blocks, effect=args.effect, max_blocks=args.max_blocks)
    files = writable_files(args, _FORMATS, "sol-compare")
    if sides[0].kind == "file":
        outcome, described = _compare_files(args, sides, plan)
        data: Mapping[str, Any] | None = None
    else:
        found = _compare_servers(args, sides, plan, shared=_given(args, "b") is None)
        if found is None:  # Ctrl-C before anything was measured
            return 130
        outcome, described, data = found
    _print(outcome, described)
    _write(files, outcome, described, data, args)
    return outcome.exit_code


def _given(args: argparse.Namespace, name: str) -> str | None:
    word, flag = cast("str | None", getattr(args, name)), cast("str | None", getattr(args, f"{name}_flag"))
    if word is not None and flag is not None:
        raise ConfigError(f"{name.upper()} was given twice: {word!r} and --{name} {flag!r}; give one", param=name)
    return flag if word is None else word


def _compare_files(
    args: argparse.Namespace, sides: list[SideText], plan: Plan
) -> tuple[Outcome, dict[str, dict[str, Any]]]:
    from sol.cli import build_parser
    from sol.compare.likelihoods import Likelihoods
    from sol.compare.recorded import compare_runs, read_run
    from sol.compare.session import Outcome
    from sol.compare.texts import Equivalence, compare_texts

    plain = vars(build_parser().parse_args(["compare"]))
    given = [name for name in _OF_SERVERS if getattr(args, name) != plain[name]]
    if given:
        flag = "--" + given[0].replace("_", "-")
        raise ConfigError(f"{flag} has no effect on recorded runs: nothing is sent", param=given[0])
    a, b = (read_run(Path(side.text), args.load) for side in sides)
    comparison, notes = compare_runs(a, b, plan)
    texts = compare_texts(comparison.blocks)
    if not texts.num_compared:
        reason = "the runs hold no texts of the same prompts; sol bench keeps them with --save-text"
        texts = Equivalence(num_compared=0, reason=reason)
    outcome = Outcome(
        comparison=comparison, texts=texts, notes=notes,
        likelihoods=Likelihoods(offered=False, reason="the runs are over"),
    )  # fmt: skip
    described = {
        name: {"name": f"{side.text} ({run.tool}, {run.name})", "file": side.text, "tool": run.tool, "load": run.name}
        for name, side, run in zip("ab", sides, (a, b), strict=True)
    }
    return outcome, described


def _compare_servers(
    args: argparse.Namespace, sides: list[SideText], plan: Plan, *, shared: bool
) -> tuple[Outcome, dict[str, dict[str, Any]], Mapping[str, Any]] | None:
    from sol.bench.options import BenchOptions
    from sol.bench.run import Limits
    from sol.compare.http import RoundLoad
    from sol.compare.session import Checks

    if args.load is not None:
        raise ConfigError("--load has no effect on servers: it chooses among recorded loads", param="load")
    if args.rate is not None and args.concurrency is not None:
        raise ConfigError("give --concurrency or --rate, not both", param="rate")
    if args.rate is None and args.arrivals is not None:
        raise ConfigError("--arrivals has no effect without --rate", param="arrivals")
    if args.start_timeout <= 0 or args.request_timeout <= 0:
        raise ConfigError("--start-timeout and --request-timeout must be above 0 seconds", param="request_timeout")
    if args.server_logs is not None and all(side.kind != "command" for side in sides):
        raise ConfigError("--server-logs has no effect: no server is started", param="server_logs")
    names = {item.name for item in dataclasses.fields(BenchOptions) if item.init}
    own = ("concurrency", "rate", "arrivals")
    options = BenchOptions(**{name: value for name, value in vars(args).items() if name in names and name not in own})
    options.check_data()
    load = RoundLoad(
        prompts=args.prompts, concurrency=args.concurrency or 4, rate=args.rate, arrivals=args.arrivals or "poisson"
    )
    checks = Checks(self_prompts=args.self_prompts, likelihood_prompts=args.likelihood_prompts, near_tie=args.near_tie)
    limits = Limits(request_seconds=args.request_timeout)
    bodies = [_body(args, options, own_body) for own_body in (args.a_body, args.b_body)]

    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_measure(args, sides, bodies, options, plan, load, checks, limits, shared=shared))


async def _measure(
    args: argparse.Namespace,
    sides: list[SideText],
    bodies: list[dict[str, Any]],
    options: BenchOptions,
    plan: Plan,
    load: RoundLoad,
    checks: Checks,
    limits: Limits,
    *,
    shared: bool,
) -> tuple[Outcome, dict[str, dict[str, Any]], Mapping[str, Any]] | None:
    from sol.bench.endpoint import prepare
    from sol.bench.run import Stop
    from sol.compare.http import HttpSampler
    from sol.compare.progress import Progress
    from sol.compare.session import compare_endpoints, with_token_ids
    from sol.compare.sides import started

    stop, loop = Stop(), asyncio.get_running_loop()
    display = Progress(quiet=args.quiet)
    main = asyncio.current_task()
    assert main is not None

    def interrupt() -> None:
        if stop.is_set or not display.measuring:  # nothing is there that could be kept, or it was pressed before
            main.cancel()
            return
        sys.stderr.write("\nStopping: the blocks so far are kept.\n")
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt)
    try:
        unique = sides[:1] if shared else sides
        async with started(
            unique, log_prefix=args.server_logs, start_timeout=args.start_timeout, say=display.say
        ) as running:
            both = running * 2 if shared else running
            models = [args.a_model or args.model, args.b_model or args.model]
            shared_key = args.api_key or os.environ.get("OPENAI_API_KEY") or None
            keys = [args.a_api_key or shared_key, args.b_api_key or shared_key]
            endpoints = [
                await prepare(_endpoint(args, one.url, model, key, body))
                for one, model, key, body in zip(both, models, keys, bodies, strict=True)
            ]
            data = await options.data(endpoints[0], [])
            a, b = await with_token_ids(*endpoints)
            sampler = HttpSampler(
                a, b, data, load, seed=args.seed, send_seeds=args.send_seeds, limits=limits, stop=stop,
                watcher=display.watch,
            )  # fmt: skip
            display.measuring = True
            outcome = await compare_endpoints(
                sampler, plan, checks, limits=limits, stop=stop, on_progress=display.block, say=display.say
            )
            if outcome.interrupted and not outcome.comparison.blocks:
                return None
            farewells = [said for name, one in zip("AB", running, strict=False) if (said := one.farewell(name))]
            ended = running[0].farewell("A") is not None
            outcome = dataclasses.replace(outcome, notes=[*farewells, *outcome.notes], a_ended=ended)
            described = {
                name: {
                    "name": side.shown + ("" if own is None else f" with {json.dumps(own)}"),
                    "command": side.shown if side.kind == "command" else None,
                    **endpoint.describe(),
                }
                for name, side, endpoint, own in zip("ab", sides, (a, b), (args.a_body, args.b_body), strict=True)
            }
            return outcome, described, {**sampler.data.describe(), "load": load.describe()}
    except asyncio.CancelledError:
        return None
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _body(args: argparse.Namespace, options: BenchOptions, own: Mapping[str, Any] | None) -> dict[str, Any]:
    body = parse_temperature(args.temperature)
    if options.ignores_eos:
        body["ignore_eos"] = True
    return {**body, **args.extra_body, **(own or {})}


def _endpoint(args: argparse.Namespace, url: str, model: str, key: str | None, body: dict[str, Any]) -> Endpoint:
    from sol.bench.endpoint import Endpoint

    return Endpoint(
        url=url, model=model, route=args.route, body=body, headers=parse_headers(args.header), api_key=key,
    )  # fmt: skip


def _print(outcome: Outcome, described: Mapping[str, Mapping[str, Any]]) -> None:
    from rich.console import Console

    from sol.cli.doctor import section
    from sol.compare.summary_text import difference_rows, facts, metric_rows, verdict_line, warnings

    console = Console(highlight=False, markup=False, soft_wrap=True)
    section(console, "Compared", [("A", str(described["a"]["name"])), ("B", str(described["b"]["name"]))])
    print_table(console, metric_rows(outcome.comparison))
    section(console, "What was found", facts(outcome))
    if outcome.texts.differences:
        print_table(console, difference_rows(outcome.texts, most=5))
    for text in warnings(outcome):
        console.print(f"Note: {text}", style="yellow")
    console.print(verdict_line(outcome), style="bold")


def _write(
    files: Mapping[str, Path],
    outcome: Outcome,
    described: Mapping[str, Mapping[str, Any]],
    data: Mapping[str, Any] | None,
    args: argparse.Namespace,
) -> None:
    from sol.cli.machine import inspect_machine, package_versions
    from sol.compare.report import to_html
    from sol.compare.result import to_json

    # What A and B are, `described` says, and without keys.
    secret = ("api_key", "a_api_key", "b_api_key", "header", "run", "a", "b", "a_flag", "b_flag")
    options = {
        name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()
        if name not in secret
    }  # fmt: skip
    document = to_json(
        outcome, sides=described, data=data, options=options, machine=dataclasses.asdict(inspect_machine()),
        packages=package_versions(), keep_text=args.save_text,
    )  # fmt: skip
    for name, path in files.items():
        text = json.dumps(document, ensure_ascii=False, separators=(",", ":")) if name == "json" else (
            to_html(outcome, document)
        )  # fmt: skip
        path.write_text(text, encoding="utf-8")
        print(f"Written: {path}")


def _share(text: str) -> float:
    """`5%` or `0.05`."""
    try:
        value = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no share, like 5% or 0.05") from None
    if value >= 1 and not text.endswith("%"):  # who writes 5 means 5%, and 500% would be found at once
        raise argparse.ArgumentTypeError(f"{text!r} would be {100 * value:g}%: write {text}%, or {value / 100:g}")
    return value
