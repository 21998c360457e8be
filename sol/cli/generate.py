"""Examples: sol generate "The capital of France is" --max-tokens 16
git diff | sol generate - --model org/name"""

from __future__ import annotations

import argparse
import sys

from sol.cli.arguments import (
    add_engine_arguments,
    add_model_argument,
    add_sampling_arguments,
    engine_config,
    sampling_params,
)
from sol.errors import RequestError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompts", nargs="+", metavar="PROMPT", help="a text to continue, as it is; - reads one from stdin"
    )
    add_model_argument(parser, positional=False)
    add_sampling_arguments(parser, {"max_tokens": 256})
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    # What cannot work is said before the model is loaded.
    params, config = sampling_params(args), engine_config(args)
    if args.prompts.count("-") > 1:
        raise RequestError("PROMPT - reads all of stdin, so it can be given only once", param="prompts")
    texts = [sys.stdin.read() if prompt == "-" else prompt for prompt in args.prompts]
    if not all(texts):
        raise RequestError("PROMPT must not be empty", param="prompts")

    from sol.interrupt import Interrupt
    from sol.local import LocalEngine

    engine, interrupt = LocalEngine(config), Interrupt()
    prompts = [engine.tokenizer.encode(text) for text in texts]
    # All prompts are computed together; they are printed in their order, the first unfinished one as it comes.
    waiting = ["" for _ in prompts]
    finished = [False for _ in prompts]
    current = 0
    with interrupt.watched():
        for piece in engine.stream(prompts, [params] * len(prompts), cancelled=interrupt.pressed):
            waiting[piece.prompt_index] += piece.text
            finished[piece.prompt_index] = piece.finish_reason is not None
            while current < len(prompts):
                sys.stdout.write(waiting[current])
                waiting[current] = ""
                if not finished[current]:
                    break
                sys.stdout.write("\n")
                current += 1
            sys.stdout.flush()
    engine.close()
    return 130 if interrupt.pressed() else 0
