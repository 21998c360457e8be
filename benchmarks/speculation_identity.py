"""Token ids with speculation against those without, on SmolLM2-135M in float32: every drafter, greedy and seeded, alone
and among neighbours, with and without the prefix cache, first and second turns.

All drafters draft at every step. The draft model is the target itself, so that nearly everything is accepted;
`early_exit` runs a quarter of the target's layers, so that little is. A difference between tokens whose logits are
within `--tolerance` is a near tie, which arithmetic in another order decides. There should be none: the C++ kernels add
up in the same order whatever is computed together.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from common import Report, arguments

from sol.config import DEFAULT_MODEL, EngineConfig
from sol.engine.process import ProcessClient
from sol.models.source import resolve
from sol.sampling_params import SamplingParams
from sol.text.chat_template import load_chat_template
from sol.text.tokenizer import Tokenizer, end_token_ids
from sol.verification import Prompt, built_in_prompts
from sol.verification.checks import TOLERANCES
from sol.verification.equality import Case, Open, compare, judge, plain_cases
from sol.verification.prompts import FOLLOW_UP
from sol.verification.report import Cell
from sol.verification.session import PLAIN, Ask, Session

ENGINES = ("ngram+suffix+draft_model+early_exit", "suffix+draft_model")
"""Each drafter of the first drafts alone as well; of the second only both together."""
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "seeded": SamplingParams(temperature=0.8),
}


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--model", default=DEFAULT_MODEL, help=f"(default: {DEFAULT_MODEL})")
    parser.add_argument("--tolerance", type=float, default=TOLERANCES["float32"], metavar="LOGITS")
    args = parser.parse_args()
    report = Report("speculation_identity", args.quick)
    files = resolve(args.model)
    tokenizer = Tokenizer.from_files(files)
    prompts = built_in_prompts(tokenizer, load_chat_template(files))[: 2 if args.quick else None]
    eos = end_token_ids(files, tokenizer)
    plain = EngineConfig(
        model=args.model, dtype="float32", max_model_len=512, max_num_seqs=64, enable_prefix_caching=False,
        speculation="off",
    )  # fmt: skip
    with session(plain, eos) as reference:
        first, second = turns(reference, prompts, tokenizer.encode(FOLLOW_UP, add_special_tokens=False), args.quick)
    cells: list[Cell] = []
    differences: list[Open] = []
    for drafters in ENGINES:
        for caching in (False, True):
            options: dict[str, Any] = {
                "method": drafters, "model": args.model, "controller": "fixed", "num_speculative_tokens": 4,
            }  # fmt: skip
            config = replace(plain, enable_prefix_caching=caching, speculation="auto", speculative_config=options)
            with session(config, eos) as engine:
                for cases in (first, second):
                    choices = None if drafters == ENGINES[0] else {drafters: None}
                    found, differing = compare(engine, cases, prefix_cache=caching, choices=choices)
                    cells += found
                    differences += differing
    if differences:
        with session(plain, eos) as reference:
            judge(reference, differences, args.tolerance)
    for cell in cells:
        report.row(
            drafter=cell.drafter,
            sampling=cell.sampling,
            prefix_cache="yes" if cell.prefix_cache else "no",
            company=cell.company,
            turn=cell.turn,
            answers=cell.num_requests,
            tokens=cell.num_tokens,
            steps=cell.num_steps,
            cached=cell.num_cached_tokens,
            drafts=cell.num_draft_tokens,
            accepted=cell.num_accepted_tokens,
            errors=cell.num_errors,
            near_ties=cell.num_near_ties,
        )
    for one in differences:
        print(f"{one.difference.cell}: {one.difference}")
    report.at_most("answers that differ", sum(cell.num_errors for cell in cells), 0)
    report.at_most("near ties (expected: none)", sum(cell.num_near_ties for cell in cells), 0)
    drafting = [cell for cell in cells if cell.drafter != "none"]
    report.at_most("cells in which nothing was drafted", sum(not cell.num_draft_tokens for cell in drafting), 0)
    return report.finish(args.json)


@contextlib.contextmanager
def session(config: EngineConfig, eos: Sequence[int]) -> Iterator[Session]:
    client = ProcessClient(config)
    try:
        yield Session(client, eos)
    finally:
        client.close()


def turns(
    reference: Session, prompts: Sequence[Prompt], follow_up: Sequence[int], quick: bool
) -> tuple[list[Case], list[Case]]:
    """What plain decoding answers, each alone and without a prefix cache; then to a second question."""
    lengths = (12, 8) if quick else (96, 48)

    def cases(turn: int, asked: Sequence[tuple[str, list[int]]]) -> list[Case]:
        return plain_cases(
            reference,
            [
                (name, sampling, turn, Ask(token_ids, replace(params, max_tokens=lengths[turn - 1]), number, PLAIN))
                for number, (name, token_ids) in enumerate(asked)
                for sampling, params in SAMPLINGS.items()
            ],
        )

    first = cases(1, [(prompt.name, prompt.token_ids) for prompt in prompts])
    greedy = [case for case in first if case.sampling == "greedy"]
    return first, cases(2, [(case.prompt, [*case.ask.token_ids, *case.expected, *follow_up]) for case in greedy])


if __name__ == "__main__":
    raise SystemExit(main())
