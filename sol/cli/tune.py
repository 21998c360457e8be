"""Examples: sol tune meta-llama/Meta-Llama-3-8B-Instruct --slo "ttft_p95<500ms,tpot_p95<30ms"
sol tune --engine vllm meta-llama/Meta-Llama-3-8B-Instruct --slo agent-30 --price-per-hour 2.5
sol tune --simulate l4-8b-int4 --slo "ttft_p95<2s,tpot_p95<60ms"

Exit code: 0 a configuration was found, 1 none meets the SLO, 2 for what cannot work, 130 after Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sol.cli.arguments import add_model_argument, chosen_model, whole_number
from sol.cli.bench import add_data_arguments
from sol.errors import ConfigError, SolError

if TYPE_CHECKING:
    from sol.bench.options import BenchOptions
    from sol.tune import Config, Goal, Runner, Search, Space, TuneResult
    from sol.tune.engines import Target
    from sol.tune.roofline import Roofline

_NUM_TEXTS = 24
"""On which lossy configurations are compared."""
_SEVERAL_DEVICES = {f"{flag}-parallel-size" for flag in ("--tensor", "--pipeline", "--data")} | {"-tp", "-pp", "-dp"}
"""Flags of engines that take more devices than one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    what = parser.add_argument_group("what is tuned")
    what.add_argument("--engine", choices=("sol", "vllm"), help="whose server is started (default: sol)")
    what.add_argument(
        "--simulate", metavar="PROFILE|FILE",
        help="tune sol simulate's engine, on its virtual clock: a profile, or a file of its options",
    )  # fmt: skip
    what.add_argument(
        "--vary", action="append", default=[], metavar="NAME=VALUES",
        help="values to try, in place of the usual ones: max_num_seqs=8,16,32, or a JSON list; one value fixes it; may "
        "be given again",
    )  # fmt: skip
    what.add_argument("--speculative-model", metavar="MODEL", help="a draft model to try as well")
    what.add_argument("--engine-args", metavar="WORDS", help='more of the engine\'s flags: "--max-model-len 8192"')
    what.add_argument("--program", metavar="WORDS", help="what to run instead of sol serve or vllm serve")
    what.add_argument("--start-timeout", type=float, metavar="SECONDS", help="of a server (default: 600)")
    goal = parser.add_argument_group("goal")
    goal.add_argument("--slo", required=True, metavar="CLAUSES|PRESET", help='as sol bench has it: "tpot_p95<30ms"')
    goal.add_argument(
        "--price-per-hour", type=float, metavar="X",
        help="of the machine: look for the least cost per million good tokens (default: the greatest goodput)",
    )  # fmt: skip
    goal.add_argument(
        "--kl-bound", type=float, metavar="NATS", help="most KL divergence a token of lossy choices (default: 0.02)"
    )
    goal.add_argument("--allow-lossy", action="store_true", help="try lossy choices without measuring what they change")
    _add_search(parser.add_argument_group("search"))
    add_data_arguments(parser.add_argument_group("data"))


