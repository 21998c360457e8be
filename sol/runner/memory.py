"""Memory is planned before it is used: weights and workspace first, then what is left for the KV cache.

A CPU shares its memory with everything else on the machine, so its plan is modest: the default share leaves room for
a second server, and the KV cache does not grow past what a few full-length requests need unless it is asked to. Its
memory is reserved as address space and costs nothing until it is written.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from sol.config import EngineConfig
from sol.errors import OutOfMemoryError
from sol.models.config import ModelConfig
from sol.ops.reference import GATHER_TOKENS
from sol.runner.cgroup import CGroups

GIB: Final = 1 << 30
_CPU_SHARE: Final = 0.4
_GPU_SHARE: Final = 0.9
_CPU_KV_BYTES: Final = 2 * GIB
"""A CPU's KV cache stops here by default, or at two requests of the model's full length if they need more."""
_CPU_RESERVE: Final = GIB // 2
"""Left to the rest of the machine, whatever the share says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """In bytes, of the device: for a CPU what the cgroup allows this process."""

    total: int
    available: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """In bytes, except where the name says otherwise."""

    total: int
    available: int
    budget: int
    """What weights, workspace and KV cache may take together."""
    weights: int
    workspace: int
    kv_cache: int
    kv_per_token: int
    block_size: int
    """Tokens"""
    num_blocks: int
    max_model_len: int
    """Tokens"""

    @property
    def kv_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def full_length_requests(self) -> float:
        """How many requests of `max_model_len` tokens fit at once."""
        return self.kv_tokens / self.max_model_len


def device_memory(device: torch.device) -> DeviceMemory:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(total=total, available=free)
    fields = {}
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        name, value = line.split(":")
        fields[name] = int(value.split()[0]) * 1024
    total, available = fields["MemTotal"], fields["MemAvailable"]
    group = CGroups().memory()
    if group is not None:
        total, available = min(total, group[0]), min(available, group[1])
    return DeviceMemory(total=total, available=available)


def kv_bytes_per_token(model: ModelConfig, dtype: torch.dtype) -> int:
    return 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim * dtype.itemsize


def workspace_bytes(model: ModelConfig, dtype: torch.dtype, max_num_batched_tokens: int, max_num_seqs: int) -> int:
    """What the largest step allocates on its way, from the shapes: activations and gathered keys and values of one
    layer, and logits."""
    q_size = model.num_attention_heads * model.head_dim
    kv_size = model.num_key_value_heads * model.head_dim
    activations = 4 * model.hidden_size + 3 * q_size + 4 * kv_size + 4 * model.intermediate_size
    if model.experts is not None:  # pairs of tokens and experts, and what they give in float32
        per_pair = model.intermediate_size + 2 * model.hidden_size + 3 * model.experts.num_experts
        activations += model.experts.num_experts_per_tok * per_pair
    logits = model.vocab_size * (dtype.itemsize + 3 * torch.float32.itemsize)
    gathered = GATHER_TOKENS * 2 * kv_size
    return (max_num_batched_tokens * activations + gathered) * dtype.itemsize + max_num_seqs * logits


