"""Numbers for people."""

from __future__ import annotations

GIB = 2**30
MIB = 2**20


def size(count: int) -> str:
    """Bytes: "93.8 MiB"."""
    if count >= GIB:
        return f"{count / GIB:.2f} GiB"
    if count >= MIB:
        return f"{count / MIB:.1f} MiB"
    return f"{count / 1024:.1f} KiB" if count >= 1024 else f"{count} B"
