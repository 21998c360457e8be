"""Limits that a container or a service manager sets (Linux control groups, version 2)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

_ROOT: Final = Path("/sys/fs/cgroup")
_MEMBERSHIP: Final = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class CGroups:
    """This process's group and all above it, any of which may set a limit. In a container the root is the group."""

    root: Path = _ROOT
    membership: Path = _MEMBERSHIP

    def cores(self) -> float | None:
        """CPU time granted, in cores; None if unlimited."""
        grants = []
        for folder in self._folders():
            quota, _, period = (_read(folder / "cpu.max") or "max").partition(" ")
            if quota != "max":
                grants.append(int(quota) / int(period))
        return min(grants, default=None)

    def memory(self) -> tuple[int, int] | None:
        """(limit, bytes still free under it) of the group with least left; None if unlimited.

        Page cache does not count as used: the kernel gives it up when memory is asked for.
        """
        limits = []
        for folder in self._folders():
            limit = _read(folder / "memory.max") or "max"
            if limit == "max":
                continue
            used = int(_read(folder / "memory.current") or "0")
            for line in (_read(folder / "memory.stat") or "").splitlines():
                name, _, value = line.partition(" ")
                if name in ("active_file", "inactive_file"):
                    used -= int(value)
            limits.append((int(limit), max(0, int(limit) - max(0, used))))
        return min(limits, key=lambda pair: pair[1], default=None)

    def _folders(self) -> list[Path]:
        lines = (_read(self.membership) or "").splitlines()
        path = next((line.removeprefix("0::").lstrip("/") for line in lines if line.startswith("0::")), "")
        folder = self.root / path
        return [folder, *(parent for parent in folder.parents if parent == self.root or self.root in parent.parents)]


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
