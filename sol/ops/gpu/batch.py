"""A step's batch as kernels see it: everything that changes from step to step lies in device memory.

A CUDA graph replays fixed launches over fixed addresses, so a kernel may take shapes and the bounds below from the
host, and nothing else: how long a request is and where it lies is read on the device. A batch that is smaller than
its graph is filled up with requests of one token each that read and write the scratch block, the cache's last: they
are requests like any other to a kernel, and what they compute is not used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """T tokens of R requests, flattened; all tensors contiguous, on one device."""

    token_ids: torch.Tensor
    """[T] int64"""
    positions: torch.Tensor
    """[T] int64"""
    slot_mapping: torch.Tensor
    """[T] int64: where each token's key and value go, block id · block_size + offset"""
    block_table: torch.Tensor
    """[R, max_blocks] int32; entries past a request's last block are undefined and must not be followed"""
    query_start_loc: torch.Tensor
    """[R + 1] int32: the tokens of request r are rows query_start_loc[r] to query_start_loc[r + 1] - 1"""
    seq_lens: torch.Tensor
    """[R] int32: tokens of each request up to and including this step's last"""
    logits_rows: torch.Tensor | slice
    """[S] int64: rows of T whose logits are wanted, in order; slice(None) for all of them, without a copy"""
    max_query_len: int
    """No request has more tokens in this step; 1 says that T = R and row r is request r"""
    max_seq_len: int
    """No request is longer; what a grid may be sized by. In a graph it is the model's length, not the batch's"""

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_requests(self) -> int:
        return self.seq_lens.shape[0]
