"""The kernels against the reference ops in float32, and bit for bit against themselves in other company."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import torch
from gpu_model import BLOCK_SIZE, SMALL, DecodeBatch, Shape, make_program

from sol.ops import Dense, KVCache, Linear, Norm, Program, RaggedBatch, run
from sol.ops.gpu import attention
from sol.ops.gpu.launch import num_processors
from sol.ops.gpu.ops import GpuOps
from sol.ops.program import AttentionInput, MlpInput, PagedAttention, ProjectResidual
from sol.ops.reference import ReferenceOps

REFERENCE = ReferenceOps()
BOUND = 1e-2
"""‖found − expected‖ / ‖expected‖ of a 16-bit result, beyond which a kernel is wrong"""


class Check:
    def __init__(self, add: Callable[..., None]) -> None:
        self._add = add
        self.failed = 0

    def close(self, name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
        error = float((found.double() - expected.double()).norm() / expected.double().norm())
        self._report(name, error < BOUND, error=error)

    def same(self, name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
        self._report(name, torch.equal(found, expected), differing=int((found != expected).sum()))

    def _report(self, name: str, passed: bool, **values: float) -> None:
        self.failed += not passed
        self._add("check" if passed else "FAILED", name=name, **values)


def wide(value: Norm | Linear) -> Norm | Linear:
    """The same in float32."""
    if isinstance(value, Norm):
        return Norm(value.weight.float(), value.eps)
    return Linear(tuple(Dense(s.weight.float()) for s in value.segments), value.bias)


def ragged(shape: Shape, query_lens: list[int], seq_lens: list[int], device: torch.device) -> RaggedBatch:
    needed = [-(-length // BLOCK_SIZE) for length in seq_lens]
    order = torch.randperm(sum(needed) + 3)
    table = torch.zeros(len(needed), max(needed), dtype=torch.int64)
    positions, slots = [], []
    used = 0
    for row, (query_len, seq_len, blocks) in enumerate(zip(query_lens, seq_lens, needed, strict=True)):
        table[row, :blocks] = order[used : used + blocks]
        used += blocks
        position = torch.arange(seq_len - query_len, seq_len)
        positions.append(position)
        slots.append(table[row][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
    tokens = torch.randint(shape.vocabulary, (sum(query_lens),))
    rows = torch.tensor(query_lens).cumsum(0) - 1
    return RaggedBatch(
        token_ids=tokens.to(device),
        positions=torch.cat(positions).to(device),
        slot_mapping=torch.cat(slots).to(device),
        block_table=table.to(device),
        query_lens=query_lens,
        seq_lens=seq_lens,
        logits_rows=rows.to(device),
    )


PARTS = ("projections", "attention", "bits")


def check(add: Callable[..., None], shape: Shape, device: torch.device, part: str) -> int:
    """Returns how many comparisons of one of `PARTS` failed."""
    result = Check(add)
    on_cpu = device.type == "cpu"
    if part == "projections":
        _projections(result, shape, device, torch.float16, (6, 100))
        if not on_cpu:
            _projections(result, shape, device, torch.bfloat16, (1, 6, 16, 17, 40, 64, 100))
    elif part == "attention":
        small = shape is SMALL
        sizes = ((16, 4, 2), (64, 6, 2)) if small else ((128, 32, 8), (64, 9, 3), (80, 32, 1), (256, 16, 8))
        for size, heads, kv_heads in sizes:
            _attention(result, replace(shape, layers=1, size=size, heads=heads, kv_heads=kv_heads), device, small)
    else:
        _same_bits(result, shape, device)
    return result.failed


def _projections(
    result: Check, shape: Shape, device: torch.device, dtype: torch.dtype, counts: tuple[int, ...]
) -> None:
    program = make_program(replace(shape, layers=1), device, dtype)
    attention_input, _, output, mlp_input, down = program.body
    assert isinstance(attention_input, AttentionInput)
    assert isinstance(output, ProjectResidual)
    assert isinstance(mlp_input, MlpInput)
    assert isinstance(down, ProjectResidual)
    ops = GpuOps(device)
    for tokens in counts:
        name = f"[{tokens} tokens, {str(dtype).removeprefix('torch.')}]"
        x = torch.randn(tokens, shape.hidden, device=device, dtype=dtype)
        h = torch.randn(tokens, shape.intermediate, device=device, dtype=dtype)
        batch = ragged(shape, [tokens], [tokens + 5], device)
        cache = KVCache(DecodeBatch(replace(shape, layers=1), 1, 16 * 10, 1, device, dtype=dtype).cache)
        twin = KVCache(cache.data.float())
        q = ops.attention_input(x, attention_input, ops.prepare(program, batch, cache))
        plan = REFERENCE.prepare(_widened(program), batch, twin)
        wide_op = replace(attention_input, norm=wide(attention_input.norm), qkv=wide(attention_input.qkv))
        result.close("q" + name, q, REFERENCE.attention_input(x.float(), wide_op, plan))
        result.close("cache" + name, cache.data, twin.data)
        found = ops.project_residual(h, down.weight, x.clone())
        result.close("down" + name, found, REFERENCE.project_residual(h.float(), wide(down.weight), x.float()))
        a = torch.randn(tokens, shape.heads * shape.size, device=device, dtype=dtype)
        found = ops.project_residual(a, output.weight, x.clone())
        result.close("o" + name, found, REFERENCE.project_residual(a.float(), wide(output.weight), x.float()))
        wide_mlp = MlpInput(norm=wide(mlp_input.norm), gate_up=wide(mlp_input.gate_up))
        result.close("gate_up" + name, ops.mlp_input(x, mlp_input), REFERENCE.mlp_input(x.float(), wide_mlp))
        norm, head = program.final_norm, program.head
        result.close("head" + name, ops.logits(x, norm, head), REFERENCE.logits(x.float(), wide(norm), wide(head)))


def _widened(program: Program) -> Program:
    return replace(program, embedding=Dense(program.embedding.weight.float()))


def _attention(result: Check, shape: Shape, device: torch.device, small: bool) -> None:
    program = make_program(replace(shape, hidden=64, intermediate=64, vocabulary=64), device)
    scale = 10 if small else 1
    batches = {
        "decoding": ([1] * 5, [1, 128, 257, 1000 // scale, 4500 // scale]),
        "verification": ([6, 1, 16], [6, 258, 1030 // scale]),
        "mix": ([1, 300 // scale, 7, 17], [700 // scale, 300 // scale, 900 // scale, 600 // scale]),
        # Enough for the large tiles, whatever the heads.
        "prompts": ([4100 // scale, 40], [4100 // scale, 900 // scale]),
    }
    ops = GpuOps(device)
    for name, (query_lens, seq_lens) in batches.items():
        batch = ragged(shape, query_lens, seq_lens, device)
        blocks = sum(-(-n // BLOCK_SIZE) for n in seq_lens) + 3
        dtype = program.final_norm.weight.dtype
        data = torch.randn(1, 2, blocks, BLOCK_SIZE, shape.kv_heads, shape.size, device=device).to(dtype)
        q = torch.randn(sum(query_lens), shape.heads, shape.size, device=device).to(dtype)
        # One multiprocessor has large tiles for its prompts, and whole contexts of its requests.
        processors = (num_processors(device), 1) if small else (num_processors(device),)
        for (window, softcap), count in itertools.product(((None, None), (100, 2.0)), processors):
            op = PagedAttention(layer=0, scale=shape.size**-0.5, window=window, softcap=softcap)
            cache, twin = KVCache(data), KVCache(data.float())
            with mock.patch.object(attention, "num_processors", return_value=count):
                found = ops.paged_attention(q, op, ops.prepare(program, batch, cache))
            plan = REFERENCE.prepare(_widened(program), batch, twin)
            expected = REFERENCE.paged_attention(q.float(), op, plan)
            where = f"{shape.heads}/{shape.kv_heads} heads of {shape.size}, window {window}, softcap {softcap}"
            if small:
                where += f", {count} processors"
            result.close(f"attention[{name}, {where}]", found, expected)


def _same_bits(result: Check, shape: Shape, device: torch.device) -> None:
    """Steps of 1 to 16 tokens are one numerics class: whatever else is in a step, a token's logits are the same."""
    shape = replace(shape, layers=min(shape.layers, 2))
    program = make_program(shape, device)
    ops = GpuOps(device)
    for context in (20, 259, 4099):
        if context > shape.max_len:
            continue
        verify = DecodeBatch(shape, 1, context, 6, device)
        cache = KVCache(verify.cache)
        together = run(program, ops, verify.batch, cache)
        written = cache.data.clone()
        alone = []
        for token in range(6):
            part = slice(token, token + 1)
            length = context - 5 + token
            single = replace(
                verify.batch,
                token_ids=verify.batch.token_ids[part],
                positions=verify.batch.positions[part],
                slot_mapping=verify.batch.slot_mapping[part],
                query_start_loc=torch.tensor([0, 1], dtype=torch.int32, device=device),
                seq_lens=torch.tensor([length], dtype=torch.int32, device=device),
                max_query_len=1,
                max_seq_len=length,
            )
            alone.append(run(program, ops, single, cache))
        result.same(f"verify = decode[{context}]", torch.cat(alone), together)
        result.same(f"verified cache = decoded cache[{context}]", cache.data, written)
    _same_attention(result, shape, device)
    for count in (2, 16):
        many = DecodeBatch(shape, count, 300, 1, device)
        cache = KVCache(many.cache)
        together = run(program, ops, many.batch, cache)
        first = replace(
            many.batch,
            token_ids=many.batch.token_ids[:1],
            positions=many.batch.positions[:1],
            slot_mapping=many.batch.slot_mapping[:1],
            block_table=many.batch.block_table[:1],
            query_start_loc=many.batch.query_start_loc[:2],
            seq_lens=many.batch.seq_lens[:1],
        )
        result.same(f"one of {count} = alone", run(program, ops, first, cache), together[:1])
        result.same(f"the same twice[{count}]", run(program, ops, many.batch, cache), together)


