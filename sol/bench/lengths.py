"""Distributions of lengths, as they are written on the command line."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from sol.errors import ConfigError

MAX_LENGTH: Final = 10_000_000

FORMS: Final = "128, uniform:64:256 (from, to), normal:512:128 (mean, deviation) or lognormal:512:0.5 (median, sigma)"

_PARAMETERS: Final = {"constant": 1, "uniform": 2, "normal": 2, "lognormal": 2}


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of whole numbers of at least 1, and at most `MAX_LENGTH`."""

    kind: str
    first: float
    second: float = 0.0

    @classmethod
    def parse(cls, text: str, param: str) -> Lengths:
        """Raises `ConfigError` for what is none of `FORMS`."""
        parts = text.split(":")
        kind, *numbers = parts if parts[0] in _PARAMETERS else ["constant", *parts]
        try:
            values = [float(number) for number in numbers]
        except ValueError:
            values = []
        valid = len(values) == _PARAMETERS[kind] and all(map(math.isfinite, values)) and 1 <= values[0] <= MAX_LENGTH
        if valid and kind in ("constant", "uniform"):
            valid = all(value == int(value) for value in values)
        if valid and kind == "uniform":
            valid = values[0] <= values[1] <= MAX_LENGTH
        if valid and kind in ("normal", "lognormal"):
            valid = values[1] >= 0
        if not valid:
            raise ConfigError(f"{param} must be like {FORMS}, not {text!r}", param=param)
        return cls(kind, *values)

    @property
    def text(self) -> str:
        if self.kind == "constant":
            return f"{self.first:.0f}"
        return f"{self.kind}:{self.first:g}:{self.second:g}"

    def draw(self, rng: np.random.Generator) -> int:
        """One length. A draw below 1 counts as 1: a normal distribution is cut off there."""
        if self.kind == "constant":
            return int(self.first)
        if self.kind == "uniform":
            return int(rng.integers(int(self.first), int(self.second), endpoint=True))
        if self.kind == "normal":
            value = rng.normal(self.first, self.second)
        else:
            value = self.first * math.exp(rng.normal(0.0, self.second))
        return max(1, min(MAX_LENGTH, round(value)))
