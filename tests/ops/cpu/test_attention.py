"""Paged attention of the C++ backend inside whole steps: held to the reference, and to itself in every bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from tiny_cpu import Paged, cpu_executor, isas, native, random_tokens
from tiny_programs import VOCAB_SIZE, packed, random_program, reference

from sol.ops import Dense, Executor, Program
from sol.ops.cpu.native import Isa, KVDType

pytestmark = pytest.mark.usefixtures("library")


@pytest.fixture
def library() -> None:
    native()


def tokens(count: int, seed: int = 0) -> list[int]:
    return random_tokens(count, seed=seed, vocab_size=VOCAB_SIZE)


def ragged(executor: Executor, **options: int) -> torch.Tensor:
    """Prompts, chunks, decoding and verification in the same steps."""
    paged = Paged(executor, num_requests=4, **options)
    prompts = [tokens(count, seed=count) for count in (1, 6, 19, 45)]
    return torch.cat(
        [
            paged.step({0: prompts[0], 2: prompts[2][:10], 3: prompts[3][:37]}),
            paged.step({3: prompts[3][37:], 0: [7], 1: prompts[1], 2: prompts[2][10:]}),
            paged.step({1: [5], 3: [8], 2: [11]}),
            paged.step({3: [9, 10, 11], 2: [4], 1: [6, 7]}),
        ]
    )


def in_chunks(executor: Executor, prompt: list[int], sizes: Iterable[int], **options: int) -> torch.Tensor:
    """Logits of all tokens of one request, computed so many a step."""
    paged = Paged(executor, **options)
    parts, done = [], 0
    for size in sizes:
        if done >= len(prompt):
            break
        parts.append(paged.step({0: prompt[done : done + size]}))
        done += size
    assert done >= len(prompt)
    return torch.cat(parts)


def assert_matches_reference(program: Program, isa: Isa | None = None, **options: int) -> None:
    expected = ragged(reference(program, **options), **options)
    with cpu_executor(packed(program, isa=isa), isa=isa, **options) as executor:
        found = ragged(executor, **options)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(4, 2, 16), (6, 2, 8), (3, 1, 12), (2, 2, 2), (3, 3, 34), (5, 1, 80), (1, 1, 256), (14, 2, 64), (7, 7, 128)],
)
def test_shapes_of_heads(heads: int, kv_heads: int, head_dim: int, isa: Isa) -> None:
    assert_matches_reference(random_program(heads=heads, kv_heads=kv_heads, head_dim=head_dim), isa)


@pytest.mark.parametrize("block_size", [1, 5, 16, 17, 32, 100])
@pytest.mark.parametrize("window", [None, 3])
def test_sizes_of_blocks(block_size: int, window: int | None) -> None:
    blocks = 4 * -(-64 // block_size)
    assert_matches_reference(random_program(window=window), num_blocks=blocks, block_size=block_size)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("window", [None, 1, 2, 8, 30])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_windows_and_soft_caps(window: int | None, softcap: float | None, isa: Isa) -> None:
    assert_matches_reference(random_program(heads=6, kv_heads=2, window=window, softcap=softcap), isa)


@pytest.mark.parametrize("window", [None, 300])
def test_long_contexts_match_the_reference(window: int | None) -> None:
    program = random_program(window=window, layers=1)
    prompt, sizes = tokens(700), [600, 90, 1, 1, 3, 1, 4]
    expected = in_chunks(reference(program), prompt, sizes)
    with cpu_executor(packed(program), max_num_tokens=600, num_threads=2) as executor:
        torch.testing.assert_close(in_chunks(executor, prompt, sizes), expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("kv_dtype", KVDType)
@pytest.mark.parametrize("window", [None, 20])
def test_chunks_threads_and_segments_change_no_bit(window: int | None, kv_dtype: KVDType, isa: Isa) -> None:
    """535 tokens are three segments; one stream on several threads has their attention split."""
    program = packed(random_program(heads=6, kv_heads=2, head_dim=24, layers=1, window=window), isa=isa)
    prompt = tokens(535)

    def run(sizes: Iterable[int], **options: Any) -> torch.Tensor:
        with cpu_executor(program, isa=isa, kv_dtype=kv_dtype, max_num_tokens=600, **options) as executor:
            return in_chunks(executor, prompt, sizes)

    whole = run([535])
    assert whole.isfinite().all()
    for threads, sizes in [(3, [535]), (1, [500, *[1] * 35]), (2, [250, *[5] * 57]), (3, [490, *[1] * 20, *[7] * 4])]:
        assert torch.equal(run(sizes, num_threads=threads), whole), (threads, sizes)
    if isa == isas()[-1]:
        assert torch.equal(run(itertools.repeat(1)), whole)


@pytest.mark.parametrize("kv_dtype", KVDType)
def test_neighbours_change_no_bit(kv_dtype: KVDType) -> None:
    program = packed(random_program())
    with cpu_executor(program, kv_dtype=kv_dtype, num_threads=2) as executor:
        together = ragged(executor)
    steps = [{0: 1, 2: 10, 3: 37}, {3: 8, 0: 1, 1: 6, 2: 9}, {1: 1, 3: 1, 2: 1}, {3: 3, 2: 1, 1: 2}]
    with cpu_executor(program, kv_dtype=kv_dtype) as executor:
        paged = Paged(executor, num_requests=4)
        prompts = [tokens(count, seed=count) for count in (1, 6, 19, 45)]
        streams = [prompts[0] + [7], [*prompts[1], 5, 6, 7], [*prompts[2], 11, 4], [*prompts[3], 8, 9, 10, 11]]
        alone = [paged.step({request: stream}) for request, stream in enumerate(streams)]
    done, row = [0] * 4, 0
    for step in steps:
        for request, count in step.items():
            expected = alone[request][done[request] : done[request] + count]
            assert torch.equal(together[row : row + count], expected)
            done[request] += count
            row += count
    assert row == len(together)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize(("kv_dtype", "bound"), [(KVDType.FLOAT16, 0.02), (KVDType.INT8, 0.15)])
def test_narrow_caches_stay_near_float32(kv_dtype: KVDType, bound: float, isa: Isa) -> None:
    program = packed(random_program(heads=3, kv_heads=1, head_dim=20), isa=isa)
    with cpu_executor(program, isa=isa) as executor:
        expected = ragged(executor)
    with cpu_executor(program, isa=isa, kv_dtype=kv_dtype) as executor:
        found = ragged(executor)
    error = (found - expected).abs().max().item() / expected.std().item()
    assert 0 < error < bound


def test_narrow_caches_take_less_memory() -> None:
    sizes = [native().kv_block_nbytes(native().best_isa(), dtype, 3, 64, 16) for dtype in KVDType]
    assert sizes == [3 * 2 * 16 * 64 * 4, 3 * 2 * 16 * 64 * 2, 3 * 2 * 16 * (64 + 4)]


def test_requests_may_read_what_another_writes_in_the_same_step() -> None:
    """Two requests share the blocks of a prefix that the first of them computes in this very step."""
    program, prompt = random_program(), tokens(50)

    def run(executor: Executor) -> torch.Tensor:
        paged = Paged(executor, num_requests=2)
        paged.tables[1, :2] = paged.tables[0, :2]
        paged.lengths[1] = 32
        return paged.step({0: prompt[:48], 1: prompt[32:50]})

    with cpu_executor(packed(program), num_threads=2) as executor:
        found = run(executor)
    torch.testing.assert_close(found, run(reference(program)), atol=2e-4, rtol=0)
    # The same with few tokens, which would otherwise be written where they are attended to.
    with cpu_executor(packed(program), num_threads=2) as executor:
        paged = Paged(executor, num_requests=2)
        paged.step({0: prompt[:24]})
        paged.tables[1, :2] = paged.tables[0, :2]
        paged.lengths[1] = 32
        second = paged.step({1: prompt[32:40], 0: prompt[24:32]})
    assert torch.equal(second[8:], found[24:32])
    assert torch.equal(second[:8], found[48:56])


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("kv_dtype", KVDType)
@pytest.mark.parametrize("window", [None, 4])
def test_a_token_that_is_not_a_number_spoils_none_before_it(window: int | None, kv_dtype: KVDType, isa: Isa) -> None:
    """Nor any after it that does not see it: what a row does not see is skipped, not multiplied by zero."""
    program = random_program(heads=3, kv_heads=3, layers=1, window=window)
    assert isinstance(program.embedding, Dense)
    program.embedding.weight[0] = float("nan")  # random tokens are at least 3
    prompt = tokens(30)
    with cpu_executor(packed(program, isa=isa), isa=isa, kv_dtype=kv_dtype) as executor:
        expected = Paged(executor).step({0: prompt})
        found = Paged(executor).step({0: [*prompt[:12], 0, *prompt[13:]]})
    assert torch.equal(found[:12], expected[:12])
    assert found[12].isnan().all()
    if window is None:
        assert found[12:].isnan().all()
    else:
        assert found[12:16].isnan().all()
        assert torch.equal(found[16:], expected[16:])
