"""Who made which part of a stream: whatever is held back, however the tokens arrive."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sol.engine.types import (
    TARGET,
    DraftCounts,
    EngineRequest,
    FinishReason,
    RequestOutput,
    SpeculationParams,
    SpeculationUsage,
)
from sol.models.source import ModelFiles
from sol.sampling_params import SamplingParams
from sol.server.generation import Choice, ChoiceOutput, _take
from sol.server.metrics import Metrics
from sol.server.segments import Segment, Segments, segments_field
from sol.text.detokenizer import Detokenizer
from sol.text.tokenizer import Tokenizer

METRICS = Metrics("m")
ORIGINS = ("suffix", "draft_model", TARGET)


@pytest.fixture(scope="module")
def tokenizer(smollm2: ModelFiles) -> Tokenizer:
    return Tokenizer.from_files(smollm2)


def test_runs_of_one_origin_are_one_segment() -> None:
    segments = Segments().take("one two three", [0, 3, 7], ["suffix", "suffix", TARGET], finished=False)
    assert segments == [Segment("one two", "suffix", 2), Segment(" three", TARGET, 1)]


def test_a_token_whose_text_is_held_back_counts_in_the_chunk_that_shows_it() -> None:
    taker = Segments()
    assert taker.take("", [0, 0], ["suffix", TARGET], finished=False) == []
    assert taker.take("é!", [1], ["suffix"], finished=False) == [
        Segment("", "suffix", 1),  # its bytes were completed by the next token
        Segment("é", TARGET, 1),
        Segment("!", "suffix", 1),
    ]


def test_the_rest_of_a_token_does_not_count_twice() -> None:
    taker = Segments()
    assert taker.take("ab", [0], ["suffix"], finished=False) == [Segment("ab", "suffix", 1)]
    assert taker.take("cd", [4], [TARGET], finished=False) == [Segment("cd", "suffix", 0)]
    assert taker.take("ef", [6], ["suffix"], finished=True) == [Segment("ef", TARGET, 1), Segment("", "suffix", 1)]


def test_tokens_of_a_stop_string_count_in_the_last_chunk() -> None:
    taker = Segments()
    assert taker.take("a", [0, 2, 5], ["suffix", "suffix", TARGET], finished=True) == [
        Segment("a", "suffix", 2),
        Segment("", TARGET, 1),
    ]


def test_segments_are_json_at_the_end_of_a_choice() -> None:
    assert segments_field(None) == ""
    assert segments_field([]) == ',"speculation":{"segments":[]}'
    assert segments_field([Segment('"\u2028', TARGET, 1)]) == (
        ',"speculation":{"segments":[{"text":"\\"\\u2028","origin":"target","tokens":1}]}'
    )
    usage = SpeculationUsage()
    assert segments_field([], usage) == ',"speculation":{"segments":[],"mean_acceptance_length":null}'
    usage.drafters = {
        "suffix": DraftCounts(num_drafts=2, num_draft_tokens=9, num_accepted_tokens=5),
        "ngram": DraftCounts(num_drafts=1, num_draft_tokens=1),
    }
    assert segments_field([], usage) == ',"speculation":{"segments":[],"mean_acceptance_length":2.6667}'


class Arrivals:
    """One request's tokens as the engine might deliver them, through the server's own code."""

    def __init__(
        self, tokenizer: Tokenizer, ids: Sequence[int], origins: Sequence[str], params: SamplingParams
    ) -> None:
        self.tokenizer, self.ids, self.origins, self.params = tokenizer, ids, origins, params

    def take(self, sizes: Sequence[int], reason: FinishReason) -> tuple[Choice, list[ChoiceOutput]]:
        request = EngineRequest(
            request_id="a", prompt_token_ids=[1], params=self.params, seed=0,
            speculation=SpeculationParams(include_origins=True),
        )  # fmt: skip
        choice = Choice(0, 0, request, Detokenizer(self.tokenizer, self.params, [1]), None)
        outputs: list[ChoiceOutput] = []
        position = 0
        while not outputs or outputs[-1].finish_reason is None:
            end = min(position + sizes[len(outputs) % len(sizes)], len(self.ids))
            output = RequestOutput(
                request_id="a",
                new_token_ids=list(self.ids[position:end]),
                origins=list(self.origins[position:end]),
                finish_reason=reason if end == len(self.ids) else None,
            )
            outputs.append(_take(choice, output, METRICS))
            position = end
        return choice, outputs

    def makers(self, reason: FinishReason) -> list[str]:
        """Who made each character, if no stop string held any back: a character is made by the token that completes
        it."""
        params = SamplingParams(max_tokens=None, skip_special_tokens=self.params.skip_special_tokens)
        detokenizer = Detokenizer(self.tokenizer, params, [1])
        makers: list[str] = []
        for index, (token_id, origin) in enumerate(zip(self.ids, self.origins, strict=True)):
            ended = reason == "stop" and index == len(self.ids) - 1
            makers += [origin] * len(detokenizer.push([token_id], ended_by_token=ended).text)
        return makers + [self.origins[-1]] * len(detokenizer.finish().text)


def tokens_to_test(tokenizer: Tokenizer, data: st.DataObject) -> list[int]:
    text = data.draw(st.text(st.sampled_from([*"ab \n.", "é", "你", "😀", "\u200d"]), max_size=12))
    ids = tokenizer.encode(text, add_special_tokens=False)
    odd = st.sampled_from([*sorted(tokenizer.special_ids)[:3], *tokenizer.encode("😀", add_special_tokens=False), 300])
    for token_id in data.draw(st.lists(odd, max_size=4)):
        ids.insert(data.draw(st.integers(0, len(ids))), token_id)
    return ids or [300]


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_character_and_every_token_has_its_maker(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = tokens_to_test(tokenizer, data)
    origins = [data.draw(st.sampled_from(ORIGINS)) for _ in ids]
    stops = data.draw(st.lists(st.text(st.sampled_from("ab \n.é"), min_size=1, max_size=4), max_size=3))
    options: dict[str, Any] = {
        "stop": stops, "max_tokens": None, "min_tokens": data.draw(st.integers(0, 4)),
        "skip_special_tokens": data.draw(st.booleans()), "include_stop_str_in_output": data.draw(st.booleans()),
    }  # fmt: skip
    reason: FinishReason = data.draw(st.sampled_from(["stop", "length"]))
    arrivals = Arrivals(tokenizer, ids, origins, SamplingParams(**options))
    choice, outputs = arrivals.take(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=5)), reason)

    makers: list[str] = []
    counted: Counter[str] = Counter()
    for output in outputs:
        assert output.segments is not None
        assert "".join(segment.text for segment in output.segments) == output.text
        names = [segment.origin for segment in output.segments]
        assert all(one != other for one, other in itertools.pairwise(names)), "two segments of one origin"
        for segment in output.segments:
            makers += [segment.origin] * len(segment.text)
            counted[segment.origin] += segment.tokens
    assert counted == Counter(origins[: choice.num_tokens])
    if options["include_stop_str_in_output"] and reason == "stop":
        reason = "length"  # then the last token's text is shown like any other's
    assert makers == arrivals.makers(reason)[: len(makers)]
