"""What the simulated model says, and the tokens it says it in."""

from __future__ import annotations

import collections
import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sol.errors import ConfigError, RequestError
from sol.sampling_params import SamplingParams
from sol.simulate import vocabulary
from sol.simulate.language import Answer, answer, check_params
from sol.simulate.laws import TextLaws

PROMPT = vocabulary.encode("Tell me of the river.")


def say(laws: TextLaws | None = None, prompt: list[int] = PROMPT, *, seed: int = 0, run: int = 0, choice: int = 0,
        most_tokens: int = 1000, **params: Any) -> Answer:  # fmt: skip
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 60, **params})
    return answer(laws or TextLaws(output_tokens_mean=10_000.0), prompt, sampling, seed=seed, choice_index=choice,
                  most_tokens=most_tokens, run=run)  # fmt: skip


@given(st.text(max_size=60))
@example("The quick brown fox, 12345 你好 é\n\tx  y <|end|>")
def test_tokens_joined_are_the_text(text: str) -> None:
    token_ids = vocabulary.encode(text)
    assert vocabulary.decode(token_ids) == text
    assert all(0 <= token_id < vocabulary.VOCAB_SIZE for token_id in token_ids)
    assert vocabulary.END not in token_ids


def test_counts_are_like_those_of_real_tokenizers() -> None:
    assert len(vocabulary.encode("The water of the river")) == 5
    assert len(vocabulary.encode("你好世界")) == 4
    assert len(vocabulary.encode("2026")) == 2
    assert vocabulary.decode(range(vocabulary.VOCAB_SIZE))  # every id has bytes
    assert vocabulary.decode(vocabulary.encode("half \ud800 pair")) == "half ? pair"


def test_a_chats_prompt_begins_with_the_turns_before() -> None:
    first = [{"role": "user", "content": "Hi"}]
    second = [*first, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "More"}]
    opening = vocabulary.encode_chat(first, add_generation_prompt=True)
    whole = vocabulary.encode_chat(second, add_generation_prompt=True)
    assert whole[: len(opening)] == opening
    assert vocabulary.decode(opening) == "<|user|>Hi<|end|><|assistant|>"


def test_the_text_is_that_of_its_tokens_and_reads_like_sentences() -> None:
    said = say()
    assert vocabulary.encode(said.text) == said.token_ids
    assert said.ends[-1] == len(said.text)
    assert said.text[0].isupper()
    assert ". " in said.text
    assert (said.finish_reason, said.stop_reason) == ("length", None)


def test_it_follows_from_prompt_parameters_and_seed() -> None:
    assert say().token_ids == say(seed=5, run=9, choice=1).token_ids  # greedy: the prompt alone
    assert say(prompt=[*PROMPT, 300]).token_ids[0:5] != say().token_ids[0:5]
    sampled = say(temperature=1.0, seed=5)
    assert sampled.token_ids == say(temperature=1.0, seed=5, run=3).token_ids
    assert len({tuple(say(temperature=1.0, seed=s, choice=c).token_ids) for s in (5, 6) for c in (0, 1)}) == 4
    for name, value in [("temperature", 0.3), ("top_k", 2), ("top_p", 0.5), ("min_p", 0.5)]:
        assert say(**{"temperature": 1.0, name: value}, seed=5).token_ids != sampled.token_ids, name
    assert say(temperature=1.0, top_k=1, seed=5).token_ids == say().token_ids


def test_a_longer_answer_begins_as_the_shorter_one() -> None:
    assert say(max_tokens=50).token_ids[:20] == say(max_tokens=20).token_ids


def test_it_ends_by_itself_around_the_mean() -> None:
    laws = TextLaws(output_tokens_mean=50.0, output_tokens_sigma=0.5)
    answers = [say(laws, [300 + i], max_tokens=None) for i in range(400)]
    assert sum(len(a.token_ids) for a in answers) / 400 == pytest.approx(50, rel=0.08)
    assert len({len(a.token_ids) for a in answers}) > 30
    ended = answers[0]
    assert (ended.finish_reason, ended.stop_reason, ended.token_ids[-1]) == ("stop", None, vocabulary.END)
    assert "<|end|>" not in ended.text
    assert say(laws, [300], max_tokens=None, skip_special_tokens=False).text.endswith("<|end|>")
    fixed = TextLaws(output_tokens_mean=7.0, output_tokens_sigma=0.0)
    assert len(say(fixed).token_ids) == 7
    assert len(say(fixed, min_tokens=12).token_ids) == 13
    assert len(say(fixed, ignore_eos=True).token_ids) == 60
    assert len(say(fixed, ignore_eos=True, most_tokens=30).token_ids) == 30


