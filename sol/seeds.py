"""Seeds for requests that bring none."""

from __future__ import annotations

import hashlib
import itertools


class SeedSource:
    """Seeds for requests that bring none: the k-th depends on the engine's `seed` option and k alone."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._counter = itertools.count()

    def next(self) -> int:
        """A number from 0 to 2**63 - 1."""
        place = f"{self._seed}:{next(self._counter)}".encode()
        return int.from_bytes(hashlib.blake2b(place, digest_size=8).digest(), "little") >> 1
