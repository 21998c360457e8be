"""SuffixProposer copies what it saw, says how sure it is, and follows a request through whatever happens to it."""

from __future__ import annotations

import random
from itertools import accumulate
from operator import mul

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lookup_texts import (
    continues_from,
    lookup_row,
    places,
    proposals_along,
    propose_one,
    source_texts,
    texts,
)

from sol.errors import ConfigError
from sol.speculation.propose import Proposal
from sol.speculation.propose.suffix import SuffixProposer
from sol.speculation.propose.suffix_align import FIRST_COPIED
from sol.speculation.propose.suffix_text import TOKENS_PER_CALL
from sol.speculation.usage import expected_accepted


def expected(proposal: Proposal) -> float:
    return expected_accepted(proposal.scores or [])


@given(
    texts,
    texts,
    st.integers(1, 20),
    st.one_of(st.integers(2, 3), st.integers(2, 30)),
    st.floats(0, 3),
    st.floats(0, 1),
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
)
def test_a_proposal_is_the_real_continuation_of_an_earlier_occurrence_within_its_bounds(
    prompt: list[int],
    output: list[int],
    max_tokens: int,
    depth: int,
    factor: float,
    least: float,
    steps: list[int],
) -> None:
    proposer = SuffixProposer(max_tree_depth=depth, max_spec_factor=factor, min_token_prob=least)
    seen = 0
    for turn, proposal in enumerate(proposals_along(proposer, prompt, output, steps=steps, max_tokens=max_tokens)):
        seen = min(len(output), seen + steps[turn % len(steps)])
        text, drafts = prompt + output[:seen], proposal.token_ids
        scores = proposal.scores
        assert scores is not None
        assert len(drafts) == len(scores) <= min(max_tokens, factor * depth)
        assert all(0.0 <= score <= 1.0 for score in scores)
        assert all(product >= least * (1.0 - 1e-9) for product in accumulate(scores, mul))
        if drafts:
            # What may be taken for an edited copy goes on from elsewhere as well.
            among = places(text, 2) if depth < FIRST_COPIED else range(1, len(text))
            assert any(continues_from(text, place, drafts) for place in among)


