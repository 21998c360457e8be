"""Finding the KV cache of a prompt's beginning among the blocks that are there already.

The hash of a block is chained: it covers the block's tokens and, through its parent's hash, every token before them,
so that an equal hash means an equal prefix. It is 128 bits of BLAKE2b, which nobody can collide on purpose to read
another's cache.

A block is published when the step that computes its last token is *planned*, not when it has run: inside a step each
layer writes the KV cache of all the step's tokens before its attention reads any, so whoever is planned later, in the
same step or after it, may read the block. This is what lets the n choices of a prompt that arrive together compute it
once. It is safe because a plan is always carried out, in order, and because only running requests are preempted and no
plan holds a preempted request. Where a block's last token is not known yet (the step that samples it is still under
way), the block is published once it is.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b

from sol.engine.block_pool import BlockPool
from sol.engine.request import Request

_DIGEST_SIZE = 16


def hash_block(parent: bytes, token_ids: list[int]) -> bytes:
    """16 bytes for a full block; `parent` is the hash of the block before it, `root_hash` for the first."""
    return blake2b(parent + array("q", token_ids).tobytes(), digest_size=_DIGEST_SIZE).digest()


def root_hash(cache_salt: str | None) -> bytes:
    """What stands for the parent of a request's first block: requests of different salts have no hash in common."""
    if cache_salt is None:
        return b""
    return blake2b(cache_salt.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_SIZE, person=b"salt").digest()


class PrefixCache:
    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size

    def find(self, request: Request) -> list[int]:
        """The blocks, in order, that already hold the beginning of the request's tokens.

        At least the last token is left over: its logits are what the request is there for. The blocks are not held
        yet; `BlockPool.acquire` does that.
        """
        block_ids: list[int] = []
        for index in range((request.num_tokens - 1) // self._block_size):
            block_id = self._pool.find(self._hash(request, index))
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def publish(self, request: Request) -> None:
        """Let others find the blocks that are full of known tokens once `num_computed_tokens` tokens are computed."""
        for index in range(request.num_published_blocks, self._num_known_blocks(request)):
            self._pool.publish(request.block_ids[index], self._hash(request, index))
            request.num_published_blocks = index + 1

    def withdraw(self, request: Request) -> None:
        """Let nobody find what the request has published, even if its blocks are given back already."""
        found = (self._pool.find(block_hash) for block_hash in request.block_hashes)
        self._pool.withdraw([block_id for block_id in found if block_id is not None])

    def check_integrity(self, request: Request) -> None:
        """Raise `AssertionError` unless the request's computed full blocks are published as what they hold, only these.

        A block whose content another block held already has no hash of its own.
        """
        size = self._block_size
        published = self._num_known_blocks(request)
        assert request.num_published_blocks == published, f"{request.request_id!r}: computed blocks are not published"
        parent = root_hash(request.cache_salt)
        for index, block_id in enumerate(request.block_ids):
            block_hash = self._pool.block_hash(block_id)
            if index >= published:
                assert block_hash is None, f"block {block_id} is published before it is computed"
                continue
            parent = hash_block(parent, request.token_ids[index * size : (index + 1) * size])
            assert block_hash in (None, parent), f"block {block_id} is published as what it does not hold"

    def _num_known_blocks(self, request: Request) -> int:
        return min(request.num_computed_tokens, request.num_tokens) // self._block_size

    def _hash(self, request: Request, index: int) -> bytes:
        hashes = request.block_hashes
        size = self._block_size
        while len(hashes) <= index:
            start = len(hashes) * size
            parent = hashes[-1] if hashes else root_hash(request.cache_salt)
            hashes.append(hash_block(parent, request.token_ids[start : start + size]))
        return hashes[index]
