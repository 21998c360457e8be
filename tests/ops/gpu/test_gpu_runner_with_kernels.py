"""The runner on the GPU's ops (interpreted): chunks, decoding, padding and blocks fit together."""

from __future__ import annotations

import pytest
import torch
from gpu_batches import BLOCK_SIZE, Shape, make_program

pytest.importorskip("triton")

from sol.config import SchedulerConfig
from sol.engine.scheduler import Scheduler
from sol.engine.types import EngineRequest, RequestOutput
from sol.ops import EagerExecutor, KVCache
from sol.ops.gpu.ops import GpuOps
from sol.ops.reference import ReferenceOps
from sol.runner.gpu_runner import GpuRunner
from sol.runner.model_runner import ModelRunner
from sol.sampling_params import SamplingParams

CPU = torch.device("cpu")
SHAPE = Shape(heads=4, kv_heads=2, size=16)
LAYERS = 1
CONFIG = SchedulerConfig(
    max_model_len=32,
    max_num_seqs=3,
    max_num_batched_tokens=12,
    max_num_prefill_tokens=8,
    block_size=BLOCK_SIZE,
    num_blocks=24,
    enable_prefix_caching=True,
)


def make_cache(num_blocks: int) -> KVCache:
    return KVCache(torch.full((LAYERS, 2, num_blocks, BLOCK_SIZE, SHAPE.kv_heads, SHAPE.size), torch.nan))


def generate(runner: GpuRunner | ModelRunner, *, ahead: int) -> dict[str, list[int]]:
    scheduler = Scheduler(CONFIG)
    for index, length in enumerate((9, 2, 15)):
        prompt = [(7 * index + i) % SHAPE.vocabulary for i in range(length)]
        params = SamplingParams(temperature=0.0, max_tokens=4)
        scheduler.add(EngineRequest(request_id=str(index), prompt_token_ids=prompt, params=params, seed=0))
    tokens: dict[str, list[int]] = {}
    started = []
    outputs: list[RequestOutput]
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        if plan is not None:
            started.append(runner.submit(plan))
        if plan is None or len(started) > ahead:
            outputs = scheduler.update_from_output(started.pop(0)())
            for output in outputs:
                tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    return tokens


def test_tokens_are_those_of_the_reference() -> None:
    program = make_program(SHAPE, layers=LAYERS)
    reference = ModelRunner(
        EagerExecutor(program, ReferenceOps(), make_cache(CONFIG.num_blocks)),
        block_size=BLOCK_SIZE,
        num_blocks=CONFIG.num_blocks,
        device=CPU,
    )
    runner = GpuRunner(
        program,
        GpuOps(CPU),
        make_cache(CONFIG.num_blocks + 1),
        max_num_seqs=CONFIG.max_num_seqs,
        max_num_batched_tokens=CONFIG.max_num_batched_tokens,
        max_model_len=CONFIG.max_model_len,
        device=CPU,
    )
    assert generate(runner, ahead=1) == generate(reference, ahead=0)
