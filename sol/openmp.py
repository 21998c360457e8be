"""How torch's threads wait for each other."""

from __future__ import annotations

import os

ENVIRONMENT = {"GOMP_SPINCOUNT": "4000"}
"""Unless the user has set it: OpenMP's threads spin for some 60 µs when they wait, which covers the gaps within a step,
and then sleep. By default they spin for milliseconds and take the cores from the HTTP process, from other servers and
from each other: beside one busy process on two cores, decoding fell to a third (docs/kernels.md)."""


def settle() -> None:
    """Set it for this process. It counts only before torch is first imported."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
