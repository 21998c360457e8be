"""Past outputs are drafted from by their own tenant alone, within exact bounds, and are gone when they are dropped."""

from __future__ import annotations

from array import array
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lookup_texts import lookup_row, propose_one, texts

from sol.speculation.propose.suffix import SuffixProposer
from sol.speculation.propose.suffix_index import SEPARATOR, NgramIndex
from sol.speculation.propose.suffix_match import ORDERS, find_matches
from sol.speculation.propose.suffix_memory import OUTPUT_OVERHEAD, OutputMemory

ANSWER = list(range(500, 540))


def finish(proposer: SuffixProposer, prompt: list[int], output: list[int], tenant: str | None) -> None:
    propose_one(proposer, lookup_row(prompt, output, tenant=tenant, request_id="past"))
    proposer.forget(["past"], finished=True)


def test_a_tenant_is_continued_from_its_own_past_outputs() -> None:
    proposer = SuffixProposer(max_cached_requests=10)
    finish(proposer, [1, 2, 3], ANSWER, "a")
    proposal = propose_one(proposer, lookup_row([7, 8, 9], ANSWER[:6], tenant="a"))
    assert proposal.token_ids == ANSWER[6:12]
    assert proposal.scores is not None
    assert min(proposal.scores) > 0.5


@pytest.mark.parametrize("tenant", ["b", None])
def test_nobody_else_is(tenant: str | None) -> None:
    proposer = SuffixProposer(max_cached_requests=10)
    finish(proposer, [1, 2, 3], ANSWER, "a")
    assert propose_one(proposer, lookup_row([7, 8, 9], ANSWER[:6], tenant=tenant)).token_ids == []


def test_nothing_is_remembered_of_nobody_of_the_preempted_or_with_no_room() -> None:
    proposer = SuffixProposer(max_cached_requests=10)
    finish(proposer, [1, 2, 3], ANSWER, None)
    propose_one(proposer, lookup_row([1], ANSWER, tenant="a", request_id="preempted"))
    proposer.forget(["preempted"], finished=False)
    finish(proposer, [1, 2, 3], [], "a")
    off = SuffixProposer()
    finish(off, [1, 2, 3], ANSWER, "a")
    assert len(proposer.memory) == len(off.memory) == 0
    assert proposer.num_bytes == off.num_bytes == 0


def test_prompts_are_not_remembered() -> None:
    proposer = SuffixProposer(max_cached_requests=10)
    finish(proposer, ANSWER, [1, 2, 3], "a")
    assert propose_one(proposer, lookup_row([7, 8], ANSWER[:6], tenant="a")).token_ids == []


def test_of_an_output_not_yet_taken_in_what_was_is_remembered() -> None:
    proposer = SuffixProposer(max_cached_requests=10)
    long = list(range(5000))
    finish(proposer, [1], long, "a")
    held = proposer.memory.of("a")
    assert held is not None
    assert 100 < len(held.index) < 5000
    assert propose_one(proposer, lookup_row([1], long[:9], tenant="a")).token_ids == long[9:17]


def test_the_better_of_own_text_and_memory_is_proposed() -> None:
    proposer = SuffixProposer(max_cached_requests=10)
    finish(proposer, [1], ANSWER, "a")
    own = [*ANSWER[18:20], 71, 72, 73, 74]  # two tokens that match, where memory has twenty
    proposal = propose_one(proposer, lookup_row(own, ANSWER[:20], tenant="a"))
    assert proposal.token_ids == ANSWER[20:28]
    own = [*range(30), *ANSWER[10:20], 71, 72, 73, 74]
    proposal = propose_one(proposer, lookup_row(own, [3, 4, *range(5, 30), *ANSWER[10:20]], tenant="a"))
    assert proposal.token_ids == [71, 72, 73, 74, 3, 4, 5, 6]


def test_no_draft_goes_beyond_an_output_into_the_next() -> None:
    proposer = SuffixProposer(max_cached_requests=10)
    finish(proposer, [1], ANSWER[:20], "a")
    finish(proposer, [1], ANSWER[30:], "a")
    proposal = propose_one(proposer, lookup_row([1], ANSWER[:17], tenant="a"))
    assert proposal.token_ids == ANSWER[17:20]


