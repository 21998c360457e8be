"""At the prompt: /reset forgets the conversation, /exit or Ctrl-D leaves; Ctrl-C stops the current answer."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from typing import TYPE_CHECKING

from sol.cli.arguments import (
    add_engine_arguments,
    add_model_argument,
    add_sampling_arguments,
    engine_config,
    sampling_params,
)
from sol.errors import RequestError

if TYPE_CHECKING:
    from rich.console import Console

    from sol.engine.types import SpeculationUsage
    from sol.local import LocalEngine
    from sol.sampling_params import SamplingParams

_COMMANDS = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before the conversation")
    add_sampling_arguments(parser, {"max_tokens": None, "temperature": 0.7})
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    params, config = sampling_params(args), engine_config(args)

    from rich.console import Console

    from sol.local import LocalEngine

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (importing it gives input() line editing and history)

    notes = Console(stderr=True, highlight=False, markup=False)
    engine = LocalEngine(config)
    _ = engine.chat_template  # a model that has none is an error now, not at the first question
    notes.print(f"{engine.info.model} ({engine.info.device}, {engine.info.dtype}). {_COMMANDS}.")
    beginning = [{"role": "system", "content": args.system}] if args.system else []
    messages = list(beginning)
    while (line := _read_line()) is not None:
        if line in ("/exit", "/quit"):
            break
        if line == "/reset":
            messages = list(beginning)
            notes.print("The conversation is forgotten.", style="dim")
        elif line.startswith("/"):
            notes.print(f"{line.split()[0]} is no command: {_COMMANDS}.", style="dim")
        elif line:
            asked = [*messages, {"role": "user", "content": line}]
            answer = _answer(engine, asked, params, notes)
            if answer is not None:
                messages = [*asked, {"role": "assistant", "content": answer}]
    engine.close()
    return 0


def _read_line() -> str | None:
    """One line from the user; "" after Ctrl-C, None at the end of input."""
    try:
        line = input("> " if sys.stdin.isatty() else "")
    except EOFError:
        if sys.stdin.isatty():
            print()
        return None
    except KeyboardInterrupt:
        print()
        return ""
    return line.strip()


def _answer(engine: LocalEngine, messages: list[dict[str, str]], params: SamplingParams, notes: Console) -> str | None:
    """Print the model's answer as it comes; None if there was none, because the conversation no longer fits."""
    from sol.interrupt import Interrupt

    interrupt = Interrupt()
    text, tokens, reason, usage = "", 0, None, None
    started = first = 0.0
    try:
        prompt = engine.tokenizer.encode(engine.chat_template.render(messages), add_special_tokens=False)
        started = time.perf_counter()
        with interrupt.watched():
            for piece in engine.stream([prompt], [params], cancelled=interrupt.pressed):
                first = first or time.perf_counter()
                text, tokens = text + piece.text, tokens + len(piece.token_ids)
                reason, usage = piece.finish_reason, piece.speculation
                sys.stdout.write(piece.text)
                sys.stdout.flush()
    except RequestError as error:
        notes.print(error.message, style="red")
        notes.print("/reset begins a new conversation.", style="dim")
        return None
    print()
    seconds = time.perf_counter() - first
    speed = f", then {(tokens - 1) / seconds:.1f} tokens/s" if tokens > 1 and seconds > 0 else ""
    ended = {"length": "; the length limit ended it", "abort": "; stopped"}.get(reason or "", "")
    if tokens:
        line = f"{tokens} tokens, the first after {first - started:.2f} s{speed}{_speculated(usage)}{ended}"
        notes.print(line, style="dim", soft_wrap=True)  # the terminal wraps it, between words or not
    return text


def _speculated(usage: SpeculationUsage | None) -> str:
    """What speculation did for an answer; empty if nothing was drafted."""
    from sol.speculation.usage import add_counts, mean_acceptance_length

    length = None if usage is None else mean_acceptance_length(add_counts(usage.drafters.values()))
    if usage is None or length is None:
        return ""
    faster = "" if usage.speedup is None else f", about {usage.speedup:.2f}× plain decoding"
    return f", mean acceptance length {length:.2f}{faster}"