def _same_attention(result: Check, shape: Shape, device: torch.device) -> None:
    """A row's chunks are added up by the program that computed them all, or by the last of several."""
    program = make_program(replace(shape, layers=1, hidden=64, intermediate=64, vocabulary=64), device)
    ops, op = GpuOps(device), PagedAttention(layer=0, scale=shape.size**-0.5)
    lengths = [300, 511, 513] if device.type == "cpu" else [300, 1500, 2049, 4500] * 40
    batch = ragged(shape, [1] * len(lengths), lengths, device)
    blocks = sum(-(-n // BLOCK_SIZE) for n in lengths) + 3
    data = torch.randn(1, 2, blocks, BLOCK_SIZE, shape.kv_heads, shape.size, device=device)
    cache = KVCache(data.to(program.final_norm.weight.dtype))
    q = torch.randn(len(lengths), shape.heads, shape.size, device=device).to(cache.data.dtype)
    together = ops.paged_attention(q, op, ops.prepare(program, batch, cache))
    for row, length in enumerate(lengths[:4]):
        part = slice(row, row + 1)
        single = replace(
            batch,
            token_ids=batch.token_ids[part],
            positions=batch.positions[part],
            slot_mapping=batch.slot_mapping[part],
            block_table=batch.block_table[part],
            query_lens=[1],
            seq_lens=[length],
            logits_rows=batch.logits_rows[:1],
        )
        alone = ops.paged_attention(q[part], op, ops.prepare(program, single, cache))
        result.same(f"attention of one of {len(lengths)} = alone[{length}]", alone, together[part])
