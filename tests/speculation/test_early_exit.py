"""EarlyExitProposer drafts what the target's first layers say, over the target's own cache, and leaves it as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from drafting_requests import BLOCK_SIZE, GREEDY, NUM_BLOCKS, SAMPLED, make_row, one, oracle, program, prompt
from tiny_cpu import cpu_executor, native
from tiny_programs import random_program, reference

from sol.errors import ConfigError
from sol.ops import EagerExecutor, Executor, Program
from sol.ops.cpu.executor import CpuExecutor
from sol.ops.program import PagedAttention
from sol.ops.reference import ReferenceOps
from sol.speculation.propose import ProposalRow
from sol.speculation.propose.early_exit import EarlyExitProposer, default_exit_layers, first_layers
from sol.speculation.propose.model_batch import Span, ragged_batch


@pytest.fixture(scope="module")
def target() -> Program:
    return program(layers=3, hidden=32, intermediate=32)


@pytest.fixture
def executor(target: Program) -> Iterator[CpuExecutor]:
    with cpu_executor(target, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, num_threads=2) as made:
        yield made


def exit_after(target: CpuExecutor, num_layers: int) -> CpuExecutor:
    return CpuExecutor(
        native(),
        first_layers(target.program, num_layers),
        isa=native().best_isa(),
        kv_cache=target.kv_cache_spec,
        max_num_tokens=64,
        num_threads=target.num_threads,
        threads_of=target,
        cache_of=target,
    )


def drafter(executor: Executor) -> EarlyExitProposer:
    return EarlyExitProposer(executor, block_size=BLOCK_SIZE, max_positions=2048, max_num_tokens=8)


def tokens_of(row: ProposalRow) -> list[int]:
    return [*row.sampling.prompt_token_ids, *row.sampling.output_token_ids]


def compute(target: Executor, row: ProposalRow, start: int = 0, more: tuple[int, ...] = ()) -> torch.Tensor:
    """The target's pass over a row's tokens, the last one left out unless drafts come after it."""
    tokens = torch.tensor([*tokens_of(row), *more][start : None if more else -1]).numpy()
    batch = ragged_batch([Span(row.block_ids, start, tokens, wants_logits=True)], BLOCK_SIZE, torch.device("cpu"))
    return target.forward(batch).clone()


def test_it_says_what_the_first_layers_say(target: Program, executor: CpuExecutor) -> None:
    rows = [
        make_row("a", prompt(9), blocks=range(5, 15), max_tokens=5),
        make_row("b", prompt(4, seed=2), prompt(3, seed=3), blocks=range(20, 30), max_tokens=3, params=SAMPLED),
    ]
    for row in rows:
        compute(executor, row)
    early = exit_after(executor, 2)
    expected = [oracle(first_layers(target, 2), row) for row in rows]
    assert [p.token_ids for p in drafter(early).propose(rows)] == expected
    assert [one(drafter(early), row).token_ids for row in rows] == expected
    early.close()


def test_the_targets_cache_stays_the_targets(executor: CpuExecutor) -> None:
    """Verifying after drafting gives the bits of verifying without, whatever the drafter left behind."""
    row = make_row("a", prompt(9), blocks=range(5, 15), max_tokens=5)
    compute(executor, row)
    untouched = compute(executor, row, 8, more=(7, 8, 9))
    early = exit_after(executor, 1)
    drafts = one(drafter(early), row).token_ids
    assert torch.equal(compute(executor, row, 8, more=(7, 8, 9)), untouched)
    kept = executor.kv_cache.clone()
    compute(executor, row, 8, more=tuple(drafts[:-1]))
    written = executor.kv_cache.clone()
    one(drafter(early), row)
    assert torch.equal(executor.kv_cache, written), "it writes what verifying its drafts writes"
    assert not torch.equal(kept, written)
    early.close()


def test_the_target_may_go_first(target: Program) -> None:
    with cpu_executor(target, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, num_threads=2) as executor:
        row = make_row("a", prompt(9), blocks=range(5, 15), max_tokens=3)
        compute(executor, row)
        early = exit_after(executor, 2)
    assert one(drafter(early), row).token_ids == oracle(first_layers(target, 2), row)
    early.close()


def test_the_reference_ops_do_too() -> None:
    whole = reference(random_program(layers=3), num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    early = EagerExecutor(first_layers(whole.program, 2), ReferenceOps(), whole.kv_cache)
    row = make_row("a", prompt(9), blocks=range(5, 15), params=GREEDY)
    compute(whole, row)
    found = one(drafter(early), row).token_ids
    fresh = reference(first_layers(whole.program, 2), num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    logits = compute(fresh, row, 0, more=(found[0],))
    assert len(found) == 4
    assert int(logits[-1].argmax()) == found[1]


def test_a_request_whose_cache_has_a_gap_is_refused(executor: CpuExecutor) -> None:
    early = exit_after(executor, 1)
    row = make_row("a", prompt(9), blocks=range(5, 15))
    row.num_computed_tokens = 5
    with pytest.raises(ValueError, match="5 of the 9 tokens of 'a' are computed"):
        one(drafter(early), row)
    drafter(early).forget(["a"], finished=True)
    assert drafter(early).name == "early_exit"
    early.close()


@pytest.mark.parametrize("num_layers", [0, 3, 4])
def test_only_some_of_the_layers_can_be_left_out(target: Program, num_layers: int) -> None:
    with pytest.raises(
        ConfigError, match=f"num_exit_layers is {num_layers}, but the model has 3 layers: choose 1 to 2"
    ):
        first_layers(target, num_layers)
    assert sum(isinstance(op, PagedAttention) for op in first_layers(target, 2).body) == 2


def test_a_quarter_of_the_layers_by_default() -> None:
    assert [default_exit_layers(count) for count in (2, 4, 30, 32)] == [1, 1, 7, 8]
