"""Noise as a function: of (seed, choice, position, token id) and nothing else.

No generator is advanced, so the noise of a position does not depend on which positions were sampled before, in which
batch, or on which device. The bits are SplitMix64's (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
Generators", OOPSLA 2014): a stream for each (seed, choice, position), one number in it for each token id.

Speculation needs more noise than the target's own, each independent of all others: see `Purpose`.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import torch

_GOLDEN: Final = 0x9E3779B97F4A7C15
_MIX_1: Final = 0xBF58476D1CE4E5B9
_MIX_2: Final = 0x94D049BB133111EB
_MASK: Final = 0xFFFFFFFFFFFFFFFF
_CHUNK: Final = 16384
"""Token ids at a time on a CPU: in its caches, and below where torch wakes threads for each of a dozen short passes."""


class Purpose(IntEnum):
    """What noise beside the target's own is for."""

    DRAFT = 1
    """Sampling a draft"""
    ACCEPT = 2
    """Deciding whether it stays"""
    RECOVER = 3
    """Sampling the token in place of one that does not"""


def choice_key(seed: int, choice_index: int) -> int:
    """The 64-bit key of a choice, from which those of its positions are made."""
    key = _mix((seed + _GOLDEN) & _MASK)
    return _mix((key + (choice_index + 1) * _GOLDEN) & _MASK)


def stream_key(seed: int, choice_index: int, position: int) -> int:
    """The 64-bit key of the noise of output token `position` (0 for the first) of a choice."""
    return _mix((choice_key(seed, choice_index) + (position + 1) * _GOLDEN) & _MASK)


def slot_key(seed: int, choice_index: int, start: int, slot: int, purpose: Purpose) -> int:
    """The 64-bit key of the noise for draft `slot` of a step whose first token has output index `start`.

    Not for output index start + slot: a step may look at drafts that it does not emit (block verification decides by
    all of them), and the next step, whose `start` is another, must find fresh noise at their places.
    """
    # From a choice's key, positions go forward and purposes backward: their keys never meet.
    key = _mix((choice_key(seed, choice_index) - purpose * _GOLDEN) & _MASK)
    key = _mix((key + (start + 1) * _GOLDEN) & _MASK)
    return _mix((key + (slot + 1) * _GOLDEN) & _MASK)


def uniform(key: int) -> float:
    """A number from 0 to 1 - 2**-53, in steps of 2**-53: less than h with probability h, to that precision."""
    return (_mix((key + _GOLDEN) & _MASK) >> 11) * 2.0**-53


def stream_keys(choice_keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """`stream_key` of many choices at once: int64 tensors, 64-bit keys as the int64 with the same bits."""
    return _mix_tensor((positions + 1).mul_(_signed(_GOLDEN)).add_(choice_keys))


def gumbel(key: int | torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise for token ids (int64, any shape), float32 of the same shape.

    `key` may be a tensor of keys as `stream_keys` gives them, which is broadcast against the token ids.

    argmax(logits + gumbel) is then a sample of softmax(logits). It is computed as -log(E), E exponential, from 53
    bits: E's relative precision near 0, which decides the winners, is that of float32.
    """
    if token_ids.device.type == "cpu" and token_ids.numel() > _CHUNK and isinstance(key, int):
        chunks = torch.split(token_ids.flatten(), _CHUNK)
        return torch.cat([gumbel(key, chunk) for chunk in chunks]).view(token_ids.shape)
    bits = _bits(key, token_ids)
    bits >>= 11
    bits &= (1 << 53) - 1
    # The largest round up to 1 in float32, whose noise would be -inf: the likeliest token could lose to any other.
    uniform = bits.to(torch.float32).mul_(2.0**-53).clamp_(min=2.0**-54, max=1.0 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _bits(key: int | torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """The numbers at places `token_ids` of SplitMix64's sequence from the state `key` on, as int64."""
    steps = (token_ids + 1).mul_(_signed(_GOLDEN))
    return _mix_tensor(steps.add_(_signed(key)) if isinstance(key, int) else steps + key)


def _mix_tensor(bits: torch.Tensor) -> torch.Tensor:
    """`_mix` of each int64, in place."""
    shifted = torch.empty_like(bits)
    for shift, factor in ((30, _MIX_1), (27, _MIX_2), (31, None)):
        torch.bitwise_right_shift(bits, shift, out=shifted)
        bits ^= shifted.bitwise_and_((1 << (64 - shift)) - 1)  # the mask makes the shift a logical one
        if factor is not None:
            bits *= _signed(factor)
    return bits


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    """The int64 with the same bits."""
    return value - (1 << 64) if value >= 1 << 63 else value
