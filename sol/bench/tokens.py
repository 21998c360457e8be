"""When each token came: what a stream says of its chunks, turned into times of tokens.

With speculation a chunk brings several tokens, so the gap between two chunks is not the time of one token. It is
spread evenly over the tokens of the later chunk: a chunk of three tokens after 30 ms is three gaps of 10 ms. Tokens of
the first chunk beyond its first have no gap of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sol.bench.records import RequestRecord, TokenCounting

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """Of one streamed response."""

    times: Floats
    """Of arrivals."""
    counts: NDArray[np.int64]
    """Tokens of each; 0 only where several chunks show one token."""

    @property
    def num_tokens(self) -> int:
        return int(self.counts.sum())

    def token_gaps(self) -> Floats:
        """Seconds between tokens, one for each token after the first arrival."""
        with_tokens = self.counts > 0
        times, counts = self.times[with_tokens], self.counts[with_tokens]
        return np.repeat(np.diff(times) / counts[1:], counts[1:])

    def chunk_gaps(self) -> Floats:
        """Seconds between arrivals, however many tokens they bring."""
        return np.diff(self.times)


def token_times(record: RequestRecord, counting: TokenCounting) -> TokenTimes:
    times = np.frombuffer(record.times, dtype=np.float64) if record.times else np.zeros(0)
    given = np.array(record.counts, dtype=np.int64)
    if counting in ("segments", "usage", "token_ids"):
        return TokenTimes(times, np.maximum(given, 0))
    if record.completion_tokens is None or not len(times):
        # What one read brought is several chunks, and of those each counts as one token.
        return TokenTimes(times, _share(max(record.num_chunks, len(times)), np.array(record.characters)))
    return TokenTimes(times, _share(record.completion_tokens, np.array(record.characters)))


def num_output_tokens(record: RequestRecord, counting: TokenCounting) -> int:
    """The endpoint's own count where there is one."""
    if record.completion_tokens is not None:
        return record.completion_tokens
    return token_times(record, counting).num_tokens


def _share(total: int, characters: NDArray[np.int64]) -> NDArray[np.int64]:
    """`total` tokens over arrivals: one each as long as there are enough, the rest by their characters (the largest
    remainders take what rounding leaves)."""
    n = len(characters)
    if total <= n:
        return (np.arange(n) < total).astype(np.int64)
    # With one token each, give or take the end token that shows nothing, there is nothing to guess.
    if total - n <= 1:
        singles = np.ones(n, dtype=np.int64)
        singles[-1] += total - n
        return singles
    weights = np.maximum(characters.astype(np.float64), 1e-9)
    shares = weights / weights.sum() * (total - n)
    counts: NDArray[np.int64] = np.floor(shares).astype(np.int64)
    left = total - n - int(counts.sum())
    counts[np.argsort(counts - shares, kind="stable")[:left]] += 1
    counts += 1
    return counts
