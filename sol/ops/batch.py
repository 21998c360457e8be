"""A step's ragged batch and the paged KV cache, as the ops see them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """T tokens of R requests, flattened, no padding. Prefill, chunk and decode differ in `query_lens` alone."""

    token_ids: torch.Tensor
    """[T] int64"""
    positions: torch.Tensor
    """[T] int64"""
    slot_mapping: torch.Tensor
    """[T] int64: where each token's key and value go, block id · block_size + offset"""
    block_table: torch.Tensor
    """[R, max_blocks] int64; entries past a request's last block are 0 and never read"""
    query_lens: list[int]
    """Tokens of each request in this step, all at least 1"""
    seq_lens: list[int]
    """Tokens of each request up to and including this step's last"""
    logits_rows: torch.Tensor
    """[S] int64: rows of T whose logits are wanted, in order"""


@dataclass(frozen=True, slots=True)
class KVCache:
    """`data` [layers, 2, num_blocks, block_size, num_kv_heads, head_dim]; keys at 0, values at 1."""

    data: torch.Tensor

    @property
    def num_blocks(self) -> int:
        return self.data.shape[2]

    @property
    def block_size(self) -> int:
        return self.data.shape[3]

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, each [num_blocks, block_size, num_kv_heads, head_dim]."""
        keys, values = self.data[index]
        return keys, values
