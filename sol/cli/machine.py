"""What the machine has, read from /proc, /sys and package metadata; nothing here imports torch.

Every function takes the file system's root, so that tests can show it another machine.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

from sol.runner.cgroup import CGroups

ROOT = Path("/")

INSTRUCTION_SETS = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_vnni", "avx_vnni", "amx_int8", "amx_bf16",
                    "asimd", "asimddp", "i8mm", "bf16", "sve")  # fmt: skip
"""Those that decide how fast a CPU multiplies matrices, as the kernel spells them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    os: str
    cpu: str
    instruction_sets: tuple[str, ...]
    cores: int
    """Logical processors of the machine."""
    usable_cores: float
    """What this process may use: its affinity, cut by the cgroup's CPU quota, which may be fractional."""
    memory_bytes: int
    available_bytes: int
    """What can be had without swapping, before the cgroup's limit."""
    memory_limit_bytes: int | None
    """The cgroup's limit, None without one."""
    nvidia_driver: str | None


def inspect_machine(root: Path = ROOT) -> Machine:
    """This machine, or the one whose /proc, /sys and /dev lie under `root`."""
    cpuinfo = _read(root / "proc/cpuinfo")
    memory = _memory(root)
    groups = CGroups(root / "sys/fs/cgroup", root / "proc/self/cgroup")
    limit = groups.memory()
    return Machine(
        os=_operating_system(root),
        cpu=_cpu_model(cpuinfo),
        instruction_sets=_instruction_sets(cpuinfo),
        cores=os.cpu_count() or 1,
        usable_cores=min(float(len(os.sched_getaffinity(0))), groups.cores() or math.inf),
        memory_bytes=memory.get("MemTotal", 0),
        available_bytes=memory.get("MemAvailable", 0),
        memory_limit_bytes=None if limit is None else limit[0],
        nvidia_driver=_nvidia_driver(root),
    )


def package_versions() -> dict[str, str | None]:
    """Installed versions of what Sol depends on, extras included; None for what is not installed."""
    versions: dict[str, str | None] = {}
    for requirement in importlib.metadata.requires("sol-inference") or []:
        if 'extra == "serve"' in requirement or "extra ==" not in requirement:
            name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
            versions[name] = installed_version(name)
    return versions


def installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _memory(root: Path) -> dict[str, int]:
    found = re.findall(r"^(\w+):\s+(\d+) kB$", _read(root / "proc/meminfo"), re.MULTILINE)
    return {name: int(kibibytes) * 1024 for name, kibibytes in found}


def _cpu_model(cpuinfo: str) -> str:
    found = re.search(r"^(?:model name|Model|Hardware)\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return found.group(1).strip() if found else platform.machine()


def _instruction_sets(cpuinfo: str) -> tuple[str, ...]:
    found = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    flags = set(found.group(1).split()) if found else set()
    return tuple(name for name in INSTRUCTION_SETS if name in flags)


def _operating_system(root: Path) -> str:
    found = re.search(r'^PRETTY_NAME="?([^"\n]+)"?$', _read(root / "etc/os-release"), re.MULTILINE)
    return f"{found.group(1) if found else platform.system()}, {platform.system()} {platform.release()}"


def _nvidia_driver(root: Path) -> str | None:
    found = re.search(r"Kernel Module[^\d]*(\d+(?:\.\d+)+)", _read(root / "proc/driver/nvidia/version"))
    return found.group(1) if found else None


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
