"""Speculative decoding on this machine: SmolLM2-135M in float32, with and without, the same requests in one run.

    python benchmarks/speculation.py [--quick] [--only copying cells] [--method suffix] [--pairs 20] [--json FILE]

copying  one stream whose answer copies from its prompt (edit, extract, continue a list, restructure): tokens a second
         with lookup drafting over plain ones, for each lookup drafter. `restructure` copies short pieces into another
         form. Bar: 1.8 times, the geometric mean over the prompts with the better drafter.
cells    named loads, plain and speculating in turn (ABBA, so that a drift of the machine cancels): the ratio of their
         times over all pairs, with a 95 % interval. Bars: the ratio is at least 0.98, the interval's lower end 0.95.
         chat copies little; adversarial is random text over eight tokens, in which every short match is found and
         none predicts what comes next.

Every pair's token ids are compared: one that differs fails the benchmark. Both sides share one runner, so weights and
KV cache lie at the same places for both: two copies of a model in one process differ in speed by up to a tenth.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from common import Report, arguments

from sol.assemble import build_core
from sol.config import EngineConfig
from sol.engine.core import EngineCore
from sol.engine.scheduler import Scheduler
from sol.engine.types import EngineRequest, SpeculationUsage
from sol.models.source import resolve
from sol.progress import Progress
from sol.sampling_params import SamplingParams
from sol.speculation.usage import acceptance_rate, add_counts, mean_acceptance_length
from sol.text.chat_template import load_chat_template
from sol.text.tokenizer import Tokenizer

TEXT = """The old lighthouse stands at the end of the stone pier, three hundred meters from the village square. It was \
built in 1874 by a man named Peter Harlan, who had lost his brother in a storm two winters before. Every evening he \
climbed the ninety steps to the lamp room and lit the great oil lamp with his own hands. When he grew old, his \
daughter Ruth took over the work, and after her the harbor office put in an electric light that needed nobody."""
FACTS = """Alice Turner, alice.turner@example.com, +1 555 0101, Boston, engineer
Bruno Keller, bruno.keller@example.com, +1 555 0102, Denver, teacher
Carla Mendes, carla.mendes@example.com, +1 555 0103, Austin, nurse
David Okafor, david.okafor@example.com, +1 555 0104, Seattle, pilot
Elena Petrova, elena.petrova@example.com, +1 555 0105, Chicago, architect"""
LIST = "\n".join(f'{{"id": {number}, "name": "item {number}", "price": {number}.50, "in_stock": true}},'
                 for number in range(1, 13))  # fmt: skip
RECORD = '{"name": "Alice Turner", "email": "alice.turner@example.com", "phone": "+1 555 0101", "city": "Boston"}'
COPYING = {
    "edit": (True, f"Repeat this text exactly, but call the man Paul Harlan:\n\n{TEXT}"),
    "extract": (True, f"Extract all sentences about Peter from this text. Copy them exactly:\n\n{TEXT}"),
    "list": (False, f"{LIST}\n"),
    "restructure": (False, f"{FACTS}\n\nNames, addresses, numbers and cities as JSON:\n{RECORD}\n"),
}
"""Whether it is a chat, and its text. Small as the model is, it copies here."""
CHAT = (
    "Why is the sky blue? Explain it to a child.",
    "Give me three ideas for a birthday present for my father, who likes gardening.",
    "Write a short poem about a cat that is afraid of rain.",
    "What should I look out for when I buy a used bicycle?",
    "Tell me something surprising about octopuses.",
    "How do I politely decline an invitation to a wedding?",
    "Describe a day in the life of a medieval blacksmith.",
    "Which is healthier, running or swimming, and why?",
)
_PROMPT_TOKENS = 4096
"""As many as all requests of a load have in their prompts, or more"""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that arrive at once."""

    prompts: list[list[int]]
    params: SamplingParams

    def requests(self, turn: int, side: str) -> list[EngineRequest]:
        """Ids begin with `side`: the runner forgets one side's when that side's next step comes. Seeds differ from turn
        to turn: one text that happens to draft badly, or well, should not count 40 times."""
        return [
            EngineRequest(
                request_id=f"{side}{index}", prompt_token_ids=prompt, params=self.params, seed=1000 * turn + index
            )
            for index, prompt in enumerate(self.prompts)
        ]


@dataclass(slots=True)
class Run:
    seconds: float = 0.0
    """Of steps after which every prompt had been computed, so of decoding alone"""
    num_tokens: int = 0
    token_ids: dict[str, list[int]] = field(default_factory=dict)
    usages: dict[str, SpeculationUsage] = field(default_factory=dict)


