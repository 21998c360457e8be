"""CUDA graphs of steps that verify drafts: a few tokens each of a few requests.

A graph is captured for some numbers of requests, of tokens in all, and of tokens of one request; a step takes the
smallest that holds it. What is left of its requests has no tokens, and what is left of its tokens belongs to no
request: they are computed from whatever memory holds, into the scratch block, and read by nobody.

Everything a step needs comes in one copy from the host; block tables and the tokens that only the device knows are
looked up there.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from sol.ops import KVCache, Program
from sol.ops.gpu.batch import DeviceBatch
from sol.ops.program import Ops, run
from sol.runner.decode_graphs import DecodeGraphs, Graph, capture_graph
from sol.runner.device_rows import DeviceRows

_Ints = npt.NDArray[np.int64]

_PER_TOKEN: Final = 4
"""Token id or -1, position, slot, entry"""
_PER_REQUEST: Final = 3
"""Entry, length, first token; one more first token at the end"""

MOST_TOKENS: Final = 128
"""Of a step; larger ones keep the device busy for long enough to launch one kernel after the other."""
INVARIANT: Final = 16
"""Tokens of a step up to which all kernels reduce in one order (docs/kernels.md)"""
LONGEST: Final = ((8, 16), (32, 8), (64, 4))
"""(requests, tokens): a graph of at most so many requests holds at most so many tokens of each."""


@dataclass(frozen=True, slots=True, order=True)
class Size:
    num_requests: int
    num_tokens: int

    @property
    def longest(self) -> int:
        """Tokens of one request"""
        return next(longest for requests, longest in LONGEST if self.num_requests <= requests)


def verify_buckets(max_num_seqs: int, max_num_drafts: int) -> list[Size]:
    """Sizes worth a graph, for at most `max_num_drafts` drafts of a request.

    Steps of at most 16 tokens compute each of them as if it were alone, and drafts do not lift a step out of these: up
    to 16 requests need no larger size, and must have these.
    """
    sizes = set()
    for requests in (1, 2, 4, 8, 16, 32, 64):
        requests = min(requests, max_num_seqs)
        most = INVARIANT if requests <= INVARIANT else MOST_TOKENS
        most = min(most, requests * min(Size(requests, 0).longest, max_num_drafts + 1))
        step = 1 if requests == 1 else 4 if requests <= INVARIANT else 16
        sizes |= {Size(requests, tokens) for tokens in (*range(step, most, step), most) if tokens > requests}
        if requests == INVARIANT:
            sizes.add(Size(requests, INVARIANT))  # for fewer of them, with drafts
    return sorted(sizes)


class VerifyGraphs:
    """Finds nothing before `capture` was called."""

    def __init__(
        self,
        program: Program,
        ops: Ops,
        kv_cache: KVCache,
        entries: DeviceRows,
        decode: DecodeGraphs,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        self._program, self._ops, self._kv_cache = program, ops, kv_cache
        self._entries, self._decode, self._device = entries, decode, device
        self._max_model_len = max_model_len
        self._scratch_slot = (kv_cache.num_blocks - 1) * kv_cache.block_size
        self._sizes: list[Size] = []
        self._graphs: dict[Size, Graph] = {}
        self._inputs = torch.zeros(0, dtype=torch.int64, device=device)
        self._token_ids = torch.zeros(0, dtype=torch.int64, device=device)

    def find(self, num_requests: int, num_tokens: int, longest: int) -> Size | None:
        """The smallest size that holds such a step."""
        return min(
            (
                size
                for size in self._sizes
                if size.num_requests >= num_requests and size.num_tokens >= num_tokens and size.longest >= longest
            ),
            key=lambda size: (size.num_tokens, size.num_requests),
            default=None,
        )

    def capture(self, sizes: Sequence[Size], *, graphs: bool = True) -> None:
        """Once at start-up, after the decode steps' graphs, whose memory they share. `graphs=False`: steps of these
        sizes are launched op by op."""
        self._sizes = sorted(sizes)
        if not sizes:
            return
        self._inputs = self._inputs.new_zeros(max(map(_num_inputs, sizes)))
        self._token_ids = self._token_ids.new_zeros(max(size.num_tokens for size in sizes))
        if not graphs:
            return
        for size in sorted(sizes, key=lambda size: size.num_tokens, reverse=True):
            self.inputs(size).copy_(torch.from_numpy(self.padding(size)))
            self._graphs[size] = capture_graph(functools.partial(self._step, size), self._decode.pool, self._device)

    def inputs(self, size: Size) -> torch.Tensor:
        """[n] int64 on the device: where a step's inputs go, laid out as `padding` is."""
        return self._inputs[: _num_inputs(size)]

    def padding(self, size: Size) -> _Ints:
        """The inputs of a step without requests."""
        inputs = np.zeros(_num_inputs(size), dtype=np.int64)
        tokens, requests, _ = _split(inputs, size)
        tokens[2], tokens[3] = self._scratch_slot, self._entries.padding
        requests[0], requests[1] = self._entries.padding, 1
        return inputs

    def fill(self, inputs: _Ints, size: Size, tokens: _Ints, requests: _Ints, counts: Sequence[int]) -> None:
        """`tokens` [4, T]: id (-1: what the device has), position, slot, entry of each; `requests` [2, R]: entry and
        length; `counts`: tokens of each request."""
        inputs[:] = self.padding(size)
        per_token, per_request, starts = _split(inputs, size)
        per_token[:, : tokens.shape[1]] = tokens
        per_request[:, : len(counts)] = requests
        starts[1 : len(counts) + 1] = np.cumsum(counts)
        starts[len(counts) + 1 :] = tokens.shape[1]

    def run(self, size: Size) -> tuple[torch.Tensor, torch.Tensor]:
        """Start a step: logits [num_tokens, vocab_size] float32 and the tokens sampled after each, both good until the
        next step."""
        captured = self._graphs.get(size)
        if captured is None:
            return self._step(size), self._token_ids[: size.num_tokens]
        captured.graph.replay()
        return captured.logits, self._token_ids[: size.num_tokens]

    def _step(self, size: Size) -> torch.Tensor:
        per_token, per_request, starts = _split(self.inputs(size), size)
        token_ids, positions, slots, entries = per_token
        batch: Any = DeviceBatch(
            token_ids=torch.where(token_ids < 0, self._entries.last_token_ids[entries], token_ids),
            positions=positions,
            slot_mapping=slots,
            block_table=self._entries.block_table[per_request[0]],
            query_start_loc=starts.int(),
            seq_lens=per_request[1].int(),
            logits_rows=slice(None),
            max_query_len=size.longest,
            max_seq_len=self._max_model_len,
        )
        logits = run(self._program, self._ops, batch, self._kv_cache)
        self._decode.sample_into(logits, entries, (positions + 1).int(), self._token_ids[: size.num_tokens])
        return logits


def _num_inputs(size: Size) -> int:
    return _PER_TOKEN * _width(size) + _PER_REQUEST * size.num_requests + 1


def _width(size: Size) -> int:
    """Of a line of inputs: an even number, because Triton compiles a kernel again for pointers that are not aligned to
    16 bytes."""
    return size.num_tokens + size.num_tokens % 2


def _split(inputs: Any, size: Size) -> tuple[Any, Any, Any]:
    """[4, num_tokens], [2, num_requests] and [num_requests + 1] of a step's inputs, an array or a tensor."""
    first = _PER_TOKEN * _width(size)
    second = first + 2 * size.num_requests
    return (
        inputs[:first].reshape(_PER_TOKEN, _width(size))[:, : size.num_tokens],
        inputs[first:second].reshape(2, size.num_requests),
        inputs[second:],
    )
