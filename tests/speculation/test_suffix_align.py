"""A copy with edits is followed across them, as sure as its own edits make it, and given up where it does not go on."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from pydoc_data.topics import topics  # type: ignore[import-untyped, unused-ignore]
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lookup_texts import edited, edits, lookup_row, proposals_along, propose_one, source_texts

from sol.speculation.propose.suffix import SuffixProposer
from sol.speculation.propose.suffix_align import Alignment
from sol.speculation.usage import expected_accepted

SOURCE = list(range(1000, 1100))
sources = st.lists(st.integers(0, 30), min_size=12, max_size=60)
slices = st.lists(st.integers(1, 5), min_size=1, max_size=4)


def proposed(output: Sequence[int], source: Sequence[int] = SOURCE, **options: float) -> list[int]:
    """However improbable."""
    proposer = SuffixProposer(min_token_prob=0.0, **options)  # type: ignore[arg-type]
    return propose_one(proposer, lookup_row(source, output)).token_ids


def passes(proposer: SuffixProposer, prompt: Sequence[int], answer: Sequence[int], most: int = 8) -> int:
    """The steps in which a target that says `answer` is done, verifying all drafts every time."""
    row, count = lookup_row(prompt, max_tokens=most), 0
    output = row.sampling.output_token_ids
    assert isinstance(output, list)
    drafts: list[int] = []
    while len(output) < len(answer):
        accepted = 0
        while accepted < len(drafts) and drafts[accepted : accepted + 1] == answer[len(output) + accepted :][:1]:
            accepted += 1
        output += answer[len(output) : len(output) + accepted + 1]
        drafts = propose_one(proposer, row).token_ids
        count += 1
    return count


def test_behind_a_replaced_token_the_source_goes_on_at_once() -> None:
    assert proposed([*SOURCE[20:40], 7]) == SOURCE[41:49]


def test_a_token_left_out_is_noticed_by_what_came_instead() -> None:
    assert proposed([*SOURCE[20:40], SOURCE[41]]) == SOURCE[42:50]


def test_a_token_put_in_is_noticed_when_the_replaced_one_follows() -> None:
    assert proposed([*SOURCE[20:40], 7, SOURCE[40]]) == SOURCE[41:49]


@pytest.mark.parametrize("left_out", [2, 5])
def test_several_tokens_left_out_are_noticed_by_the_next_one(left_out: int) -> None:
    begin = 40 + left_out
    assert proposed([*SOURCE[20:40], 7, SOURCE[begin]]) == SOURCE[begin + 1 : begin + 9]


def test_two_tokens_for_two_are_not_guessed_but_the_next_one_that_agrees_is_enough() -> None:
    assert proposed([*SOURCE[20:40], 7, 8]) == []
    assert proposed([*SOURCE[20:40], 7, 8, SOURCE[42]]) == SOURCE[43:51]


def test_a_copy_that_does_not_go_on_is_given_up() -> None:
    lost = [*SOURCE[20:40], 7, 8, 9, 10, 11, 12, 13]
    assert proposed([*lost, SOURCE[47]]) == []
    assert proposed([*lost, *SOURCE[70:72]]) == SOURCE[72:74]  # an ordinary match again


def test_two_tokens_that_agreed_are_no_copy_yet() -> None:
    assert proposed([*SOURCE[38:40], 7]) == []


def test_drafts_are_bounded_by_the_tokens_copied_before_the_break() -> None:
    assert proposed([*SOURCE[36:40], 7]) == SOURCE[41:45]
    assert proposed([*SOURCE[36:40], 7], max_spec_factor=0.5) == SOURCE[41:43]
    assert proposed([*SOURCE[36:40], 7], max_tree_depth=3) == []


def test_a_source_that_ends_is_followed_into_the_output() -> None:
    source = SOURCE[:20]
    assert proposed([*source[:19], 7], source)[:4] == [*source[:3], source[3]]
    assert proposed([*source, *source[:15], source[15]], source)[:6] == [*source[16:], *source[:2]]


def test_a_longer_ordinary_match_wins_over_the_source_followed_so_far() -> None:
    other = list(range(2000, 2060))
    output = [*SOURCE[:20], 7, *SOURCE[21:40], *other[10:20]]
    assert proposed(output, [*SOURCE, *other]) == other[20:28]
    assert proposed([*output, 7], [*SOURCE, *other]) == other[21:29]


def test_a_list_whose_entries_differ_in_a_few_tokens_takes_a_pass_for_each_of_those() -> None:
    entries = [f'{{"id": {n}, "name": "item {n}", "price": {n}.50, "in_stock": true}},\n' for n in range(10, 20)]
    numbers: dict[str, int] = {}
    split = [re.findall(r"\w+?(?=\d|\b)|\d|\s+|[^\w\s]", entry) for entry in entries]
    tokens = [[numbers.setdefault(word, len(numbers)) for word in words] for words in split]
    prompt = [token for entry in tokens[:4] for token in entry]
    answer = [token for entry in tokens[4:] for token in entry]
    bound = 3 * 6 + len(answer) / 9  # the changes, and what 8 drafts a pass take at least
    assert passes(SuffixProposer(), prompt, answer) < bound + 3


def test_a_text_that_goes_on_after_its_edits_gets_surer_and_one_that_does_not_less_sure() -> None:
    survives, breaks = [], []
    for repeat in range(8):
        at = 12 * repeat
        survives += [*SOURCE[at : at + 11], 5000 + repeat]
        breaks += [*SOURCE[at : at + 9], *range(6000 + 20 * repeat, 6012 + 20 * repeat)]
    first, last = (
        propose_one(SuffixProposer(), lookup_row(SOURCE, survives[: 12 * repeat])).scores for repeat in (1, 8)
    )
    assert first
    assert last
    assert 0.1 < first[0] < 0.4 < 0.8 < last[0]
    misled = propose_one(SuffixProposer(), lookup_row(SOURCE, [*breaks, *SOURCE[:12], 9])).scores
    fresh = propose_one(SuffixProposer(), lookup_row(SOURCE, [*SOURCE[:12], 9])).scores
    assert fresh
    assert misled is not None
    assert not misled or misled[0] < 0.5 * fresh[0]


@given(sources, edits, slices, st.integers(2, 30))
def test_an_alignment_follows_from_the_tokens_alone(
    source: list[int], changes: list[tuple[int, int, list[int]]], steps: list[int], depth: int
) -> None:
    output = edited(source, changes)
    along = proposals_along(SuffixProposer(max_tree_depth=depth), source, output, steps=steps)
    if along:
        assert along[-1] == propose_one(SuffixProposer(max_tree_depth=depth), lookup_row(source, output))


@given(sources, edits, st.integers(0, 80))
def test_a_preempted_request_finds_its_alignment_again(
    source: list[int], changes: list[tuple[int, int, list[int]]], preempted_at: int
) -> None:
    output = edited(source, changes)
    proposer = SuffixProposer()
    propose_one(proposer, lookup_row(source, output[:preempted_at]))
    proposer.forget(["a"], finished=False)
    longer = lookup_row(source, output)
    assert propose_one(proposer, longer) == propose_one(SuffixProposer(), longer)


@given(sources, edits, slices, st.integers(1, 12), st.floats(0, 3), st.floats(0, 1))
def test_drafts_across_edits_keep_their_bounds(
    source: list[int],
    changes: list[tuple[int, int, list[int]]],
    steps: list[int],
    max_tokens: int,
    factor: float,
    least: float,
) -> None:
    proposer = SuffixProposer(max_tree_depth=8, max_spec_factor=factor, min_token_prob=least)
    for proposal in proposals_along(proposer, source, edited(source, changes), steps=steps, max_tokens=max_tokens):
        scores = proposal.scores
        assert scores is not None
        assert len(scores) == len(proposal.token_ids) <= min(max_tokens, factor * 8)
        assert all(0.0 <= score <= 1.0 for score in scores)
        product = 1.0
        for score in scores:
            product *= score
        assert not scores or product >= least * (1.0 - 1e-9)


def english(count: int) -> list[list[int]]:
    """Python's documentation, a number for each word, space or sign."""
    numbers: dict[str, int] = {}
    chosen = [topics[name] for name in sorted(topics) if len(topics[name]) > 6000][:count]
    split = (re.findall(r"\w+|\s+|[^\w\s]", text) for text in chosen)
    return [[numbers.setdefault(word, len(numbers)) for word in words][:2000] for words in split]


