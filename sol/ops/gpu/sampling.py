"""From logits to tokens on the device: the twin of `sol.sampling.batched.sample_rows`.

Three launches for any mix of rows. The first finds, for rows with a cut (top_k, top_p, min_p), the least logit that
may be sampled: a bisection over the bits of float32, in which order is that of integers, so that nothing is sorted and
a row without a cut costs nothing. It searches among the tokens that are not hopeless, which it gathers first: usually
a few hundred. Only where they are too many or not enough does it search the whole row. The second takes the best of
logits plus Gumbel noise in each part of the vocabulary, the third the best of those. Greedy rows have no noise. The
noise has the bits of `sol.sampling.noise` (SplitMix64), and its two logarithms are those of CUDA's library, as torch
takes them on a GPU.

What bounds it: reading the logits once (the second), and for cut rows two or three passes of one multiprocessor over
a row that lies in the L2 cache; up to 70 where the distribution is so flat that thousands of tokens are likely.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from sol.ops.gpu.launch import INTERPRETED

_CHUNK: Final = 4096
_SCAN: Final = 8192
_CAPACITY: Final = 16384
"""Of a row's gathered tokens."""

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
_MIX_2 = tl.constexpr(0x94D049BB133111EB - (1 << 64))
_LOWEST = tl.constexpr(-(2**31))
_HIGHEST = tl.constexpr(2**31 - 1)
_STEPS = tl.constexpr(33)
_HOPE = tl.constexpr(8.0)
"""A token is hopeless if it is e^8, about 3000, times less likely than the likeliest."""


def sample_rows(
    logits: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    parameters: tuple[torch.Tensor, ...],
    token_ids: torch.Tensor,
    last_token_ids: torch.Tensor,
) -> None:
    """logits [S, V] float32, contiguous → `token_ids` [S] int64; -1 where logits are not numbers.

    `rows` [S] int64 says which entry of `parameters` (the tensors of `sol.sampling.batched.SamplingParameters`, in
    their order) is whose; `seq_lens` [S] int32 how many tokens a request has already. What is sampled also goes to
    `last_token_ids[rows]` (int64), from where the next step reads its input; 0 for -1.
    """
    count, vocabulary = logits.shape
    chunks = triton.cdiv(vocabulary, _CHUNK)
    device = logits.device
    gathered = torch.empty((count, _CAPACITY), dtype=torch.float32, device=device)
    threshold = torch.empty(count, dtype=torch.float32, device=device)
    best = torch.empty((count, chunks), dtype=torch.float32, device=device)
    best_ids = torch.empty((count, chunks), dtype=torch.int32, device=device)
    temperature, top_k, top_p, log_min_p, choice_key, num_prompt_tokens = parameters
    _threshold_kernel[(count,)](
        logits,
        rows,
        temperature,
        top_k,
        top_p,
        log_min_p,
        gathered,
        threshold,
        vocabulary,
        CAPACITY=_CAPACITY,
        BLOCK=_SCAN,
        num_warps=16,
    )
    _best_kernel[(count, chunks)](
        logits,
        rows,
        seq_lens,
        temperature,
        choice_key,
        num_prompt_tokens,
        threshold,
        best,
        best_ids,
        vocabulary,
        BLOCK=_CHUNK,
        INTERPRETED=INTERPRETED,
        num_warps=8,
    )
    _pick_kernel[(count,)](
        best, best_ids, rows, token_ids, last_token_ids, chunks, BLOCK=triton.next_power_of_2(chunks), num_warps=1
    )


