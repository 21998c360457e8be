"""NgramProposer proposes what followed the latest earlier occurrence of the longest n-gram, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lookup_texts import continues_from, lookup_row, places, proposals_along, propose_one, texts

from sol.errors import ConfigError
from sol.sampling_params import SamplingParams
from sol.speculation.propose.ngram import NgramProposer


def expected_drafts(text: list[int], shortest: int, longest: int, count: int) -> list[int]:
    for order in range(longest, shortest - 1, -1):
        for place in places(text, order):
            drafts: list[int] = []
            while len(drafts) < count:
                drafts.append([*text, *drafts][place + len(drafts)])
            return drafts
    return []


@given(
    texts,
    texts,
    st.tuples(st.integers(1, 6), st.integers(1, 6)).map(sorted),
    st.integers(1, 20),
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
)
def test_a_proposal_is_what_followed_the_latest_occurrence_of_the_longest_n_gram(
    prompt: list[int], output: list[int], lengths: list[int], max_tokens: int, steps: list[int]
) -> None:
    shortest, longest = lengths
    proposer = NgramProposer(prompt_lookup_min=shortest, prompt_lookup_max=longest)
    seen = 0
    for turn, proposal in enumerate(proposals_along(proposer, prompt, output, steps=steps, max_tokens=max_tokens)):
        seen = min(len(output), seen + steps[turn % len(steps)])
        text = prompt + output[:seen]
        assert proposal.token_ids == expected_drafts(text, shortest, longest, max_tokens)
        assert proposal.scores is not None
        assert len(proposal.scores) == len(proposal.token_ids)
        assert all(0.0 <= score <= 1.0 for score in proposal.scores)


@given(texts, texts, st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_what_it_knows_follows_from_the_tokens_alone(prompt: list[int], output: list[int], steps: list[int]) -> None:
    followed, fresh = NgramProposer(prompt_lookup_min=1), NgramProposer(prompt_lookup_min=1)
    along = proposals_along(followed, prompt, output, steps=steps)
    if along:
        assert along[-1] == propose_one(fresh, lookup_row(prompt, output))


@pytest.mark.parametrize("period", [1, 2, 3, 7])
def test_a_loop_is_continued_beyond_the_end_of_the_text(period: int) -> None:
    loop = list(range(period)) * 12
    proposal = propose_one(NgramProposer(), lookup_row([90, 91], loop, max_tokens=30))
    assert proposal.token_ids == (loop * 9)[len(loop) : len(loop) + 30]
    assert continues_from(loop, len(loop) - period, proposal.token_ids)


def test_scores_grow_with_the_match_and_with_success() -> None:
    words = list(range(100, 160))
    short = propose_one(NgramProposer(prompt_lookup_min=2), lookup_row([*words, 1, 2, 10, 11]))
    assert short.token_ids == []
    [first] = (
        propose_one(NgramProposer(prompt_lookup_min=2), lookup_row([*words, 1, *words[10:12]], max_tokens=1)).scores
        or []
    )
    copied = proposals_along(NgramProposer(prompt_lookup_min=2), [*words, 1], words[10:50])
    assert first < 0.5
    assert (copied[20].scores or [0.0])[0] > 0.9
    assert copied[20].token_ids == words[31:39]


def test_a_match_that_goes_on_grows_beyond_the_longest_n_gram() -> None:
    words = list(range(100, 140))
    proposal = propose_one(NgramProposer(), lookup_row([*words, *words[:12]], [words[12]]))
    assert proposal.scores is not None
    assert proposal.scores[0] > 0.8  # of a match of 13 tokens; one of 5 is worth 0.6


def test_nothing_is_drafted_behind_the_end_of_the_request() -> None:
    turn = [5, 6, 7, 8, 9, 2, 3, 4]
    row = lookup_row([*turn, 5, 6, 7, 8, 9], eos=[2])
    assert propose_one(NgramProposer(), row).token_ids == [2]
    row = lookup_row([*turn, 5, 6, 7, 8, 9], eos=[2], params=SamplingParams(ignore_eos=True, stop_token_ids=[4]))
    proposal = propose_one(NgramProposer(), row)
    assert proposal.token_ids == [2, 3, 4]
    assert len(proposal.scores or []) == 3


@pytest.mark.parametrize("lengths", [(0, 3), (4, 3), (1, 65), (-1, -1)])
def test_lengths_that_cannot_work_are_refused(lengths: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match=f"prompt_lookup_min is {lengths[0]} and prompt_lookup_max {lengths[1]}"):
        NgramProposer(prompt_lookup_min=lengths[0], prompt_lookup_max=lengths[1])


def test_requests_are_kept_apart_and_freed_when_they_leave() -> None:
    proposer = NgramProposer(prompt_lookup_min=2)
    rows = [lookup_row([first, 2, 3, 4, first, 2], request_id=str(first)) for first in (10, 20, 30)]
    assert [proposal.token_ids[:3] for proposal in proposer.propose(rows)] == [[3, 4, first] for first in (10, 20, 30)]
    assert proposer.num_bytes > 0
    proposer.forget(["10", "20", "unknown"], finished=True)
    proposer.forget(["30"], finished=False)
    assert proposer.num_bytes == 0
