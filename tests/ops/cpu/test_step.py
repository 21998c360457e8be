"""A step of the C++ backend: its threads, what it does with a bad batch or description, several models at once."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from typing import Any

import pytest
import torch
from tiny_cpu import Paged, cpu_executor, isas, native, random_tokens
from tiny_programs import VOCAB_SIZE, as_int8, packed, random_program, reference

from sol.ops import Dense, RaggedBatch
from sol.ops.cpu.executor import TIMES, CpuExecutor
from sol.ops.cpu.native import Isa, NativeError
from sol.ops.weights import Stored

pytestmark = pytest.mark.usefixtures("library")


@pytest.fixture
def library() -> None:
    native()


def tokens(count: int, seed: int = 0) -> list[int]:
    return random_tokens(count, seed=seed, vocab_size=VOCAB_SIZE)


def mixed(weight: Dense) -> Stored:
    """Some matrices int8, others float32, so that both kinds of input are needed."""
    return as_int8(weight) if weight.weight.shape[0] % 64 == 0 else weight


def prompt_and_decode(executor: Any) -> torch.Tensor:
    paged = Paged(executor, num_requests=3)
    parts = [paged.step({0: tokens(70, seed=1), 1: tokens(5, seed=2), 2: tokens(17, seed=3)})]
    parts += [paged.step({request: [3 + request + step] for request in range(3)}) for step in range(4)]
    parts += [paged.step({1: [9]}), paged.step({2: [4, 5, 6]})]
    return torch.cat(parts)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("store", [lambda weight: weight, as_int8, mixed], ids=["float32", "int8", "mixed"])
def test_the_number_of_threads_changes_no_bit(store: Any, isa: Isa) -> None:
    program = packed(random_program(bias=True), isa=isa, store=store)
    results = []
    for num_threads in (1, 2, 3, 5):
        with cpu_executor(program, isa=isa, num_threads=num_threads) as executor:
            results.append(prompt_and_decode(executor))
    assert results[0].isfinite().all()
    for result in results[1:]:
        assert torch.equal(result, results[0])


@pytest.mark.parametrize("tokens_at_once", [1, 2, 4, 5, 6, 300])
@pytest.mark.parametrize("store", [lambda weight: weight, as_int8], ids=["float32", "int8"])
def test_the_number_of_tokens_changes_no_bit(tokens_at_once: int, store: Any) -> None:
    program, prompt = packed(random_program(), store=store), tokens(300)
    with cpu_executor(program, max_num_tokens=300, num_threads=2) as executor:
        whole = Paged(executor).step({0: prompt})
        paged = Paged(executor)
        parts = [paged.step({0: prompt[i : i + tokens_at_once]}) for i in range(0, 300, tokens_at_once)]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize(
    "gate_rows", [(192,), (96, 96), (48, 48, 96), (40, 56, 40, 56), (40, 152), (90, 102), (96, 40, 56), (191, 1)]
)
def test_gate_and_up_in_segments_of_any_size(gate_rows: tuple[int, ...], isa: Isa) -> None:
    program = random_program(gate_rows=gate_rows, bias=True)
    with cpu_executor(packed(program, isa=isa), isa=isa, num_threads=2) as executor:
        found = prompt_and_decode(executor)
    torch.testing.assert_close(found, prompt_and_decode(reference(program)), atol=2e-4, rtol=0)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("head_dim", [6, 16, 72, 128])
def test_norms_of_heads(head_dim: int, isa: Isa) -> None:
    program = random_program(head_dim=head_dim, head_norms=True)
    with cpu_executor(packed(program, isa=isa), isa=isa, num_threads=2) as executor:
        found = prompt_and_decode(executor)
    torch.testing.assert_close(found, prompt_and_decode(reference(program)), atol=2e-4, rtol=0)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize(
    "options",
    [
        {"head_norms": True},
        {"softcap": 0.7, "window": 5, "bias": True},
        {"gate_rows": (90, 102), "hidden": 35, "head_dim": 6},  # gate and up do not pair, rows end within a vector
    ],
)
def test_what_gemma_adds(options: dict[str, Any], isa: Isa) -> None:
    program = random_program(gemma=True, **options)
    with cpu_executor(packed(program, isa=isa), isa=isa, num_threads=2) as executor:
        found = prompt_and_decode(executor)
    torch.testing.assert_close(found, prompt_and_decode(reference(program)), atol=2e-4, rtol=0)


def test_what_gemma_adds_depends_on_no_neighbour() -> None:
    program = packed(random_program(gemma=True, softcap=0.7), store=as_int8)
    with cpu_executor(program, num_threads=2) as executor:
        whole = Paged(executor).step({0: tokens(20)})
        alone = Paged(executor)
        parts = [alone.step({0: tokens(20)[:15]}), *(alone.step({0: [token]}) for token in tokens(20)[15:])]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("intermediate", [1, 7, 40, 90])
def test_odd_intermediate_sizes(intermediate: int) -> None:
    program = random_program(intermediate=intermediate, hidden=35)
    with cpu_executor(packed(program)) as executor:
        found = prompt_and_decode(executor)
    torch.testing.assert_close(found, prompt_and_decode(reference(program)), atol=2e-4, rtol=0)


def test_only_the_rows_asked_for() -> None:
    with cpu_executor(packed(random_program()), num_threads=2) as executor:
        everything = Paged(executor).batch({0: tokens(20)})
        logits = executor.forward(everything).clone()
        for rows in ([19], [3, 3, 0], [], list(range(20))):
            wanted = dataclasses.replace(everything, logits_rows=torch.tensor(rows, dtype=torch.int64))
            assert torch.equal(executor.forward(wanted), logits[rows])


def test_models_side_by_side_in_several_threads() -> None:
    program = packed(random_program())
    with cpu_executor(program) as executor:
        expected = prompt_and_decode(executor)
    results: list[torch.Tensor] = []

    def work() -> None:
        with cpu_executor(program, num_threads=2) as executor:
            results.extend(prompt_and_decode(executor) for _ in range(3))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 9
    assert all(torch.equal(result, expected) for result in results)


def thread_names() -> list[str]:
    names = []
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/comm", encoding="utf-8") as file:
            names.append(file.read().strip())
    return sorted(name for name in names if name.startswith("sol-cpu"))


def test_threads_are_named_pinned_and_gone_when_closed() -> None:
    cores = sorted(os.sched_getaffinity(0))
    with cpu_executor(packed(random_program()), num_threads=3, cores=[cores[0], cores[-1], cores[0]]) as executor:
        prompt_and_decode(executor)
        deadline = time.monotonic() + 30
        while len(thread_names()) < 2 and time.monotonic() < deadline:  # a thread that has yet to run has no name
            prompt_and_decode(executor)
        assert thread_names() == ["sol-cpu-1", "sol-cpu-2"]
        assert os.sched_getaffinity(0) == set(cores), "the caller's own"
    assert thread_names() == []


def test_a_forked_child_may_close_what_its_parent_uses() -> None:
    with cpu_executor(packed(random_program()), num_threads=2) as executor:
        expected = prompt_and_decode(executor)
        child = os.fork()
        if child == 0:  # it has none of the threads; nothing may wait for them
            status = 1
            try:
                status = 0 if torch.equal(prompt_and_decode(executor), expected) else 2
                executor.close()
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert torch.equal(prompt_and_decode(executor), expected)


def test_times_add_up() -> None:
    with cpu_executor(packed(random_program())) as executor:
        prompt_and_decode(executor)
        times = executor.times()
        assert list(times) == list(TIMES)
        assert all(times[name] > 0 for name in TIMES if name != "waiting")
        assert set(executor.times().values()) == {0.0}


BAD_BATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "token": ({"token_ids": torch.tensor([1, VOCAB_SIZE, 2])}, r"token_ids\[1\] is 96; there are 96 tokens"),
    "negative token": ({"token_ids": torch.tensor([1, 2, -1])}, r"token_ids\[2\] is -1"),
    "position": ({"positions": torch.tensor([0, 1, 64])}, r"positions\[2\] is 64; there are 64 positions"),
    "slot": ({"slot_mapping": torch.tensor([0, 1, 8 * 16])}, r"slot_mapping\[2\] is 128; there are 128 slots"),
    "block": ({"block_table": torch.tensor([[8]])}, r"block_table\[0, 0\] is 8; there are 8 blocks"),
    "query_lens": ({"query_lens": [2]}, r"query_lens add up to 2; num_tokens is 3"),
    "query_lens too long": ({"query_lens": [4]}, r"query_lens\[0\] is 4"),
    "no query": ({"query_lens": [0]}, r"query_lens\[0\] is 0"),
    "seq_lens": ({"seq_lens": [2]}, r"seq_lens\[0\] is 2; it is at least query_lens\[0\], 3"),
    "narrow table": ({"seq_lens": [17]}, r"block_table's 1 blocks of 16 tokens hold less"),
    "long request": ({"seq_lens": [65]}, r"seq_lens\[0\] is 65; .* at most 64"),
    "logits row": ({"logits_rows": torch.tensor([3])}, r"logits_rows\[0\] is 3"),
    "more rows than tokens": ({"logits_rows": torch.tensor([0, 0, 0, 0])}, r"num_logits_rows is 4"),
    "no tokens": ({"token_ids": torch.empty(0, dtype=torch.int64)}, r"num_tokens is 0; .* 1 to 4"),
    "too many tokens": ({"token_ids": torch.tensor([1, 1, 1, 1, 1])}, r"num_tokens is 5"),
}


@pytest.mark.parametrize("name", BAD_BATCHES)
def test_a_bad_batch_is_refused_and_changes_nothing(name: str) -> None:
    changes, message = BAD_BATCHES[name]
    good = RaggedBatch(
        token_ids=torch.tensor([1, 2, 3]),
        positions=torch.tensor([0, 1, 2]),
        slot_mapping=torch.tensor([0, 1, 2]),
        block_table=torch.tensor([[0]]),
        query_lens=[3],
        seq_lens=[3],
        logits_rows=torch.tensor([0, 1, 2]),
    )
    program = packed(random_program(max_positions=64))
    with cpu_executor(program, num_blocks=8, max_num_tokens=4, num_threads=2) as executor:
        expected = executor.forward(good).clone()
        before = executor.kv_cache.clone()
        with pytest.raises(NativeError, match=message) as caught:
            executor.forward(dataclasses.replace(good, **changes))
        assert caught.value.code == NativeError.ARGUMENT
        assert torch.equal(executor.kv_cache, before)
        assert torch.equal(executor.forward(good), expected)


def create(**changes: Any) -> CpuExecutor:
    options = {"num_threads": 1} | changes
    with cpu_executor(packed(random_program()), **options) as executor:
        return executor


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_threads": 0}, "num_threads is 0"),
        ({"max_num_tokens": 0}, "max_num_tokens is 0"),
        ({"block_size": 257}, "block_size is 257"),
        ({"cores": [100000]}, "may not use core 100000"),
        ({"cores": [-1]}, "may not use core -1"),
    ],
)
def test_a_bad_description_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(NativeError, match=message):
        create(**changes)


def test_an_order_of_ops_that_is_not_walked_is_refused() -> None:
    program = random_program()
    for body in (program.body[1:], program.body[:4], (*program.body[:2], *program.body[3:])):
        with (
            pytest.raises(NativeError, match="kind") as caught,
            cpu_executor(packed(dataclasses.replace(program, body=body))),
        ):
            pass
        assert caught.value.code == NativeError.UNSUPPORTED
