"""Programs on the C++ backend beside the same programs on the reference, and a driver that pages their requests."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from sol.models.checkpoint import Checkpoint, open_checkpoint
from sol.models.config import ModelConfig, load_model_config
from sol.models.packed_cache import CpuPacker
from sol.models.registry import load_program
from sol.models.source import resolve
from sol.ops import EagerExecutor, Executor, KVCache, Program, RaggedBatch
from sol.ops.cpu.executor import CpuExecutor, KVCacheSpec
from sol.ops.cpu.native import Isa, KVDType, Native, NativeUnavailableError, load
from sol.ops.reference import ReferenceOps

BLOCK_SIZE = 16


@functools.cache
def native() -> Native:
    """The library; a test that needs it is skipped where it was not built."""
    try:
        return load()
    except NativeUnavailableError as error:
        pytest.skip(str(error))


def isas() -> list[Isa]:
    """For `parametrize`: what this processor has; the portable one where nothing was built (then tests skip)."""
    try:
        return load().isas()
    except NativeUnavailableError:
        return [Isa.PORTABLE]


def open_model(path: Path) -> tuple[ModelConfig, Checkpoint]:
    files = resolve(str(path), progress=False)
    return load_model_config(files), open_checkpoint(files)


def packed_program(
    config: ModelConfig,
    checkpoint: Checkpoint,
    *,
    isa: Isa | None = None,
    matrix_dtype: torch.dtype | None = None,
    max_positions: int = 512,
) -> Program:
    """A program whose matrices are packed, as they are stored or in `matrix_dtype`."""
    library = native()
    with CpuPacker(library, isa if isa is not None else library.best_isa()) as packer:
        return load_program(
            config,
            checkpoint,
            dtype=torch.float32,
            max_positions=max_positions,
            packer=packer,
            matrix_dtype=matrix_dtype,
        )


@contextmanager
def cpu_executor(program: Program, *, isa: Isa | None = None, **options: Any) -> Iterator[CpuExecutor]:
    """One that is closed at the end. Options: kv_dtype, num_blocks, block_size, max_num_tokens, num_threads, cores."""
    library = native()
    executor = CpuExecutor(
        library,
        program,
        isa=isa if isa is not None else library.best_isa(),
        kv_cache=KVCacheSpec(
            dtype=options.pop("kv_dtype", KVDType.FLOAT32),
            num_blocks=options.pop("num_blocks", 64),
            block_size=options.pop("block_size", BLOCK_SIZE),
        ),
        max_num_tokens=options.pop("max_num_tokens", 256),
        num_threads=options.pop("num_threads", 1),
        **options,
    )
    try:
        executor.kv_cache.fill_(0xFF)  # NaN wherever nothing was written: a read out of place shows
        yield executor
    finally:
        executor.close()


def reference_executor(
    config: ModelConfig, program: Program, *, num_blocks: int = 64, block_size: int = BLOCK_SIZE
) -> EagerExecutor:
    shape = (config.num_hidden_layers, 2, num_blocks, block_size, config.num_key_value_heads, config.head_dim)
    return EagerExecutor(program, ReferenceOps(), KVCache(torch.full(shape, float("nan"), dtype=torch.float32)))


class Paged:
    """Drives an executor; each request's blocks are scattered over the cache, in the same way for every driver."""

    def __init__(
        self, executor: Executor, *, num_requests: int = 1, num_blocks: int = 64, block_size: int = BLOCK_SIZE
    ) -> None:
        self.executor = executor
        self.block_size = block_size
        each = num_blocks // num_requests
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1))
        self.tables = order[: each * num_requests].view(num_requests, each)
        self.lengths = [0] * num_requests

    def batch(self, chunks: Mapping[int, Sequence[int]]) -> RaggedBatch:
        """The step that appends each chunk to its request; every token's logits are wanted."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for request, chunk in chunks.items():
            start, table = self.lengths[request], self.tables[request]
            span = range(start, start + len(chunk))
            tokens += chunk
            positions += span
            slots += [int(table[p // self.block_size]) * self.block_size + p % self.block_size for p in span]
            self.lengths[request] += len(chunk)
        longest = max(self.lengths[request] for request in chunks)
        return RaggedBatch(
            token_ids=torch.tensor(tokens),
            positions=torch.tensor(positions),
            slot_mapping=torch.tensor(slots),
            block_table=self.tables[list(chunks), : math.ceil(longest / self.block_size)].contiguous(),
            query_lens=[len(chunk) for chunk in chunks.values()],
            seq_lens=[self.lengths[request] for request in chunks],
            logits_rows=torch.arange(len(tokens)),
        )

    def step(self, chunks: Mapping[int, Sequence[int]]) -> torch.Tensor:
        """Logits of every token of every chunk, request by request."""
        return self.executor.forward(self.batch(chunks)).clone()


def random_tokens(count: int, seed: int, vocab_size: int = 320) -> list[int]:
    return torch.randint(3, vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
