"""The official client against a running server: `/v1/chat/completions`."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from running_server import Server

from sol.models.source import ModelFiles
from sol.text.tokenizer import Tokenizer

MESSAGES: list[Any] = [{"role": "user", "content": "Name the days of the week."}]
GREEDY: dict[str, Any] = {"model": "smollm2", "messages": MESSAGES, "temperature": 0}


def test_an_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**GREEDY, max_tokens=6)
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model) == ("chat.completion", "smollm2")
    (choice,) = answer.choices
    assert choice.index == 0
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert choice.logprobs is None
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 6


def test_a_second_name_and_no_name(client: openai.OpenAI, server: Server) -> None:
    assert client.chat.completions.create(**{**GREEDY, "model": "default"}, max_tokens=1).model == "default"
    answer = server.post("/v1/chat/completions", messages=MESSAGES, max_tokens=1).json()
    assert answer["model"] == "smollm2"


def test_an_end_of_turn_stops(client: openai.OpenAI, server: Server) -> None:
    answer = client.chat.completions.create(
        model="smollm2", messages=[{"role": "user", "content": "Say only: Hi"}], temperature=0, max_tokens=64
    )
    assert answer.choices[0].finish_reason == "stop"
    assert "<|im_end|>" not in str(answer.choices[0].message.content)
    assert answer.choices[0].model_extra == {"stop_reason": None}


def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**GREEDY, max_tokens=12)
    with client.chat.completions.create(
        **GREEDY, max_tokens=12, stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    first, *middle, finish, usage = chunks
    assert first.choices[0].delta.role == "assistant"
    assert first.choices[0].delta.content == ""
    assert all(chunk.choices[0].delta.content for chunk in middle)
    assert all(chunk.choices[0].finish_reason is None for chunk in [first, *middle])
    assert finish.choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert finish.choices[0].delta.content is None
    assert "".join(str(c.choices[0].delta.content) for c in middle) == whole.choices[0].message.content
    assert usage.choices == []
    assert usage.usage is not None
    assert whole.usage is not None
    assert usage.usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


def test_each_chunk_says_how_many_tokens_there_are_so_far_if_asked(client: openai.OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked: dict[str, Any] = {**GREEDY, "temperature": 1.0, "seed": 3, "n": 2, "max_tokens": 5, "stream": True}
    with client.chat.completions.create(**asked, extra_body={"stream_options": options}) as stream:
        *chunks, last = list(stream)
    counts: dict[int, list[int]] = {0: [], 1: []}
    for chunk in chunks:
        assert chunk.usage is not None
        assert last.usage is not None
        assert chunk.usage.prompt_tokens == last.usage.prompt_tokens
        assert chunk.usage.total_tokens == chunk.usage.prompt_tokens + chunk.usage.completion_tokens
        counts[chunk.choices[0].index].append(chunk.usage.completion_tokens)
    for of_choice in counts.values():
        assert of_choice[0] == 0  # the role
        assert of_choice == sorted(of_choice)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == sum(of_choice[-1] for of_choice in counts.values()) == 10
    with pytest.raises(openai.BadRequestError, match="continuous_usage_stats needs include_usage"):
        client.chat.completions.create(**asked, extra_body={"stream_options": {"continuous_usage_stats": True}})


def test_a_stream_without_usage_has_none(server: Server) -> None:
    text = server.post("/v1/chat/completions", messages=MESSAGES, max_tokens=2, stream=True).text
    assert "usage" not in text
    assert text.endswith("\n\ndata: [DONE]\n\n")


def test_a_seed_decides(client: openai.OpenAI) -> None:
    def say(**options: Any) -> list[str | None]:
        answer = client.chat.completions.create(
            model="smollm2", messages=MESSAGES, temperature=1.5, max_tokens=4, **options
        )
        return [choice.message.content for choice in answer.choices]

    three = say(seed=7, n=3)
    assert len(set(three)) == 3
    assert say(seed=7, n=3) == three
    assert say(seed=7) == three[:1]
    assert say(seed=8) != three[:1]
    assert say(seed=-7) != three[:1]
    assert say() != say()


def test_choices_stream_side_by_side(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {**GREEDY, "temperature": 1.0, "seed": 3, "n": 3, "max_tokens": 4}
    whole = client.chat.completions.create(**options)
    texts = ["", "", ""]
    finished: list[int] = []
    order: list[int] = []
    with client.chat.completions.create(**options, stream=True) as stream:
        chunks = [chunk.choices[0] for chunk in stream]
    assert [choice.delta.role for choice in chunks[:3]] == ["assistant"] * 3
    assert [choice.index for choice in chunks[:3]] == [0, 1, 2]
    for choice in chunks:
        texts[choice.index] += choice.delta.content or ""
        order.append(choice.index)
        if choice.finish_reason:
            finished.append(choice.index)
    assert texts == [choice.message.content for choice in whole.choices]
    assert sorted(finished) == [0, 1, 2]
    assert order != sorted(order)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12


def test_logprobs(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {**GREEDY, "max_tokens": 5, "logprobs": True, "top_logprobs": 3}
    answer = client.chat.completions.create(**options)
    choice = answer.choices[0]
    assert choice.logprobs is not None
    entries = choice.logprobs.content
    assert entries is not None
    assert len(entries) == 5
    assert b"".join(bytes(entry.bytes or []) for entry in entries).decode() == choice.message.content
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (t.logprob for t in entry.top_logprobs), reverse=True
        )
        assert (entry.top_logprobs[0].token, entry.top_logprobs[0].logprob) == (entry.token, entry.logprob)
        assert entry.logprob <= 0
    with client.chat.completions.create(**options, stream=True) as stream:
        streamed = [e for chunk in stream if chunk.choices[0].logprobs for e in chunk.choices[0].logprobs.content or []]
    assert [entry.token for entry in streamed] == [entry.token for entry in entries]
    assert [entry.logprob for entry in streamed] == pytest.approx([entry.logprob for entry in entries], abs=1e-3)


def test_logprobs_without_alternatives(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**GREEDY, max_tokens=2, logprobs=True)
    assert answer.choices[0].logprobs is not None
    assert [entry.top_logprobs for entry in answer.choices[0].logprobs.content or []] == [[], []]


def test_each_token_has_one_entry_even_while_text_is_withheld(client: openai.OpenAI) -> None:
    text = str(client.chat.completions.create(**GREEDY, max_tokens=12).choices[0].message.content)
    stop = text[4:14]  # spans several tokens
    with client.chat.completions.create(
        **GREEDY, max_tokens=12, stop=stop, logprobs=True, stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    entries = [e for c in chunks if c.choices and c.choices[0].logprobs for e in c.choices[0].logprobs.content or []]
    assert chunks[-1].usage is not None
    assert len(entries) == chunks[-1].usage.completion_tokens
    assert stop in b"".join(bytes(entry.bytes or []) for entry in entries).decode()
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text[:4]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI, server: Server, stream: bool) -> None:
    whole = client.chat.completions.create(**GREEDY, max_tokens=16)
    text = str(whole.choices[0].message.content)
    stop = text[8:12]
    end = text.index(stop)
    for include in (False, True):
        answer = client.chat.completions.create(
            **GREEDY,
            max_tokens=16,
            stop=["never said", stop],
            stream=stream,
            extra_body={"include_stop_str_in_output": include},
        )
        if stream:
            choices = [chunk.choices[0] for chunk in answer]  # type: ignore[union-attr]
            said = "".join(choice.delta.content or "" for choice in choices)
            last: Any = choices[-1]
        else:
            last = answer.choices[0]  # type: ignore[union-attr]
            said = last.message.content
            assert answer.usage.completion_tokens < 16  # type: ignore[union-attr]
        assert said == text[: end + len(stop) * include]
        assert last.finish_reason == "stop"
        assert last.model_extra["stop_reason"] == stop
    server.wait_until_idle()


def test_stop_tokens_and_end_tokens(client: openai.OpenAI, smollm2: ModelFiles) -> None:
    tokenizer = Tokenizer.from_files(smollm2)
    whole = client.chat.completions.create(**GREEDY, max_tokens=8)
    third = tokenizer.encode(str(whole.choices[0].message.content), add_special_tokens=False)[2]
    answer = client.chat.completions.create(**GREEDY, max_tokens=8, extra_body={"stop_token_ids": [third]})
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].model_extra == {"stop_reason": third}
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 3
    eos = tokenizer.eos_token_ids[0]
    say_it = {"logit_bias": {str(eos): 100}}
    ended = client.chat.completions.create(**GREEDY, max_tokens=8, **say_it)
    assert (ended.choices[0].message.content, ended.choices[0].finish_reason) == ("", "stop")
    assert ended.usage is not None
    assert ended.usage.completion_tokens == 1
    longer = client.chat.completions.create(**GREEDY, max_tokens=8, **say_it, extra_body={"min_tokens": 2})
    assert longer.usage is not None
    assert longer.usage.completion_tokens == 3
    ignored = client.chat.completions.create(**GREEDY, max_tokens=3, **say_it, extra_body={"ignore_eos": True})
    assert ignored.choices[0].finish_reason == "length"
    shown = client.chat.completions.create(
        **GREEDY, max_tokens=2, **say_it, extra_body={"ignore_eos": True, "skip_special_tokens": False}
    )
    assert shown.choices[0].message.content == tokenizer.id_to_token(eos) * 2


def test_content_parts_and_the_developer(client: openai.OpenAI) -> None:
    plain = [{"role": "system", "content": "Be brief.\nBe kind."}, *MESSAGES]
    parts = [
        {"role": "developer", "content": [{"type": "text", "text": t} for t in ("Be brief.", "Be kind.")]},
        {"role": "user", "content": [{"type": "text", "text": MESSAGES[0]["content"]}]},
    ]
    answers = [
        client.chat.completions.create(model="smollm2", messages=m, temperature=0, max_tokens=4)  # type: ignore[arg-type]
        for m in (plain, parts)
    ]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
    assert answers[0].usage is not None
    assert answers[1].usage is not None
    assert answers[0].usage.prompt_tokens == answers[1].usage.prompt_tokens


def test_an_answer_goes_back_into_the_next_question(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**GREEDY, max_tokens=2)
    again = [*MESSAGES, answer.choices[0].message.model_dump(), {"role": "user", "content": "Go on."}]
    assert client.chat.completions.create(model="smollm2", messages=again, max_tokens=1).choices


def test_equal_beginnings_are_found_in_the_cache(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "The cache should know this text. " * 12}]
    cached = []
    for _ in range(2):
        answer = client.chat.completions.create(model="smollm2", messages=messages, max_tokens=1)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached[0] is not None
    assert cached[1] is not None
    assert cached[1] > max(64, cached[0])