def test_memory_that_misleads_is_trusted_less() -> None:
    proposer = SuffixProposer(max_cached_requests=10)
    finish(proposer, [1], [token for pair in range(150) for token in (2 * pair, 2 * pair + 1, 9000 + pair)], "a")
    first = last = None
    row = lookup_row([1], [], tenant="a")
    output = row.sampling.output_token_ids
    assert isinstance(output, list)
    for pair in range(140):
        output += [2 * pair, 2 * pair + 1]
        last = propose_one(proposer, row)
        first = first or last
        output.append(20_000 + pair)  # never what memory says
    assert first is not None
    assert first.scores is not None
    assert first.scores[0] > 0.3
    assert last is not None
    assert last.token_ids == []


outputs = st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 5), min_size=1, max_size=60)), max_size=60)


@given(outputs, st.integers(1, 6), st.integers(OUTPUT_OVERHEAD + 1, 500), st.integers(OUTPUT_OVERHEAD + 1, 900))
def test_bounds_hold_the_oldest_go_first_and_the_account_is_exact(
    remembered: list[tuple[str, list[int]]], max_requests: int, max_tenant_tokens: int, max_tokens: int
) -> None:
    memory = OutputMemory(max_requests=max_requests, max_tenant_tokens=max_tenant_tokens, max_tokens=max_tokens)
    kept: deque[tuple[str, list[int]]] = deque()
    most = min(max_tenant_tokens, max_tokens)

    def charge(tenant: str | None = None) -> int:
        return sum(len(output) + OUTPUT_OVERHEAD for owner, output in kept if tenant in (None, owner))

    for tenant, output in remembered:
        memory.remember(tenant, output)
        kept.append((tenant, output[-(most - OUTPUT_OVERHEAD) :]))
        while sum(owner == tenant for owner, _ in kept) > max_requests or charge(tenant) > most:
            kept.remove(next(entry for entry in kept if entry[0] == tenant))
        while charge() > max_tokens:
            kept.popleft()
        assert memory.num_tokens == charge() <= max_tokens
        assert len(memory) == len(kept)
        for owner in "abc":
            assert memory.tenant_tokens(owner) == charge(owner)
            held = memory.of(owner)
            mine = [output for other, output in kept if other == owner]
            if held is None:
                assert mine == []
                continue
            assert len(held) == len(mine)
            text = list(held.index.tokens)
            behind = [token for output in mine for token in (*output, SEPARATOR)]
            assert text[len(text) - len(behind) :] == behind
            assert set(text[: len(text) - len(behind)]) <= {SEPARATOR}


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=300), min_size=1, max_size=40), texts)
def test_what_is_found_is_in_what_is_kept(remembered: list[list[int]], text: list[int]) -> None:
    memory = OutputMemory(max_requests=3, max_tenant_tokens=2000, max_tokens=2000)
    for output in remembered:
        memory.remember("a", output)
    held = memory.of("a")
    assert held is not None
    index = NgramIndex(ORDERS)
    index.extend(text)
    for place, length in find_matches(held.index, index.tokens, index.hashes, 24):
        piece = held.index.tokens[place - length : place]
        assert piece == array("i", text[len(text) - length :])
        assert SEPARATOR not in piece


def test_what_was_dropped_is_overwritten_at_once_and_freed_soon() -> None:
    memory = OutputMemory(max_requests=2, max_tenant_tokens=100_000, max_tokens=100_000)
    memory.remember("a", [123_456] * 600)
    for _ in range(3):
        memory.remember("a", [5] * 600)
    held = memory.of("a")
    assert held is not None
    assert 123_456 not in held.index.tokens
    for _ in range(100):
        memory.remember("a", [5] * 600)
        assert len(held.index) <= 4 * 601
        assert memory.num_bytes < 28 * 4 * 601


def test_a_tenant_whose_output_cannot_be_taken_in_is_dropped_whole() -> None:
    memory = OutputMemory(max_requests=5, max_tenant_tokens=10_000, max_tokens=10_000)
    memory.remember("a", [1, 2, 3])
    memory.remember("b", [1, 2, 3])
    with pytest.raises(OverflowError):
        memory.remember("a", [1, 2**40])
    assert memory.of("a") is None
    assert len(memory) == 1
    assert memory.num_tokens == memory.tenant_tokens("b") == 3 + OUTPUT_OVERHEAD
