from __future__ import annotations

import json
from typing import Any

import pytest

from sol.errors import RequestError
from sol.server.parsing import parse, shorten
from sol.server.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

MESSAGES = [{"role": "user", "content": "Hi"}]


def chat(**fields: Any) -> ChatBody:
    return parse(json.dumps({"messages": MESSAGES, **fields}).encode(), ChatBody)


def completion(**fields: Any) -> CompletionBody:
    return parse(json.dumps({"prompt": "Hi", **fields}).encode(), CompletionBody)


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"temperature": "hot"}, "temperature", "must be a number, not 'hot'"),
        ({"temperature": True}, "temperature", "must be a number"),
        ({"n": 1.5}, "n", "must be an integer"),
        ({"n": "1"}, "n", "must be an integer"),
        ({"stream": "yes"}, "stream", "must be true or false"),
        ({"seed": [1]}, "seed", "must be an integer"),
        ({"messages": "Hi"}, "messages", "must be a list"),
        ({"messages": ["Hi"]}, "messages[0]", "must be an object"),
        ({"stop": 5}, "stop", "must be a non-empty string or a list of them"),
        ({"stop": ["a", ""]}, "stop", "non-empty"),
        ({"stop": ["x"] * 17}, "stop", "at most 16 strings, not 17"),
        ({"stop": ["x", "x" * 1025]}, "stop", "at most 1024 characters, not 1025"),
        ({"stop_token_ids": ["1"]}, "stop_token_ids[0]", "must be an integer"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "token ids as keys, not 'a'"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "from -100 to 100 as values, not 101 (token 5)"),
        ({"logit_bias": {"5": True}}, "logit_bias", "as values, not True"),
        ({"logit_bias": [5]}, "logit_bias", "must be an object"),
        ({"stream_options": {"include_usage": True, "colour": 1}}, "stream_options.colour", "unknown field"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation", "not supported"),
        ({"stream_options": []}, "stream_options", "must be an object"),
        ({"stream_options": {"include_speculation": 1}}, "stream_options.include_speculation", "must be true or false"),
        ({"speculation": True}, "speculation", "must be an object"),
        ({"speculation": {"enabled": "no"}}, "speculation.enabled", "must be true or false, not 'no'"),
        ({"speculation": {"drafter": 5}}, "speculation.drafter", "must be a string, not 5"),
        ({"speculation": {"tenant": ["a"]}}, "speculation.tenant", "must be a string"),
        ({"speculation": {"drafters": ["ngram"]}}, "speculation.drafters", "unknown field"),
        ({"model": 5}, "model", "must be a string"),
        ({"temprature": 0.5}, "temprature", "unknown field 'temprature'"),
        ({"temprature": None}, "temprature", "unknown field 'temprature'"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "required"),
        ({"tools": [{"type": "web_search", "function": {"name": "f"}}]}, "tools[0].type", "'function'"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "letters"),
        ({"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]}, "tools[0].function.x", "unknown"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools[0].function.parameters",
            "of an object",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"required": "a"}}}]},
            "tools[0].function.parameters",
            "must be a list",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f"}}] * 129}, "tools", "at most 128 items"),
        ({"tool_choice": "any"}, "tool_choice", "required"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "name a function"),
        ({"function_call": "auto"}, "function_call", "not supported"),
        ({"functions": [{"name": "f"}]}, "functions", "not supported"),
        ({"modalities": ["text", "audio"]}, "modalities", "not supported"),
        ({"store": True}, "store", "not supported"),
        ({"priority": False}, "priority", "must be an integer"),
        ({"cache_salt": 5}, "cache_salt", "must be a string"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "not supported"),
        ({"echo": True}, "echo", "not supported"),
        ({"prompt_logprobs": True}, "prompt_logprobs", "must be an integer"),
        ({"logprobs": 3}, "logprobs", "must be true or false"),
        ({"top_logprobs": True}, "top_logprobs", "must be an integer"),
    ],
)
def test_what_a_chat_cannot_mean_is_refused_by_name(fields: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(RequestError) as error:
        chat(**fields)
    assert error.value.param == param
    assert param in error.value.message
    assert says in error.value.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "end"}, "suffix"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": {"text": "Hi"}}, "prompt"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_completion_tokens": 2}, "max_completion_tokens"),
        ({"messages": MESSAGES}, "messages"),
    ],
)
def test_what_a_completion_cannot_mean_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as error:
        completion(**fields)
    assert error.value.param == param


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("Hi", ["Hi"]),
        (["Hi", "there"], ["Hi", "there"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_the_four_forms_of_a_prompt(prompt: Any, prompts: list[Any]) -> None:
    assert completion(prompt=prompt).prompt == prompts


def test_fields_that_change_nothing_are_taken() -> None:
    body = chat(
        user="me",
        metadata={"a": "b"},
        safety_identifier="x",
        prompt_cache_key="y",
        store=False,
        service_tier="auto",
        parallel_tool_calls=True,
        response_format={"type": "text"},
        tools=[],
        tool_choice="none",
        functions=None,
        priority=0,
        logprobs=None,
        n=None,
        temperature=None,
        stop=None,
        logit_bias=None,
        stream_options=None,
        best_of=None,
    )
    assert body.messages == MESSAGES
    assert body.stop == []
    assert body.logit_bias == {}


def test_values_keep_their_meaning() -> None:
    body = chat(temperature=1, stop="\n", logit_bias={"5": -100, "7": 0.5}, seed=2**63 - 1)
    assert body.temperature == 1.0
    assert body.stop == ["\n"]
    assert body.logit_bias == {5: -100.0, 7: 0.5}
    assert body.seed == 2**63 - 1


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b'{"temperature": NaN}', "not valid JSON"),
        (b'{"prompt": "\\ud800"}', "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b'"Hi"', "must be a JSON object"),
    ],
)
def test_what_is_not_a_json_object_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        parse(data, ChatBody)


def test_a_missing_field_is_named() -> None:
    for body_type, param in ((ChatBody, "messages"), (CompletionBody, "prompt"), (DetokenizeBody, "tokens")):
        with pytest.raises(RequestError, match="is required") as error:
            parse(b"{}", body_type)
        assert error.value.param == param
    assert parse(b"{}", TokenizeBody).prompt is None


def test_long_values_are_quoted_in_part() -> None:
    with pytest.raises(RequestError) as error:
        chat(seed="9" * 100_000)
    assert len(error.value.message) < 200
    with pytest.raises(RequestError) as error:
        chat(**{"x" * 100_000: 1})
    assert len(error.value.message) < 300
    assert len(shorten({"a": "b" * 1000})) < 100
    assert shorten("short") == "'short'"
