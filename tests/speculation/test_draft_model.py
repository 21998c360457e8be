"""DraftModelProposer drafts what its model would say with a cache of its own, whatever became of the shared blocks."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from drafting_requests import (
    GREEDY,
    NUM_BLOCKS,
    PENALISED,
    SAMPLED,
    Counting,
    draft_model,
    make_row,
    one,
    oracle,
    program,
    prompt,
    proposer,
    tokens_of,
    with_output,
)
from tiny_cpu import cpu_executor

from sol.ops import Program
from sol.sampling_params import SamplingParams
from sol.speculation.propose import ProposalRow
from sol.speculation.propose.draft_model import DraftModelProposer


@pytest.fixture(scope="module", name="drafting")
def drafting_program() -> Program:
    return program(layers=1, hidden=32, intermediate=32)


@pytest.fixture
def counting(drafting: Program) -> Iterator[Counting]:
    with cpu_executor(drafting, num_blocks=NUM_BLOCKS, block_size=4) as executor:
        yield Counting(executor)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
def test_it_drafts_what_a_target_of_the_same_weights_says(drafting: Program, params: SamplingParams) -> None:
    row = make_row("a", prompt(9), prompt(3, seed=1), blocks=range(5, 15), max_tokens=6, params=params)
    with draft_model(drafting) as drafter:
        found = one(drafter, row)
        assert found.token_ids == oracle(drafting, row)
        assert found.scores is not None
        assert len(found.scores) == 6
        assert all(0.0 <= score <= 1.0 for score in found.scores)
        assert found.probs is None, "nobody has to know how they were drawn"
        # All accepted, and a bonus token; then all but one rejected.
        for emitted in ([*found.token_ids, 11], [*found.token_ids[:1], 95]):
            row = with_output(row, emitted)
            found = one(drafter, row)
            assert found.token_ids == oracle(drafting, row)


def test_only_what_is_new_is_computed(counting: Counting) -> None:
    drafter = proposer(counting)
    row = make_row("a", prompt(10), blocks=range(10), max_tokens=3)
    drafts = one(drafter, row).token_ids
    assert counting.passes == [[10], [1], [1]]
    counting.passes.clear()
    row = with_output(row, [*drafts, 1])  # its own last draft it has not computed
    one(drafter, row)
    assert counting.passes == [[2], [1], [1]]
    counting.passes.clear()
    drafts = one(drafter, with_output(row, [])).token_ids  # asked again: one token for its logits
    assert counting.passes == [[1], [1], [1]]
    counting.passes.clear()
    one(drafter, with_output(row, [drafts[0], (drafts[1] + 1) % 96]))  # the first was right: it is kept
    assert counting.passes == [[1], [1], [1]]


def test_a_batch_drafts_together_each_as_if_alone(drafting: Program) -> None:
    rows = [
        make_row("a", prompt(3, seed=1), blocks=range(0, 8), max_tokens=1),
        make_row("b", prompt(17, seed=2), blocks=range(8, 18), max_tokens=5, params=SAMPLED),
        make_row("c", prompt(4, seed=3), prompt(5, seed=4), blocks=range(20, 30), max_tokens=3, params=PENALISED),
        make_row("d", prompt(1, seed=5), blocks=range(30, 40), max_tokens=4, params=SAMPLED, seed=8),
    ]
    with draft_model(drafting) as drafter:
        for _ in range(3):
            found = drafter.propose(rows)
            assert [p.token_ids for p in found] == [oracle(drafting, row) for row in rows]
            for row, proposal in zip(rows, found, strict=True):
                with draft_model(drafting) as fresh:
                    assert one(fresh, row) == proposal
            rows = [
                with_output(r, [*p.token_ids[: i % 3], 9]) for i, (r, p) in enumerate(zip(rows, found, strict=True))
            ]
            rows.reverse()


def test_a_long_prompt_is_caught_up_in_bounded_chunks_beside_others(counting: Counting, drafting: Program) -> None:
    drafter = proposer(counting, max_num_tokens=10)
    short = make_row("short", prompt(2, seed=1), blocks=range(20, 30), max_tokens=2)
    long = make_row("long", prompt(14, seed=14), blocks=range(8), max_tokens=2)
    longer = make_row("longer", prompt(28, seed=28), blocks=range(8, 18), max_tokens=2)
    drafts: list[list[list[int]]] = []
    rows = [long, longer, short]
    for _ in range(12):
        found = [proposal.token_ids for proposal in drafter.propose(rows)]
        drafts.append(found)
        rows = [rows[0], rows[1], with_output(rows[2], found[2])] if len(tokens_of(rows[2])) < 20 else rows
        if all(found):
            break
    assert all(sum(lens) <= 10 for lens in counting.passes)
    assert all(found[2] for found in drafts), "who is caught up never waits"
    assert [bool(found[0]) for found in drafts[:2]] == [False, True], "the older one first"
    assert drafts[-1][:2] == [oracle(drafting, long), oracle(drafting, longer)]
    assert not drafts[1][1]


def test_a_gap_is_caught_up(counting: Counting, drafting: Program) -> None:
    drafter = proposer(counting)
    row = make_row("a", prompt(6), blocks=range(30, 45))
    one(drafter, row)
    row = with_output(row, prompt(21, seed=3))  # the controller did not draft meanwhile
    counting.passes.clear()
    assert one(drafter, row).token_ids == oracle(drafting, row)
    # One of the drafts is not what was emitted, or it is: then there is less to do.
    assert counting.passes[0][0] in range(18, 22)


def test_choices_that_share_a_prompt_compute_it_once(counting: Counting, drafting: Program) -> None:
    drafter = proposer(counting)
    shared = prompt(13)
    first = make_row("a", shared, blocks=[1, 2, 3, 4, 5, 6], max_tokens=2)
    second = make_row("b", shared, [8], blocks=[1, 2, 3, 14, 15, 16], max_tokens=2)
    found = drafter.propose([first, second])
    assert [len(p.token_ids) for p in found] == [2, 0]
    assert counting.passes[0] == [13]
    counting.passes.clear()
    found = drafter.propose([first, second])
    assert counting.passes[0] == [1, 2]
    assert [p.token_ids for p in found] == [oracle(drafting, first), oracle(drafting, second)]


def test_a_prefix_hit_is_believed_only_as_far_as_it_was_computed(counting: Counting, drafting: Program) -> None:
    drafter = proposer(counting)
    one(drafter, make_row("a", prompt(10), blocks=[1, 2, 3, 4], max_tokens=1))
    drafter.forget(["a"], finished=True)
    # Blocks 1 and 2 are found and were computed, block 3 is new; 9 was found and never computed by the drafter.
    counting.passes.clear()
    hit = make_row("b", [*prompt(8), *prompt(6, seed=2)], blocks=[1, 2, 13, 14, 15], max_tokens=1)
    assert one(drafter, hit).token_ids == oracle(drafting, hit)
    assert counting.passes == [[6]]
    counting.passes.clear()
    miss = make_row("c", [*prompt(8), *prompt(6, seed=2)], blocks=[1, 9, 23, 24, 25], max_tokens=1)
    assert one(drafter, miss).token_ids == oracle(drafting, miss)
    assert counting.passes == [[10]]


def test_equal_tokens_after_other_ones_are_not_the_same_block(counting: Counting, drafting: Program) -> None:
    drafter = proposer(counting)
    tail = prompt(6, seed=2)
    one(drafter, make_row("a", [*prompt(4), *tail], blocks=[1, 2, 3], max_tokens=1))
    drafter.forget(["a"], finished=True)
    other = make_row("b", [*prompt(4, seed=9), *tail], blocks=[5, 2, 3, 4], max_tokens=2)
    assert one(drafter, other).token_ids == oracle(drafting, other)
    assert counting.passes[1] == [10]
    swapped = make_row("c", [*tail[:4], *prompt(4), *tail], blocks=[2, 1, 3, 6, 7], max_tokens=2)
    assert one(drafter, swapped).token_ids == oracle(drafting, swapped)


def test_a_preempted_request_finds_again_what_is_left_of_its_blocks(counting: Counting, drafting: Program) -> None:
    drafter = proposer(counting)
    row = make_row("a", prompt(12), blocks=[1, 2, 3, 4, 5], max_tokens=2)
    drafts = one(drafter, row).token_ids
    drafter.forget(["a", "nobody"], finished=False)
    one(drafter, make_row("b", prompt(7, seed=5), blocks=[2, 9, 10], max_tokens=2))  # block 2 went to another one
    back = with_output(row, [*drafts, 4, 4])
    counting.passes.clear()
    assert one(drafter, back).token_ids == oracle(drafting, back)
    assert counting.passes[0] == [back.num_tokens - 4], "block 1 is left"
    # Longer, into other blocks, with the same id.
    drafter.forget(["a"], finished=False)
    moved = dataclasses.replace(back, block_ids=make_row("", [1], blocks=range(40, 50)).block_ids)
    assert one(drafter, moved).token_ids == oracle(drafting, moved)


def test_a_reused_request_id_is_another_request(drafting: Program) -> None:
    with draft_model(drafting) as drafter:
        one(drafter, make_row("a", prompt(9), blocks=range(6)))
        drafter.forget(["a"], finished=True)
        again = make_row("a", prompt(11, seed=1), blocks=range(6))
        assert one(drafter, again).token_ids == oracle(drafting, again)


@pytest.mark.parametrize("fail_in", [0, 1, 2])
def test_a_pass_that_fails_leaves_books_that_are_true(counting: Counting, drafting: Program, fail_in: int) -> None:
    drafter = proposer(counting)
    row = make_row("a", prompt(7), blocks=range(10), max_tokens=5)
    before = one(drafter, row).token_ids
    row = with_output(row, before)
    counting.fail_in = fail_in
    with pytest.raises(MemoryError):
        one(drafter, row)
    # All of the cache is NaN now, so whatever it still believes of it shows. Only what it wrote since may stay.
    other = make_row("b", prompt(9, seed=2), blocks=range(20, 30))
    assert one(drafter, other).token_ids == oracle(drafting, other)
    stale = proposer(counting)
    assert one(stale, row).token_ids == oracle(drafting, row)


def test_what_a_failing_pass_was_to_write_is_not_believed(counting: Counting) -> None:
    drafter = proposer(counting)
    counting.fail_in = 0
    row = make_row("a", prompt(7), blocks=range(10), max_tokens=1)
    with pytest.raises(MemoryError):
        one(drafter, row)
    counting.passes.clear()
    assert one(drafter, row).token_ids
    assert counting.passes == [[7]]


def test_beyond_the_context_of_the_draft_model_there_are_no_drafts(counting: Counting) -> None:
    drafter = proposer(counting, max_positions=12)
    row = make_row("a", prompt(10), blocks=range(10), max_tokens=8)
    lengths = []
    for _ in range(6):
        lengths.append(len(one(drafter, row).token_ids))
        row = with_output(row, [3])
    assert lengths == [3, 2, 1, 0, 0, 0]  # position 11 is the last that it computes
    assert len(one(drafter, make_row("b", prompt(30, seed=1), blocks=range(20, 30))).token_ids) == 0


def test_it_never_writes_past_its_blocks(counting: Counting) -> None:
    drafter = proposer(counting)
    assert len(one(drafter, make_row("a", prompt(6), blocks=[3, 4], max_tokens=9)).token_ids) == 3


def test_nothing_is_drafted_after_an_end(drafting: Program) -> None:
    row = make_row("a", prompt(9), blocks=range(10), max_tokens=5)
    drafts = oracle(drafting, row)
    with draft_model(drafting) as drafter:
        ending = dataclasses.replace(row, sampling=dataclasses.replace(row.sampling, eos_token_ids=[drafts[1]]))
        end = drafts.index(drafts[1]) + 1
        assert one(drafter, ending).token_ids == drafts[:end]
        params = dataclasses.replace(GREEDY, ignore_eos=True)
        going_on = dataclasses.replace(ending, sampling=dataclasses.replace(ending.sampling, params=params))
        assert one(drafter, going_on).token_ids == drafts


def test_greedy_drafts_for_requests_that_sample(drafting: Program) -> None:
    row = make_row("a", prompt(9), blocks=range(10), params=SAMPLED)
    greedy = dataclasses.replace(row, sampling=dataclasses.replace(row.sampling, params=GREEDY))
    with draft_model(drafting, sample_method="greedy") as drafter:
        assert one(drafter, row).token_ids == oracle(drafting, greedy)


def test_independent_drafts_come_with_what_they_were_drawn_from(drafting: Program) -> None:
    row = make_row("a", prompt(9), blocks=range(10), params=SAMPLED, max_tokens=6, eos=range(96))
    greedy = make_row("b", prompt(5), blocks=range(20, 30))
    with draft_model(drafting, sample_method="independent") as drafter:
        found, beside = drafter.propose([row, greedy])
        assert len(found.token_ids) == 6, "the number of drafts does not depend on them, ends included"
        assert found.probs is not None
        assert found.probs.shape == (6, 96)
        torch.testing.assert_close(found.probs.sum(1), torch.ones(6))
        assert (found.probs[range(6), found.token_ids] > 0).all()
        assert beside.token_ids == oracle(drafting, greedy)
        assert beside.probs is None
        drawn = {tuple(one(drafter, make_row("a", prompt(9), blocks=range(10), params=SAMPLED, seed=seed)).token_ids)
                 for seed in range(8)}  # fmt: skip
        assert len(drawn) > 4


def test_logits_that_are_not_finite_end_the_drafts(drafting: Program) -> None:
    class Broken:
        """NaN for some rows of its second pass."""

        def __init__(self, executor: Any, rows: list[int], first: int) -> None:
            self.executor, self.rows, self.first, self.passes = executor, rows, first, 0

        def forward(self, batch: Any) -> torch.Tensor:
            logits: torch.Tensor = self.executor.forward(batch).clone()
            self.passes += 1
            if self.passes > self.first:
                logits[[row for row in self.rows if row < len(logits)]] = float("nan")
            return logits

    rows = [make_row("a", prompt(5), blocks=range(9)), make_row("b", prompt(6), blocks=range(10, 19))]
    with cpu_executor(drafting, num_blocks=NUM_BLOCKS, block_size=4) as executor:
        found = proposer(Broken(executor, [1], 1)).propose(rows)
        assert [len(p.token_ids) for p in found] == [4, 1]
        assert [len(p.scores or []) for p in found] == [4, 1]
        with pytest.raises(FloatingPointError, match="draft_model"):
            proposer(Broken(executor, [0, 1], 0)).propose(rows)


def test_random_lives_of_requests(drafting: Program) -> None:
    """Requests that grow, are preempted, end, and take over each other's blocks: always what a fresh cache gives."""
    chance = random.Random(5)
    target = drafting
    with draft_model(drafting, max_num_tokens=24) as drafter:
        requests: dict[str, ProposalRow] = {}
        free = list(range(NUM_BLOCKS))
        starts = [prompt(8, seed=seed) for seed in range(3)]
        kept: dict[tuple[int, ...], int] = {}

        def admit(name: str, tokens: list[int], params: SamplingParams) -> None:
            """Takes what blocks hold its beginning, as the prefix cache would."""
            held = {int(b) for r in requests.values() for b in r.block_ids}
            blocks: list[int] = []
            for end in range(4, len(tokens), 4):
                found = kept.get(tuple(tokens[:end]))
                if found is None or found in blocks:
                    break
                blocks.append(found)
            wanted = 10 - len(blocks)
            fresh = [b for b in free if b not in held and b not in blocks]
            chance.shuffle(fresh)
            for block in fresh[:wanted]:
                for key in [k for k, b in kept.items() if b == block]:
                    del kept[key]
            requests[name] = make_row(name, tokens, blocks=[*blocks, *fresh[:wanted]], params=params, max_tokens=3)

        for step in range(60):
            if len(requests) < 4:
                begin = chance.choice(starts)[: chance.choice([4, 8])]
                admit(f"r{step}", begin + prompt(chance.randint(1, 5), seed=step), chance.choice([GREEDY, SAMPLED]))
            asked = [row for row in requests.values() if chance.random() < 0.8]
            found = drafter.propose(asked) if asked else []
            for row, proposal in zip(asked, found, strict=True):
                if proposal.token_ids and step % 4 == 0:
                    assert proposal.token_ids == oracle(target, row)
                emitted = [*proposal.token_ids[: chance.randint(0, 3)], chance.randrange(96)]
                grown = with_output(row, emitted)
                name = row.request_id
                tokens = tokens_of(grown)
                for index in range((len(tokens) - 1) // 4):
                    kept.setdefault(tuple(tokens[: 4 * index + 4]), int(row.block_ids[index]))
                if len(tokens) > 33 or chance.random() < 0.1:
                    del requests[name]
                    drafter.forget([name], finished=True)
                elif chance.random() < 0.15:
                    del requests[name]
                    drafter.forget([name], finished=False)
                    admit(name, tokens, row.sampling.params)
                else:
                    requests[name] = grown


def test_it_is_called_what_users_write(counting: Counting) -> None:
    drafter: DraftModelProposer = proposer(counting)
    assert drafter.name == "draft_model"
    assert drafter.propose([]) == []
