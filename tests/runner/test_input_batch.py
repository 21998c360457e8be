"""From plans to tensors: what a step computes, where it goes, and who is sampled."""

from __future__ import annotations

import pytest
import torch

from sol.engine.types import CachedRequestData, NewRequestData, SchedulerOutput
from sol.runner.input_batch import InputBatch
from sol.sampling_params import SamplingParams

BLOCK_SIZE = 4


def new(
    name: str, tokens: list[int], blocks: list[int], *, prompt: int | None = None, start: int = 0
) -> NewRequestData:
    return NewRequestData(
        request_id=name,
        token_ids=tokens,
        num_prompt_tokens=len(tokens) if prompt is None else prompt,
        num_computed_tokens=start,
        block_ids=blocks,
        params=SamplingParams(min_tokens=3, repetition_penalty=1.2),
        seed=5,
        choice_index=1,
        eos_token_ids=[2],
    )


def plan(
    counts: dict[str, int],
    *,
    added: list[NewRequestData] | None = None,
    cached: dict[str, tuple[int, list[int]]] | None = None,
    removed: list[str] | None = None,
) -> SchedulerOutput:
    return SchedulerOutput(
        num_scheduled_tokens=counts,
        new_requests=added or [],
        cached_requests=[
            CachedRequestData(request_id=name, num_computed_tokens=start, new_block_ids=blocks)
            for name, (start, blocks) in (cached or {}).items()
        ],
        removed_request_ids=removed or [],
    )


@pytest.fixture
def batch() -> InputBatch:
    return InputBatch(BLOCK_SIZE, torch.device("cpu"))


def test_a_chunk_a_whole_prompt_and_a_prefix_hit_in_one_step(batch: InputBatch) -> None:
    first = plan(
        {"chunk": 5, "whole": 2, "hit": 1},
        added=[
            new("chunk", [10, 11, 12, 13, 14, 15, 16], [7, 3]),
            new("whole", [20, 21], [5]),
            new("hit", [30, 31, 32, 33, 34], [1, 9], start=4),
        ],
    )
    batch.apply(first)
    built, sampled = batch.build(first)
    assert built.token_ids.tolist() == [10, 11, 12, 13, 14, 20, 21, 34]
    assert built.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 4]
    assert built.slot_mapping.tolist() == [28, 29, 30, 31, 12, 20, 21, 36]
    assert built.block_table.tolist() == [[7, 3], [5, 0], [1, 9]]
    assert (built.query_lens, built.seq_lens) == ([5, 2, 1], [5, 2, 5])
    assert sampled == ["whole", "hit"]
    assert built.logits_rows.tolist() == [6, 7]

    batch.append("whole", [22])
    second = plan({"whole": 1, "chunk": 1}, cached={"whole": (2, []), "chunk": (5, [])}, removed=["hit"])
    batch.apply(second)
    built, sampled = batch.build(second)
    assert built.token_ids.tolist() == [22, 15]
    assert built.slot_mapping.tolist() == [22, 13]
    assert sampled == ["whole"]  # the chunk's last token is still to come
    with pytest.raises(KeyError):
        batch.sampling_rows(["hit"])


def test_blocks_grow_one_by_one_and_many_at_once(batch: InputBatch) -> None:
    batch.apply(plan({"r": 1}, added=[new("r", [0], [100])]))
    blocks = [100]
    for count in (1, 1, 1, 7, 1, 20, 1):
        given = [100 + 3 * (len(blocks) + i) for i in range(count)]
        blocks += given
        step = plan({"r": 1}, cached={"r": (0, given)})
        batch.apply(step)
        built, _ = batch.build(step)
        assert built.block_table.tolist() == [blocks]


def test_a_preempted_request_comes_back_with_its_output(batch: InputBatch) -> None:
    start = plan({"r": 3}, added=[new("r", [10, 11, 12], [4])])
    batch.apply(start)
    for token in (40, 41, 42):
        batch.append("r", [token])
    before = batch.sampling_rows(["r"])[0]
    # Preempted and taken up again in one plan; the first chunk ends between prompt and output.
    back = plan({"r": 2}, added=[new("r", [10, 11, 12, 40, 41, 42], [8, 6], prompt=3)], removed=["r"])
    batch.apply(back)
    assert batch.sampling_rows(["r"]) == [before]
    assert not before.below_min_tokens
    assert batch.build(back)[1] == []
    for first, count, tokens, is_sampled in ((2, 2, [12, 40], False), (4, 2, [41, 42], True), (3, 1, [40], False)):
        chunk = plan({"r": count}, cached={"r": (first, [])})
        batch.apply(chunk)
        built, sampled = batch.build(chunk)
        assert built.token_ids.tolist() == tokens
        assert bool(sampled) is is_sampled
        assert built.seq_lens == [first + count]


def test_a_step_that_samples_nobody_asks_for_no_logits(batch: InputBatch) -> None:
    step = plan({"r": 2}, added=[new("r", [1, 2, 3], [0])])
    batch.apply(step)
    built, sampled = batch.build(step)
    assert sampled == []
    assert built.logits_rows.shape == (0,)


def test_a_request_is_not_added_twice_and_may_be_removed_twice(batch: InputBatch) -> None:
    step = plan({"r": 1}, added=[new("r", [1], [0])])
    batch.apply(step)
    with pytest.raises(RuntimeError, match="adds 'r', which the runner holds already"):
        batch.apply(step)
    batch.remove(["r", "r"])
    batch.apply(step)