@pytest.mark.parametrize("kind", [source_texts, english])
def test_scores_after_breaks_are_honest_where_nothing_was_copied_on_purpose(
    monkeypatch: pytest.MonkeyPatch, kind: Callable[[int], list[list[int]]]
) -> None:
    """Text as it repeats by itself: of the drafts that come from an alignment, scores and hits differ by 0.08 at
    most."""
    aligned: list[list[float]] = []
    ordinary = Alignment.draft

    def noted(self: Alignment, *args: Any, **options: Any) -> tuple[list[int], list[float]]:
        drafts, scores = ordinary(self, *args, **options)
        aligned.append(scores)
        return drafts, scores

    monkeypatch.setattr(Alignment, "draft", noted)
    promised = hits = count = 0.0
    for source in kind(8):
        row = lookup_row(source[:500])
        output = row.sampling.output_token_ids
        assert isinstance(output, list)
        proposer = SuffixProposer()
        for done in range(500, min(1500, len(source) - 8)):
            output.append(source[done])
            aligned.clear()
            proposal = propose_one(proposer, row)
            if not any(scores is proposal.scores for scores in aligned):
                continue  # an ordinary match won
            for draft, score, real in zip(
                proposal.token_ids, proposal.scores or [], source[done + 1 : done + 9], strict=False
            ):
                promised, hits, count = promised + score, hits + (draft == real), count + 1
                if draft != real:
                    break
    assert count > 1000
    assert abs(promised - hits) / count < 0.08


