"""Where the next trial promises most: expected improvement under a Gaussian process over the space's places.

Jones et al. 1998, "Efficient Global Optimization of Expensive Black-Box Functions". The kernel is fixed, for there are
few trials to fit one with: of an ordered parameter values near each other are alike, of another one all values are
equally unlike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sol.tune.space import Config, Space

Floats = NDArray[np.float64]

_REACH: Final = 0.7
"""The kernel's length, as a part of an ordered parameter's range."""
_UNLIKE: Final = 0.8
"""Correlation of configurations that differ in a parameter without order, or in a switch."""
_NOISE: Final = 1e-3
"""Variance of a score about its truth, where all scores together have 1: short loads are inexact."""


def most_promising(
    space: Space, known: Sequence[Config], scores: Sequence[float], candidates: Sequence[Config]
) -> Config:
    """Of `candidates` (at least one) the one with the greatest expected improvement over the best of `scores`."""
    values = np.array(scores, dtype=np.float64)
    spread = float(values.std()) or 1.0
    values = (values - values.mean()) / spread
    at_known, at_candidates = _places(space, known), _places(space, candidates)
    inverse = np.linalg.inv(_kernel(space, at_known, at_known) + _NOISE * np.eye(len(values)))
    cross = _kernel(space, at_candidates, at_known)
    mean = cross @ inverse @ values
    deviation = np.sqrt(np.maximum(1.0 - np.einsum("ij,jk,ik->i", cross, inverse, cross), 1e-12))
    z = (mean - values.max()) / deviation
    density = np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    below = np.array([0.5 * math.erfc(-one / math.sqrt(2)) for one in z.tolist()])
    return candidates[int(np.argmax(deviation * (z * below + density)))]


def _places(space: Space, configs: Sequence[Config]) -> Floats:
    return np.array([space.place(config) for config in configs], dtype=np.float64)


def _kernel(space: Space, first: Floats, second: Floats) -> Floats:
    exponent = np.zeros((len(first), len(second)))
    for number, parameter in enumerate(space.parameters):
        apart = np.abs(first[:, number, None] - second[None, :, number])
        if parameter.is_ordered and len(parameter.values) > 2:
            exponent -= 0.5 * (apart / (_REACH * (len(parameter.values) - 1))) ** 2
        else:
            exponent += math.log(_UNLIKE) * (apart > 0)
    return np.exp(exponent)
