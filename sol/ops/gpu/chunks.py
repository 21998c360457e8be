"""Where a long context is cut for attention: at fixed positions, whatever the batch and the length.

The first 16 chunks have 256 tokens each, the next 16 have 512, and so on: a row's work splits over many programs while
the number of partial results grows with the logarithm of its context. Since the cuts depend on nothing, a token's
partial results, and the order in which they are added, are the same in decoding and in verification.
"""

from __future__ import annotations

import triton
import triton.language as tl

FIRST_SIZE = tl.constexpr(256)
PER_LEVEL = tl.constexpr(16)


@triton.jit
def chunk_of(position):
    """The chunk that a position lies in."""
    level = 0
    first = position * 0
    while position >= first + (PER_LEVEL * FIRST_SIZE << level):
        first += PER_LEVEL * FIRST_SIZE << level
        level += 1
    return level * PER_LEVEL + (position - first) // (FIRST_SIZE << level)


@triton.jit
def chunk_of_each(positions):
    """The chunks that positions lie in."""
    chunk = positions * 0 - 1
    start = 0
    index = 0
    last = tl.max(positions, 0)
    while start <= last:
        chunk += (positions >= start).to(tl.int32)
        index += 1
        start = chunk_start(index)
    return chunk


@triton.jit
def chunk_from(position):
    """The first chunk that begins at a position or after it."""
    chunk = position * 0
    if position > 0:
        chunk = chunk_of(position - 1) + 1
    return chunk


@triton.jit
def chunk_start(chunk):
    """A chunk's first position; its end is the next one's start."""
    level = chunk // PER_LEVEL
    return ((PER_LEVEL * FIRST_SIZE << level) - PER_LEVEL * FIRST_SIZE) + (chunk % PER_LEVEL) * (FIRST_SIZE << level)


def num_chunks(length: int) -> int:
    """Of a context of `length` tokens."""
    level, first = 0, 0
    span = PER_LEVEL.value * FIRST_SIZE.value
    while length > first + (span << level):
        first += span << level
        level += 1
    return level * PER_LEVEL.value + -(-(length - first) // (FIRST_SIZE.value << level))
