"""An engine's runner on a GPU: kernels compiled, memory measured, graphs captured."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace

import torch

from sol.errors import ConfigError, OutOfMemoryError
from sol.models.config import ModelConfig
from sol.ops import KVCache, Program
from sol.ops.program import Ops
from sol.runner.decode_graphs import decode_buckets
from sol.runner.drafters import Drafters
from sol.runner.gpu_runner import GpuRunner
from sol.runner.memory import MemoryPlan, allocate_kv_cache
from sol.runner.verify_graphs import verify_buckets
from sol.sampling.grammar import Grammars
from sol.speculation.config import VerifyMethod


def gpu_ops(device: torch.device) -> Ops:
    """For one program: they remember things from one launch to the next. Raises `ConfigError` where there is no
    Triton."""
    try:
        from sol.ops.gpu.ops import GpuOps
    except ImportError as error:
        raise ConfigError(
            f"device is cuda, but Triton, which compiles the kernels, cannot be imported ({error}): install the triton "
            f"that torch {torch.__version__} asks for, or use --device cpu",
            param="device",
        ) from error
    return GpuOps(device)


def build_gpu_runner(
    program: Program,
    model: ModelConfig,
    first: MemoryPlan,
    plan: Callable[[int], MemoryPlan],
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    drafters: Callable[[KVCache], Drafters] | None = None,
    drafter_weights: int = 0,
    num_trial_tokens: int = 0,
    verify_method: VerifyMethod = "coupled",
    max_num_logits_rows: int | None = None,
    num_speculative_tokens: int = 0,
    grammars: Grammars | None = None,
) -> tuple[GpuRunner, MemoryPlan]:
    """A runner that is ready, and the plan its memory follows.

    `first` was made before the weights were loaded, with a guess of the workspace. Here the largest step and the
    largest graph run over a small cache, and what the device has lost by then, modules of compiled kernels included,
    is the workspace that `plan` is asked about.
    `drafters` makes those of a runner with this cache, ready and with caches of their own of as many blocks, less the
    last. They are made for the small cache, too, so their largest passes are in what is measured.
    `drafter_weights`: bytes that were loaded for them beforehand; their KV caches are in `first.kv_per_token`.
    `num_trial_tokens`: that the small cache has room for at least, if there are so many.
    `num_speculative_tokens`: the most drafts of a request that a step verifies. `grammars` compiles those of requests.
    Raises `OutOfMemoryError`, and `ConfigError` where there is no Triton.
    """
    verifying = verify_buckets(max_num_seqs, num_speculative_tokens) if drafters is not None else []
    block_bytes = first.kv_per_token * first.block_size

    def make(num_blocks: int) -> GpuRunner:
        # The last block is for scribbling.
        cache = KVCache(allocate_kv_cache(replace(first, num_blocks=num_blocks + 1), model, dtype, device))
        made = None if drafters is None else drafters(cache)
        return GpuRunner(
            program,
            gpu_ops(device),
            cache,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=first.max_model_len,
            device=device,
            drafters=made,
            verify_method=verify_method,
            max_num_logits_rows=max_num_logits_rows,
            grammars=grammars,
        )

    try:
        blocks = min(first.num_blocks, -(-max(max_num_batched_tokens, num_trial_tokens) // first.block_size))
        trial = make(blocks)
        trial.run_worst_case()
        trial.capture(decode_buckets(max_num_seqs)[-1:])
        trial.capture_verifying(verifying[-1:])
        torch.cuda.synchronize(device)
        free, _ = torch.cuda.mem_get_info(device)
        used = first.available - free - program.weight_bytes - drafter_weights - blocks * block_bytes
        del trial
        gc.collect()
        torch.cuda.empty_cache()
        memory = plan(max(0, used))
        runner = make(memory.num_blocks)
        runner.run_worst_case()
        runner.warm_up()
        runner.capture()
        runner.capture_verifying(verifying)
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            f"the largest step does not fit into the GPU's memory: lower --max-num-batched-tokens or --max-num-seqs, "
            f"or free memory ({error})",
            param="max_num_batched_tokens",
        ) from error
    # What start-up made lives as long as the engine: the collector need not look at it in the middle of a step.
    gc.collect()
    gc.freeze()
    return runner, memory
