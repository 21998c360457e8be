"""An engine is ready only once the largest step that can come has been run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tiny_models import TinyLlama

from sol.assemble import build_core
from sol.config import EngineConfig
from sol.engine.types import SchedulerOutput, StepOutput
from sol.runner.model_runner import ModelRunner

OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "speculation": "off", "kv_cache_memory_bytes": 1 << 20}


@pytest.mark.parametrize(("kernels", "max_num_seqs", "max_num_batched_tokens"), [
    ("auto", 3, 200), ("torch", 3, 200), ("auto", 5, 5), ("auto", 1, 700),
])  # fmt: skip
def test_the_largest_step_is_run_before_an_engine_is_ready(
    tiny_llama: Callable[..., TinyLlama],
    monkeypatch: pytest.MonkeyPatch,
    kernels: Any,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> None:
    steps: list[SchedulerOutput] = []
    execute = ModelRunner.execute

    def watched(self: ModelRunner, plan: SchedulerOutput) -> StepOutput:
        steps.append(plan)
        return execute(self, plan)

    monkeypatch.setattr(ModelRunner, "execute", watched)
    config = EngineConfig(
        model=str(tiny_llama().directory),
        cpu_kernels=kernels,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        **OPTIONS,
    )
    core = build_core(config, progress=False)
    (step,) = steps
    longest = max(step.num_scheduled_tokens.values())
    assert len(step.num_scheduled_tokens) >= max_num_seqs
    # All of a step's tokens, of requests that are no longer than any may be.
    assert sum(step.num_scheduled_tokens.values()) == max_num_batched_tokens
    assert longest <= core.info.max_model_len
    assert not core.has_work


def test_an_engine_that_cannot_run_it_does_not_start(
    tiny_llama: Callable[..., TinyLlama], monkeypatch: pytest.MonkeyPatch
) -> None:
    def execute(self: ModelRunner, plan: SchedulerOutput) -> StepOutput:
        raise MemoryError("no memory for a step")

    monkeypatch.setattr(ModelRunner, "execute", execute)
    with pytest.raises(MemoryError, match="no memory for a step"):
        build_core(EngineConfig(model=str(tiny_llama().directory), **OPTIONS), progress=False)