def test_pieces_that_never_go_on_after_they_break_off_get_few_drafts_then() -> None:
    draw = random.Random(4)
    text = list(range(3000, 3300))
    proposer = SuffixProposer()
    row = lookup_row(text)
    output = row.sampling.output_token_ids
    assert isinstance(output, list)
    promised = []
    for _ in range(60):
        place = draw.randrange(280)
        output += text[place : place + draw.randint(4, 9)]
        output.append(text[draw.randrange(280)])
        promised.append(expected_accepted(propose_one(proposer, row).scores or []))
    assert sum(promised[20:]) / 40 < 0.1


def test_scores_are_honest_where_copies_are_edited() -> None:
    """Each token of a copy is replaced, left out or preceded by another with 2 % probability: accepted tokens are
    expected within 10 %, and of drafts that come right after an edit, scores and hits differ by 0.12 at most."""
    draw = random.Random(2)
    total = accepted = after = after_hits = 0.0
    count = 0
    for source in source_texts(6):
        part = source[200:900]
        answer, edited_at = [], set()
        for token in part:
            kind = draw.random() / 0.02
            if kind < 3:
                answer += [[draw.randrange(9000, 9100)], [draw.randrange(9000, 9100), token], []][int(kind)]
                edited_at.add(len(answer))
            else:
                answer.append(token)
        for done, proposal in enumerate(proposals_along(SuffixProposer(), part, answer), start=1):
            scores = proposal.scores or []
            total += expected_accepted(scores)
            for number, (draft, score, real) in enumerate(zip(proposal.token_ids, scores, answer[done:], strict=False)):
                accepted += draft == real
                if number == 0 and edited_at & {done - 1, done}:
                    after, after_hits, count = after + score, after_hits + (draft == real), count + 1
                if draft != real:
                    break
    assert abs(total - accepted) < 0.1 * accepted
    assert count > 200
    assert abs(after - after_hits) / count < 0.12


def test_edits_cost_about_a_pass_each() -> None:
    draw = random.Random(3)
    taken = least = 0.0
    for source in source_texts(4):
        part = source[200:800]
        changed = {place for place in range(len(part)) if draw.random() < 0.03}
        answer = [9000 + place if place in changed else token for place, token in enumerate(part)]
        taken += passes(SuffixProposer(), part, answer)
        least += len(changed) + len(answer) / 9
    assert taken < 1.25 * least
