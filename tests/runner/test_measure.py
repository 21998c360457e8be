"""Steps that are measured at start-up: which are run, and what counts as their time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from sol.engine.types import SchedulerOutput, StepOutput
from sol.runner.measure import measure_steps
from sol.speculation.plan import StepShape, shapes_to_measure

BLOCK = 16


class Runner:
    """Takes `seconds` a token on its own clock, checks what it is asked for, and accepts every draft but the last."""

    def __init__(self, num_blocks: int, max_model_len: int, seconds: float = 1e-4) -> None:
        self.num_blocks, self.max_model_len, self.seconds = num_blocks, max_model_len, seconds
        self.now = 0.0
        self.steps = 0
        self._held: dict[str, list[int]] = {}
        """Blocks"""

    def clock(self) -> float:
        return self.now

    def execute(self, plan: SchedulerOutput) -> StepOutput:
        for new in plan.new_requests:
            assert new.request_id not in self._held
            self._held[new.request_id] = new.block_ids
            assert new.num_computed_tokens == len(new.token_ids) - 1
        held = [block for blocks in self._held.values() for block in blocks]
        assert len(set(held)) == len(held)
        assert max(held) < self.num_blocks
        starts = {one.request_id: one.num_computed_tokens for one in plan.new_requests}
        starts |= {one.request_id: one.num_computed_tokens for one in plan.cached_requests}
        sampled = {}
        for name, count in plan.num_scheduled_tokens.items():
            last = starts[name] + count
            assert last <= min(self.max_model_len, len(self._held[name]) * BLOCK)
            sampled[name] = [0] * max(1, len(plan.draft_token_ids.get(name, [])))
        self.now += self.seconds * sum(plan.num_scheduled_tokens.values()) * (3 if self.steps % 3 == 1 else 1)
        self.steps += 1
        return StepOutput(sampled_token_ids=sampled, logprobs={})

    def remove(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            del self._held[request_id]

    def measure(self, shapes: Sequence[StepShape], rows: int = 10**6, seconds: float = 100.0) -> dict[int, float]:
        measured = measure_steps(
            self,
            shapes,
            num_blocks=self.num_blocks,
            block_size=BLOCK,
            max_model_len=self.max_model_len,
            max_num_logits_rows=rows,
            seconds=seconds,
            clock=self.clock,
        )
        assert not self._held
        return {shape.num_tokens: took for shape, took in measured}


def shape(requests: int, tokens_each: int, context: int = 64) -> StepShape:
    tokens = requests * tokens_each
    return StepShape(
        num_tokens=tokens, num_requests=requests, num_logits_rows=tokens, num_context_tokens=requests * context
    )


def test_the_faster_of_two_steps_counts_and_long_ones_run_once() -> None:
    runner = Runner(num_blocks=100, max_model_len=512)
    assert runner.measure([shape(1, 1), shape(1, 4), shape(2, 8)]) == pytest.approx({1: 1e-4, 4: 4e-4, 16: 16e-4})
    runner = Runner(num_blocks=100, max_model_len=512, seconds=0.1)
    runner.measure([shape(1, 1)])
    assert runner.steps == 2


def test_when_time_is_up_three_shapes_are_known() -> None:
    runner = Runner(num_blocks=100, max_model_len=512)
    assert len(runner.measure([shape(1, count) for count in range(1, 9)], seconds=0.0)) == 3


def test_no_step_has_more_rows_of_logits_than_there_is_memory_for() -> None:
    runner = Runner(num_blocks=1000, max_model_len=512)
    assert list(runner.measure([shape(1, 1), shape(8, 5), shape(8, 4), shape(1, 17)], rows=32)) == [1, 32, 17]


@pytest.mark.parametrize("max_model_len", [1, 2, 16, 100, 130, 4096])
@pytest.mark.parametrize("num_blocks", [1, 9, 400])
def test_small_engines_measure_what_they_have_room_for(max_model_len: int, num_blocks: int) -> None:
    shapes = shapes_to_measure(
        max_num_seqs=4, max_num_batched_tokens=32, max_model_len=max_model_len, num_speculative_tokens=16
    )
    Runner(num_blocks, max_model_len).measure(shapes)