def _add_search(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--trials", type=whole_number, default=40, metavar="N", help="servers to start (default: 40)")
    group.add_argument(
        "--num-requests", type=whole_number, default=300, metavar="N", help="of the longest loads (default: 300)"
    )
    group.add_argument("--tolerance", type=float, default=0.02, metavar="X", help="of the rate found (default: 0.02)")
    group.add_argument("--time-limit", type=float, metavar="SECONDS", help="stop as Ctrl-C does after so long")
    group.add_argument("--request-timeout", type=float, metavar="SECONDS", help="of a request (default: 600)")
    group.add_argument(
        "--ignore-eos", action=argparse.BooleanOptionalAction, default=None,
        help="go on to the asked length whatever the model says (default: for synthetic data)",
    )  # fmt: skip
    group.add_argument(
        "--memory-bandwidth", type=float, metavar="GB/S",
        help="of the machine, for what cannot reach the SLO (default: known of common GPUs)",
    )  # fmt: skip
    group.add_argument("--output", default="sol-tune", metavar="PREFIX", help="of all files (default: sol-tune)")
    group.add_argument("--resume", action="store_true", help="go on with the search of this --output")
    group.add_argument("--quiet", action="store_true", help="no progress")


def run(args: argparse.Namespace) -> int:
    from sol.tune import Goal, Search

    bound = {} if args.kl_bound is None else {"kl_bound": args.kl_bound}
    goal = Goal.of(args.slo, price_per_hour=args.price_per_hour, allow_lossy=args.allow_lossy, **bound)
    if args.time_limit is not None and not args.time_limit > 0:
        raise ConfigError(f"time_limit must be more than 0 seconds, not {args.time_limit}", param="time_limit")
    plan = _simulated(args, goal) if args.simulate is not None else _real(args, goal)
    search = Search(
        trials=args.trials, num_requests=args.num_requests, tolerance=args.tolerance, seed=args.seed,
        path=Path(f"{args.output}.journal"), resume=args.resume, settings=plan.what,
    )  # fmt: skip

    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(_tune(plan, goal, search, args))
    _write(result, plan, args)
    if result.interrupted and args.time_limit is None:
        return 130
    return 0 if result.best is not None else 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan:
    runner: Runner
    space: Space
    default: Config | None
    what: dict[str, Any]
    title: str
    target: Target | None
    options: Callable[[Config], dict[str, Any]]
    """All that a configuration's file has to say."""


def _simulated(args: argparse.Namespace, goal: Goal) -> _Plan:
    from sol.bench.lengths import Lengths
    from sol.simulate.config import simulate_config
    from sol.simulate.laws import PROFILES
    from sol.tune import Parameter, SimulatedRunner, Space, Workload, simulated_space
    from sol.tune.engines import check_named_once, parse_variation

    model = args.model if args.model is not None else args.model_flag
    for name, value in (
        ("MODEL", model), ("--engine", args.engine), ("--speculative-model", args.speculative_model),
        ("--engine-args", args.engine_args), ("--program", args.program), ("--start-timeout", args.start_timeout),
        ("--kl-bound", args.kl_bound), ("--allow-lossy", args.allow_lossy or None),
        ("--memory-bandwidth", args.memory_bandwidth), ("--request-timeout", args.request_timeout),
        ("--ignore-eos", args.ignore_eos), ("--tasks", args.tasks), ("--languages", args.languages),
        ("--turns", args.turns), ("--turn-delay", args.turn_delay), ("--multi-turn", args.multi_turn or None),
        ("--dataset", None if args.dataset == "synthetic" else args.dataset),
    ):  # fmt: skip
        if value is not None:
            raise ConfigError(f"{name} has no effect with --simulate: leave it out", param=name.strip("-").lower())
    if args.num_prefixes is not None and args.prefix_tokens is None:
        raise ConfigError("--num-prefixes needs --prefix-tokens", param="num_prefixes")
    if args.simulate in PROFILES:
        config = simulate_config({"profile": args.simulate})
    elif Path(args.simulate).exists():
        config = simulate_config({}, file=Path(args.simulate))
    else:
        raise ConfigError(
            f"simulate must be one of {', '.join(PROFILES)}, or a file, not {args.simulate!r}", param="simulate"
        )
    given = {
        name: Lengths.parse(text, name)
        for name in ("input_tokens", "output_tokens") if (text := getattr(args, name)) is not None
    }  # fmt: skip
    workload = Workload(
        **given, prefix_tokens=args.prefix_tokens or 0, num_prefixes=args.num_prefixes or 1, seed=args.seed
    )
    space = simulated_space(config.laws)
    parameters = {parameter.name: parameter for parameter in space.parameters}
    varied = [parse_variation(text, tuple(parameters)) for text in args.vary]
    check_named_once([name for name, _ in varied])
    for name, values in varied:
        parameters[name] = Parameter(name=name, values=values, demand=parameters[name].demand)
    space = Space(tuple(parameters.values()))
    runner = SimulatedRunner(config.laws, goal.slo, workload)
    for parameter in space.parameters:
        for value in parameter.values:
            runner.laws({parameter.name: value})
    default = runner.default()
    return _Plan(
        runner=runner,
        space=space,
        default=default if default in space else None,
        what={"simulate": dataclasses.asdict(config.laws), "workload": workload.describe()},
        title=f"sol tune: {args.simulate}, simulated",
        target=None,
        options=lambda config: dataclasses.asdict(runner.laws(config)),
    )


def _real(args: argparse.Namespace, goal: Goal) -> _Plan:
    from sol.bench.options import BenchOptions
    from sol.cli.machine import inspect_machine
    from sol.tune.engines import Target, Variation, default_config, engine_space, serve_options, split_words
    from sol.tune.machine import inspect
    from sol.tune.roofline import Machine
    from sol.tune.servers import ServerRunner

    names = {item.name for item in dataclasses.fields(BenchOptions) if item.init} - {"num_requests", "slo"}
    given = {name: value for name, value in vars(args).items() if name in names and value is not None}
    load = BenchOptions(**given)
    load.check_data()
    extra = split_words(args.engine_args or "")
    target = Target(engine=args.engine or "sol", model=chosen_model(args), extra_args=extra, program=args.program)
    own = inspect_machine()
    flags = {word.partition("=")[0] for word in extra}
    machine = inspect(
        on_cpu="cpu" in extra or "--device=cpu" in extra,
        memory_bytes=min(own.memory_bytes, own.memory_limit_bytes or own.memory_bytes),
    )
    if flags & _SEVERAL_DEVICES:  # how many, the engine knows; bounds of one device would exclude what can be
        machine = dataclasses.replace(machine, limits=Machine())
    if args.memory_bandwidth is not None:
        machine = dataclasses.replace(
            machine, limits=dataclasses.replace(machine.limits, bandwidth=args.memory_bandwidth * 1e9)
        )
    roofline = _roofline(target, goal, machine.limits)
    space = engine_space(
        target,
        variations=[Variation.parse(text) for text in args.vary],
        speculative_model=args.speculative_model,
        quantized=roofline is not None and roofline.model.quantization is not None,
        on_cpu=machine.on_cpu,
    )
    runner = ServerRunner(
        target, space, goal.slo, load, logs=Path(f"{args.output}-logs"), roofline=roofline, texts=_texts(load),
        start_timeout=args.start_timeout or 600.0, api_key=os.environ.get("OPENAI_API_KEY") or None,
    )  # fmt: skip
    described = {name: value for name, value in load.describe().items() if name in given}
    return _Plan(
        runner=runner,
        space=space,
        default=default_config(space, target.engine, on_cpu=machine.on_cpu),
        what={**target.describe(), "machine": machine.describe(), "load": described},
        title=f"sol tune: {target.model} on {target.engine}",
        target=target,
        options=lambda config: serve_options(target, config),
    )


def _roofline(target: Target, goal: Goal, limits: Any) -> Roofline | None:
    """None where the model's shape cannot be read: then nothing follows from it."""
    from sol.models.config import load_model_config
    from sol.models.source import resolve
    from sol.tune.roofline import Roofline

    if target.engine != "sol" and not Path(target.model).exists():
        return None  # the engine fetches it itself
    try:
        model = load_model_config(resolve(target.model))
    except SolError:
        if target.engine == "sol":
            raise
        return None
    return Roofline(model=model, machine=limits, slo=goal.slo, price_per_hour=goal.price_per_hour)


def _texts(load: BenchOptions) -> list[str]:
    """What the user asks, where that is text; else the built-in prompts."""
    from sol.bench.data import built_in
    from sol.bench.endpoint import as_text
    from sol.bench.files import read_conversations
    from sol.bench.options import DEFAULT_MAX_TOKENS

    if load.data_kind == "file":
        conversations = read_conversations(Path(load.dataset or ""), DEFAULT_MAX_TOKENS, multi_turn=False)[:_NUM_TEXTS]
    else:
        data = built_in(seed=0)
        conversations = [data.conversation(index) for index in range(_NUM_TEXTS)]
    prompts = [conversation.turns[0].prompt for conversation in conversations]
    return [prompt if isinstance(prompt, str) else as_text(prompt) for prompt in prompts]


async def _tune(plan: _Plan, goal: Goal, search: Search, args: argparse.Namespace) -> TuneResult:
    from sol.tune import Watcher, tune
    from sol.tune.progress import Progress

    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def interrupt() -> None:
        if stop.is_set():  # a second Ctrl-C waits for nothing
            loop.remove_signal_handler(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        sys.stderr.write("\nStopping: every finished trial is kept, and --resume goes on.\n")
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt)
    timer = None if args.time_limit is None else loop.call_later(args.time_limit, stop.set)
    try:
        return await tune(
            plan.runner, plan.space, goal, search=search, default=plan.default, stop=stop,
            watcher=Watcher() if args.quiet else Progress(search.trials, loads=plan.target is not None),
        )  # fmt: skip
    finally:
        if timer is not None:
            timer.cancel()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _write(result: TuneResult, plan: _Plan, args: argparse.Namespace) -> None:
    from rich.console import Console

    from sol.cli.bench import print_table
    from sol.tune.output import command_line, to_json, to_yaml
    from sol.tune.report import best_rows, headline, to_html, warnings

    options = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()
               if name != "run" and value not in (None, [], False)}  # fmt: skip
    document = to_json(result, what=plan.what, options=options)
    files = {Path(f"{args.output}.json"): json.dumps(document, ensure_ascii=False, indent=1)}
    start = use = ""
    if result.best is not None:
        comment = f"Written by sol tune: {headline(result)}"
        if plan.target is None or plan.target.engine == "sol":
            path = Path(f"{args.output}.yaml")
            use = f"sol {'simulate' if plan.target is None else 'serve'} --config {path}"
            if plan.target is not None and plan.target.extra_args:
                use += f" {args.engine_args}"
            start = files[path] = to_yaml(plan.options(result.best.config), f"{comment}\n{use}")
        else:
            use = command_line(plan.target, result.best.config)
            start = files[Path(f"{args.output}.sh")] = f"#!/bin/sh\n# {comment}\nexec {use}\n"
    files[Path(f"{args.output}.html")] = to_html(result, document, title=plan.title, start=start)
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(f"{headline(result)}\n", style="bold")
    if result.best is not None:
        print_table(console, best_rows(result))
    for text in warnings(result):
        console.print(f"Note: {text}", style="yellow")
    for path in files:
        print(f"Written: {path}")
    if use:
        print(f"\n{use}")
