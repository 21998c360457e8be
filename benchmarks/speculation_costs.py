"""What a verifying step costs on this machine's CPU: a table that the virtual clock of speculation_clock.py runs on.

    python benchmarks/speculation_costs.py --json benchmarks/results/cpu-verify-costs.json

Seconds of steps (forward pass, verification, reading the result) of the default model in float32, by number of requests
and tokens of each (its last one and its drafts), and of steps that compute a chunk of a prompt beside decoding. Shapes
take turns in several rounds, and the median over them counts; of two steps in a round the quicker one, as when an
engine starts. Within three minutes on two quiet cores: later rounds end when the time is up.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from common import Report, arguments

from sol import SamplingParams, assemble
from sol.config import EngineConfig, SchedulerConfig
from sol.engine.core import EngineCore
from sol.engine.scheduler import Scheduler
from sol.engine.speculation import Speculation
from sol.engine.types import EngineInfo, EngineRequest
from sol.runner.drafters import Drafters
from sol.runner.measure import measure_steps
from sol.runner.model_runner import ModelRunner
from sol.speculation.plan import Emission, FixedController, StepShape
from sol.speculation.propose import Proposal, ProposalRow

TOKENS = (1, 2, 3, 4, 6, 8, 12, 16)
REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (128, 1024)
"""The second one for few requests only: it is where the price of context comes from."""
MOST_TOKENS = 512
CHUNKS = (32, 128)
ROUNDS = 7
SECONDS = 140
"""After which no step is measured that has been before"""


class Noise:
    """A drafter whose drafts are as many as asked for, and wrong."""

    name = "noise"

    def __init__(self, vocab_size: int) -> None:
        self._random, self._vocab_size = random.Random(0), vocab_size

    def propose(self, rows: Sequence[ProposalRow]) -> list[Proposal]:
        return [Proposal(token_ids=self._draw(row.max_tokens)) for row in rows]

    def forget(self, request_ids: Sequence[str], *, finished: bool) -> None:
        pass

    def _draw(self, count: int) -> list[int]:
        return [self._random.randrange(self._vocab_size) for _ in range(count)]


class Recorder(FixedController):
    """Keeps what each step took by its shape."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(("noise",), num_tokens)
        self.steps: dict[tuple[int, int, int], list[float]] = defaultdict(list)
        """(requests, tokens of all, those of prompts) → seconds"""

    def observe_step(self, shape: StepShape, seconds: float, emissions: Sequence[Emission]) -> None:
        drafts = sum(emission.num_draft_tokens for emission in emissions)
        beside = shape.num_tokens - drafts - len(emissions)
        self.steps[shape.num_requests, shape.num_tokens, beside].append(seconds)


