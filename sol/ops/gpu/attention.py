"""Paged attention: which kernel takes which request, with which block sizes.

Which of the two kernels computes a request depends on its own number of query tokens alone, and so do the cuts of its
context: what else is in a step changes no bit of a decoded or verified token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from sol.ops.gpu.attention_kernels import attend_few_kernel, attend_many_kernel
from sol.ops.gpu.batch import DeviceBatch
from sol.ops.gpu.chunks import num_chunks
from sol.ops.gpu.launch import Counters, has_large_tiles, num_processors, pdl_options

FEW = 16
"""The most query tokens of a request that `attend_few_kernel` takes"""


@dataclass(frozen=True, slots=True)
class ManyConfig:
    """Block sizes of `attend_many_kernel`: query rows, keys."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Block sizes; `few_block_n` decides the order of additions."""

    few_block_n: int = 128
    few_warps: int = 4
    few_stages: int = 3
    few_programs: int = 2
    """Programs a multiprocessor that chunks are spread over"""
    deep_stages: int = 5
    """Instead of `few_stages` where requests are so few that each program has a multiprocessor to itself"""
    many: ManyConfig = ManyConfig(64, 64, 4, 5)
    large: ManyConfig = ManyConfig(256, 64, 8, 5)
    """Instead of `many` where a step has enough query tokens for a tile on every multiprocessor"""


LARGE_TILES = AttentionConfig()
SMALL_TILES = AttentionConfig(
    few_block_n=64, deep_stages=3, many=ManyConfig(64, 64, 4, 3), large=ManyConfig(64, 64, 4, 3)
)
"""At most 96 KiB of shared memory"""


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """What attention needs besides q, for all layers of a step."""

    batch: DeviceBatch
    num_heads: int
    num_kv_heads: int
    head_dim: int
    few_tokens: int
    """Requests with at most as many query tokens go to `attend_few_kernel`; 0: none of the batch's"""
    many: bool
    """Some may have more"""
    counters: Counters


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    inputs: AttentionInputs,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    config: AttentionConfig | None = None,
) -> torch.Tensor:
    """q [T, H, E], keys and values [blocks, block size, kv heads, E] → [T, H · E]"""
    config = config or (LARGE_TILES if has_large_tiles(q.device) else SMALL_TILES)
    batch, heads, kv_heads, size = inputs.batch, inputs.num_heads, inputs.num_kv_heads, inputs.head_dim
    out = torch.empty(q.shape[0], heads * size, dtype=q.dtype, device=q.device)
    group = heads // kv_heads
    block_d = max(16, triton.next_power_of_2(size))
    wide = max(1, block_d * q.element_size() // 256)  # tiles of larger heads or numbers have fewer keys
    common = {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "SIZE": size,
        "PAGE": keys.shape[1],
        "WINDOW": window or 0,
        "SOFTCAP": softcap is not None,
        "BLOCK_D": block_d,
        "WIDE": keys.numel() >= 1 << 31,
    } | pdl_options(q.device)
    requests = batch.num_requests
    if inputs.few_tokens:
        few = inputs.few_tokens
        block_m = max(16, triton.next_power_of_2(group))
        block_q = block_m // group
        tiles = triton.cdiv(few, block_q)
        chunks = num_chunks(batch.max_seq_len)
        slots = tiles * block_q
        rows, processors = requests * tiles * kv_heads, num_processors(q.device)
        deep = 2 * rows <= processors
        shares = max(1, min(chunks, (processors if deep else config.few_programs * processors) // rows))
        whole = shares == 1
        # Several shares are taken where rows are few: about 1 MB a chunk at most, for heads of 128.
        cells = 1 if whole else requests * slots * heads * chunks
        partial = torch.empty(cells, size, dtype=torch.float32, device=q.device)
        lse = torch.empty(cells, dtype=torch.float32, device=q.device)
        attend_few_kernel[(requests * tiles, kv_heads, shares)](
            q, keys, values, out, partial, lse, inputs.counters.of(rows),
            batch.block_table, batch.query_start_loc, batch.seq_lens, batch.block_table.stride(0),
            scale, softcap or 0.0, chunks, few, tiles, BLOCK_Q=block_q, BLOCK_M=block_m,
            BLOCK_N=max(16, config.few_block_n // wide), WHOLE=whole,
            num_warps=config.few_warps, num_stages=config.deep_stages if deep else config.few_stages, **common,
        )  # fmt: skip
    if inputs.many:
        for many in (config.large, config.many):
            block_m = max(16, many.block_m // wide, triton.next_power_of_2(group))
            block_q = block_m // group
            if triton.cdiv(q.shape[0], block_q) * kv_heads >= num_processors(q.device):
                break
        attend_many_kernel[(kv_heads, triton.cdiv(q.shape[0], block_q) + requests)](
            q, keys, values, out, batch.block_table, batch.query_start_loc, batch.seq_lens, requests,
            batch.block_table.stride(0), scale, softcap or 0.0, inputs.few_tokens, BLOCK_Q=block_q,
            BLOCK_M=block_m, BLOCK_N=max(16, many.block_n // wide),
            num_warps=many.num_warps, num_stages=many.num_stages, **common,
        )  # fmt: skip
    return out
