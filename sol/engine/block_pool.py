"""The blocks of the KV cache: who holds them, which are free, and which content they still have.

A block is an index into the runner's cache tensors. It is *held* while at least one request has it in its block
table (`ref_count` counts the tables) and *free* otherwise. A free block keeps its content, and its hash if it has
one, until it is handed out again: that is what prefix caching finds. Every block is usable; a runner that needs one
to scribble on allocates it itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """`num_blocks` blocks with the ids 0 to num_blocks - 1. Not thread-safe."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._block_of_hash: dict[bytes, int] = {}
        # Least recently freed first. An OrderedDict because a prefix hit takes blocks from the middle.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the blocks that are held, 0 to 1."""
        return 1.0 - len(self._free) / self.num_blocks

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def block_hash(self, block_id: int) -> bytes | None:
        """The hash under which a block can be found; None if it cannot."""
        return self._hashes[block_id]

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, the longest unused first; their old content can be found no more.

        Raises `RuntimeError` if fewer are free: the scheduler asks `num_free` first.
        """
        if count > len(self._free):
            raise RuntimeError(f"{count} blocks asked for, {len(self._free)} of {self.num_blocks} are free")
        block_ids = [self._free.popitem(last=False)[0] for _ in range(count)]
        self.withdraw(block_ids)
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Hold blocks that `find` named, one more time each; free ones leave the free list."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._free[block_id]
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Give up one hold on each block of a table.

        Last block first: the end of a prompt is worth less to others than its beginning, so it has to be evicted
        first. A block that nobody can find is worth nothing and is handed out next.
        """
        for block_id in reversed(block_ids):
            if self._ref_counts[block_id] == 0:
                raise RuntimeError(f"block {block_id} released, but nobody holds it")
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free[block_id] = None
                if self._hashes[block_id] is None:
                    self._free.move_to_end(block_id, last=False)

    def find(self, block_hash: bytes) -> int | None:
        """The block with this content, held or free; None if there is none."""
        return self._block_of_hash.get(block_hash)

    def num_free_among(self, block_ids: Iterable[int]) -> int:
        return sum(self._ref_counts[block_id] == 0 for block_id in block_ids)

    def publish(self, block_id: int, block_hash: bytes) -> None:
        """Let a held block be found by the hash of its content.

        If another block has the same content already, that one stays the one to be found.
        """
        if self._ref_counts[block_id] == 0 or self._hashes[block_id] is not None:
            raise RuntimeError(f"block {block_id} cannot be published: it is free or has a hash")
        if self._block_of_hash.setdefault(block_hash, block_id) == block_id:
            self._hashes[block_id] = block_hash

    def withdraw(self, block_ids: Iterable[int]) -> None:
        """Let these blocks be found no more."""
        for block_id in block_ids:
            block_hash = self._hashes[block_id]
            if block_hash is not None:
                del self._block_of_hash[block_hash]
                self._hashes[block_id] = None

    def check_integrity(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Raise `AssertionError` unless the pool agrees with itself and with the tables of all requests."""
        holds = [0] * self.num_blocks
        for table in block_tables:
            assert len(set(table)) == len(table), f"a block stands twice in the table {table}"
            for block_id in table:
                holds[block_id] += 1
        assert holds == self._ref_counts, f"reference counts {self._ref_counts}, but tables hold {holds}"
        for block_id, count in enumerate(self._ref_counts):
            assert (block_id in self._free) == (count == 0), f"block {block_id}: {count} holders, wrong in free list"
        found = {block_id: block_hash for block_hash, block_id in self._block_of_hash.items()}
        assert len(found) == len(self._block_of_hash), "two hashes lead to one block"
        assert found == {i: h for i, h in enumerate(self._hashes) if h is not None}, "hashes and blocks disagree"
