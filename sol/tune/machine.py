"""What machine the trials run on: its processor's kind, its memory, and of known GPUs what they can do at best."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from typing import Any, Final

from sol.tune.roofline import Machine

_QUERY_SECONDS: Final = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspected:
    on_cpu: bool
    name: str
    """Of the GPU; of a CPU nothing."""
    limits: Machine

    def describe(self) -> dict[str, Any]:
        """What a search that goes on has to find again."""
        return {"on_cpu": self.on_cpu, "gpu": self.name}


def inspect(*, on_cpu: bool, memory_bytes: int) -> Inspected:
    """The first GPU that processes may use, or the CPU where there is none or `on_cpu`, which has `memory_bytes`."""
    gpu = None if on_cpu else _gpu()
    if gpu is None:
        return Inspected(on_cpu=True, name="", limits=Machine(memory_bytes=memory_bytes or None))
    name, memory = gpu
    return Inspected(on_cpu=False, name=name, limits=Machine.of_gpu(name, memory) if memory else Machine())


def _gpu() -> tuple[str, float] | None:
    """Its name and bytes, as the driver's program tells them; 0 bytes of a GPU that it does not describe."""
    program, visible = shutil.which("nvidia-smi"), os.environ.get("CUDA_VISIBLE_DEVICES")
    if program is None or visible in ("", "-1"):
        return None
    command = [program, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    if visible is None:
        return _first(command)
    # A slice of a GPU (MIG) has an identifier of its own, of which the program says nothing here.
    return _first([*command, "-i", visible.split(",")[0].strip()]) or (("", 0.0) if _first(command) else None)


def _first(command: list[str]) -> tuple[str, float] | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_QUERY_SECONDS, check=True)  # noqa: S603
        name, _, mebibytes = done.stdout.splitlines()[0].rpartition(",")
        return name.strip(), float(mebibytes) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
