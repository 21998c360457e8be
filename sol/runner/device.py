"""Which device, dtype and threads an engine uses."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Final

import torch

from sol.config import Device, DType
from sol.errors import ConfigError
from sol.runner.cgroup import CGroups

DTYPES: Final[dict[str, torch.dtype]] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
_OLDEST_GPU: Final = (8, 0)


def resolve_device(wanted: Device) -> torch.device:
    """Raises `ConfigError` if a GPU was asked for and there is none that Sol supports."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "device is cuda, but torch finds no GPU: check the driver (nvidia-smi) and that torch is a CUDA build "
            f"(this one is {torch.__version__}), or use --device cpu",
            param="device",
        )
    capability = torch.cuda.get_device_capability()
    if capability < _OLDEST_GPU:
        raise ConfigError(
            f"the GPU {torch.cuda.get_device_name()} has compute capability {capability[0]}.{capability[1]}; Sol needs "
            "8.0 (Ampere) or newer. Use --device cpu",
            param="device",
        )
    return torch.device("cuda")


def resolve_dtype(wanted: DType, device: torch.device, checkpoint_dtype: str) -> torch.dtype:
    """auto: float32 on a CPU, where few processors compute in 16 bits; the checkpoint's own on a GPU."""
    if wanted != "auto":
        return DTYPES[wanted]
    return torch.float32 if device.type == "cpu" else DTYPES[checkpoint_dtype]


def usable_cores() -> int:
    """Cores that this process may use: its affinity, and the CPU time its cgroup is granted."""
    cores = len(os.sched_getaffinity(0))
    granted = CGroups().cores()
    return cores if granted is None else max(1, min(cores, math.ceil(granted)))


def num_threads() -> int:
    """On a CPU: what OMP_NUM_THREADS says where it is set, else one for each usable core."""
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]  # a list is of nested regions: the first counts
    return int(wanted) if wanted.isdecimal() and int(wanted) > 0 else usable_cores()


def device_name(device: torch.device) -> str:
    """The GPU's or the processor's name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "CPU"


def gpu_uuid(device: torch.device) -> str | None:
    """What NVML finds the GPU by, without its prefix; None of other devices."""
    if device.type != "cuda":
        return None
    return str(torch.cuda.get_device_properties(device).uuid)
