"""Tables of rotary angles."""

from __future__ import annotations

import math

import torch

from sol.models.config import LinearRopeScaling, Llama3RopeScaling, LongRopeScaling, ModelConfig, RopeFactors
from sol.ops.weights import Rope


def build_rope(
    config: ModelConfig, max_positions: int, device: torch.device | str = "cpu", *, local: bool = False
) -> Rope:
    """Cosines and sines for positions 0 to `max_positions` - 1, computed in float32 as Hugging Face does.

    `local`: of layers with a window, where these have a base of their own.
    """
    size = config.rotary_dim or config.head_dim
    scale = 1.0
    if local and config.local_rope_theta is not None:
        frequencies = _frequencies(config.local_rope_theta, size)
    elif isinstance(config.rope_scaling, LongRopeScaling):
        scaling = config.rope_scaling
        is_long = max_positions > scaling.original_max_position_embeddings
        frequencies = _frequencies(config.rope_theta, size, scaling.long_factors if is_long else scaling.short_factors)
        scale = scaling.attention_factor
    else:
        frequencies = _scaled(config, _frequencies(config.rope_theta, size))
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
    cos, sin = angles.cos() * scale, angles.sin() * scale
    unturned = (max_positions, (config.head_dim - size) // 2)
    # Pairs that are not rotated are rotated by nothing: no backend needs to know of them.
    cos, sin = torch.cat([cos, torch.ones(unturned)], dim=1), torch.cat([sin, torch.zeros(unturned)], dim=1)
    return Rope(cos=cos.to(device), sin=sin.to(device))


def _frequencies(theta: float, size: int, factors: tuple[float, ...] = ()) -> torch.Tensor:
    """[size / 2] radians a position; `factors` divide them."""
    exponents = torch.arange(0, size, 2, dtype=torch.int64).float() / size
    wavelengths = theta**exponents
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * wavelengths if factors else wavelengths)


def _scaled(config: ModelConfig, frequencies: torch.Tensor) -> torch.Tensor:
    match config.rope_scaling:
        case None | LongRopeScaling():
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
