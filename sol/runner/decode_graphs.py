"""A decode step on the device, from its inputs to the next one's, and the CUDA graphs that replay it.

Graphs are captured for some numbers of rows; a step takes the smallest that holds it and fills it up with the padding
row. All share one memory pool, and replay one after the other, so together they need little more than the largest.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from sol.ops import KVCache, Program
from sol.ops.gpu.batch import DeviceBatch
from sol.ops.program import Ops, run
from sol.runner.device_rows import DeviceRows
from sol.sampling import batched

LARGEST: Final = 512
"""Rows; from here on the device is busy for long enough to launch one kernel after the other."""


def decode_buckets(max_num_seqs: int) -> list[int]:
    """Numbers of rows worth a graph: where a row more costs time, padding costs at most an eighth of it."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, LARGEST + 1, 32)]
    most = min(max_num_seqs, LARGEST)
    return [*(size for size in sizes if size < most), most]


@dataclass(frozen=True, slots=True)
class Graph:
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor
    """[rows, vocab_size] in the pool's memory, valid until any graph is replayed"""


class DecodeGraphs:
    """Runs decode steps: replays the graph where there is one for so many rows, else launches op by op."""

    def __init__(
        self,
        program: Program,
        ops: Ops,
        kv_cache: KVCache,
        entries: DeviceRows,
        max_num_seqs: int,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        self._program, self._ops, self._kv_cache, self._entries = program, ops, kv_cache, entries
        self._max_num_seqs, self._max_model_len = max_num_seqs, max_model_len
        self._device = device
        self._graphs: dict[int, Graph] = {}
        self.pool: Any = None
        """The memory of the graphs, once there are any; others that are replayed in turn with them may share it."""
        self._buckets: list[int] = []
        size, max_blocks = max_num_seqs, entries.block_table.shape[1]
        self._inputs = torch.zeros(4 * size, dtype=torch.int64, device=device)
        self._token_ids = torch.zeros(size, dtype=torch.int64, device=device)
        self._batch = DeviceBatch(
            token_ids=torch.zeros(size, dtype=torch.int64, device=device),
            positions=torch.zeros(size, dtype=torch.int64, device=device),
            slot_mapping=torch.zeros(size, dtype=torch.int64, device=device),
            block_table=torch.zeros((size, max_blocks), dtype=torch.int32, device=device),
            query_start_loc=torch.arange(size + 1, dtype=torch.int32, device=device),
            seq_lens=torch.ones(size, dtype=torch.int32, device=device),
            logits_rows=slice(None),
            max_query_len=1,
            max_seq_len=max_model_len,
        )

    def padded(self, count: int) -> int:
        """How many rows a step of `count` is filled up to."""
        return next((size for size in self._buckets if size >= count), count)

    def inputs(self, size: int) -> torch.Tensor:
        """[4, size] int64: where the inputs of a step of `size` rows go (`sol.ops.gpu.inputs`)."""
        return self._inputs[: 4 * size].view(4, size)

    def run(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Start a step: logits [size, vocab_size] float32 and sampled tokens [size], both good until the next one."""
        captured = self._graphs.get(size)
        if captured is None:
            return self._step(size), self._token_ids[:size]
        captured.graph.replay()
        return captured.logits, self._token_ids[:size]

    def sample(self, logits: torch.Tensor, entries: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
        """Tokens of any step's logits; they become their rows' next inputs."""
        count = logits.shape[0]
        token_ids = self._token_ids[:count]
        if count > token_ids.shape[0]:  # drafts
            token_ids = self._token_ids.new_empty(count)
        if count:
            self.sample_into(logits, entries, seq_lens, token_ids)
        return token_ids

    def capture(self, buckets: Sequence[int]) -> None:
        """Once at start-up."""
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        # The largest first: the others then fit into what it left in the pool.
        for size in sorted(buckets, reverse=True):
            self._fill_with_padding(size)
            self._graphs[size] = capture_graph(functools.partial(self._step, size), self.pool, self._device)
        self._buckets = sorted({*self._buckets, *buckets})

    def _fill_with_padding(self, size: int) -> None:
        columns = torch.tensor([[self._entries.padding], [0], [1], [-1]], dtype=torch.int64)
        self.inputs(size).copy_(columns.expand(4, size))

    def _step(self, size: int) -> torch.Tensor:
        inputs = self.inputs(size)
        full = self._batch
        batch: Any = DeviceBatch(
            token_ids=full.token_ids[:size],
            positions=full.positions[:size],
            slot_mapping=full.slot_mapping[:size],
            block_table=full.block_table[:size],
            query_start_loc=full.query_start_loc[: size + 1],
            seq_lens=full.seq_lens[:size],
            logits_rows=full.logits_rows,
            max_query_len=1,
            max_seq_len=full.max_seq_len,
        )
        if self._device.type == "cuda":
            from sol.ops.gpu.inputs import decode_inputs

            decode_inputs(
                inputs, self._entries.block_table, self._entries.last_token_ids, batch, self._kv_cache.block_size
            )
        else:
            self._entries.decode_inputs(inputs, batch, self._kv_cache.block_size)
        logits = run(self._program, self._ops, batch, self._kv_cache)
        self.sample_into(logits, inputs[0], batch.seq_lens, self._token_ids[:size])
        return logits

    def sample_into(
        self, logits: torch.Tensor, entries: torch.Tensor, seq_lens: torch.Tensor, token_ids: torch.Tensor
    ) -> None:
        """Without a wait: `token_ids` and the rows' next inputs are written."""
        parameters, last = self._entries.parameters, self._entries.last_token_ids
        if self._device.type == "cuda":
            from sol.ops.gpu.sampling import sample_rows

            sample_rows(logits, entries, seq_lens, parameters.tensors(), token_ids, last)
        else:
            token_ids.copy_(batched.sample_rows(logits, entries, seq_lens, parameters))
            last.index_copy_(0, entries, token_ids.clamp(min=0))


def capture_graph(step: Callable[[], torch.Tensor], pool: Any, device: torch.device) -> Graph:
    """`step` starts a step whose inputs are in place and returns its logits. It runs op by op first: what is compiled
    or allocated then is not captured."""
    step()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with _no_collection(), torch.cuda.graph(graph, pool=pool):
        logits = step()
    return Graph(graph, _alias(logits))


@contextlib.contextmanager
def _no_collection() -> Any:
    """While a graph is captured nothing may be freed that waits for the device; the collector would do it anywhere."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True, slots=True)
class _Memory:
    """CUDA memory that belongs to somebody else, for `torch.as_tensor`."""

    __cuda_array_interface__: dict[str, Any]


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same float32s without holding the memory: in a pool it then serves the other graphs, too."""
    interface = {"shape": tuple(tensor.shape), "typestr": "<f4", "data": (tensor.data_ptr(), False), "version": 3}
    return torch.as_tensor(_Memory(interface), device=tensor.device)
