"""An engine on a virtual clock: the real scheduler, controller and lookup drafters around a model of recorded answers.

Time passes by a table of measured steps, and by measured constants for lookups; nothing here depends on the machine.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from speculation_workloads import Exchange

from sol.config import SchedulerConfig
from sol.engine.core import EngineCore
from sol.engine.scheduler import Scheduler
from sol.engine.speculation import Speculation
from sol.engine.types import EngineInfo, EngineRequest, SchedulerOutput, StepOutput
from sol.runner.drafters import Drafters, as_draft
from sol.sampling.processing import SamplingRow
from sol.sampling_params import SamplingParams
from sol.speculation.plan import Controller, GoodputController, StepShape
from sol.speculation.propose import Proposal, ProposalRow, Proposer
from sol.speculation.propose.ngram import NgramProposer
from sol.speculation.propose.suffix import SuffixProposer

LOOKUP_CALL, LOOKUP_ROW, LOOKUP_TOKEN = 5e-6, 8e-6, 3e-6
"""Seconds of a lookup drafter: a call, a request, and a token that is new to it since it was last asked."""
CONTROLLER_STEP, CONTROLLER_ROW, CONTROLLER_DRAFT = 40e-6, 1e-6, 8e-6
"""Seconds of what decides and learns: a step, a request that decodes, and one that has drafts at hand"""
FIXED_STEP, FIXED_ROW = 20e-6, 1.9e-6
"""The same of a fixed setting, which does nothing but keep the books"""
MOST_TOKENS_A_STEP: Final = 16_384
"""So many that no prompt waits: else prompts would decide how many requests run at a time, not the streams"""
VOCAB_SIZE: Final = 100_000
PROPOSERS: Final[dict[str, Callable[[], Proposer]]] = {
    "ngram": lambda: NgramProposer(prompt_lookup_min=2, prompt_lookup_max=5),
    # Long drafts of little promise too: how many of them are verified is for the controller to say.
    "suffix": lambda: SuffixProposer(max_spec_factor=8.0, min_token_prob=0.05),
}


class CostTable:
    """Seconds of a step by requests and tokens of each, as `speculation_costs.py` and `gpu_verify.py` write them."""

    def __init__(self, file: Path) -> None:
        content = json.loads(file.read_text(encoding="utf-8"))
        rows = [row for row in content["rows"] if "seconds" in row]
        self.is_gpu = "card" in content
        grid = [row for row in rows if "chunk" not in row]
        self.context: int = grid[0]["context"]
        self._lines: dict[int, tuple[list[float], list[float]]] = {}
        for row in grid:
            if row["context"] == self.context:
                # A table's noise must not make more tokens cheaper: a controller would be right to ask for more.
                tokens, seconds = self._lines.setdefault(row["requests"], ([], []))
                tokens.append(float(row["tokens_per_request"]))
                seconds.append(max([row["seconds"], *seconds[-1:]]))
        self._requests = sorted(self._lines)
        at = {(r["requests"], r["tokens_per_request"], r["context"]): r["seconds"] for r in grid}
        longer = [
            (seconds - at[n, 1, self.context]) / (n * (context - self.context))
            for (n, tokens, context), seconds in at.items()
            if context != self.context and tokens == 1
        ]
        self._per_context = max(0.0, float(np.median(longer))) if longer else 0.0
        chunks = [(row["seconds"] - self._grid(row["requests"], 1.0)) / row["chunk"] for row in rows if "chunk" in row]
        one_request = self._lines[1]
        self.per_prompt_token: float = (
            float(np.median(chunks)) if chunks else (one_request[1][-1] - one_request[1][0]) / (one_request[0][-1] - 1)
        )

    def seconds(self, shape: StepShape) -> float:
        prompt_tokens = shape.num_tokens - shape.num_logits_rows
        seconds = self.per_prompt_token * prompt_tokens
        if shape.num_logits_rows:
            requests = min(shape.num_requests, shape.num_logits_rows)
            seconds += self._grid(requests, shape.num_logits_rows / requests)
        usual = shape.num_requests * self.context
        return max(seconds + self._per_context * (shape.num_context_tokens - usual), 0.5 * seconds)

    def _grid(self, requests: int, tokens: float) -> float:
        above = min(bisect.bisect_left(self._requests, requests), len(self._requests) - 1)
        high = self._requests[above]
        if high == requests or above == 0:
            return self._line(high, tokens) * max(1.0, requests / high)
        low = self._requests[above - 1]
        share = (requests - low) / (high - low)
        return (1 - share) * self._line(low, tokens) + share * self._line(high, tokens)

    def _line(self, requests: int, tokens: float) -> float:
        xs, ys = self._lines[requests]
        if tokens <= xs[-1]:
            return float(np.interp(tokens, xs, ys))
        if len(xs) == 1:
            return ys[0] * tokens / xs[0]
        return ys[-1] + (tokens - xs[-1]) * (ys[-1] - ys[-2]) / (xs[-1] - xs[-2])


@dataclass(slots=True)
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class Charged:
    """A lookup drafter that takes time on the virtual clock."""

    def __init__(self, proposer: Proposer, clock: Clock) -> None:
        self._proposer, self._clock = proposer, clock
        self._known: dict[str, int] = {}

    @property
    def name(self) -> str:
        return self._proposer.name

    def propose(self, rows: Sequence[ProposalRow]) -> list[Proposal]:
        new = sum(row.num_tokens - self._known.get(row.request_id, 0) for row in rows)
        self._known.update((row.request_id, row.num_tokens) for row in rows)
        self._clock.now += LOOKUP_CALL + LOOKUP_ROW * len(rows) + LOOKUP_TOKEN * new
        return self._proposer.propose(rows)

    def forget(self, request_ids: Sequence[str], *, finished: bool) -> None:
        for request_id in request_ids:
            self._known.pop(request_id, None)
        self._proposer.forget(request_ids, finished=finished)


@dataclass(slots=True)
class _Row:
    answer: list[int]
    sampling: SamplingRow
    output: list[int]
    num_computed: int

    @property
    def num_tokens(self) -> int:
        return len(self.sampling.prompt_token_ids) + len(self.output)


@dataclass(slots=True)
class AnsweringRunner:
    """Samples what each request's answer has next, verifies drafts against it, and lets time pass."""

    answers: dict[str, list[int]]
    table: CostTable
    clock: Clock
    drafters: Drafters
    prompt_tokens: int = 0
    """Computed so far"""
    target_passes: int = 0
    num_drafted: int = 0
    """Requests that the latest step made drafts for"""
    verified: bool = False
    """Whether the latest step verified drafts"""
    _rows: dict[str, _Row] = field(default_factory=dict)

    def submit(self, plan: SchedulerOutput) -> Callable[[], StepOutput]:
        result = self._execute(plan)
        return lambda: result

    def _execute(self, plan: SchedulerOutput) -> StepOutput:
        self.drafters.leave(plan)
        for name in plan.removed_request_ids:
            del self._rows[name]
        for new in plan.new_requests:
            prompt, output = new.token_ids[: new.num_prompt_tokens], new.token_ids[new.num_prompt_tokens :]
            row = SamplingRow(new.params, new.seed, new.choice_index, prompt, output, new.eos_token_ids)
            self._rows[new.request_id] = _Row(self.answers[new.request_id], row, output, new.num_computed_tokens)
        result = StepOutput(sampled_token_ids={}, logprobs={})
        context = logits = 0
        for name, count in plan.num_scheduled_tokens.items():
            row, drafts = self._rows[name], plan.draft_token_ids.get(name, [])
            row.num_computed += count
            context += row.num_computed
            if row.num_computed < row.num_tokens + len(drafts):
                continue
            logits += 1 + len(drafts)
            sampled = result.sampled_token_ids[name] = []
            place = len(row.output)
            for position in range(len(drafts) + 1):
                # Past its recorded answer a request goes on with what ends the run anyway.
                right = row.answer[place + position] if place + position < len(row.answer) else 0
                sampled.append(right)
                if position < len(drafts) and drafts[position] != right:
                    break
            row.num_computed -= len(drafts) + 1 - len(sampled)
            row.output += sampled
        shape = StepShape(
            num_tokens=sum(plan.num_scheduled_tokens.values()),
            num_requests=len(plan.num_scheduled_tokens),
            num_logits_rows=logits,
            num_context_tokens=context,
        )
        self.prompt_tokens += shape.num_tokens - logits
        self.target_passes += 1
        self.clock.now += self.table.seconds(shape)
        self.num_drafted, self.verified = 0, bool(plan.draft_token_ids)
        if plan.proposals:
            self._propose(plan, result)
        return result

    def _propose(self, plan: SchedulerOutput, result: StepOutput) -> None:
        nowhere = np.zeros(0, dtype=np.int64)
        rows = {
            name: ProposalRow(
                request_id=name,
                sampling=self._rows[name].sampling,
                max_tokens=1,
                block_ids=nowhere,
                num_computed_tokens=self._rows[name].num_computed,
            )
            for name in plan.proposals
        }
        answer = self.drafters.propose(plan.proposals, rows)
        result.draftings = answer.draftings
        result.drafts = {name: as_draft(*proposal) for name, proposal in answer.proposals.items()}
        self.num_drafted = len(result.drafts)


