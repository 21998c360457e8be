"""The Triton kernels against the reference ops, interpreted on the CPU with small shapes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton")

from gpu_batches import Shape, make_batch, make_program, normal

from sol.ops import Dense, KVCache, Linear, Norm, RaggedBatch, Rope, run
from sol.ops.gpu import attention, elementwise
from sol.ops.gpu import linear as tuned
from sol.ops.gpu.attention import AttentionConfig, AttentionInputs, ManyConfig, attend
from sol.ops.gpu.chunks import num_chunks
from sol.ops.gpu.launch import Counters
from sol.ops.gpu.linear import linear, linear_residual
from sol.ops.gpu.ops import GpuOps, _on_device
from sol.ops.gpu.tuning import LinearConfig, linear_config, token_class
from sol.ops.program import AttentionInput, MlpInput, Moe, PagedAttention, ProjectResidual
from sol.ops.reference import ReferenceOps

CPU = torch.device("cpu")
REFERENCE = ReferenceOps()
SMALL = LinearConfig(block_tokens=16, block_rows=16, block_k=32, split_k=1, num_warps=4, num_stages=2, early=True)


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    """By the norm of the error: the rounding of `dtype` (default: the tensors' own), a few times over."""
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    bound = 1e-5 if (dtype or found.dtype) == torch.float32 else 3e-3
    assert error < bound, f"relative error {error:.2e}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("tokens", "rows", "columns"), [(1, 32, 64), (5, 40, 96), (16, 48, 80), (40, 24, 64)])
def test_linear(dtype: torch.dtype, tokens: int, rows: int, columns: int) -> None:
    x, weight, bias = normal(tokens, columns).to(dtype), normal(rows, columns, seed=1).to(dtype), normal(rows).to(dtype)
    out = torch.full((tokens, rows), float("nan"), dtype=torch.float32)
    linear(x, weight, out, Counters(CPU), bias=bias)
    close(out, functional.linear(x.float(), weight.float(), bias.float()), dtype)


@pytest.mark.parametrize("split_k", [1, 2, 3])
@pytest.mark.parametrize("biased", [False, True])
def test_residual_with_split_columns(split_k: int, biased: bool) -> None:
    x, weight, residual = normal(3, 160), normal(40, 160, seed=1), normal(3, 40, seed=2)
    bias = normal(40, seed=3) if biased else None
    counters = Counters(CPU)
    config = replace(SMALL, split_k=split_k)
    for _ in range(2):  # the counters are zero again
        out = residual.clone()
        linear_residual(x, weight, out, counters, bias=bias, config=config)
        close(out, REFERENCE.project_residual(x, Linear((Dense(weight),), bias), residual))
    assert not counters.of(1).any()


@pytest.mark.parametrize("split_k", [1, 2])
def test_a_token_has_the_same_bits_with_other_tokens_or_none(split_k: int) -> None:
    x, weight, residual = normal(16, 128), normal(32, 128, seed=1), normal(16, 32, seed=2)
    config = replace(SMALL, split_k=split_k)
    together = residual.clone()
    linear_residual(x, weight, together, Counters(CPU), config=config)
    for token in (0, 7, 15):
        alone = residual[token : token + 1].clone()
        linear_residual(x[token : token + 1], weight, alone, Counters(CPU), config=config)
        assert torch.equal(alone[0], together[token])


SHAPES = {
    "grouped": Shape(heads=4, kv_heads=2, size=16),
    "three to a head": Shape(heads=6, kv_heads=2, size=64),
    "one head": Shape(heads=4, kv_heads=1, size=80),
    "no groups": Shape(heads=2, kv_heads=2, size=32),
}
BATCHES = {
    "decoding": ([1, 1, 1], [1, 40, 270]),
    "verification": ([6, 1, 3], [6, 257, 300]),
    "prefill": ([20, 33], [20, 33]),
    "mix": ([1, 20, 4, 40], [17, 20, 260, 300]),
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention(shape: str, batch: str) -> None:
    check_attention(SHAPES[shape], *BATCHES[batch])


@pytest.mark.parametrize(("window", "softcap"), [(7, None), (300, None), (None, 2.0), (5, 1.0)])
def test_attention_with_a_window_and_a_softcap(window: int | None, softcap: float | None) -> None:
    for query_lens, seq_lens in BATCHES.values():
        check_attention(SHAPES["grouped"], query_lens, seq_lens, window=window, softcap=softcap)


def test_attention_over_several_levels_of_chunks() -> None:
    check_attention(Shape(heads=2, kv_heads=2, size=16), [1, 2], [4097, 5000])


def check_attention(
    shape: Shape, query_lens: list[int], seq_lens: list[int], *, window: int | None = None, softcap: float | None = None
) -> None:
    program = make_program(shape, layers=1)
    batch, cache = make_batch(shape, query_lens, seq_lens)
    q = normal(sum(query_lens), shape.heads, shape.size, seed=4)
    op = PagedAttention(layer=0, scale=shape.size**-0.5, window=window, softcap=softcap)
    expected = REFERENCE.paged_attention(q, op, REFERENCE.prepare(program, batch, cache))
    ops = GpuOps(CPU)
    close(ops.paged_attention(q, op, ops.prepare(program, batch, cache)), expected)


@pytest.mark.parametrize("processors", [1, 9, 20])
def test_chunks_on_any_number_of_programs(processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program has all of a context's chunks, some of them, one or none."""
    monkeypatch.setattr(attention, "num_processors", lambda device: processors)
    check_attention(Shape(heads=2, kv_heads=1, size=16), [1, 3], [900, 4400], window=None)
    check_attention(Shape(heads=2, kv_heads=1, size=16), [1, 3], [900, 1400], window=600)


@pytest.mark.parametrize("processors", [1, 999])
def test_prompts_in_tiles_of_two_sizes(processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "num_processors", lambda device: processors)
    few = AttentionConfig(few_block_n=16, many=ManyConfig(16, 16, 4, 2), large=ManyConfig(64, 32, 4, 2))
    monkeypatch.setattr(attention, "SMALL_TILES", few)
    sizes = []
    kernel = attention.attend_many_kernel
    monkeypatch.setattr(attention, "attend_many_kernel", Recorder(kernel, sizes))
    check_attention(SHAPES["three to a head"], [20, 45], [33, 45])
    assert sizes == [64 if processors == 1 else 16]


class Recorder:
    """A kernel that notes the query rows of its tiles."""

    def __init__(self, kernel: Any, sizes: list[int]) -> None:
        self._kernel, self._sizes = kernel, sizes

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            self._sizes.append(options["BLOCK_M"])
            self._kernel[grid](*args, **options)

        return launch


@pytest.mark.parametrize("length", [255, 256, 257, 700])
def test_a_verified_token_is_a_decoded_one(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of six tokens alone, and on few programs. (Their bits are compared on a GPU, by benchmarks/gpu.py: a CPU's
    matrix product, which the interpreter uses, depends on where in a tile a row stands.)"""
    shape = SHAPES["grouped"]
    batch, cache = make_batch(shape, [6, 1], [length, 30])
    q = normal(7, shape.heads, shape.size, seed=4)
    keys, values = cache.layer(0)

    def compute(q: torch.Tensor, batch: RaggedBatch, few: int, processors: int) -> torch.Tensor:
        monkeypatch.setattr(attention, "num_processors", lambda device: processors)
        heads = (shape.heads, shape.kv_heads, shape.size)
        counters = Counters(CPU)
        inputs = AttentionInputs(_on_device(batch), *heads, few_tokens=few, many=False, counters=counters)
        out = attend(q, keys, values, inputs, scale=0.25)
        assert not counters.of(1).any()
        return out

    verified = compute(q, batch, 6, 132)
    for back in range(6):
        alone = replace(batch, query_lens=[1], seq_lens=[length - back], block_table=batch.block_table[:1])
        decoded = compute(q[5 - back : 6 - back], alone, 1, 1)
        close(decoded[0], verified[5 - back])


def test_attention_does_not_look_at_other_slots() -> None:
    shape = SHAPES["grouped"]
    batch, cache = make_batch(shape, [1, 20, 6], [270, 33, 19])
    q = normal(27, shape.heads, shape.size, seed=4)
    op, program = PagedAttention(layer=0, scale=0.25), make_program(shape, layers=1)
    ops = GpuOps(CPU)
    clean = ops.paged_attention(q, op, ops.prepare(program, batch, cache))
    held = torch.zeros(cache.num_blocks * cache.block_size, dtype=torch.bool)
    for row, length in enumerate(batch.seq_lens):
        n = torch.arange(length)
        held[batch.block_table[row][n // cache.block_size] * cache.block_size + n % cache.block_size] = True
    cache.data.flatten(2, 3)[:, :, ~held] = float("nan")
    assert torch.equal(ops.paged_attention(q, op, ops.prepare(program, batch, cache)), clean)


@pytest.mark.parametrize("tokens", [1, 16, 17, 70])
@pytest.mark.parametrize(("biased", "head_norms"), [(False, False), (True, False), (False, True), (True, True)])
def test_attention_input(tokens: int, biased: bool, head_norms: bool) -> None:
    shape = SHAPES["three to a head"]
    program = make_program(shape, layers=1, biased=biased, head_norms=head_norms)
    op = program.body[0]
    assert isinstance(op, AttentionInput)
    batch, cache = make_batch(shape, [tokens], [tokens + 3])
    twin = KVCache(cache.data.clone())
    x = normal(tokens, shape.hidden)
    ops = GpuOps(CPU)
    close(
        ops.attention_input(x, op, ops.prepare(program, batch, cache)),
        REFERENCE.attention_input(x, op, REFERENCE.prepare(program, batch, twin)),
    )
    close(cache.data, twin.data)


@pytest.mark.parametrize("tokens", [2, 20, 70])
@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("biased", [False, True])
def test_mlp(tokens: int, segments: int, biased: bool) -> None:
    weight = normal(96, 64, seed=1)
    parts = tuple(Dense(part) for part in weight.split(96 // segments))
    bias = normal(96, seed=2) if biased else None
    op = MlpInput(norm=Norm(normal(64, seed=3), 1e-6), gate_up=Linear(parts, bias))
    x = normal(tokens, 64)
    h = GpuOps(CPU).mlp_input(x, op)
    close(h, REFERENCE.mlp_input(x, op))
    down = Linear(tuple(Dense(part) for part in normal(64, 48, seed=5).split(64 // segments)), op.gate_up.bias)
    down = replace(down, bias=None if bias is None else normal(64, seed=6))
    close(GpuOps(CPU).project_residual(h, down, x.clone()), REFERENCE.project_residual(h, down, x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("batch", BATCHES)
def test_a_whole_model(batch: str, dtype: torch.dtype) -> None:
    shape = SHAPES["grouped"]
    program = make_program(shape, layers=2, dtype=dtype)
    ragged, cache = make_batch(shape, *BATCHES[batch], layers=2, dtype=dtype)
    twin = KVCache(cache.data.clone())
    expected = run(program, REFERENCE, ragged, twin)
    close(run(program, GpuOps(CPU), ragged, cache), expected, dtype)
    close(cache.data, twin.data)


@pytest.mark.parametrize("batch", ["decoding", "mix"])
@pytest.mark.parametrize("num_experts", [3, 20])
def test_a_whole_model_of_experts(batch: str, num_experts: int) -> None:
    """Tiles that experts fill, share and leave empty."""
    shape = Shape(heads=4, kv_heads=2, size=16, hidden=72, intermediate=40)
    program = make_program(shape, layers=2, num_experts=num_experts)
    ragged, cache = make_batch(shape, *BATCHES[batch], layers=2)
    expected = run(program, REFERENCE, ragged, KVCache(cache.data.clone()))
    close(run(program, GpuOps(CPU), ragged, cache), expected)


def test_experts_of_another_layout_are_refused() -> None:
    shape = SHAPES["grouped"]
    op = make_program(shape, layers=1, num_experts=3).body[-1]
    assert isinstance(op, Moe)
    apart = replace(op, down=tuple(reversed(op.down)))
    with pytest.raises(ValueError, match="experts lie apart"):
        GpuOps(CPU).moe(normal(2, shape.hidden), apart)


@pytest.mark.parametrize("head_norms", [False, True])
@pytest.mark.parametrize("batch", BATCHES)
def test_a_whole_model_as_gemma_has_it(batch: str, head_norms: bool) -> None:
    shape = SHAPES["grouped"]
    dtype = torch.float32 if head_norms else torch.float16
    program = make_program(shape, layers=2, dtype=dtype, head_norms=head_norms, gemma=True)
    ragged, cache = make_batch(shape, *BATCHES[batch], layers=2, dtype=dtype)
    twin = KVCache(cache.data.clone())
    expected = run(program, REFERENCE, ragged, twin)
    close(run(program, GpuOps(CPU), ragged, cache), expected, dtype)
    close(cache.data, twin.data)


@pytest.mark.parametrize(("dtype", "begins"), [(torch.float32, True), (torch.float16, False)])
def test_a_model_whose_projections_begin_the_norms(
    dtype: torch.dtype, begins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the first and the last norm; float16 has no room for it."""
    shape = SHAPES["grouped"]
    program = make_program(shape, layers=2, dtype=dtype, biased=True)
    ragged, cache = make_batch(shape, *BATCHES["decoding"], layers=2, dtype=dtype)
    expected = run(program, REFERENCE, ragged, KVCache(cache.data.clone()))
    apart = []
    rms_norm = elementwise.rms_norm
    monkeypatch.setattr(elementwise, "rms_norm", lambda x, norm: (apart.append(norm), rms_norm(x, norm))[1])
    close(run(program, GpuOps(CPU), ragged, cache), expected, dtype)
    assert len(apart) == (2 if begins else 5)


def test_a_residual_that_was_changed_is_normed_anew() -> None:
    shape = SHAPES["grouped"]
    program = make_program(shape, layers=1)
    batch, cache = make_batch(shape, [2], [2])
    ops = GpuOps(CPU)
    ops.prepare(program, batch, cache)
    _, _, output, mlp, _ = program.body
    assert isinstance(output, ProjectResidual)
    assert isinstance(mlp, MlpInput)
    residual = ops.project_residual(normal(2, 64), output.weight, normal(2, shape.hidden))
    other = residual + 1.0
    close(ops.mlp_input(other, mlp), REFERENCE.mlp_input(other, mlp))
    close(ops.mlp_input(residual, mlp), REFERENCE.mlp_input(residual, mlp))


@pytest.mark.parametrize("item_bytes", [2, 4])
@pytest.mark.parametrize("tokens", [1, 32, 64])
def test_shapes_nobody_has_measured_fit_small_gpus(tokens: int, item_bytes: int) -> None:
    for rows, columns in ((576, 576), (49152, 576), (1536, 576), (4096, 4096), (4096, 14336), (32, 100)):
        config = linear_config(rows, columns, tokens, item_bytes, False)
        assert config.block_tokens >= tokens
        held = config.num_stages * (config.block_rows + config.block_tokens) * config.block_k * item_bytes
        assert held <= 96 << 10


def test_measured_block_sizes_are_one_for_a_class_of_token_counts() -> None:
    measured = [linear_config(4096, 4096, tokens, 2, True) for tokens in (1, 16, 17, 32, 33, 64)]
    assert [config.block_tokens for config in measured] == [16, 16, 32, 32, 64, 64]
    assert measured[0] is measured[1]
    assert measured[0] != linear_config(4096, 4096, 1, 2, False)


@pytest.mark.parametrize(("tokens", "kernels"), [(65, 1), (128, 1), (129, 0)])
def test_of_more_tokens_only_measured_matrices_are_fused(
    tokens: int, kernels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = SHAPES["grouped"]
    program = make_program(shape, layers=1)
    measured = replace(SMALL, block_tokens=128, num_stages=2)
    rows = 2 * shape.intermediate
    monkeypatch.setattr(
        tuned, "measured_config", lambda r, c, t, *_: measured if (r, token_class(t)) == (rows, 128) else None
    )
    launched = []
    launch = tuned._launch
    monkeypatch.setattr(tuned, "_launch", lambda *a, **k: (launched.append(a[3]), launch(*a, **k))[1])
    ops = GpuOps(CPU)
    batch, cache = make_batch(shape, [tokens], [tokens])
    plan = ops.prepare(program, batch, cache)
    attention_input, _, _, mlp, _ = program.body
    assert isinstance(attention_input, AttentionInput)
    assert isinstance(mlp, MlpInput)
    x = normal(tokens, shape.hidden)
    close(ops.mlp_input(x, mlp), REFERENCE.mlp_input(x, mlp))
    ops.attention_input(x, attention_input, plan)
    assert len(launched) == kernels


def test_a_step_without_logits() -> None:
    shape = SHAPES["grouped"]
    ragged, cache = make_batch(shape, [3], [3])
    ragged = replace(ragged, logits_rows=torch.empty(0, dtype=torch.int64))
    assert run(make_program(shape, layers=1), GpuOps(CPU), ragged, cache).shape == (0, shape.vocabulary)


def test_a_weight_that_kernels_do_not_read_is_refused() -> None:
    ops = GpuOps(CPU)
    by_columns = Dense(normal(8, 4).t())
    with pytest.raises(ValueError, match="lies by columns"):
        ops.embed(torch.tensor([0]), by_columns)
    rope = Rope(torch.ones(1, 1), torch.ones(1, 1))
    with pytest.raises(TypeError, match="Rope"):
        ops.embed(torch.tensor([0]), rope)  # type: ignore[arg-type]


def test_the_number_of_chunks_grows_slowly() -> None:
    assert [num_chunks(n) for n in (1, 256, 257, 4096, 4097, 8192, 131072)] == [1, 1, 2, 16, 17, 24, 81]
