"""Bounds for statistical tests that must not fail by chance."""

from __future__ import annotations

import math


def chi_square_limit(degrees: int, tail: float = 6.0) -> float:
    """What a χ² statistic exceeds with probability about 1e-9 (Wilson and Hilferty's approximation at 6 sigma)."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + tail * math.sqrt(spread)) ** 3