@dataclass(frozen=True, slots=True)
class Run:
    """What passed until `tokens` were there."""

    seconds: float
    """Of everything but the computation of prompts, whose share would only hide differences"""
    tokens: int
    target_passes: int
    start: Run | None = None
    """Until as many answers were complete as there are streams"""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def later_tokens_per_second(self) -> float:
        """After the start, in which a controller that knows nothing yet learns."""
        assert self.start is not None
        return (self.tokens - self.start.tokens) / (self.seconds - self.start.seconds)


def run(
    exchanges: Sequence[Exchange],
    streams: int,
    table: CostTable,
    controller: Controller | None,
    drafters: Sequence[str],
    num_speculative_tokens: int,
    *,
    work_ahead: int = 0,
) -> Run:
    """Answer `exchanges`, `streams` at a time, until there are too few left for that: what comes then says more of the
    longest answer than of drafts. Without a controller, plainly. Raises `AssertionError` for a wrong answer."""
    clock = Clock()
    longest = max(len(e.prompt) + len(e.answer) for e in exchanges) + num_speculative_tokens + 8
    config = SchedulerConfig(
        max_model_len=longest,
        max_num_seqs=streams,
        max_num_batched_tokens=MOST_TOKENS_A_STEP,
        max_num_prefill_tokens=MOST_TOKENS_A_STEP,
        block_size=16,
        num_blocks=streams * (longest // 16 + 3),
        enable_prefix_caching=False,
    )
    speculation = controller and Speculation(controller, num_speculative_tokens=num_speculative_tokens)
    proposers = [Charged(PROPOSERS[name](), clock) for name in drafters]
    answers = {str(i): exchange.answer for i, exchange in enumerate(exchanges)}
    runner = AnsweringRunner(answers, table, clock, Drafters(proposers, vocab_size=VOCAB_SIZE, clock=clock))
    core = EngineCore(Scheduler(config, speculation or None), runner, _info(config), clock=clock, work_ahead=work_ahead)
    core.add([_request(str(i), exchange) for i, exchange in enumerate(exchanges)])
    made: dict[str, list[int]] = {name: [] for name in answers}
    left = len(answers)
    start: Run | None = None

    def so_far() -> Run:
        return Run(
            seconds=clock.now - runner.prompt_tokens * table.per_prompt_token,
            tokens=sum(map(len, made.values())),
            target_passes=runner.target_passes,
            start=start,
        )

    while left >= streams:
        outputs = core.step().outputs
        # A GPU's steps are planned ahead, while it computes, unless they verify drafts.
        if runner.verified or not table.is_gpu:
            if isinstance(controller, GoodputController):
                clock.now += CONTROLLER_STEP + CONTROLLER_ROW * len(outputs) + CONTROLLER_DRAFT * runner.num_drafted
            elif controller is not None:
                clock.now += FIXED_STEP + FIXED_ROW * len(outputs)
        for output in outputs:
            made[output.request_id] += output.new_token_ids
            left -= output.finish_reason is not None
            assert output.error is None, output.error
        if start is None and len(answers) - left >= streams:
            start = so_far()
    if speculation is not None and speculation.failure is not None:
        raise speculation.failure
    for name, tokens in made.items():
        assert tokens == answers[name][: len(tokens)], f"answer {name} is not the recorded one"
    return so_far()


def _request(name: str, exchange: Exchange) -> EngineRequest:
    params = SamplingParams(temperature=0.0, max_tokens=len(exchange.answer), ignore_eos=True)
    return EngineRequest(request_id=name, prompt_token_ids=exchange.prompt, params=params, seed=0)


def _info(config: SchedulerConfig) -> EngineInfo:
    return EngineInfo(
        model="recorded answers",
        device="virtual",
        dtype="none",
        vocab_size=VOCAB_SIZE,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        weight_bytes=0,
        kv_cache_bytes=0,
        load_seconds=0.0,
    )
