"""The one place that joins engine and runner: what the engine's process and `sol.LLM` start from.

`plan` says what an engine would be without loading weights; `build_core` makes it.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from sol.assemble_drafters import DraftersPlan, GpuDrafters, model_proposers, plan_drafters
from sol.config import EngineConfig, SchedulerConfig
from sol.engine.core import EngineCore
from sol.engine.scheduler import Scheduler
from sol.engine.speculation import Speculation
from sol.engine.types import EngineInfo
from sol.errors import ConfigError
from sol.models.checkpoint import Checkpoint, open_checkpoint
from sol.models.config import ModelConfig, load_model_config
from sol.models.dummy_checkpoint import parameter_shapes
from sol.models.packed_cache import CpuPacker, Source, packed_nbytes
from sol.models.quantization_config import REQUANTIZING
from sol.models.registry import load_program
from sol.models.source import ModelFiles, resolve_configured
from sol.ops import EagerExecutor, Executor, KVCache
from sol.ops.cpu.executor import CpuExecutor, KVCacheSpec
from sol.ops.cpu.native import NativeError
from sol.ops.reference import ReferenceOps
from sol.runner import cpu_kernels
from sol.runner.cpu_kernels import CpuKernels, check_kv_cache_dtype, choose_kernels, pinned_cores, unavailable
from sol.runner.device import gpu_uuid, num_threads, resolve_device, resolve_dtype
from sol.runner.drafters import Drafters
from sol.runner.gpu import build_gpu_runner, gpu_ops
from sol.runner.gpu_runner import GpuRunner
from sol.runner.measure import measure_steps
from sol.runner.memory import (
    DeviceMemory,
    MemoryPlan,
    allocate_kv_cache,
    device_memory,
    kv_bytes_per_token,
    no_room_for_kv_cache,
    plan_memory,
    return_freed_memory,
    workspace_bytes,
)
from sol.runner.model_runner import ModelRunner
from sol.runner.verify_graphs import INVARIANT
from sol.sampling.grammar import Grammars
from sol.speculation.config import SpeculativeConfig
from sol.speculation.native import best_arithmetic
from sol.speculation.plan import Controller, FixedController, GoodputController, shapes_to_measure
from sol.speculation.propose import LOOKUPS, Proposer, lookup_proposers
from sol.text.grammar import GrammarCompiler
from sol.text.tokenizer import Tokenizer, end_token_ids
from sol.version import __version__

logger = logging.getLogger(__name__)

_MIN_MORE_ROWS: Final = 64
"""Drafts that a step can verify, however few requests there may be"""
_MEASURING_SECONDS: Final = 1.0
"""For steps that are measured at start-up"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """Everything that is settled before the weights are loaded."""

    files: ModelFiles
    model: ModelConfig
    device: torch.device
    dtype: torch.dtype
    """Of weights; with the C++ kernels of those that are not kept as they are stored."""
    kernels: CpuKernels | None
    """The C++ kernels, or None where torch computes."""
    checkpoint: Checkpoint
    threads: int
    """On a CPU: of the kernels or of torch, whichever computes."""
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_prefill_tokens: int
    max_num_logits_rows: int
    """Most rows of logits in a step: of requests that are sampled, and of drafts."""
    speculative: SpeculativeConfig
    drafters: DraftersPlan
    """Those that compute a model"""
    converts_weights: bool
    """Matrices are stored in `dtype`, not as their checkpoint has them."""
    memory: MemoryPlan
    """Drafters included"""


def plan(config: EngineConfig, *, progress: bool = True) -> EnginePlan:
    """Fetches the model if it is not here, and settles device, dtype, limits and memory.

    Raises `ConfigError`, `OutOfMemoryError`, or what `sol.models.source.resolve` raises.
    """
    device = resolve_device(config.device)
    on_cpu = device.type == "cpu"
    files = resolve_configured(config, progress=progress)
    model = load_model_config(files)
    dtype = resolve_dtype(config.dtype, device, model.torch_dtype)
    quantized = config.dtype == "auto" and (model.quantization or config.quantization) is not None
    kernels = choose_kernels(config, device, quantized=quantized)
    if kernels is None:
        check_kv_cache_dtype(config, dtype)
    if config.max_model_len is not None and config.max_model_len > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, but the model was made for at most "
            f"{model.max_position_embeddings} tokens: lower it",
            param="max_model_len",
        )
    max_num_seqs = config.max_num_seqs or _default_seqs(config, on_cpu)
    max_num_batched_tokens = config.max_num_batched_tokens or max(512 if on_cpu else 8192, max_num_seqs)
    if max_num_batched_tokens < max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens ({max_num_batched_tokens}) must be at least max_num_seqs ({max_num_seqs}): every "
            "running request gets a token in each step",
            param="max_num_batched_tokens",
        )
    speculative = config.speculative()
    # Beside a row of each request's last token: rows of drafts, and of prompts whose logprobs somebody wants.
    max_num_logits_rows = min(max_num_seqs + max(_MIN_MORE_ROWS, max_num_seqs), max_num_batched_tokens)
    checkpoint = open_checkpoint(files, config.quantization)
    shapes = parameter_shapes(model)
    if kernels is None:
        weights = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
        workspace = workspace_bytes(model, dtype, max_num_batched_tokens, max_num_logits_rows)
        kv_per_token = kv_bytes_per_token(model, dtype)
    else:
        matrix_dtype = None if config.dtype == "auto" else dtype
        weights = packed_nbytes(kernels.native, kernels.isa, shapes, checkpoint, matrix_dtype)
        workspace = cpu_kernels.workspace_bytes(model, max_num_batched_tokens, max_num_logits_rows)
        kv_per_token = kernels.kv_bytes_per_token(model, config.block_size)
    max_num_prefill_tokens = config.max_num_prefill_tokens or (128 if on_cpu else 2048)
    drafters = plan_drafters(
        config,
        speculative,
        files,
        model,
        device,
        kernels=kernels,
        dtype=dtype,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_prefill_tokens=max_num_prefill_tokens,
        progress=progress,
    )
    memory = plan_memory(
        config,
        model,
        device,
        memory=device_memory(device),
        weights=weights + drafters.weights,
        workspace=workspace + drafters.workspace,
        kv_per_token=kv_per_token + drafters.kv_per_token,
        max_num_seqs=max_num_seqs,
    )
    return EnginePlan(
        files=files,
        model=model,
        device=device,
        dtype=dtype,
        kernels=kernels,
        checkpoint=checkpoint,
        threads=num_threads(),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_prefill_tokens=max_num_prefill_tokens,
        max_num_logits_rows=max_num_logits_rows,
        speculative=speculative,
        drafters=drafters,
        converts_weights=config.dtype != "auto",
        memory=memory,
    )


def build_core(config: EngineConfig, *, progress: bool = True) -> EngineCore:
    """An engine that is ready: weights loaded, KV cache reserved, the largest step run once.

    Raises what `plan` raises, and `CheckpointError`.
    """
    started = time.monotonic()
    settled = plan(config, progress=progress)
    model, memory, device = settled.model, settled.memory, settled.device
    torch.set_num_threads(settled.threads)
    speculative = settled.speculative
    grammars = None if config.skip_tokenizer_init else _grammars(settled.files, model)
    compile_grammar = None if grammars is None else grammars.compile
    runner: ModelRunner | GpuRunner
    if device.type == "cuda":
        runner, memory, weight_bytes = _build_gpu_runner(config, settled, grammars=compile_grammar, progress=progress)
        drafters = runner.drafters
    else:
        executor, weight_bytes = _build_executor(config, settled, progress=progress)
        computing, drafter_bytes = model_proposers(settled, executor, progress=progress)
        weight_bytes += drafter_bytes
        drafters = _drafters(settled, [*lookup_proposers(speculative), *computing])
        runner = ModelRunner(
            executor,
            block_size=config.block_size,
            num_blocks=memory.num_blocks,
            device=device,
            drafters=drafters,
            verify_method=speculative.verify_method,
            grammars=compile_grammar,
        )
        runner.run_worst_case(settled.max_num_logits_rows, settled.max_num_batched_tokens, memory.max_model_len)
        if isinstance(executor, CpuExecutor):
            executor.trim()
        return_freed_memory()
    speculation = None
    if drafters is not None:
        speculation = Speculation(
            _controller(settled, memory, runner),
            num_speculative_tokens=speculative.num_speculative_tokens,
            caching=[name for name in drafters.names if name not in LOOKUPS],
        )
    scheduler = Scheduler(
        SchedulerConfig(
            max_model_len=memory.max_model_len,
            max_num_seqs=settled.max_num_seqs,
            max_num_batched_tokens=settled.max_num_batched_tokens,
            max_num_prefill_tokens=settled.max_num_prefill_tokens,
            block_size=config.block_size,
            num_blocks=memory.num_blocks,
            enable_prefix_caching=config.enable_prefix_caching,
            max_num_logits_rows=settled.max_num_logits_rows,
            num_invariant_tokens=INVARIANT if device.type == "cuda" else None,
            scheduling_policy=config.scheduling_policy,
            priority_aging_seconds=config.priority_aging_seconds,
        ),
        speculation,
    )
    info = EngineInfo(
        model=config.model,
        device=str(device),
        dtype=str(settled.dtype).removeprefix("torch."),
        vocab_size=model.vocab_size,
        max_model_len=memory.max_model_len,
        max_num_seqs=settled.max_num_seqs,
        max_num_batched_tokens=settled.max_num_batched_tokens,
        block_size=config.block_size,
        num_blocks=memory.num_blocks,
        weight_bytes=weight_bytes,
        kv_cache_bytes=memory.kv_cache,
        load_seconds=time.monotonic() - started,
        drafters=drafters.names if drafters is not None else [],
        num_speculative_tokens=speculative.num_speculative_tokens if drafters is not None else 0,
        gpu_uuid=gpu_uuid(device),
    )
    return EngineCore(scheduler, runner, info, work_ahead=1 if device.type == "cuda" else 0, grammars=grammars)


def _grammars(files: ModelFiles, model: ModelConfig) -> GrammarCompiler:
    """Its tokenizer is not loaded before somebody wants a grammar."""

    def load() -> tuple[Tokenizer, tuple[int, ...]]:
        tokenizer = Tokenizer.from_files(files)
        return tokenizer, end_token_ids(files, tokenizer)

    return GrammarCompiler(load, vocab_size=model.vocab_size)


def _drafters(settled: EnginePlan, proposers: Sequence[Proposer]) -> Drafters | None:
    return Drafters(proposers, vocab_size=settled.model.vocab_size) if proposers else None


def _controller(settled: EnginePlan, memory: MemoryPlan, runner: ModelRunner | GpuRunner) -> Controller:
    """Who decides about drafts, told what steps take here."""
    speculative = settled.speculative
    shapes = shapes_to_measure(
        max_num_seqs=settled.max_num_seqs,
        max_num_batched_tokens=settled.max_num_batched_tokens,
        max_model_len=memory.max_model_len,
        num_speculative_tokens=speculative.num_speculative_tokens,
    )
    measured = measure_steps(
        runner,
        shapes,
        num_blocks=memory.num_blocks,
        block_size=memory.block_size,
        max_model_len=memory.max_model_len,
        max_num_logits_rows=settled.max_num_logits_rows,
        seconds=_MEASURING_SECONDS,
    )
    drafters, num_tokens = speculative.drafters, speculative.num_speculative_tokens
    if speculative.controller == "fixed":
        return FixedController(drafters, num_tokens, measured=measured)
    return GoodputController(drafters, num_tokens, measured=measured, arithmetic=best_arithmetic())


def _build_gpu_runner(
    config: EngineConfig, settled: EnginePlan, *, progress: bool, grammars: Grammars | None = None
) -> tuple[GpuRunner, MemoryPlan, int]:
    """The runner with its drafters, the plan of its memory with what was measured, and the bytes of all weights."""
    first = settled.memory
    program = load_program(
        settled.model,
        settled.checkpoint,
        dtype=settled.dtype,
        device=settled.device,
        max_positions=first.max_model_len,
        progress=progress,
    )

    computing = GpuDrafters(settled, program, functools.partial(gpu_ops, settled.device), progress=progress)
    weights = program.weight_bytes + computing.weight_bytes

    def drafters(kv_cache: KVCache) -> Drafters:
        proposers = [*lookup_proposers(settled.speculative), *computing.make(kv_cache)]
        return Drafters(proposers, vocab_size=settled.model.vocab_size)

    def replan(workspace: int) -> MemoryPlan:
        memory = plan_memory(
            config,
            settled.model,
            settled.device,
            memory=DeviceMemory(total=first.total, available=first.available),
            weights=weights,
            workspace=workspace + settled.drafters.kept_probs,
            kv_per_token=first.kv_per_token,
            max_num_seqs=settled.max_num_seqs,
        )
        return replace(memory, max_model_len=min(memory.max_model_len, first.max_model_len))

    runner, memory = build_gpu_runner(
        program,
        settled.model,
        first,
        replan,
        dtype=settled.dtype,
        device=settled.device,
        max_num_seqs=settled.max_num_seqs,
        max_num_batched_tokens=settled.max_num_batched_tokens,
        drafters=drafters if settled.speculative.drafters else None,
        drafter_weights=computing.weight_bytes,
        num_trial_tokens=settled.drafters.max_num_tokens,
        verify_method=settled.speculative.verify_method,
        max_num_logits_rows=settled.max_num_logits_rows,
        num_speculative_tokens=settled.speculative.num_speculative_tokens,
        grammars=grammars,
    )
    return runner, memory, weights


def _build_executor(config: EngineConfig, settled: EnginePlan, *, progress: bool) -> tuple[Executor, int]:
    """The model on its backend with its KV cache, and the bytes of its weights."""
    model, memory = settled.model, settled.memory
    load = functools.partial(
        load_program, model, settled.checkpoint, max_positions=memory.max_model_len, progress=progress
    )
    kernels = settled.kernels
    if kernels is None:
        if settled.device.type == "cpu" and config.cpu_kernels == "auto":
            logger.warning("computing with torch, several times slower: %s", unavailable(config, settled.device))
        program = load(dtype=settled.dtype, device=settled.device)
        kv_cache = KVCache(allocate_kv_cache(memory, model, settled.dtype, settled.device))
        return EagerExecutor(program, ReferenceOps(), kv_cache), program.weight_bytes
    matrix_dtype = None if config.dtype == "auto" else settled.dtype
    # Converting to a floating-point type takes no longer than reading the larger file that would come of it.
    source = None
    if matrix_dtype is None:
        source = Source(settled.files, (config.quantization,) if config.quantization in REQUANTIZING else ())
    with CpuPacker(kernels.native, kernels.isa, source, version=__version__) as packer:
        program = load(dtype=torch.float32, packer=packer, matrix_dtype=matrix_dtype)
    # From here on torch only samples: more threads of it would take the cores from the kernels' own.
    torch.set_num_threads(1)
    try:
        executor = CpuExecutor(
            kernels.native,
            program,
            isa=kernels.isa,
            kv_cache=KVCacheSpec(dtype=kernels.kv_dtype, num_blocks=memory.num_blocks, block_size=memory.block_size),
            max_num_tokens=settled.max_num_batched_tokens,
            num_threads=settled.threads,
            cores=pinned_cores(settled.threads),
        )
    except NativeError as error:
        raise cpu_kernels.as_config_error(error) from error
    except MemoryError as error:
        raise no_room_for_kv_cache(memory, error) from error
    return executor, program.weight_bytes


def _default_seqs(config: EngineConfig, on_cpu: bool) -> int:
    usual = 128 if on_cpu else 256
    return usual if config.max_num_batched_tokens is None else min(usual, config.max_num_batched_tokens)