def test_stop_strings_end_the_text_wherever_tokens_end() -> None:
    plain = say()
    word = plain.text.split()[4]
    inner = word[1:-1] or word
    stopped = say(stop=["never", inner])
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", inner)
    assert stopped.text == plain.text[: plain.text.index(inner)]
    assert stopped.token_ids == plain.token_ids[: len(stopped.token_ids)]
    assert stopped.ends[-1] == len(stopped.text)
    kept = say(stop=[inner], include_stop_str_in_output=True)
    assert kept.text == stopped.text + inner
    spanning = say(stop=[plain.text[3:12]])
    assert spanning.text == plain.text[:3]
    assert max(spanning.ends) == 3
    late = say(stop=["e"], min_tokens=20)
    assert len(late.token_ids) > 20


def test_stop_token_ids_end_it_without_their_text() -> None:
    plain = say()
    token_id = plain.token_ids[6]
    first = plain.token_ids.index(token_id)
    stopped = say(stop_token_ids=[token_id])
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", token_id)
    assert stopped.token_ids == plain.token_ids[: first + 1]
    assert stopped.text == vocabulary.decode(plain.token_ids[:first])


def test_logprobs_are_those_of_the_law_that_tokens_are_drawn_by() -> None:
    said = say(logprobs=20)
    for entry, token_id in zip(said.logprobs, said.token_ids, strict=True):
        assert (entry.rank, entry.top[0]) == (1, (token_id, entry.logprob))
        assert sum(math.exp(logprob) for _, logprob in entry.top) == pytest.approx(1)
        assert len({other for other, _ in entry.top}) == 20
    # The first token of many samples, against what logprobs promise.
    promised = dict(say(logprobs=20).logprobs[0].top)
    drawn = collections.Counter(say(temperature=1.0, seed=s, max_tokens=1).token_ids[0] for s in range(4000))
    for token_id, logprob in promised.items():
        assert drawn[token_id] / 4000 == pytest.approx(math.exp(logprob), abs=0.03)
    assert say(logprobs=0).logprobs[0].top == []
    assert say().logprobs is None


def first_difference(a: Answer, b: Answer) -> int | None:
    pairs = enumerate(zip(a.token_ids, b.token_ids, strict=True))
    return next((i for i, (x, y) in pairs if x != y), None)


def test_another_model_differs_at_its_rate_and_then_for_good() -> None:
    other = TextLaws(output_tokens_mean=10_000.0, difference_rate=0.02)
    places = [first_difference(say(prompt=[300 + i]), say(other, [300 + i])) for i in range(400)]
    found = [place for place in places if place is not None]
    # A text of 60 tokens stays equal with probability 0.98 ** 60.
    assert len(found) / 400 == pytest.approx(1 - 0.98**60, abs=0.07)
    tokens = sum(60 if place is None else place + 1 for place in places)
    assert len(found) / tokens == pytest.approx(0.02, rel=0.2)
    assert say(other).token_ids == say(other, run=7).token_ids
    variant = TextLaws(output_tokens_mean=10_000.0, difference_rate=0.5, variant=2)
    assert say(variant).token_ids != say(TextLaws(output_tokens_mean=10_000.0, difference_rate=0.5)).token_ids
    i = next(i for i, place in enumerate(places) if place is not None and place < 40)
    a, b = say(prompt=[300 + i]), say(other, [300 + i])
    after = slice(places[i] + 1, None)
    assert sum(x == y for x, y in zip(a.token_ids[after], b.token_ids[after], strict=True)) < 10


def test_near_ties_flip_between_runs_and_show_in_logprobs() -> None:
    laws = TextLaws(output_tokens_mean=10_000.0, near_tie_rate=0.05, near_tie_flip_rate=0.5)
    differing = 0
    for run in range(1, 30):
        one, other = say(laws, logprobs=2), say(laws, logprobs=2, run=run)
        place = first_difference(one, other)
        if place is not None:
            differing += 1
            top = one.logprobs[place].top
            assert abs(top[0][1] - top[1][1]) < 0.01
            assert other.token_ids[place] == top[1][0]
    assert differing > 10
    never = TextLaws(output_tokens_mean=10_000.0, near_tie_rate=0.05, near_tie_flip_rate=0.0)
    assert len({tuple(say(never, run=run).token_ids) for run in range(10)}) == 1


def test_what_needs_logits_is_refused() -> None:
    for params in ({"presence_penalty": 0.5}, {"repetition_penalty": 1.1}, {"logit_bias": {3: 1.0}}):
        with pytest.raises(RequestError, match="not simulated"):
            check_params(SamplingParams(**params))
    for options in ({"near_tie_rate": 2.0}, {"output_tokens_mean": 0.5}, {"output_tokens_sigma": -1.0}):
        with pytest.raises(ConfigError):
            TextLaws(**options)
