"""The simulated KV cache: how many blocks are held, and which contents a prefix could be found in.

Blocks have no place, only a state: empty, cached (nobody holds it, its content is known), held with a known content
(by one or several requests), held by one request alone. Cached blocks are given up least recently freed first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence


def block_hashes(token_ids: Sequence[int], block_size: int) -> list[int]:
    """Of each whole block of a text: 64 bits that depend on its tokens and all before them."""
    packed = array("I", token_ids).tobytes()
    width = block_size * 4
    hashes: list[int] = []
    digest = b""
    for end in range(width, len(packed) + 1, width):
        digest = hashlib.blake2b(digest + packed[end - width : end], digest_size=8).digest()
        hashes.append(int.from_bytes(digest, "little"))
    return hashes


def named_hashes(name: str, num_tokens: int, block_size: int) -> list[int]:
    """Hashes of a text of which only a name is known: equal names share what both have, as equal prefixes would."""
    return [
        int.from_bytes(hashlib.blake2b(f"{index}:{name}".encode(), digest_size=8).digest(), "little")
        for index in range(num_tokens // block_size)
    ]


class Held:
    """The blocks of one request."""

    __slots__ = ("hashes", "num_private", "num_published")

    def __init__(self) -> None:
        self.hashes: list[int] = []
        """Of the blocks with a known content, from the first on."""
        self.num_private = 0
        self.num_published = 0
        """Leading blocks whose content was offered to others, whether or not somebody else had it already."""

    @property
    def count(self) -> int:
        return len(self.hashes) + self.num_private


class BlockPool:
    """`num_blocks` blocks, shared by prefix when `caching`."""

    def __init__(self, num_blocks: int, *, caching: bool) -> None:
        self.num_blocks = num_blocks
        self._caching = caching
        self._num_empty = num_blocks
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._references: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return self._num_empty + len(self._cached)

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, 0 to 1."""
        return 1 - self.num_free / self.num_blocks

    def find(self, hashes: Sequence[int], most: int) -> int:
        """How many leading blocks, at most `most`, have contents that are known."""
        if not self._caching:
            return 0
        for index, value in enumerate(hashes[:most]):
            if value not in self._references and value not in self._cached:
                return index
        return min(most, len(hashes))

    def admit(self, held: Held, found: Sequence[int], num_new: int) -> bool:
        """Hold the blocks of `found`, which `find` has just seen, and `num_new` more; nothing where they do not fit."""
        num_waking = sum(value in self._cached for value in found)
        if num_new > self.num_free - num_waking:
            return False
        for value in found:
            self._cached.pop(value, None)
            self._references[value] = self._references.get(value, 0) + 1
        held.hashes.extend(found)
        held.num_published = len(found)
        return self.allocate(held, num_new)

    def allocate(self, held: Held, num_new: int) -> bool:
        """Hold `num_new` more; nothing where they do not fit."""
        if num_new > self.num_free:
            return False
        from_empty = min(num_new, self._num_empty)
        self._num_empty -= from_empty
        for _ in range(num_new - from_empty):
            self._cached.popitem(last=False)
        held.num_private += num_new
        return True

    def publish(self, held: Held, hashes: Sequence[int], num_full: int) -> None:
        """The first `num_full` blocks of the request are computed: others may find them from now on."""
        if not self._caching:
            return
        for value in hashes[held.num_published : num_full]:
            held.num_published += 1
            # Two requests that compute the same at the same time both keep their copy; one of them is found.
            if value not in self._references and value not in self._cached:
                self._references[value] = 1
                held.hashes.append(value)
                held.num_private -= 1

    def free(self, held: Held) -> None:
        """Let go of all. A prompt's end is given up before its beginning, which more prompts have."""
        for value in reversed(held.hashes):
            count = self._references[value] - 1
            if count:
                self._references[value] = count
            else:
                del self._references[value]
                self._cached[value] = None
        self._num_empty += held.num_private
        held.hashes.clear()
        held.num_private = held.num_published = 0

    def check_integrity(self, holders: Sequence[Held]) -> None:
        """Raise `AssertionError` unless every block is counted once and `holders` are all who hold any."""
        references: dict[int, int] = {}
        for held in holders:
            for value in held.hashes:
                references[value] = references.get(value, 0) + 1
        assert references == self._references
        assert not references.keys() & self._cached.keys()
        num_private = sum(held.num_private for held in holders)
        assert len(references) + num_private + self.num_free == self.num_blocks
        assert self._num_empty >= 0
