"""Which kernels compute on a CPU, and what they need of it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

import torch

from sol.config import EngineConfig
from sol.errors import ConfigError
from sol.models.config import ModelConfig
from sol.ops.cpu import native
from sol.ops.cpu.native import Isa, KVDType, Native, NativeError, NativeUnavailableError

KV_DTYPES: Final = {"float32": KVDType.FLOAT32, "float16": KVDType.FLOAT16, "int8": KVDType.INT8}
ISA_NAMES: Final = {isa.name.lower(): isa for isa in Isa}


@dataclass(frozen=True, slots=True)
class CpuKernels:
    """The C++ kernels, for one instruction set."""

    native: Native
    isa: Isa
    kv_dtype: KVDType

    def kv_bytes_per_token(self, model: ModelConfig, block_size: int) -> int:
        """Of all layers, rounded up."""
        block = self.native.kv_block_nbytes(
            self.isa, self.kv_dtype, model.num_key_value_heads, model.head_dim, block_size
        )
        return -(-model.num_hidden_layers * block // block_size)


def choose_kernels(config: EngineConfig, device: torch.device, *, quantized: bool) -> CpuKernels | None:
    """The C++ kernels that this configuration gets; None where torch computes. `quantized`: the weights in memory are.

    Raises `ConfigError` if some were asked for that are not to be had, or an option that torch's ops do not have.
    """
    if device.type != "cpu" and config.cpu_kernels != "auto":
        raise ConfigError(
            f"cpu_kernels is {config.cpu_kernels}, but the device is {device.type}: leave it out, or use --device cpu",
            param="cpu_kernels",
        )
    found = unavailable(config, device)
    if found is not None:
        if config.cpu_kernels not in ("auto", "torch"):
            raise ConfigError(f"cpu_kernels is {config.cpu_kernels}, but {found}", param="cpu_kernels")
        return None
    library = native.load()
    supported = library.isas()
    isa = library.best_isa() if config.cpu_kernels == "auto" else ISA_NAMES[config.cpu_kernels]
    if isa not in supported:
        raise ConfigError(
            f"cpu_kernels is {config.cpu_kernels}, but this processor and this build of Sol have "
            f"{', '.join(isa.name.lower() for isa in reversed(supported))}: choose one of these, or auto",
            param="cpu_kernels",
        )
    # float16 has far more precision than quantised weights leave, and is half as much to read.
    automatic = KVDType.FLOAT16 if quantized else KVDType.FLOAT32
    return CpuKernels(library, isa, KV_DTYPES.get(config.kv_cache_dtype, automatic))


def unavailable(config: EngineConfig, device: torch.device) -> str | None:
    """Why the C++ kernels are not used; None if they are."""
    if device.type != "cpu":
        return f"the device is {device.type}"
    if config.cpu_kernels == "torch":
        return "cpu_kernels is torch"
    try:
        native.load()
    except NativeUnavailableError as error:
        return str(error)
    return None


def check_kv_cache_dtype(config: EngineConfig, dtype: torch.dtype) -> None:
    """Torch's ops keep keys and values in the model's dtype. Raises `ConfigError` if another was asked for."""
    name = str(dtype).removeprefix("torch.")
    if config.kv_cache_dtype not in ("auto", name):
        raise ConfigError(
            f"kv_cache_dtype is {config.kv_cache_dtype}, but without the C++ kernels for CPUs the KV cache has the "
            f"model's dtype, {name}: use auto",
            param="kv_cache_dtype",
        )


def workspace_bytes(model: ModelConfig, max_num_batched_tokens: int, max_num_seqs: int) -> int:
    """What the largest step needs beside weights and KV cache: activations of all its tokens in float32 and int8, and
    the logits with what sampling makes of them."""
    q_size = model.num_attention_heads * model.head_dim
    kv_size = model.num_key_value_heads * model.head_dim
    activations = (
        (4 if model.post_norms else 3) * model.hidden_size + 3 * q_size + 2 * kv_size + 3 * model.intermediate_size
    )
    if model.experts is not None:
        activations += model.hidden_size + model.experts.num_experts + 6 * model.experts.num_experts_per_tok
    return 4 * (max_num_batched_tokens * activations + max_num_seqs * 4 * model.vocab_size)


def pinned_cores(num_threads: int) -> list[int] | None:
    """The core of each thread, or None to leave that to the kernel.

    Threads are pinned only where there is one for every core that this process may run on: then there is nothing to
    choose. With fewer, two servers on one machine would choose the same ones.
    """
    cores = sorted(os.sched_getaffinity(0))
    return cores if len(cores) == num_threads else None


def as_config_error(error: NativeError) -> ConfigError:
    """A model that the kernels refuse."""
    return ConfigError(f"the C++ kernels do not take this model ({error.message}): use --cpu-kernels torch",
                       param="cpu_kernels")  # fmt: skip
