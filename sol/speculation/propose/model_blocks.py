"""What a drafter's own KV cache really holds, block by block.

It shares block ids with the target's cache, but not its contents: the target may find a prefix that the drafter never
computed, and a block may have been given to another request since the drafter wrote to it. So nothing is believed of a
block but the tokens that were written to it, and nothing of the tokens before them but their chained hash. A rejected
draft needs no special care: the block holds a token that the request does not have, and is valid up to there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from sol.engine.prefix_cache import hash_block

Ints: TypeAlias = npt.NDArray[np.int64]
_Chains: TypeAlias = npt.NDArray[np.uint64]

_WORDS: Final = 2
"""A hash is so many 64-bit numbers."""
_ROOT: Final = np.zeros(_WORDS, dtype=np.uint64)
"""What comes before a request's first block."""


class Context:
    """A request's tokens as its drafter reads them, and the chained hashes of its full blocks. It only grows."""

    __slots__ = ("_chains", "_num_chains", "_num_tokens", "_tokens", "readable")

    def __init__(self, block_size: int) -> None:
        self._tokens: Ints = np.empty(4 * block_size, dtype=np.int64)
        self._num_tokens = 0
        self._chains: _Chains = np.empty((4, _WORDS), dtype=np.uint64)
        self._num_chains = 0
        self.readable = True
        """False once there is a token that the drafter has nothing for."""

    def __len__(self) -> int:
        return self._num_tokens

    @property
    def tokens(self) -> Ints:
        return self._tokens[: self._num_tokens]

    def extend(self, token_ids: Ints) -> None:
        """Of the drafter's vocabulary; negative where there is none."""
        wanted = self._num_tokens + len(token_ids)
        if wanted > len(self._tokens):
            self._tokens = np.resize(self._tokens, 2 * wanted)
        self._tokens[self._num_tokens : wanted] = token_ids
        self._num_tokens = wanted
        self.readable = self.readable and bool((token_ids >= 0).all())

    def chains(self, count: int, block_size: int) -> _Chains:
        """[count, 2]: the hash of each of the first blocks, all of whose tokens are there."""
        if count > len(self._chains):
            self._chains = np.resize(self._chains, (2 * count, _WORDS))
        for index in range(self._num_chains, count):
            parent = self._chains[index - 1] if index else _ROOT
            self._chains[index] = _chained(parent, self._tokens[index * block_size : (index + 1) * block_size])
        self._num_chains = max(self._num_chains, count)
        return self._chains[:count]


class ComputedBlocks:
    """Of each block id, which tokens the drafter has computed in it, and after which tokens."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._tokens: Ints = np.zeros((num_blocks, block_size), dtype=np.int64)
        self._filled: Ints = np.zeros(num_blocks, dtype=np.int64)
        """So many of a block's tokens are computed, from its first on."""
        self._parents: _Chains = np.zeros((num_blocks, _WORDS), dtype=np.uint64)
        """The hash of the blocks before it; where anything is filled."""
        self._chains: _Chains = np.zeros((num_blocks, _WORDS), dtype=np.uint64)
        """Its own, tokens included; where it is full."""

    def num_valid(self, context: Context, block_ids: Ints, num_tokens: int) -> int:
        """How many of the first `num_tokens` tokens of a request are computed in its blocks, without a gap."""
        size = self.block_size
        full = min(num_tokens // size, len(block_ids))
        chains = context.chains(full, size)
        held = block_ids[:full]
        fits = (self._filled[held] == size) & (self._chains[held] == chains).all(axis=1)
        index = full if fits.all() else int(fits.argmin())
        start = index * size
        if index == len(block_ids) or start >= num_tokens:
            return start
        block = block_ids[index]
        if not np.array_equal(self._parents[block], chains[index - 1] if index else _ROOT):
            return start
        count = min(int(self._filled[block]), num_tokens - start)
        differs = self._tokens[block, :count] != context.tokens[start : start + count]
        return start + (int(differs.argmax()) if differs.any() else count)

    def invalidate(self, block_ids: Ints, start: int, stop: int) -> None:
        """Tokens `start` to `stop` of a request are about to be written: those before them are valid, they are not."""
        first, last = start // self.block_size, (stop - 1) // self.block_size
        self._filled[block_ids[first]] = start % self.block_size
        self._filled[block_ids[first + 1 : last + 1]] = 0

    def record(self, block_ids: Ints, start: int, tokens: Sequence[int] | Ints) -> None:
        """They have been written, from token `start` on; all tokens before them are valid."""
        size, stop = self.block_size, start + len(tokens)
        for index in range(start // size, (stop - 1) // size + 1):
            block = block_ids[index]
            begin, end = max(start, index * size), min(stop, (index + 1) * size)
            self._tokens[block, begin - index * size : end - index * size] = tokens[begin - start : end - start]
            self._filled[block] = end - index * size
            if begin == index * size:
                self._parents[block] = self._chains[block_ids[index - 1]] if index else _ROOT
            if end == (index + 1) * size:
                self._chains[block] = _chained(self._parents[block], self._tokens[block])


def _chained(parent: _Chains, tokens: Ints) -> _Chains:
    return np.frombuffer(hash_block(parent.tobytes(), tokens.tolist()), dtype=np.uint64)
