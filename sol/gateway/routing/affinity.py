"""Engines whose prefix cache is likely to have a prompt's beginning: rendezvous hashing with bounded loads.

Each beginning ranks all engines in an order of its own (highest random weight, Thaler and Ravishankar 1998), so that an
engine that comes or goes moves only its own share. The first in this order that is not too busy is taken, as consistent
hashing with bounded loads has it (Mirrokni, Thorup and Zadimoghaddam 2018): those who pass one over agree on the next.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Final

from sol.gateway.call import Call

_MASK: Final = 2**64 - 1


def prefix_key(call: Call, prefix_chars: int) -> int | None:
    """A hash of the first `prefix_chars` characters of what the client wrote (or as many token ids, counted as four
    characters each); None: there is less."""
    prompt = call.json.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        num_ids = prefix_chars // 4
        if len(prompt) < num_ids:
            return None
        return _hash(repr(prompt[:num_ids]).encode())
    parts, missing = [], prefix_chars
    for text in call.text():
        parts.append(text[:missing])
        missing -= len(parts[-1])
        if missing <= 0:
            return _hash("\0".join(parts).encode("utf-8", "surrogatepass"))
    return None


def seed_of(name: str) -> int:
    """Of an engine's name, for `ranked`; the same in every process."""
    return _hash(name.encode())


def ranked(key: int, seeds: Iterable[int]) -> Sequence[int]:
    """Indices of `seeds`, in the order of the one with this key."""
    weights = [(_mix(key ^ seed), index) for index, seed in enumerate(seeds)]
    weights.sort(reverse=True)
    return [index for _, index in weights]


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _mix(value: int) -> int:
    """SplitMix64's finalizer (Steele, Lea and Flood 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
