"""Numbers for people."""

from __future__ import annotations

GIB = 2**30
MIB = 2**20


def size(count: int) -> str:
    """Bytes: "93.8 MiB"."""
    if count >= GIB:
        return f"{count / GIB:.2f} GiB"
    return f"{count / MIB:.1f} MiB" if count >= MIB else f"{count / 1024:.1f} KiB"
