"""`sol compare`: how often it is wrong where it is known who is slower, and the scenario that every reader tries."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

from common import ROOT, Report
from measure_servers import Cores

from sol.compare import Comparison, Plan, compare
from sol.compare.virtual import VirtualSampler, slower
from sol.config import DEFAULT_MODEL
from sol.simulate import profile

SLOWER = 1.05
RUNS = 100
LAWS = profile("h100-8b", noise="lognormal")
"""Steps have a random duration, and rounds another one: the machine's speed wanders by 5% from round to round and by as
much again slowly (`VirtualSampler`), which is what a shared machine does."""


def measure_verdicts(report: Report, _directory: Path, _cores: Cores) -> None:
    """100 comparisons of a server with itself, and 100 with one whose steps take 5% longer."""
    false = [_compare(1.0, seed, Plan()) for seed in range(RUNS)]
    found = [_compare(SLOWER, 1000 + seed, Plan(effect=SLOWER - 1)) for seed in range(RUNS)]
    for name, comparisons in (("with itself", false), ("5% slower", found)):
        verdicts = [comparison.verdict for comparison in comparisons]
        announced = sorted(c.announced for c in comparisons if c.announced is not None)
        ratios = [c.primary.ratio for c in comparisons if c.primary.ratio is not None]
        held = sum(_holds(c, 1.0 if name == "with itself" else SLOWER) for c in comparisons)
        report.row(
            compared=name, runs=RUNS, better=verdicts.count("better"), worse=verdicts.count("worse"),
            cannot_tell=verdicts.count("cannot tell"), mean_ratio=f"{sum(ratios) / len(ratios):.4f}",
            interval_holds_truth=held, announced_blocks=f"{announced[len(announced) // 2]}" if announced else "",
        )  # fmt: skip
    report.at_most("false_verdicts_in_100", sum(c.verdict != "cannot tell" for c in false), 9)
    report.at_least("slowdowns_of_5%_found_in_100", sum(c.verdict == "worse" for c in found), 72)


def _compare(factor: float, seed: int, plan: Plan) -> Comparison:
    sampler = VirtualSampler(LAWS, slower(LAWS, factor), prompts=4, concurrency=2, seed=seed)
    return asyncio.run(compare(sampler, plan))


def _holds(comparison: Comparison, truth: float) -> bool:
    low, high = comparison.primary.low, comparison.primary.high
    return low is not None and high is not None and low <= truth <= high


def measure_speculation(report: Report, directory: Path, _cores: Cores) -> None:
    """SmolLM2 without speculation against SmolLM2 with it, from one command that starts both. Answers that repeat
    their prompts are what speculation is for; both sides are asked the same."""
    data = directory / "editing.jsonl"
    _write_editing(data)
    sol = f"{sys.executable} -m sol serve {DEFAULT_MODEL} --dtype float32 --max-model-len 2048"
    prefix = directory / "speculation"
    blocks, prompts = ("6", "2") if report.quick else ("10", "4")
    command = [
        sys.executable, "-m", "sol", "compare", "--a", f"{sol} --speculation off", "--b", sol, "--dataset", str(data),
        "--concurrency", "1", "--blocks", blocks, "--prompts", prompts, "--output-tokens", "64", "--self-prompts", "4",
        "--likelihood-prompts", "0", "--output", str(prefix), "--quiet",
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, env=dict(os.environ), stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=1800, check=False,
    )  # fmt: skip
    written = prefix.with_suffix(".json")
    if not written.exists():
        raise RuntimeError(f"sol compare ended with code {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}")
    document = json.loads(written.read_text())
    effect, texts = document["effects"]["e2e"], document["texts"]
    report.row(
        a="speculation off", b="speculation", blocks=effect["num_blocks"], e2e_ratio=effect["ratio"],
        low=effect["low"], high=effect["high"], speedup=1 / effect["ratio"], texts=texts["num_compared"],
        exit_code=done.returncode,
    )  # fmt: skip
    report.more_than("speedup_by_speculation_at_least", 1 / effect["high"], 1.0)
    report.at_most("exit_code_of_sol_compare", done.returncode, 0)


def _write_editing(path: Path) -> None:
    """Short texts to be repeated with a change."""
    subjects = ("the lighthouse", "the old railway", "a winter market", "the river bridge", "an apple orchard")
    lines = []
    for i in range(200):
        text = f"In {1900 + i} {subjects[i % 5]} had {3 + i % 9} workers, {2 + i % 7} doors and a roof of red tiles. "
        text += f"Every {('morning', 'evening', 'week')[i % 3]} somebody wrote the number of visitors into a book, and "
        text += f"at the end of the year {subjects[(i + 1) % 5]} was painted again, as it had been {1 + i % 4} times."
        lines.append(json.dumps({"prompt": f"Repeat this text exactly, word by word:\n\n{text}", "max_tokens": 64}))
    path.write_text("\n".join(lines) + "\n")
