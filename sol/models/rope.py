"""Tables of rotary angles."""

from __future__ import annotations

import math

import torch

from sol.models.config import LinearRopeScaling, Llama3RopeScaling, ModelConfig, RopeFactors
from sol.ops.weights import Rope


def build_rope(
    config: ModelConfig, max_positions: int, device: torch.device | str = "cpu", *, local: bool = False
) -> Rope:
    """Cosines and sines for positions 0 to `max_positions` - 1, computed in float32 as Hugging Face does.

    `local`: of layers with a window, where these have a base of their own.
    """
    if local and config.local_rope_theta is not None:
        frequencies = _frequencies(config.local_rope_theta, config.head_dim)
    else:
        frequencies = _scaled(config, _frequencies(config.rope_theta, config.head_dim))
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
    return Rope(cos=angles.cos().to(device), sin=angles.sin().to(device))


def _frequencies(theta: float, head_dim: int) -> torch.Tensor:
    """[head_dim / 2] radians a position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    return 1.0 / (theta**exponents)


def _scaled(config: ModelConfig, frequencies: torch.Tensor) -> torch.Tensor:
    match config.rope_scaling:
        case None:
            return frequencies
        case LinearRopeScaling(factor=factor):
            return frequencies / factor
        case RopeFactors(factors=factors):
            return frequencies / torch.tensor(factors, dtype=torch.float32)
        case Llama3RopeScaling() as scaling:
            return _stretch_long_waves(frequencies, scaling)


def _stretch_long_waves(frequencies: torch.Tensor, scaling: Llama3RopeScaling) -> torch.Tensor:
    """Llama 3.1: waves longer than the original context are stretched by `factor`, short ones stay."""
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    longest_kept = scaling.original_max_position_embeddings / high
    shortest_stretched = scaling.original_max_position_embeddings / low
    smooth = (scaling.original_max_position_embeddings / wavelengths - low) / (high - low)
    blended = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    stretched = torch.where(wavelengths > shortest_stretched, frequencies / scaling.factor, frequencies)
    between = (wavelengths >= longest_kept) & (wavelengths <= shortest_stretched)
    return torch.where(between, blended, stretched)
