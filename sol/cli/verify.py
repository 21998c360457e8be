"""Generates with and without speculation and compares: token ids one by one, and sampled tokens with the model's
probabilities. Exit code 1 if they differ. Example: sol verify org/name --speculative-config '{"method": "ngram"}'"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sol.cli.arguments import add_engine_arguments, add_model_argument, engine_config
from sol.cli.doctor import section
from sol.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from sol.config import EngineConfig
    from sol.verification import Checks, Report
    from sol.verification.report import Cell


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument("--quick", action="store_true", help="shorter answers and fewer samples")
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE",
        help="what to generate from, one text a line; in a file named .jsonl a string, {\"prompt\": text} or "
        "{\"messages\": [...]} a line (default: four built-in prompts)",
    )  # fmt: skip
    parser.add_argument(
        "--tolerance", type=float, metavar="LOGITS",
        help="tokens whose logits differ by no more are a near tie, which arithmetic in another order decides: counted "
        "and shown, no error (default: by the dtype)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    config = engine_config(args)
    if args.tolerance is not None and not (math.isfinite(args.tolerance) and args.tolerance >= 0.0):
        raise ConfigError(f"--tolerance must be a number of at least 0, not {args.tolerance}", param="tolerance")

    from sol.engine.process import ProcessClient
    from sol.progress import Progress
    from sol.verification import run_checks, speculation_is_off

    if not config.speculative().drafters:
        raise speculation_is_off()  # before the model is fetched
    checks = _checks(config, args)
    report = run_checks(checks, ProcessClient, lambda total, heading: Progress(total, f"Verifying: {heading}"))
    if args.json:
        print(json.dumps(_as_json(report), indent=2))
    else:
        from rich.console import Console

        _print(report, Console(highlight=False, markup=False, soft_wrap=True))
    return 0 if report.holds else 1


def _checks(config: EngineConfig, args: argparse.Namespace) -> Checks:
    from sol.models.source import resolve_configured
    from sol.text.chat_template import load_chat_template
    from sol.text.tokenizer import Tokenizer, end_token_ids
    from sol.verification import Checks, built_in_prompts, read_prompts
    from sol.verification.prompts import FOLLOW_UP, REPETITION

    files = resolve_configured(config)
    tokenizer = Tokenizer.from_files(files)
    if args.prompts is None:
        prompts = built_in_prompts(tokenizer, load_chat_template(files))
    else:
        prompts = read_prompts(args.prompts, tokenizer, lambda: load_chat_template(files))
    return Checks(
        config=config,
        prompts=prompts,
        must_fit=args.prompts is not None,
        law_prompt=tokenizer.encode(REPETITION),
        follow_up=tokenizer.encode(FOLLOW_UP, add_special_tokens=False),
        eos_token_ids=end_token_ids(files, tokenizer),
        quick=args.quick,
        tolerance=args.tolerance,
    )


def _as_json(report: Report) -> dict[str, Any]:
    return {
        **dataclasses.asdict(report),
        "holds": report.holds,
        "num_tokens": report.num_tokens,
        "num_errors": report.num_errors,
        "num_near_ties": report.num_near_ties,
        "law": None if report.law is None else {**dataclasses.asdict(report.law), "holds": report.law.holds},
        "speeds": [{**dataclasses.asdict(speed), "speedup": speed.speedup} for speed in report.speeds],
    }


def _print(report: Report, console: Console) -> None:
    section(console, "What was verified", [
        ("model", f"{report.model} ({report.device}, {report.dtype})"),
        ("drafters", ", ".join(report.drafters)),
        ("verification", f"{report.verify_method}, up to {report.num_speculative_tokens} drafts a request and step"),
    ])  # fmt: skip
    section(console, "Token ids, compared with plain decoding", [(_result(cell), _cell(cell)) for cell in report.cells])
    ties = [difference for cell in report.cells for difference in cell.differences]
    if ties:
        section(console, f"Where tokens differ (a near tie: within {report.tolerance:g})", [
            ("near tie" if one.near_tie else "ERROR",
             f"{one.cell}: {one.prompt}, token {one.position}: {_token(one.found)} in place of {_token(one.expected)}, "
             + ("which cannot be told apart by logits" if one.gap is None else f"{one.gap:.2g} apart"))
            for one in ties
        ])  # fmt: skip
    if (law := report.law) is not None:
        section(console, "Sampled tokens, compared with the model's probabilities", [
            ("equal" if law.holds else "ERROR",
             f"{law.num_samples:,} answers of {law.num_tokens} tokens (top_k {law.top_k}, temperature "
             f"{law.temperature:g}), {_accepted(law.num_accepted_tokens, law.num_draft_tokens)}"),
            ("χ²", f"p = {law.p_value:.3g} over {law.num_cells} sequences; an error below {law.significance:g}"),
            ("distance", f"{law.distance:.4f}; an error above {law.distance_bound:.4f}"),
        ])  # fmt: skip
        if law.plain_p_value is not None:
            console.print(
                f"  Plain decoding has p = {law.plain_p_value:.3g}; both against each other p = "
                f"{law.same_p_value:.3g}.\n"
            )
    if report.speeds:
        section(console, f"Speed of one stream, as configured (controller {report.controller})", [
            (speed.prompt,
             f"{speed.speedup:.2f} times plain: {speed.tokens_per_second:,.1f} instead of "
             f"{speed.plain_tokens_per_second:,.1f} tokens/s; "
             + (_accepted(speed.num_accepted_tokens, speed.num_draft_tokens)
                + f", mean acceptance length {1 + speed.num_accepted_tokens / speed.num_drafts:.2f}"
                if speed.num_drafts else "nothing was drafted"))
            for speed in report.speeds
        ])  # fmt: skip
    for problem in report.problems:
        console.print(f"Problem: {problem}", style="red")
    ties_text = f", {_several(report.num_near_ties, 'near tie')}" if report.num_near_ties else ""
    verdict = "Speculation changes nothing" if report.holds else "Not verified"
    console.print(
        f"{verdict}: {report.num_tokens:,} tokens compared, {_several(report.num_errors, 'error')}{ties_text}, "
        f"in {report.seconds:.0f} s.",
        style="green" if report.holds else "red",
    )


def _result(cell: Cell) -> str:
    if cell.num_errors:
        return "ERROR"
    return "near ties" if cell.num_near_ties else "equal"


def _cell(cell: Cell) -> str:
    text = f"{cell.name}: {cell.num_requests} answers, {cell.num_tokens:,} tokens"
    if cell.differences:
        text += f", {len(cell.differences)} differ"
    if cell.num_draft_tokens:
        text += ", " + _accepted(cell.num_accepted_tokens, cell.num_draft_tokens)
    return text


def _accepted(accepted: int, drafted: int) -> str:
    return f"{accepted:,} of {drafted:,} drafts accepted" if drafted else "nothing was drafted"


def _token(token: int | None) -> str:
    return "the end" if token is None else str(token)


def _several(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