@given(texts, texts, st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_what_it_knows_follows_from_the_tokens_alone(prompt: list[int], output: list[int], steps: list[int]) -> None:
    along = proposals_along(SuffixProposer(), prompt, output, steps=steps)
    if along:
        assert along[-1] == propose_one(SuffixProposer(), lookup_row(prompt, output))


@given(texts, texts, texts)
def test_a_request_that_returns_is_continued_as_if_it_had_never_left(
    prompt: list[int], output: list[int], more: list[int]
) -> None:
    proposer = SuffixProposer()
    propose_one(proposer, lookup_row(prompt, output))
    proposer.forget(["a"], finished=False)
    assert proposer.num_bytes == 0
    longer = lookup_row(prompt, output + more)
    assert propose_one(proposer, longer) == propose_one(SuffixProposer(), longer)


@given(texts, texts, texts, texts)
def test_a_request_id_that_comes_back_with_another_text_sees_nothing_of_the_old_one(
    prompt: list[int], output: list[int], other_prompt: list[int], other_output: list[int]
) -> None:
    proposer = SuffixProposer()
    propose_one(proposer, lookup_row(prompt, output))
    other = lookup_row(other_prompt, other_output)
    assert propose_one(proposer, other) == propose_one(SuffixProposer(), other)


def test_the_same_lists_with_fewer_tokens_begin_anew() -> None:
    proposer = SuffixProposer()
    row = lookup_row([1, 2, 3, 4, 1, 2], [3, 4, 1, 2, 3])
    propose_one(proposer, row)
    row.sampling.output_token_ids = [3]
    assert propose_one(proposer, row).token_ids == [4, 1, 2]


def test_one_other_token_in_a_prompt_of_the_same_length_makes_another_request() -> None:
    proposer = SuffixProposer()
    propose_one(proposer, lookup_row([1, 2, 3, 4, 5, 6, 1, 2], [3]))
    assert propose_one(proposer, lookup_row([1, 2, 3, 9, 5, 6, 1, 2], [3])).token_ids == [9, 5, 6]


def test_the_same_list_with_another_last_token_begins_anew() -> None:
    proposer = SuffixProposer()
    row = lookup_row([1, 2, 3, 4, 7, 8, 9, 5], [1, 2])
    output = row.sampling.output_token_ids
    assert isinstance(output, list)
    assert propose_one(proposer, row).token_ids == [3, 4]
    output[:] = [7, 8]
    assert propose_one(proposer, row).token_ids == [9, 5]


def test_matches_that_disagreed_with_a_draft_do_not_vote_on_the_next() -> None:
    prompt = [1, 2, 5, 6, 20, 1, 2, 5, 10, 21, 1, 2, 7, 9, 22, 1, 2, 8, 9, 23, 1, 2]
    assert propose_one(SuffixProposer(min_token_prob=0.0), lookup_row(prompt)).token_ids == [5, 10]


@pytest.mark.parametrize("period", [1, 2, 5])
def test_a_loop_is_continued_beyond_the_end_of_the_text(period: int) -> None:
    loop = list(range(period)) * 25
    proposals = proposals_along(SuffixProposer(), [90, 91], loop, max_tokens=20)
    assert proposals[-1].token_ids == (loop * 9)[len(loop) : len(loop) + 20]
    assert expected(proposals[-1]) > 10


def test_the_answer_to_edit_this_text_gets_long_confident_drafts() -> None:
    [source] = source_texts(1)
    prompt, answer = source[:900], source[200:600]
    answer[150:153] = [7, 7]  # the edit
    proposals = proposals_along(SuffixProposer(), prompt, answer, max_tokens=16)
    assert proposals[140].token_ids[:9] == answer[141:150]
    assert expected(proposals[100]) > 13
    sure = [expected(proposal) > 8 for proposal in proposals[20:-16]]
    assert sum(sure) > 0.85 * len(sure)


def test_text_without_repetition_gets_no_drafts() -> None:
    words = random.Random(0).sample(range(50_000), 2000)
    assert not any(proposal.token_ids for proposal in proposals_along(SuffixProposer(), words[:1000], words[1000:]))


def test_where_matches_mislead_scores_fall() -> None:
    draw = random.Random(1)
    noise = [draw.randrange(12) for _ in range(1200)]  # everything repeats, nothing follows
    proposals = proposals_along(SuffixProposer(), noise[:600], noise[600:])
    late = [expected(proposal) for proposal in proposals[300:]]
    assert sum(late) / len(late) < 0.25


def test_scores_are_the_frequencies_of_hits_on_real_text() -> None:
    """Teacher forcing over modules of the standard library: of each draft whose predecessors were right, was it? In
    each tenth of the scores, the mean score is within 0.1 of the share of hits; tokens expected and accepted in all are
    within 10%."""
    promised, hits, counts = [0.0] * 10, [0] * 10, [0] * 10
    total = accepted = 0.0
    for source in source_texts(9):
        prompt, output = source[:500], source[500:1500]
        for done, proposal in enumerate(proposals_along(SuffixProposer(), prompt, output), start=1):
            total += expected(proposal)
            for draft, score, real in zip(proposal.token_ids, proposal.scores or [], output[done:], strict=False):
                tenth = min(9, int(10 * score))
                promised[tenth] += score
                counts[tenth] += 1
                hits[tenth] += draft == real
                accepted += draft == real
                if draft != real:
                    break
    assert sum(counts) > 5000
    assert abs(total - accepted) < 0.1 * accepted
    for sum_, hit, count in zip(promised, hits, counts, strict=True):
        if count >= 300:
            assert abs(sum_ - hit) / count < 0.1


def test_a_long_prompt_is_taken_in_over_several_calls() -> None:
    unit = list(range(1000, 1000 + TOKENS_PER_CALL // 2 + 100))
    row = lookup_row([*unit, *unit, *unit, *unit[:10]], request_id="long")
    neighbour = lookup_row([1, 2, 3, 1, 2], request_id="short")
    proposer = SuffixProposer()
    first, beside = proposer.propose([row, neighbour])
    assert first.token_ids == []
    assert beside.token_ids == []  # the call's budget is spent
    second, beside = proposer.propose([row, neighbour])
    assert second.token_ids == unit[10:18]
    assert beside.token_ids == [3, 1]


def test_a_failure_half_way_leaves_nothing_half_known() -> None:
    proposer = SuffixProposer()
    row = lookup_row([1, 2, 3, 4, 1, 2], [3])
    propose_one(proposer, row)
    output = row.sampling.output_token_ids
    assert isinstance(output, list)
    output += [4, 2**40]  # no token id: it cannot be stored
    with pytest.raises(OverflowError):
        propose_one(proposer, row)
    output[-1] = 1
    assert propose_one(proposer, row) == propose_one(SuffixProposer(), row)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_tree_depth", 1),
        ("max_cached_requests", -1),
        ("max_spec_factor", -0.5),
        ("min_token_prob", 1.5),
        ("max_cached_tokens", -1),
    ],
)
def test_values_that_cannot_work_are_refused(option: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{option} is {value}"):
        SuffixProposer(**{option: value})  # type: ignore[arg-type]
