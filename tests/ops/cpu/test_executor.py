"""Whole models on the C++ backend, held to the reference ops: every storage type, every kind of batch."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_cpu import (
    Paged,
    cpu_executor,
    isas,
    native,
    open_model,
    packed_program,
    random_tokens,
    reference_executor,
)
from tiny_models import GGUFOptions, TinyLlama, gguf_name, make_llama, random_blocks, write_gguf

from sol.models.dummy_checkpoint import parameter_shapes
from sol.models.packed_cache import packed_nbytes
from sol.models.registry import load_program
from sol.ops.cpu.native import Format, Isa, KVDType, NativeError
from sol.ops.program import Program
from sol.ops.weights import Dense, Packed

VARIANTS: dict[str, dict[str, Any]] = {
    "untied": {"tie_word_embeddings": False},
    "tied": {"tie_word_embeddings": True},
    "one kv head": {"num_key_value_heads": 1},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "odd sizes": {"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 12,
                  "intermediate_size": 50, "vocab_size": 323},
    "mistral": {"family": "Mistral", "sliding_window": 7},
    "qwen2": {"family": "Qwen2"},
    "qwen3": {"family": "Qwen3"},
    "gemma2": {"family": "Gemma2", "num_hidden_layers": 3, "sliding_window": 6, "query_pre_attn_scalar": 20},
    "gemma3": {"family": "Gemma3", "num_hidden_layers": 3, "sliding_window": 6, "sliding_window_pattern": 2},
    "phi3": {"family": "Phi3", "sliding_window": 8},
    "mixtral": {"family": "Mixtral", "num_local_experts": 4},
    "qwen3 moe": {"family": "Qwen3Moe", "num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 30},
}  # fmt: skip
KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
K_KINDS = ("Q4_K", "Q5_K", "Q6_K")
K_SCALES = {"Q3_K": 2e-4, "Q4_K": 2e-4, "Q5_K": 1e-4, "Q6_K": 3e-5}
"""Of a super-block, such that random blocks make weights of about 0.05."""


def formats(program: Program) -> set[Format]:
    return {Format(s.format) for linear in program.linears() for s in linear.segments if isinstance(s, Packed)}


def ragged_run(executor: Any, vocab_size: int = 320) -> torch.Tensor:
    """Prompts of several lengths in unequal chunks, decoding beside them, and two tokens at the end of one."""
    paged = Paged(executor, num_requests=4)
    prompts = [random_tokens(count, seed=count, vocab_size=vocab_size) for count in (1, 5, 17, 40)]
    parts = [paged.step({0: prompts[0], 2: prompts[2][:9], 3: prompts[3][:33]})]
    parts.append(paged.step({0: [7], 1: prompts[1], 2: prompts[2][9:], 3: prompts[3][33:]}))
    parts.append(paged.step({3: [8], 1: [9, 10], 2: [11]}))
    return torch.cat(parts)


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest, tiny_llama: Callable[..., TinyLlama]) -> TinyLlama:
    return tiny_llama(**VARIANTS[request.param])


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_full_precision_matches_the_reference(variant: TinyLlama, dtype: torch.dtype, isa: Isa) -> None:
    config, checkpoint = open_model(variant.directory)
    program = packed_program(config, checkpoint, isa=isa, matrix_dtype=dtype)
    assert formats(program) == {{2: Format.F16, 4: Format.F32}[dtype.itemsize] if dtype.is_floating_point
                                and dtype != torch.bfloat16 else Format.BF16}  # fmt: skip
    # The reference in float32 over weights rounded as they are stored.
    expected_program = rounded(load_program(config, checkpoint, dtype=torch.float32, max_positions=512), dtype)
    expected = ragged_run(reference_executor(config, expected_program), config.vocab_size)
    with cpu_executor(program, isa=isa) as executor:
        found = ragged_run(executor, config.vocab_size)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)


def rounded(program: Program, dtype: torch.dtype) -> Program:
    """Matrices rounded to `dtype` and back; norms and biases left alone."""

    def weight(matrix: Any) -> Dense:
        return Dense(matrix.weight.to(dtype).float())

    def change(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(change, value))
        if hasattr(value, "segments"):
            return dataclasses.replace(value, segments=tuple(map(weight, value.segments)))
        fields = {f.name for f in dataclasses.fields(value)} & {"qkv", "weight", "gate_up", "router", "down"}
        return dataclasses.replace(value, **{name: change(getattr(value, name)) for name in fields})

    return dataclasses.replace(
        program,
        embedding=weight(program.embedding),
        head=change(program.head),
        body=tuple(change(op) for op in program.body),
    )


def quantised_model(path: Path, kind: str, hidden_size: int) -> None:
    model = make_llama(hidden_size=hidden_size, intermediate_size=hidden_size, num_hidden_layers=2, head_dim=16,
                       num_attention_heads=hidden_size // 16, num_key_value_heads=hidden_size // 32,
                       initializer_range=0.05, tie_word_embeddings=True)  # fmt: skip
    names = [gguf_name(name) for name, p in model.named_parameters() if p.dim() == 2 and "lm_head" not in name]
    shapes = {gguf_name(name): p.shape for name, p in model.named_parameters() if "lm_head" not in name}
    if kind in KINDS:
        options = GGUFOptions(quantization=dict.fromkeys(names, kind))
    else:  # the gguf package cannot make them
        raw = {
            name: (random_blocks(kind, *shapes[name], seed=index, scale=K_SCALES[kind]), kind)
            for index, name in enumerate(names)
        }
        options = GGUFOptions(raw=raw)
    write_gguf(path, model, options)


@pytest.mark.parametrize("kind", [*KINDS, *K_KINDS])
def test_quantised_weights_stay_quantised_and_match_the_reference(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    quantised_model(path, kind, 256 if kind in K_KINDS else 64)
    config, checkpoint = open_model(path)
    program = packed_program(config, checkpoint)
    assert formats(program) == {Format[kind]}
    assert isinstance(program.embedding, Packed)
    assert program.head.segments[0] is program.embedding, "a tied head is packed once"
    expected = ragged_run(
        reference_executor(config, load_program(config, checkpoint, dtype=torch.float32, max_positions=512))
    )
    with cpu_executor(program) as executor:
        found = ragged_run(executor)
    # What is left is the rounding of activations to 8 bits.
    error = (found - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error < 0.03


def test_a_type_without_kernels_is_kept_in_float16_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "model.gguf"
    quantised_model(path, "Q3_K", 256)
    config, checkpoint = open_model(path)
    program = packed_program(config, checkpoint)
    assert formats(program) == {Format.F16}
    assert "none for Q3_K: those matrices are kept in float16" in caplog.text
    library, shapes = native(), parameter_shapes(config)
    planned = packed_nbytes(library, library.best_isa(), shapes, checkpoint, None)
    assert program.weight_bytes <= planned < 1.1 * program.weight_bytes
    expected = ragged_run(
        reference_executor(config, load_program(config, checkpoint, dtype=torch.float32, max_positions=512))
    )
    with cpu_executor(program) as executor:
        torch.testing.assert_close(ragged_run(executor), expected, atol=0.02, rtol=0.02)


def test_formats_may_differ_within_one_projection(tmp_path: Path) -> None:
    model = make_llama()
    layer = {"blk.0.attn_q.weight": "Q8_0", "blk.0.attn_k.weight": "Q8_0", "blk.0.attn_v.weight": "Q4_1",
             "blk.1.ffn_up.weight": "Q8_0"}  # fmt: skip
    write_gguf(tmp_path / "model.gguf", model, GGUFOptions(quantization=layer))
    config, checkpoint = open_model(tmp_path / "model.gguf")
    program = packed_program(config, checkpoint)
    kinds = [[Format(s.format).name for s in linear.segments] for linear in program.linears()]  # type: ignore[union-attr]
    assert kinds == [["Q8_0", "Q4_1"], ["F32"], ["F32"], ["F32"], ["F32"], ["F32"], ["F32", "Q8_0"], ["F32"], ["F32"]]
    expected = ragged_run(
        reference_executor(config, load_program(config, checkpoint, dtype=torch.float32, max_positions=512))
    )
    with cpu_executor(program) as executor:
        found = ragged_run(executor)
    assert (found - expected).square().mean().sqrt() / expected.square().mean().sqrt() < 0.03


@pytest.mark.parametrize(("kv_dtype", "tolerance"), [(KVDType.FLOAT16, 2e-3), (KVDType.INT8, 0.02)])
def test_a_smaller_kv_cache_costs_little(
    tiny_llama: Callable[..., TinyLlama], kv_dtype: KVDType, tolerance: float
) -> None:
    config, checkpoint = open_model(tiny_llama().directory)
    program = packed_program(config, checkpoint)
    with cpu_executor(program) as executor:
        expected = ragged_run(executor)
        full = executor.kv_cache.nbytes
    with cpu_executor(program, kv_dtype=kv_dtype) as executor:
        found = ragged_run(executor)
        assert executor.kv_cache.nbytes < 0.6 * full
    assert (found - expected).square().mean().sqrt() / expected.square().mean().sqrt() < tolerance


@pytest.mark.parametrize("name", ["untied", "gemma2", "mixtral"])
def test_logits_do_not_depend_on_chunks_neighbours_or_threads(tiny_llama: Callable[..., TinyLlama], name: str) -> None:
    config, checkpoint = open_model(tiny_llama(**VARIANTS[name]).directory)
    program = packed_program(config, checkpoint)
    tokens = random_tokens(50, seed=2)
    with cpu_executor(program) as executor:
        whole = Paged(executor).step({0: tokens})
        alone = Paged(executor)
        assert torch.equal(torch.cat([alone.step({0: [token]}) for token in tokens]), whole)
    with cpu_executor(program, num_threads=3) as executor:
        assert torch.equal(Paged(executor).step({0: tokens}), whole)
        beside = Paged(executor, num_requests=3)
        first = beside.step({1: random_tokens(13, seed=3), 0: tokens[:31], 2: random_tokens(7, seed=4)})
        second = beside.step({2: [5], 0: tokens[31:], 1: random_tokens(3, seed=5)})
        assert torch.equal(torch.cat([first[13:44], second[1:20]]), whole)


def test_only_the_rows_asked_for_get_logits(tiny_llama: Callable[..., TinyLlama]) -> None:
    config, checkpoint = open_model(tiny_llama().directory)
    program = packed_program(config, checkpoint)
    with cpu_executor(program) as executor:
        paged = Paged(executor)
        batch = paged.batch({0: random_tokens(9, seed=1)})
        every = executor.forward(batch).clone()
        some = executor.forward(dataclasses.replace(batch, logits_rows=torch.tensor([8, 0, 3])))
        assert torch.equal(some, every[[8, 0, 3]])
        assert executor.forward(dataclasses.replace(batch, logits_rows=torch.tensor([], dtype=torch.int64))).shape == (
            0,
            config.vocab_size,
        )


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": torch.tensor([1, 320])},
        {"token_ids": torch.tensor([-1, 2])},
        {"positions": torch.tensor([0, 512])},
        {"slot_mapping": torch.tensor([0, 64 * 16])},
        {"block_table": torch.tensor([[64]])},
        {"query_lens": [1]},
        {"query_lens": [3]},
        {"seq_lens": [1]},
        {"seq_lens": [40]},
        {"logits_rows": torch.tensor([2])},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_batch_that_points_outside_is_refused(tiny_llama: Callable[..., TinyLlama], change: dict[str, Any]) -> None:
    config, checkpoint = open_model(tiny_llama().directory)
    with cpu_executor(packed_program(config, checkpoint)) as executor:
        batch = Paged(executor).batch({0: [1, 2]})
        with pytest.raises(NativeError) as caught:
            executor.forward(dataclasses.replace(batch, **change))
        assert caught.value.code == NativeError.ARGUMENT
        assert caught.value.message
        assert executor.forward(batch).isfinite().all(), "it goes on"


def test_a_step_of_more_tokens_than_planned_is_refused(tiny_llama: Callable[..., TinyLlama]) -> None:
    config, checkpoint = open_model(tiny_llama().directory)
    with cpu_executor(packed_program(config, checkpoint), max_num_tokens=4) as executor:
        with pytest.raises(NativeError, match="4"):
            Paged(executor).step({0: [1, 2, 3, 4, 5]})
        assert Paged(executor).step({0: [1, 2, 3, 4]}).shape == (4, config.vocab_size)


def test_times_and_workspace_are_told_and_closing_is_final(tiny_llama: Callable[..., TinyLlama]) -> None:
    config, checkpoint = open_model(tiny_llama().directory)
    with cpu_executor(packed_program(config, checkpoint), num_threads=2, cores=None) as executor:
        Paged(executor).step({0: random_tokens(20, seed=0)})
        times = executor.times()
        assert times["logits"] > 0
        assert times["mlp_input"] > 0
        assert all(seconds >= 0 for seconds in times.values())
        assert executor.times()["logits"] == 0
        assert executor.workspace_nbytes > 0
    executor.close()


def test_two_programs_take_turns_on_one_team_of_threads(tiny_llama: Callable[..., TinyLlama]) -> None:
    config, checkpoint = open_model(tiny_llama().directory)
    program = packed_program(config, checkpoint)
    tokens = random_tokens(40, seed=6)
    with cpu_executor(program) as executor:
        expected = Paged(executor).step({0: tokens})
    before = len(list(Path("/proc/self/task").iterdir()))
    with (
        cpu_executor(program, num_threads=3) as first,
        cpu_executor(program, num_threads=3, threads_of=first) as second,
    ):
        assert num_threads(before + 2) == before + 2
        one, other = Paged(first), Paged(second)
        parts = [torch.cat([one.step({0: [token]}), other.step({0: [token]})]) for token in tokens]
        assert torch.equal(torch.stack([part[0] for part in parts]), expected)
        assert torch.equal(torch.stack([part[1] for part in parts]), expected)
        first.close()
        assert num_threads(before + 2) == before + 2, "threads stay as long as anybody has them"
        assert torch.equal(Paged(second).step({0: tokens}), expected)
    assert num_threads(before) == before


@pytest.mark.parametrize("wrong", [{"num_threads": 2}, {"num_threads": 1, "cores": [0]}])
def test_borrowed_threads_are_as_many_as_there_are(tiny_llama: Callable[..., TinyLlama], wrong: dict[str, Any]) -> None:
    config, checkpoint = open_model(tiny_llama().directory)
    program = packed_program(config, checkpoint)
    with (
        cpu_executor(program) as executor,
        pytest.raises(NativeError, match="threads_of"),
        cpu_executor(program, threads_of=executor, **wrong),
    ):
        pass


def num_threads(wanted: int) -> int:
    """Of this process, once there are `wanted` of them or a while has passed: one that has ended is gone soon after."""
    deadline = time.monotonic() + 5.0
    while (found := len(list(Path("/proc/self/task").iterdir()))) != wanted and time.monotonic() < deadline:
        time.sleep(0.001)
    return found


def test_the_kv_cache_is_as_large_as_was_planned(tiny_llama: Callable[..., TinyLlama]) -> None:
    from sol.runner.cpu_kernels import CpuKernels

    config, checkpoint = open_model(tiny_llama().directory)
    for kv_dtype in KVDType:
        kernels = CpuKernels(native(), native().best_isa(), kv_dtype)
        program = packed_program(config, checkpoint)
        with cpu_executor(program, kv_dtype=kv_dtype, num_blocks=10) as executor:
            assert executor.kv_cache.nbytes <= kernels.kv_bytes_per_token(config, 16) * 160
            assert executor.kv_cache.data_ptr() % 64 == 0
