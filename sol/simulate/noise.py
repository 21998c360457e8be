"""Random numbers as pure functions of a seed and a place, so that what one request draws never depends on another."""

from __future__ import annotations

from typing import Final

_MASK: Final = 2**64 - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_UNIT: Final = 2.0**-53


def mix(state: int, value: int = 0) -> int:
    """A 64-bit hash of two integers: the finaliser of SplitMix64 (Steele, Lea, Flood 2014) over their combination."""
    x = ((state ^ (value * 0xD1342543DE82EF95)) + _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def uniform(bits: int) -> float:
    """A number from 0 to 1, 1 excluded, of a hash."""
    return (bits >> 11) * _UNIT
