"""The kernels of paged attention in Triton: one pass over a request's keys and values for all query heads that share
them. `sol.ops.gpu.attention` launches them.

`attend_few_kernel` is for requests with few query tokens (decoding, verification): query tokens and the query heads of
one key/value head stand together in the rows of a tile, and a long context is cut into chunks (`sol.ops.gpu.chunks`)
that several programs work on; the one that ends last adds up the chunks' results. `attend_many_kernel` is for the
others (prefill, chunks of it): larger tiles, one program for all of a tile's context (FlashAttention-2,
arXiv:2307.08691).

Both take a whole batch and leave out the requests that are the other's.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sol.ops.gpu.chunks import FIRST_SIZE, chunk_from, chunk_of, chunk_of_each, chunk_start
from sol.ops.gpu.launch import DOT_PRECISION, prefetch_l2

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


@triton.jit
def _add_chunk(m, total, acc, lse, result):
    """Takes one chunk's result [M, BLOCK_D], and the logarithm of its weights' sum [M], into those of the chunks
    before; where a row has nothing in the chunk, `lse` is -inf."""
    new_m = tl.maximum(m, lse)
    base = tl.where(new_m == float("-inf"), 0.0, new_m)
    weight = tl.exp2(lse - base)
    decay = tl.exp2(m - base)
    return new_m, total * decay + weight, acc * decay[:, None] + result * weight[:, None]


@triton.jit(do_not_specialize=["max_chunks", "few_tokens", "tiles"])
def attend_few_kernel(
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
    WHOLE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs: (request · tile of query tokens, key/value head, share of the chunks).

    WHOLE: one share, so a program adds up its chunks itself, by the same operations, and needs no partial results.
    """
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
    # Each program has neighbouring chunks of about as many tokens, or none.
    origin = chunk_start(first_chunk)
    span = last + 1 - origin
    chunk = chunk_from(origin + span * tl.program_id(2) // tl.num_programs(2))
    until = chunk_from(origin + span * (tl.program_id(2) + 1) // tl.num_programs(2))
    own_count = until - chunk
    table = block_table + request.to(tl.int64) * stride_table
    mine = (query_len <= few_tokens) & (first < query_len)
    if PDL:
        gdc_launch_dependents()
        # Earlier tokens' keys and values are there already.
        if mine & (chunk < until):
            n = tl.minimum(chunk_start(chunk) + tl.arange(0, FIRST_SIZE), last)
            page = tl.load(table + n // PAGE).to(tl.int64)
            LINE: tl.constexpr = 128 // (keys.dtype.element_ty.primitive_bitwidth // 8)
            cells = ((page * PAGE + n % PAGE) * KV_HEADS + kv_head) * SIZE
            lines = tl.minimum(tl.arange(0, BLOCK_D // LINE if BLOCK_D > LINE else 1) * LINE, SIZE - 1)
            prefetch_l2(keys + cells[:, None] + lines[None, :])
            prefetch_l2(values + cells[:, None] + lines[None, :])
        gdc_wait()
    if (mine == 0) | (chunk >= until):
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
    if WHOLE:
        all_m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        all_total = tl.zeros((BLOCK_M,), tl.float32)
        all_acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    end = tl.minimum(chunk_start(until), last + 1)
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
            lse = tl.where(total > 0.0, m + tl.log2(tl.where(total > 0.0, total, 1.0)), float("-inf"))
            if WHOLE:
                all_m, all_total, all_acc = _add_chunk(all_m, all_total, all_acc, lse, result)
            else:
                # A row with one chunk is done; a row with several leaves their results to the last program.
                own_first_start = tl.maximum(own_last - WINDOW + 1, 0) if WINDOW > 0 else own_last * 0
                alone = (own_first_start >= chunk_start(chunk)) & (own_last < next_start)
                to = out + row[:, None] * SIZE + d[None, :]
                tl.store(to, result.to(out.dtype.element_ty), mask=mask & alone[:, None])
                several = valid & (alone == 0)
                tl.store(partial + (cell + chunk)[:, None] * SIZE + d[None, :], result, mask=mask & several[:, None])
                tl.store(partial_lse + cell + chunk, lse, mask=several)
            chunk += 1
            m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
            total = tl.zeros((BLOCK_M,), tl.float32)
            acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    if WHOLE:
        result = all_acc / tl.where(all_total > 0.0, all_total, 1.0)[:, None]
        tl.store(out + row[:, None] * SIZE + d[None, :], result.to(out.dtype.element_ty), mask=mask)
        return
    if chunks - first_chunk == 1:
        return
    # The program of a tile and head that ends last adds up the chunks, in their order.
    counter = counters + tl.program_id(0) * KV_HEADS + kv_head
    tl.debug_barrier()
    others = chunks - first_chunk - own_count
    ended = others
    if others > 0:
        ended = tl.atomic_add(counter, own_count, sem="acq_rel")
    if ended != others:
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
        m, total, acc = _add_chunk(m, total, acc, lse, part)
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(out + row[:, None] * SIZE + d[None, :], result.to(out.dtype.element_ty), mask=mask & several[:, None])


@triton.jit(do_not_specialize=["num_requests", "few_tokens"])
def attend_many_kernel(
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
    """Programs: (key/value head, tile of query tokens). Request r's begin at query_start_loc[r] // BLOCK_Q + r."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    # The last tiles of a request see most keys: of all heads they go first.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    kv_head = tl.program_id(0)
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