def drive(core: EngineCore, load: Load, turn: int, side: str) -> Run:
    """From the moment at which each request has its first token, until the last one has its last."""
    run = Run()
    requests = load.requests(turn, side)
    core.add(requests)
    run.token_ids = {request.request_id.removeprefix(side): [] for request in requests}
    started = None
    while core.has_work:
        for output in core.step().outputs:
            name = output.request_id.removeprefix(side)
            run.token_ids[name] += output.new_token_ids
            if started is not None:
                run.num_tokens += len(output.new_token_ids)
            if output.speculation is not None:
                run.usages[name] = output.speculation
        if started is None and all(run.token_ids.values()):
            started = time.perf_counter()
    assert started is not None
    run.seconds = time.perf_counter() - started
    return run


class Comparison:
    def __init__(self, method: str) -> None:
        options: dict[str, Any] = {"method": method}
        config = EngineConfig(
            dtype="float32",
            max_model_len=2048,
            # All prompts in one step, so that all requests begin to decode together. Prompts that are computed one
            # after another give drafting requests the time to end meanwhile: what is measured then is their rest.
            max_num_batched_tokens=_PROMPT_TOKENS,
            max_num_prefill_tokens=_PROMPT_TOKENS,
            # Either side overwrites what the other one's blocks hold.
            enable_prefix_caching=False,
            speculative_config=options,
        )
        drafting = build_core(config, progress=False)
        plain = EngineCore(Scheduler(drafting._scheduler.config), drafting._runner, drafting.info)
        self._sides = {"plain": plain, "drafting": drafting}

    def pairs(self, load: Load, count: int, title: str) -> tuple[list[tuple[Run, Run]], int]:
        """(plain, speculating) runs, in the order ABBA; and how many tokens differ."""
        pairs: list[tuple[Run, Run]] = []
        differing = 0
        with Progress(count, title) as bar:
            for side in self._sides:
                drive(self._sides[side], load, -1, side)
            for number in range(count):
                order = ("plain", "drafting") if number % 2 == 0 else ("drafting", "plain")
                runs = {side: drive(self._sides[side], load, number // 2, side) for side in order}
                plain, speculating = runs["plain"], runs["drafting"]
                pairs.append((plain, speculating))
                differing += sum(
                    a != b
                    for name, ids in plain.token_ids.items()
                    for a, b in zip(ids, speculating.token_ids[name], strict=True)
                )
                bar.advance(1)
        return pairs, differing


def ratio_with_bound(pairs: Sequence[tuple[Run, Run]]) -> tuple[float, float]:
    """Speculating over plain tokens a second, and the lower end of its 95 % interval.

    Of two neighbouring pairs (one ABBA) the geometric mean is one observation; Student's t over their logarithms.
    """
    logs = [math.log(a.seconds / b.seconds * b.num_tokens / a.num_tokens) for a, b in pairs]
    blocks = [statistics.mean(logs[i : i + 2]) for i in range(0, len(logs) - len(logs) % 2, 2)] or logs
    mean = statistics.median(blocks) if len(blocks) < 4 else statistics.mean(_trimmed(blocks))
    if len(blocks) < 2:
        return math.exp(mean), 0.0
    kept = _trimmed(blocks)
    error = statistics.stdev(kept) / math.sqrt(len(kept))
    return math.exp(mean), math.exp(mean - _student(len(kept) - 1) * error)


def _trimmed(values: Sequence[float]) -> list[float]:
    """Without the lowest and the highest tenth: a neighbour's burst hits one run of a pair."""
    cut = len(values) // 10
    return sorted(values)[cut : len(values) - cut]


def _student(degrees: int) -> float:
    """The two-sided 95 % quantile of Student's t: Cornish-Fisher's expansion about the normal one."""
    z = 1.959964
    terms = (z, (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return float(sum(term / degrees**power for power, term in enumerate(terms)))


def row(report: Report, name: str, pairs: Sequence[tuple[Run, Run]], differing: int, **more: Any) -> None:
    usages = [usage for _, run in pairs for usage in run.usages.values()]
    counts = add_counts(counts for usage in usages for counts in usage.drafters.values())
    plain = statistics.median(run.num_tokens / run.seconds for run, _ in pairs)
    speculating = statistics.median(run.num_tokens / run.seconds for _, run in pairs)
    ratio, lower = ratio_with_bound(pairs)
    beliefs = [usage.speedup for usage in usages if usage.speedup is not None]
    report.row(
        case=name,
        plain_tok_s=plain,
        sol_tok_s=speculating,
        ratio=ratio,
        lower_95=lower,
        pairs=len(pairs),
        drafted=counts.num_draft_tokens,
        acceptance=acceptance_rate(counts) or 0.0,
        mal=mean_acceptance_length(counts) or 1.0,
        believed=statistics.median(beliefs) if beliefs else 1.0,
        differing=differing,
        **more,
    )


def measure_copying(report: Report, encode: Any, *, pairs: int, tokens: int, methods: list[str]) -> None:
    best = {}
    for method in methods:
        comparison = Comparison(method)
        ratios = []
        for name, (is_chat, text) in COPYING.items():
            load = Load([encode(text, is_chat)], SamplingParams(temperature=0.0, max_tokens=tokens))
            found, differing = comparison.pairs(load, pairs, f"{method}, {name}")
            row(report, f"copying: {name}, {method}", found, differing)
            ratios.append(report.rows[-1]["ratio"])
            report.at_most(f"tokens that differ, {name}, {method}", differing, 0)
        best[method] = statistics.geometric_mean(ratios)
    name = max(best, key=lambda method: best[method])
    report.at_least(f"copying, 1 stream, {name}, over plain", best[name], 1.8)


def measure_cells(report: Report, encode: Any, *, pairs: int, method: str, short: bool) -> None:
    comparison = Comparison(method)
    sampled: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "ignore_eos": True}
    # Eight tokens, all as likely as each other: nothing that was seen says what comes next.
    chance: dict[str, Any] = {"temperature": 100.0, "logit_bias": dict.fromkeys(range(1000, 1008), 100.0), "top_k": 8,
              "ignore_eos": True}  # fmt: skip
    cells = {
        "chat 1": Load([encode(CHAT[0])], SamplingParams(max_tokens=64, **sampled)),
        "chat 8": Load([encode(text) for text in CHAT], SamplingParams(max_tokens=32, **sampled)),
        "adversarial 1": Load([[1003, *range(1000, 1008)] * 8], SamplingParams(max_tokens=64, **chance)),
        "adversarial 32": Load(
            [[1000 + (i * k) % 8 for k in range(40)] for i in range(32)], SamplingParams(max_tokens=24, **chance)
        ),
        "copy 8": Load(
            [encode(f"{i + 1}.\n{text}", is_chat) for i, (is_chat, text) in enumerate([*COPYING.values()] * 2)],
            SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True),
        ),
    }
    for name, load in cells.items():
        found, differing = comparison.pairs(load, pairs, name)
        row(report, name, found, differing)
        report.at_most(f"tokens that differ, {name}", differing, 0)
        ratio, lower = report.rows[-1]["ratio"], report.rows[-1]["lower_95"]
        report.at_least(f"{name}: over plain", ratio, 0.98)
        if not short:  # a few pairs say nothing about the interval
            report.at_least(f"{name}: over plain, lower end of 95 %", lower, 0.95)


def main() -> int:
    parser = arguments(str(__doc__))
    parser.add_argument("--only", nargs="+", choices=("copying", "cells"), default=["copying", "cells"])
    parser.add_argument("--method", default="suffix", help="the drafter of the cells (default: suffix)")
    parser.add_argument("--pairs", type=int, help="of each cell (default: 40, that is 20 ABBA; --quick: 2)")
    args = parser.parse_args()
    report = Report("speculation", args.quick)
    files = resolve(EngineConfig().model, progress=False)
    tokenizer, template = Tokenizer.from_files(files), load_chat_template(files)

    def encode(text: str, is_chat: bool = True) -> list[int]:
        if not is_chat:
            return tokenizer.encode(text)
        assert template is not None
        rendered = template.render([{"role": "user", "content": text}], add_generation_prompt=True)
        return tokenizer.encode(rendered, add_special_tokens=False)

    if "copying" in args.only:
        measure_copying(
            report,
            encode,
            pairs=args.pairs or (2 if args.quick else 10),
            tokens=32 if args.quick else 96,
            methods=["suffix"] if args.quick else ["suffix", "ngram"],
        )
    if "cells" in args.only:
        measure_cells(
            report, encode, pairs=args.pairs or (2 if args.quick else 40), method=args.method, short=args.quick
        )
    return report.finish(args.json)


if __name__ == "__main__":
    sys.exit(main())