def plan_memory(
    config: EngineConfig,
    model: ModelConfig,
    device: torch.device,
    *,
    memory: DeviceMemory,
    weights: int,
    workspace: int,
    kv_per_token: int,
    max_num_seqs: int,
) -> MemoryPlan:
    """How large the KV cache is, and how long a request may be.

    `memory` as it was before the weights were loaded. Raises `OutOfMemoryError` saying what does not fit and what to
    do.
    """
    on_cpu = device.type == "cpu"
    share = config.gpu_memory_utilization or (_CPU_SHARE if on_cpu else _GPU_SHARE)
    most = memory.available - _CPU_RESERVE if on_cpu else memory.available
    budget = min(int(memory.total * share), most)
    wanted_len = config.max_model_len or model.max_position_embeddings
    block_bytes = kv_per_token * config.block_size
    full_length_blocks = -(-wanted_len // config.block_size)
    rest = budget - weights - workspace
    if config.kv_cache_memory_bytes is not None:
        kv_cache = config.kv_cache_memory_bytes
        if kv_cache < block_bytes:
            raise OutOfMemoryError(
                f"kv_cache_memory_bytes is {_size(kv_cache)}, but a block of {config.block_size} tokens needs "
                f"{_size(block_bytes)}: raise kv_cache_memory_bytes",
                param="kv_cache_memory_bytes",
            )
        if weights + workspace + kv_cache > most:
            raise OutOfMemoryError(
                f"kv_cache_memory_bytes is {_size(kv_cache)}, but of the {_size(memory.available)} that are free the "
                f"weights take {_size(weights)} and the workspace {_size(workspace)}: lower kv_cache_memory_bytes",
                param="kv_cache_memory_bytes",
            )
    else:
        if rest < block_bytes:
            raise OutOfMemoryError(
                f"the weights need {_size(weights)} and the workspace {_size(workspace)}, but the plan has "
                f"{_size(max(0, budget))}: {_size(memory.total)} in all, {_size(memory.available)} free, "
                f"gpu_memory_utilization {share}. Raise --gpu-memory-utilization, free memory, lower "
                "--max-num-seqs and --max-num-batched-tokens, or use a smaller dtype or a smaller model",
                param="gpu_memory_utilization",
            )
        kv_cache = rest
        if on_cpu and config.gpu_memory_utilization is None:
            kv_cache = min(rest, max(_CPU_KV_BYTES, 2 * full_length_blocks * block_bytes))
    num_blocks = min(kv_cache // block_bytes, max_num_seqs * full_length_blocks)
    if num_blocks < full_length_blocks and config.max_model_len is not None:
        raise OutOfMemoryError(
            f"a request of max_model_len {wanted_len} needs {_size(full_length_blocks * block_bytes)} of KV cache "
            f"({_size(kv_per_token)} a token), but {_size(kv_cache)} are left for it: lower --max-model-len to at most "
            f"{kv_cache // block_bytes * config.block_size}, or raise "
            + ("--gpu-memory-utilization" if config.kv_cache_memory_bytes is None else "--kv-cache-memory-bytes"),
            param="max_model_len",
        )
    return MemoryPlan(
        total=memory.total,
        available=memory.available,
        budget=budget,
        weights=weights,
        workspace=workspace,
        kv_cache=num_blocks * block_bytes,
        kv_per_token=kv_per_token,
        block_size=config.block_size,
        num_blocks=num_blocks,
        max_model_len=min(wanted_len, num_blocks * config.block_size),
    )


def allocate_kv_cache(plan: MemoryPlan, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[layers, 2, num_blocks, block_size, kv heads, head size], not initialised: a CPU commits pages when written."""
    shape = (
        model.num_hidden_layers,
        2,
        plan.num_blocks,
        plan.block_size,
        model.num_key_value_heads,
        model.head_dim,
    )
    try:
        return torch.empty(shape, dtype=dtype, device=device)
    except RuntimeError as error:
        raise no_room_for_kv_cache(plan, error) from error


def no_room_for_kv_cache(plan: MemoryPlan, error: Exception) -> OutOfMemoryError:
    return OutOfMemoryError(
        f"the KV cache of {_size(plan.kv_cache)} could not be reserved: lower --gpu-memory-utilization or set "
        f"--kv-cache-memory-bytes ({error})",
        param="kv_cache_memory_bytes",
    )


def return_freed_memory() -> None:
    """Let the kernel have what this process has freed. Of the largest step, glibc would keep tens of megabytes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's own
    if trim is not None:
        trim(0)


def _size(count: int) -> str:
    if count >= GIB:
        return f"{count / GIB:.2f} GiB"
    if count >= 1 << 20:
        return f"{count / (1 << 20):.1f} MiB"
    return f"{count / 1024:.1f} KiB"
