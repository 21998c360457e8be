"""The ops' reference, for a runner that keeps a step's inputs on its device."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from sol.ops import KVCache, Program, RaggedBatch
from sol.ops.gpu.batch import DeviceBatch
from sol.ops.reference import ReferenceOps


class DeviceReferenceOps(ReferenceOps):
    """Reads on the host what a kernel reads on the device. Takes both kinds of batches, as the GPU's ops do."""

    def prepare(self, program: Program, batch: Any, kv_cache: KVCache) -> Any:
        if isinstance(batch, RaggedBatch):
            return super().prepare(program, batch, kv_cache)
        assert isinstance(batch, DeviceBatch)
        starts = batch.query_start_loc.tolist()
        query_lens = [stop - start for start, stop in itertools.pairwise(starts)]
        seq_lens, table = batch.seq_lens.tolist(), batch.block_table.long()
        assert max(query_lens) <= batch.max_query_len
        assert int(batch.seq_lens.max()) <= batch.max_seq_len
        # A kernel skips requests without tokens, and leaves alone tokens that are nobody's; here they are somebody's.
        kept = [index for index, length in enumerate(query_lens) if length]
        query_lens, seq_lens, table = [query_lens[i] for i in kept], [seq_lens[i] for i in kept], table[kept]
        for _ in range(starts[-1], batch.num_tokens):
            query_lens.append(1)
            seq_lens.append(1)
            table = torch.cat([table, torch.full_like(table[:1], kv_cache.num_blocks - 1)])
        ragged = RaggedBatch(
            token_ids=batch.token_ids,
            positions=batch.positions,
            slot_mapping=batch.slot_mapping,
            block_table=table,
            query_lens=query_lens,
            seq_lens=seq_lens,
            logits_rows=torch.arange(0),
        )
        return super().prepare(program, ragged, kv_cache)