@triton.jit
def _ordered(x):
    """int64 whose order is that of the float32s; their bits but for the sign."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _unordered(key):
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _threshold_kernel(
    logits,
    rows,
    temperatures,
    top_ks,
    top_ps,
    log_min_ps,
    gathered,
    thresholds,
    vocabulary,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0)
    row = tl.load(rows + index)
    temperature = tl.load(temperatures + row)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    log_min_p = tl.load(log_min_ps + row)
    if (temperature == 0.0) | ((top_k == 0) & (top_p >= 1.0) & (log_min_p == -float("inf"))):
        tl.store(thresholds + index, -float("inf"))
        return
    start = logits + index.to(tl.int64) * vocabulary
    few = gathered + index.to(tl.int64) * CAPACITY
    offsets = tl.arange(0, BLOCK)
    high = tl.full([BLOCK], -float("inf"), tl.float32)
    for first in range(0, vocabulary, BLOCK):
        mask = first + offsets < vocabulary
        high = tl.maximum(high, tl.load(start + first + offsets, mask, other=-float("inf")))
    most = tl.div_rn(tl.max(high), temperature)
    least = most - _HOPE
    num_few = tl.full([], 0, tl.int32)
    for first in range(0, vocabulary, BLOCK):
        mask = first + offsets < vocabulary
        scaled = tl.div_rn(tl.load(start + first + offsets, mask, other=0.0), temperature)
        hopeful = (mask & (scaled >= least)).to(tl.int32)
        places = num_few + tl.cumsum(hopeful, 0) - 1
        tl.store(few + places, scaled, (hopeful > 0) & (places < CAPACITY))
        num_few += tl.sum(hopeful)
    tl.debug_barrier()  # what one thread has stored others read
    fits = num_few <= CAPACITY
    threshold = _ordered(most + log_min_p)
    # Both searches halve a range of 33-bit keys until one is left.
    if (top_k > 0) & (top_k < vocabulary):
        source, length, divisor = _choose(fits & (num_few >= top_k), few, num_few, start, vocabulary, temperature)
        enough = tl.full([], _LOWEST, tl.int64)  # top_k tokens or more are there or above
        too_few = _ordered(most) + 1
        for _ in range(_STEPS):
            if too_few - enough > 1:
                middle = enough + (too_few - enough) // 2
                found = _count(source, length, divisor, middle, BLOCK)
                if found >= top_k:
                    enough = middle
                else:
                    too_few = middle
                if found == top_k:
                    too_few = middle + 1
        threshold = tl.maximum(threshold, enough)
    if top_p < 1.0:
        # Of what is left, tokens stay while the mass of those above them is less than top_p of all of it.
        too_much = threshold - 1
        little = _ordered(most)
        complete = fits & (threshold >= _ordered(least))
        source, length, divisor = _choose(complete, few, num_few, start, vocabulary, temperature)
        mass, _, _ = _mass(source, length, divisor, most, too_much, BLOCK)
        wanted = top_p * mass
        if fits & (threshold < _ordered(least)):
            mass, _, _ = _mass(few, num_few, 1.0, most, too_much, BLOCK)
            source, length, divisor = _choose(mass >= wanted, few, num_few, start, vocabulary, temperature)
        for _ in range(_STEPS):
            if little - too_much > 1:
                middle = too_much + (little - too_much) // 2
                mass, below, above = _mass(source, length, divisor, most, middle, BLOCK)
                # Keys between two tokens are all the same to the mass: go to the next token at once.
                if mass < wanted:
                    little = tl.maximum(below, too_much + 1)
                else:
                    too_much = tl.minimum(above, little) - 1
        threshold = little
    tl.store(thresholds + index, _unordered(threshold))


@triton.jit
def _choose(first, few, num_few, start, vocabulary, temperature):
    """Where to search: tokens gathered, which are divided by the temperature already, or all of them."""
    source = start
    length = vocabulary
    divisor = temperature
    if first:
        source = few
        length = num_few
        divisor = 1.0
    return source, length, divisor


@triton.jit
def _count(start, vocabulary, temperature, key, BLOCK: tl.constexpr):
    """How many tokens of a row lie at `key` or above."""
    offsets = tl.arange(0, BLOCK)
    counts = tl.zeros([BLOCK], tl.int32)
    for first in range(0, vocabulary, BLOCK):
        mask = first + offsets < vocabulary
        scaled = tl.div_rn(tl.load(start + first + offsets, mask, other=0.0), temperature)
        counts += (mask & (_ordered(scaled) >= key)).to(tl.int32)
    return tl.sum(counts)


@triton.jit
def _mass(start, vocabulary, temperature, most, key, BLOCK: tl.constexpr):
    """Σ exp(x - most) over the tokens of a row that lie above `key`, and the keys of the tokens next to it.

    A larger set never sums up to less. The tokens are the last one at `key` or below, and the first one above.
    """
    offsets = tl.arange(0, BLOCK)
    masses = tl.zeros([BLOCK], tl.float32)
    below = tl.full([BLOCK], _LOWEST, tl.int32)
    above = tl.full([BLOCK], _HIGHEST, tl.int32)
    for first in range(0, vocabulary, BLOCK):
        mask = first + offsets < vocabulary
        scaled = tl.div_rn(tl.load(start + first + offsets, mask, other=0.0), temperature)
        keys = _ordered(scaled).to(tl.int32)
        higher = mask & (keys > key)
        masses += tl.where(higher, tl.exp(scaled - most), 0.0)
        below = tl.maximum(below, tl.where(mask & (keys <= key), keys, _LOWEST))
        above = tl.minimum(above, tl.where(higher, keys, _HIGHEST))
    return tl.sum(masses), tl.max(below).to(tl.int64), tl.min(above).to(tl.int64)


@triton.jit
def _mix(bits):
    bits = (bits ^ ((bits >> 30) & ((1 << 34) - 1))) * _MIX_1
    bits = (bits ^ ((bits >> 27) & ((1 << 37) - 1))) * _MIX_2
    return bits ^ ((bits >> 31) & ((1 << 33) - 1))


@triton.jit
def _gumbel(key, token_ids, INTERPRETED: tl.constexpr):
    """`sol.sampling.noise.gumbel`."""
    bits = (_mix((token_ids.to(tl.int64) + 1) * _GOLDEN + key) >> 11) & ((1 << 53) - 1)
    uniform = bits.to(tl.float32) * 1.1102230246251565e-16
    uniform = tl.minimum(tl.maximum(uniform, 5.551115123125783e-17), 0.99999994)
    if INTERPRETED:  # the interpreter has no library; three terms of log1p's series suffice where 1 - u is inexact
        near = uniform + uniform * uniform * (0.5 + uniform * 0.33333334)
        return -tl.log(tl.where(uniform < 0.001, near, -tl.log(1.0 - uniform)))
    return -libdevice.log(-libdevice.log1p(-uniform))


@triton.jit
def _best_kernel(
    logits,
    rows,
    seq_lens,
    temperatures,
    choice_keys,
    num_prompt_tokens,
    thresholds,
    best,
    best_ids,
    vocabulary,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    index = tl.program_id(0)
    chunk = tl.program_id(1)
    row = tl.load(rows + index)
    temperature = tl.load(temperatures + row)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    mask = ids < vocabulary
    scores = tl.load(logits + index.to(tl.int64) * vocabulary + ids, mask, other=-float("inf"))
    bad = tl.max(((scores != scores) | (scores == float("inf"))).to(tl.int32))
    if temperature != 0.0:
        scores = tl.div_rn(scores, temperature)
        kept = mask & (scores >= tl.load(thresholds + index))
        if tl.max(kept.to(tl.int32)) > 0:
            position = tl.load(seq_lens + index).to(tl.int64) - tl.load(num_prompt_tokens + row)
            key = _mix((position + 1) * _GOLDEN + tl.load(choice_keys + row))
            scores = tl.where(kept, scores + _gumbel(key, ids, INTERPRETED), -float("inf"))
        else:
            scores = tl.full([BLOCK], -float("inf"), tl.float32)
    value, place = tl.max(scores, axis=0, return_indices=True)
    chunks = tl.num_programs(1)
    tl.store(best + index * chunks + chunk, tl.where(bad > 0, float("inf"), value))
    tl.store(best_ids + index * chunks + chunk, chunk * BLOCK + place)


@triton.jit
def _pick_kernel(best, best_ids, rows, token_ids, last_token_ids, chunks, BLOCK: tl.constexpr):
    index = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    values = tl.load(best + index * chunks + offsets, offsets < chunks, other=-float("inf"))
    value, place = tl.max(values, axis=0, return_indices=True)
    token_id = tl.load(best_ids + index * chunks + place).to(tl.int64)
    finite = (value < float("inf")) & (value > -float("inf"))
    tl.store(token_ids + index, tl.where(finite, token_id, -1))
    tl.store(last_token_ids + tl.load(rows + index), tl.where(finite, token_id, 0))
