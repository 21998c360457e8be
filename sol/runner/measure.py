"""How long steps take on this machine: a few are run before anybody waits, for whoever decides about drafts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from sol.engine.types import CachedRequestData, NewRequestData, SchedulerOutput, StepOutput
from sol.sampling_params import SamplingParams
from sol.speculation.plan.types import StepShape

_LEAST: Final = 3
"""Shapes that are measured however long they take"""
_QUICK: Final = 0.05
"""Seconds; a step that takes no longer is run twice, and the faster one counts."""


class MeasuredRunner(Protocol):
    def execute(self, plan: SchedulerOutput) -> StepOutput: ...

    def remove(self, request_ids: Sequence[str]) -> None:
        """Requests of plans that no scheduler made."""
        ...


def measure_steps(
    runner: MeasuredRunner,
    shapes: Sequence[StepShape],
    *,
    num_blocks: int,
    block_size: int,
    max_model_len: int,
    max_num_logits_rows: int,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> list[tuple[StepShape, float]]:
    """Seconds of steps of these shapes, in their order, until `seconds` are over.

    Each request of a shape has the same number of tokens, all but one of them drafts, and of context. What their KV
    cache holds does not matter. Left out are shapes that it has no room for, that would outgrow the model's length
    while they are repeated, or that have more rows of logits than memory was planned for.
    """
    measured: list[tuple[StepShape, float]] = []
    began = clock()
    for shape in shapes:
        if len(measured) >= _LEAST and clock() - began > seconds:
            break
        requests = _Requests(shape, num_blocks, block_size, max_model_len)
        if not requests.fit or shape.num_logits_rows > max_num_logits_rows:
            continue
        requests.advance(runner.execute(requests.first()))
        took = []
        for _ in range(2):
            plan = requests.next()
            started = clock()
            result = runner.execute(plan)
            took.append(clock() - started)
            requests.advance(result)
            if took[0] > _QUICK:
                break
        runner.remove(list(requests.num_tokens))
        measured.append((shape, min(took)))
    return measured


class _Requests:
    def __init__(self, shape: StepShape, num_blocks: int, block_size: int, max_model_len: int) -> None:
        self._drafts = shape.num_tokens // shape.num_requests - 1
        context = shape.num_context_tokens // shape.num_requests - self._drafts
        self.num_tokens = {f"measured-{index}": context for index in range(shape.num_requests)}
        length = context + 3 * (self._drafts + 1)  # a first step and two that are measured, every draft accepted
        blocks = -(-length // block_size)
        self.fit = context >= 1 and length <= max_model_len and blocks * shape.num_requests <= num_blocks
        self._block_ids = {
            name: list(range(index * blocks, (index + 1) * blocks)) for index, name in enumerate(self.num_tokens)
        }

    def first(self) -> SchedulerOutput:
        new = [
            NewRequestData(
                request_id=name,
                token_ids=[0] * count,
                num_prompt_tokens=count,
                num_computed_tokens=count - 1,
                block_ids=self._block_ids[name],
                params=SamplingParams(temperature=0.0),
                seed=0,
                choice_index=0,
                eos_token_ids=[],
            )
            for name, count in self.num_tokens.items()
        ]
        return self._plan(new, [])

    def next(self) -> SchedulerOutput:
        cached = [
            CachedRequestData(request_id=name, num_computed_tokens=count - 1, new_block_ids=[])
            for name, count in self.num_tokens.items()
        ]
        return self._plan([], cached)

    def advance(self, result: StepOutput) -> None:
        for name, token_ids in result.sampled_token_ids.items():
            self.num_tokens[name] += len(token_ids)

    def _plan(self, new: list[NewRequestData], cached: list[CachedRequestData]) -> SchedulerOutput:
        return SchedulerOutput(
            num_scheduled_tokens=dict.fromkeys(self.num_tokens, 1 + self._drafts),
            new_requests=new,
            cached_requests=cached,
            removed_request_ids=[],
            draft_token_ids={name: [0] * self._drafts for name in self.num_tokens} if self._drafts else {},
        )
