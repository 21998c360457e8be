"""Paged attention in Triton: one pass over a request's keys and values for all query heads that share them.

`_attend_few_kernel` is for requests with few query tokens (decoding, verification): query tokens and the query heads of
one key/value head stand together in the rows of a tile, and a long context is cut into chunks (`sol.ops.gpu.chunks`)
that several programs work on; the one that ends last adds up the chunks' results. `_attend_many_kernel` is for the
others (prefill, chunks of it): larger tiles, one program for all of a tile's context (FlashAttention-2,
arXiv:2307.08691).

Which of the two computes a request depends on its own number of query tokens alone. Both take a whole batch and leave
out the requests that are the other's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sol.ops.gpu.batch import DeviceBatch
from sol.ops.gpu.chunks import FIRST_SIZE, chunk_of, chunk_of_each, chunk_start, num_chunks
from sol.ops.gpu.launch import DOT_PRECISION, Counters, has_large_tiles, num_processors, pdl_options, prefetch_l2

FEW = 16
"""The most query tokens of a request that `_attend_few_kernel` takes"""
LOG2E = tl.constexpr(1.4426950408889634)
SUM_STAGES = tl.constexpr(4)
"""Chunks whose results are on their way while they are added up"""


@triton.jit
def _attend_block(
    q,
    m,
    total,
    acc,
    keys,
    values,
    table,
    n0,
    end,
    position,
    scale,
    softcap,
    kv_head,
    d,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One step of online softmax: keys n0 to n0 + BLOCK_N, of which those from `end` on are not there.

    q [M, BLOCK_D], m and total [M], acc [M, BLOCK_D] float32, position [M].
    """
    n = n0 + tl.arange(0, BLOCK_N)
    if MASKED:
        page = tl.load(table + n // PAGE, mask=n < end, other=0)
    else:
        page = tl.load(table + n // PAGE)
    # 32 bits where they are enough: addresses take most of the registers.
    row = (page.to(tl.int64 if WIDE else tl.int32) * PAGE + n % PAGE) * (KV_HEADS * SIZE) + kv_head * SIZE
    cells = row[:, None] + d[None, :]
    if MASKED and BLOCK_D == SIZE:
        k = tl.load(keys + cells, mask=(n < end)[:, None], other=0.0)
    elif MASKED:
        k = tl.load(keys + cells, mask=(n < end)[:, None] & (d < SIZE)[None, :], other=0.0)
    elif BLOCK_D == SIZE:
        k = tl.load(keys + cells)
    else:
        k = tl.load(keys + cells, mask=(d < SIZE)[None, :], other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision=DOT_PRECISION)
    factor = scale * LOG2E
    if SOFTCAP:
        # tanh(y) = 1 - 2 / (e^2y + 1), right at both ends.
        scores = softcap * LOG2E * (1.0 - 2.0 / (tl.exp(scores * (2.0 * scale / softcap)) + 1.0))
        factor = 1.0
    if MASKED:
        seen = (n < end)[None, :] & (n[None, :] <= position[:, None])
        if WINDOW > 0:
            seen &= n[None, :] > position[:, None] - WINDOW
        scores = tl.where(seen, scores, float("-inf"))
    new_m = tl.maximum(m, tl.max(scores, 1) * factor)
    base = tl.where(new_m == float("-inf"), 0.0, new_m)
    p = tl.exp2(scores * factor - base[:, None])
    decay = tl.exp2(m - base)
    total = total * decay + tl.sum(p, 1)
    acc *= decay[:, None]
    if MASKED and BLOCK_D == SIZE:
        v = tl.load(values + cells, mask=(n < end)[:, None], other=0.0)
    elif MASKED:
        v = tl.load(values + cells, mask=(n < end)[:, None] & (d < SIZE)[None, :], other=0.0)
    elif BLOCK_D == SIZE:
        v = tl.load(values + cells)
    else:
        v = tl.load(values + cells, mask=(d < SIZE)[None, :], other=0.0)
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=DOT_PRECISION)
    return new_m, total, acc


@triton.jit(do_not_specialize=["max_chunks", "few_tokens", "tiles"])
def _attend_few_kernel(
    q,
    keys,
    values,
    out,
    partial,
    partial_lse,
    counters,
    block_table,
    query_start_loc,
    seq_lens,
    stride_table,
    scale,
    softcap,
    max_chunks,
    few_tokens,
    tiles,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs: (request · tile of query tokens, key/value head, share of the chunks)."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    request = tl.program_id(0) // tiles
    first = (tl.program_id(0) % tiles) * BLOCK_Q
    kv_head = tl.program_id(1)
    start = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - start
    seq_len = tl.load(seq_lens + request)
    last = seq_len - query_len + tl.minimum(first + BLOCK_Q, query_len) - 1
    chunks = chunk_of(last) + 1
    first_chunk = 0
    if WINDOW > 0:
        first_chunk = chunk_of(tl.maximum(seq_len - query_len + first - WINDOW + 1, 0))
    # Each program has some neighbouring chunks; the last ones may have none.
    each = (chunks - first_chunk + tl.num_programs(2) - 1) // tl.num_programs(2)
    chunk = first_chunk + tl.program_id(2) * each
    table = block_table + request.to(tl.int64) * stride_table
    mine = (query_len <= few_tokens) & (first < query_len)
    if PDL:
        gdc_launch_dependents()
        # Earlier tokens' keys and values are there already.
        if mine & (chunk < chunks):
            n = tl.minimum(chunk_start(chunk) + tl.arange(0, FIRST_SIZE), last)
            page = tl.load(table + n // PAGE).to(tl.int64)
            LINE: tl.constexpr = 128 // (keys.dtype.element_ty.primitive_bitwidth // 8)
            cells = ((page * PAGE + n % PAGE) * KV_HEADS + kv_head) * SIZE
            lines = tl.minimum(tl.arange(0, BLOCK_D // LINE if BLOCK_D > LINE else 1) * LINE, SIZE - 1)
            prefetch_l2(keys + cells[:, None] + lines[None, :])
            prefetch_l2(values + cells[:, None] + lines[None, :])
        gdc_wait()
    if (mine == 0) | (chunk >= chunks):
        return
    i = tl.arange(0, BLOCK_M)
    token = first + i // GROUP
    head = kv_head * GROUP + i % GROUP
    valid = (i < BLOCK_Q * GROUP) & (token < query_len)
    position = seq_len - query_len + token
    d = tl.arange(0, BLOCK_D)
    row = (start + token).to(tl.int64) * HEADS + head
    mask = valid[:, None] & (d < SIZE)[None, :]
    queries = tl.load(q + row[:, None] * SIZE + d[None, :], mask=mask, other=0.0)
    # Of each row: its own last position; another row of the tile may see further.
    own_last = seq_len - query_len + tl.minimum(token, query_len - 1)
    cell = ((request * (tiles * BLOCK_Q) + token).to(tl.int64) * HEADS + head) * max_chunks
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    end = tl.minimum(chunk_start(chunk + each), last + 1)
    # One loop over all its chunks: the next chunk's keys are on their way while one is finished.
    begin = chunk_start(chunk)
    for n0 in range(begin, end, BLOCK_N):
        m, total, acc = _attend_block(
            queries, m, total, acc, keys, values, table, n0, end, position, scale, softcap, kv_head, d,
            KV_HEADS, SIZE, PAGE, WINDOW, SOFTCAP, BLOCK_N, BLOCK_D, WIDE, True,
        )  # fmt: skip
        next_start = chunk_start(chunk + 1)
        if n0 + BLOCK_N >= tl.minimum(next_start, end):
            result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
            # A row with one chunk is done; a row with several leaves their results to the last program.
            own_first_start = tl.maximum(own_last - WINDOW + 1, 0) if WINDOW > 0 else own_last * 0
            alone = (own_first_start >= chunk_start(chunk)) & (own_last < next_start)
            to = out + row[:, None] * SIZE + d[None, :]
            tl.store(to, result.to(out.dtype.element_ty), mask=mask & alone[:, None])
            several = valid & (alone == 0)
            tl.store(partial + (cell + chunk)[:, None] * SIZE + d[None, :], result, mask=mask & several[:, None])
            lse = tl.where(total > 0.0, m + tl.log2(tl.where(total > 0.0, total, 1.0)), float("-inf"))
            tl.store(partial_lse + cell + chunk, lse, mask=several)
            chunk += 1
            m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
            total = tl.zeros((BLOCK_M,), tl.float32)
            acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    if chunks - first_chunk == 1:
        return
    # The program of a tile and head that ends last adds up the chunks, in their order.
    counter = counters + tl.program_id(0) * KV_HEADS + kv_head
    tl.debug_barrier()
    sharing = (chunks - first_chunk + each - 1) // each
    if tl.atomic_add(counter, 1, sem="acq_rel") != sharing - 1:
        return
    tl.store(counter, 0)
    own_first = own_last * 0
    if WINDOW > 0:
        own_first = chunk_of_each(tl.maximum(own_last - WINDOW + 1, 0))
    own_chunks = chunk_of_each(own_last) + 1
    several = valid & (own_chunks - own_first > 1)
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for chunk in tl.range(first_chunk, chunks, num_stages=SUM_STAGES):
        here = several & (chunk >= own_first) & (chunk < own_chunks)
        lse = tl.load(partial_lse + cell + chunk, mask=here, other=float("-inf"), cache_modifier=".cg")
        part = tl.load(
            partial + (cell + chunk)[:, None] * SIZE + d[None, :],
            mask=mask & here[:, None],
            other=0.0,
            cache_modifier=".cg",
        )
        new_m = tl.maximum(m, lse)
        base = tl.where(new_m == float("-inf"), 0.0, new_m)
        weight = tl.exp2(lse - base)
        decay = tl.exp2(m - base)
        total = total * decay + weight
        acc = acc * decay[:, None] + part * weight[:, None]
        m = new_m
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(out + row[:, None] * SIZE + d[None, :], result.to(out.dtype.element_ty), mask=mask & several[:, None])


@triton.jit(do_not_specialize=["num_requests", "few_tokens"])
def _attend_many_kernel(
    q,
    keys,
    values,
    out,
    block_table,
    query_start_loc,
    seq_lens,
    num_requests,
    stride_table,
    scale,
    softcap,
    few_tokens,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs: (tile of query tokens, key/value head). Request r's begin at query_start_loc[r] // BLOCK_Q + r."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    # The last tiles of a request see most keys: they go first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    low = 0
    high = num_requests
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start_loc + middle) // BLOCK_Q + middle <= tile:
            low = middle + 1
        else:
            high = middle
    request = low - 1
    start = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - start
    seq_len = tl.load(seq_lens + request)
    first = (tile - (start // BLOCK_Q + request)) * BLOCK_Q
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if (query_len <= few_tokens) | (first >= query_len):
        return
    i = tl.arange(0, BLOCK_M)
    token = first + i // GROUP
    head = kv_head * GROUP + i % GROUP
    valid = (i < BLOCK_Q * GROUP) & (token < query_len)
    position = seq_len - query_len + token
    d = tl.arange(0, BLOCK_D)
    row = (start + token).to(tl.int64) * HEADS + head
    mask = valid[:, None] & (d < SIZE)[None, :]
    queries = tl.load(q + row[:, None] * SIZE + d[None, :], mask=mask, other=0.0)
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    table = block_table + request.to(tl.int64) * stride_table
    context = seq_len - query_len + first
    end = seq_len - query_len + tl.minimum(first + BLOCK_Q, query_len)
    if WINDOW > 0:
        begin = tl.maximum(context - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        whole = begin
    else:
        begin = 0
        whole = (context + 1) // BLOCK_N * BLOCK_N
    for n0 in range(begin, whole, BLOCK_N):
        m, total, acc = _attend_block(
            queries, m, total, acc, keys, values, table, n0, end, position, scale, softcap, kv_head, d,
            KV_HEADS, SIZE, PAGE, WINDOW, SOFTCAP, BLOCK_N, BLOCK_D, WIDE, False,
        )  # fmt: skip
    for n0 in range(whole, end, BLOCK_N):
        m, total, acc = _attend_block(
            queries, m, total, acc, keys, values, table, n0, end, position, scale, softcap, kv_head, d,
            KV_HEADS, SIZE, PAGE, WINDOW, SOFTCAP, BLOCK_N, BLOCK_D, WIDE, True,
        )  # fmt: skip
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(out + row[:, None] * SIZE + d[None, :], result.to(out.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Block sizes; `few_block_n` decides the order of additions."""

    few_block_n: int = 128
    few_warps: int = 4
    few_stages: int = 3
    few_programs: int = 2
    """Programs a multiprocessor that chunks are spread over"""
    many_block_m: int = 128
    many_block_n: int = 128
    many_warps: int = 8
    many_stages: int = 5


LARGE_TILES = AttentionConfig()
SMALL_TILES = AttentionConfig(few_block_n=64, many_block_m=64, many_block_n=64, many_warps=4, many_stages=3)
"""At most 96 KiB of shared memory"""


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """What attention needs besides q, for all layers of a step."""

    batch: DeviceBatch
    num_heads: int
    num_kv_heads: int
    head_dim: int
    few_tokens: int
    """Requests with at most as many query tokens go to `_attend_few_kernel`; 0: none of the batch's"""
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
        cells = requests * slots * heads * chunks if chunks > 1 else 1  # a row with one chunk needs none
        partial = torch.empty(cells, size, dtype=torch.float32, device=q.device)
        lse = torch.empty(cells, dtype=torch.float32, device=q.device)
        shares = config.few_programs * num_processors(q.device) // (requests * tiles * kv_heads)
        shares = max(1, min(chunks, shares))
        _attend_few_kernel[(requests * tiles, kv_heads, shares)](
            q, keys, values, out, partial, lse, inputs.counters.of(requests * tiles * kv_heads),
            batch.block_table, batch.query_start_loc, batch.seq_lens, batch.block_table.stride(0),
            scale, softcap or 0.0, chunks, few, tiles, BLOCK_Q=block_q, BLOCK_M=block_m,
            BLOCK_N=max(16, config.few_block_n // wide),
            num_warps=config.few_warps, num_stages=config.few_stages, **common,
        )  # fmt: skip
    if inputs.many:
        block_m = max(16, config.many_block_m // wide, triton.next_power_of_2(group))
        block_q = block_m // group
        block_n = max(16, config.many_block_n // wide)
        _attend_many_kernel[(triton.cdiv(q.shape[0], block_q) + requests, kv_heads)](
            q, keys, values, out, batch.block_table, batch.query_start_loc, batch.seq_lens, requests,
            batch.block_table.stride(0), scale, softcap or 0.0, inputs.few_tokens, BLOCK_Q=block_q,
            BLOCK_M=block_m, BLOCK_N=block_n, num_warps=config.many_warps, num_stages=config.many_stages, **common,
        )  # fmt: skip
    return out
