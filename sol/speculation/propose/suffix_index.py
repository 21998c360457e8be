"""Where the last tokens of a growing text occurred before: hash chains over short n-grams, as LZ77 coders keep them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

_MASK64: Final = (1 << 64) - 1
_LEAST_BITS: Final = 6
_BULK: Final = 24
"""From so many new tokens on numpy is quicker than a loop."""
MAX_ORDER: Final = 64
_BASE: Final = 0xD1342543DE82EF95
_SCALE: Final = 0x9E3779B97F4A7C15
_WEIGHTS: Final = tuple(_SCALE * pow(_BASE, power, 1 << 64) & _MASK64 for power in range(MAX_ORDER + 1))
"""An n-gram's hash is polynomial: the sum of its tokens, the last one times weight 0, the one before it times weight
1 and so on, modulo 2**64. The high bits are used, so all weights are large."""

SEPARATOR: Final = -1
"""No token: matches and drafts end at it."""


class NgramIndex:
    """A text, and for n-grams of a few lengths ("orders") the places where they occurred.

    A place is the position behind an occurrence, where its continuation begins. For each order, `heads[slot]` is the
    latest place whose n-gram hashes to `slot` and `earlier[place]` the one before it, so a walk meets all occurrences,
    newest first, and those of n-grams that share the slot: whoever walks compares tokens. A place is entered when its
    continuation is known, so a text's own end is never found.

    Memory: 4 bytes a token, and 8 to 12 more per order. In Python, a suffix automaton takes 380 bytes a token, and more
    time: 1.5 µs a token against 0.2 in bulk.
    """

    __slots__ = ("_heads", "_shift", "earlier", "hashes", "orders", "tokens")

    def __init__(self, orders: Sequence[int]) -> None:
        """`orders`: ascending, from 1 to `MAX_ORDER`."""
        self.orders = tuple(orders)
        self.tokens: array[int] = array("i")
        self.hashes = [-1] * len(self.orders)
        """Of the n-gram of each order that ends the text; -1 where the text is shorter."""
        self._reset(_LEAST_BITS)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_bytes(self) -> int:
        """What the arrays hold, without what `array` allocates ahead (an eighth at most)."""
        arrays = (self.tokens, *self._heads, *self.earlier)
        return sum(each.itemsize * len(each) for each in arrays)

    def _reset(self, bits: int) -> None:
        self._shift = 64 - bits
        self._heads = [array("i", [-1]) * (1 << bits) for _ in self.orders]
        self.earlier = [array("i") for _ in self.orders]

    @property
    def _capacity(self) -> int:
        return 1 << (64 - self._shift)

    def latest(self, level: int, hash_: int) -> int:
        """The latest place after an n-gram of `orders[level]` tokens that shares the slot of `hash_`; -1 for none."""
        return self._heads[level][hash_ >> self._shift] if hash_ >= 0 else -1

    def append(self, token: int) -> None:
        """O(number of orders)."""
        tokens, hashes, shift = self.tokens, self.hashes, self._shift
        place = len(tokens)
        if place >> (64 - shift):
            self.extend((token,))
            return
        for level, order in enumerate(self.orders):
            hash_ = hashes[level]
            if hash_ >= 0:
                heads, slot = self._heads[level], hash_ >> shift
                self.earlier[level].append(heads[slot])
                heads[slot] = place
                hashes[level] = (hash_ * _BASE + token * _SCALE - tokens[place - order] * _WEIGHTS[order]) & _MASK64
            else:
                self.earlier[level].append(-1)
        tokens.append(token)
        if place < self.orders[-1]:
            self._hash_end()

    def _hash_end(self) -> None:
        tokens, count = self.tokens, len(self.tokens)
        for level, order in enumerate(self.orders):
            if order <= count:
                end = zip(reversed(tokens[count - order :]), _WEIGHTS, strict=False)
                self.hashes[level] = sum(token * weight for token, weight in end) & _MASK64

    def extend(self, tokens: Sequence[int]) -> None:
        """As `append` for each; a long piece at a small part of the price."""
        grows = len(self.tokens) + len(tokens) > self._capacity
        if not grows and len(tokens) < _BULK:
            for token in tokens:
                self.append(token)
            return
        first = len(self.tokens)
        self.tokens.extend(tokens)
        if grows:
            self._reset(len(self.tokens).bit_length())
            first = 0
        self._enter(first)
        self._hash_end()

    def reserve(self, count: int) -> None:
        """Make room for so many tokens while there are few; `extend` does so at the price of entering all again."""
        if count > self._capacity:
            self._reset(count.bit_length())
            self._enter(0)

    def drop_front(self, count: int) -> None:
        """Forget the first `count` tokens and shift all places. O(tokens left)."""
        del self.tokens[:count]
        self.hashes = [-1] * len(self.orders)
        self._reset(max(_LEAST_BITS, len(self.tokens).bit_length()))
        self._enter(0)
        self._hash_end()

    def _enter(self, first: int) -> None:
        """The places from `first` to the last token, all at once: sorted by slot, each follows the one before it."""
        count = len(self.tokens)
        shift = np.uint64(self._shift)
        longest = self.orders[-1]
        begin = max(0, first - longest)
        part = np.frombuffer(self.tokens, dtype=np.int32)[begin:].astype(np.int64).view(np.uint64)
        sums: npt.NDArray[np.uint64] = np.zeros(count - begin, dtype=np.uint64)
        done = 0
        for level, order in enumerate(self.orders):
            while done < order:
                sums[done:] += part[: max(0, len(part) - done)] * np.uint64(_WEIGHTS[done])
                done += 1
            earlier = np.full(count - first, -1, dtype=np.int32)
            # The n-gram that ends before place p: its sum is at p - 1.
            start = max(first, order)
            if start < count:
                slots = (sums[start - 1 - begin : count - 1 - begin] >> shift).astype(np.int64)
                keys = (slots << 32) | np.arange(start, count, dtype=np.int64)
                keys.sort()
                slots, places = keys >> 32, (keys & 0xFFFFFFFF).astype(np.int32)
                heads = np.frombuffer(self._heads[level], dtype=np.int32)
                before = heads[slots]
                again = slots[1:] == slots[:-1]
                before[1:][again] = places[:-1][again]
                earlier[places - first] = before
                last = np.append(~again, True)
                heads[slots[last]] = places[last]
            self.earlier[level].frombytes(earlier.tobytes())