class Bench:
    """One model; an engine around it for every shape."""

    def __init__(self, model: str | None, max_num_seqs: int, max_model_len: int) -> None:
        self._config = EngineConfig(
            **({"model": model} if model else {}),
            dtype="float32",
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=MOST_TOKENS,
            max_model_len=max_model_len,
            kv_cache_memory_bytes=(max_num_seqs * 192 + 4 * 1280) * 46_080,
        )
        settled = assemble.plan(self._config, progress=False)
        torch.set_num_threads(settled.threads)
        executor, _ = assemble._build_executor(self._config, settled, progress=False)
        self._settled, self._executor = settled, executor
        self._random = random.Random(1)
        self._runner = self._make_runner()

    def seconds(self, requests: int, tokens: int, context: int) -> float | None:
        """Of a step in which `requests` requests, that have `context` tokens each, verify `tokens` - 1 drafts. What
        their KV cache holds does not matter, so nothing is computed before."""
        rows = requests * tokens
        shape = StepShape(
            num_tokens=rows, num_requests=requests, num_logits_rows=rows, num_context_tokens=requests * context
        )
        memory = self._settled.memory
        measured = measure_steps(
            self._runner,
            [shape],
            num_blocks=memory.num_blocks,
            block_size=self._config.block_size,
            max_model_len=memory.max_model_len,
            max_num_logits_rows=self._settled.max_num_logits_rows,
            seconds=math.inf,
        )
        return measured[0][1] if measured else None

    def chunk_seconds(self, requests: int, chunk: int, steps: int) -> float:
        """Of a step that computes `chunk` tokens of a prompt beside the next tokens of `requests` requests."""
        core, recorder = self._engine(0, max_num_prefill_tokens=chunk)
        core.add([self._request(str(i), 64, 500) for i in range(requests)])
        while not any(key[:2] == (requests, requests) for key in recorder.steps):
            core.step()
        steps = max(2, min(steps, 512 // chunk))
        core.add([self._request("prompt", (steps + 1) * chunk, 1)])
        measured = recorder.steps[requests + 1, requests + chunk, chunk]
        while len(measured) < steps:
            core.step()
        return statistics.median(measured)

    def _engine(self, num_drafts: int, **limits: int) -> tuple[EngineCore, Recorder]:
        settled, memory = self._settled, self._settled.memory
        recorder = Recorder(num_drafts)
        values: dict[str, Any] = {
            "max_model_len": memory.max_model_len,
            "max_num_seqs": settled.max_num_seqs,
            "max_num_batched_tokens": settled.max_num_batched_tokens,
            "max_num_prefill_tokens": settled.max_num_batched_tokens,
            "block_size": self._config.block_size,
            "num_blocks": memory.num_blocks,
            "enable_prefix_caching": False,
        }
        speculation = Speculation(recorder, num_speculative_tokens=max(num_drafts, 1))
        scheduler = Scheduler(SchedulerConfig(**(values | limits)), speculation)
        runner = self._make_runner()
        info = EngineInfo(
            model=self._config.model,
            device="cpu",
            dtype="float32",
            vocab_size=settled.model.vocab_size,
            max_model_len=memory.max_model_len,
            max_num_seqs=settled.max_num_seqs,
            max_num_batched_tokens=settled.max_num_batched_tokens,
            block_size=self._config.block_size,
            num_blocks=memory.num_blocks,
            weight_bytes=0,
            kv_cache_bytes=0,
            load_seconds=0.0,
        )
        return EngineCore(scheduler, runner, info), recorder

    def _make_runner(self) -> ModelRunner:
        vocab_size = self._settled.model.vocab_size
        return ModelRunner(
            self._executor,
            block_size=self._config.block_size,
            num_blocks=self._settled.memory.num_blocks,
            device=self._settled.device,
            drafters=Drafters([Noise(vocab_size)], vocab_size=vocab_size),
        )

    def _request(self, name: str, num_prompt_tokens: int, max_tokens: int) -> EngineRequest:
        return EngineRequest(
            request_id=name,
            prompt_token_ids=[self._random.randrange(1000, 40_000) for _ in range(num_prompt_tokens)],
            params=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
            seed=0,
        )


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--model", help="instead of the default one")
    args = parser.parse_args()
    report = Report("speculation_costs", args.quick)
    most = 8 if args.quick else max(REQUESTS)
    bench = Bench(args.model, max_num_seqs=most + 1, max_model_len=2048)
    steps = 8
    shapes = [
        {"requests": requests, "tokens_per_request": tokens, "context": context}
        for context in CONTEXTS
        for requests in REQUESTS
        for tokens in TOKENS
        if requests <= most and requests * tokens <= MOST_TOKENS
        if context == CONTEXTS[0] or (requests <= 4 and tokens in (1, 4))
    ]
    shapes += [
        {"requests": requests, "chunk": chunk, "context": 64}
        for chunk in CHUNKS
        for requests in (1, 8)
        if requests <= most
    ]
    took: list[list[float]] = [[] for _ in shapes]
    began = time.perf_counter()
    for turn in range(1 if args.quick else ROUNDS):
        for shape, seconds in zip(shapes, took, strict=True):
            if turn and time.perf_counter() - began > SECONDS:
                break
            requests = shape["requests"]
            if "chunk" in shape:
                seconds.append(bench.chunk_seconds(requests, shape["chunk"], steps))
            else:
                one = bench.seconds(requests, shape["tokens_per_request"], shape["context"])
                seconds += [] if one is None else [one]
            print(turn, shape, seconds[-1:], file=sys.stderr, flush=True)
    for shape, seconds in zip(shapes, took, strict=True):
        if seconds:
            report.row(**shape, seconds=round(statistics.median(seconds), 6))
    return report.finish(args.json)


if __name__ == "__main__":
    raise SystemExit(main())
