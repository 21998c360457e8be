"""The official client against a running server: what is refused, with which error, and at once."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from running_server import ENGINE, OTHER_KEY, Server

JSON = {"content-type": "application/json"}
MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -5}, "max_completion_tokens"),
        ({"logit_bias": {"1000000": 1}}, "logit_bias"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": "a" * 1025}, "stop"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"seed": 2**63}, "seed"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"extra_body": {"stop_token_ids": [1000000]}}, "stop_token_ids"),
        ({"extra_body": {"min_p": 2}}, "min_p"),
        ({"extra_body": {"top_k": 2**64}}, "top_k"),
        ({"extra_body": {"unheard_of": 1}}, "unheard_of"),
        ({"extra_body": {"chat_template_kwargs": {"tools": []}}}, "chat_template_kwargs"),
        ({"extra_body": {"chat_template_kwargs": {"self": 1}}}, "chat_template_kwargs"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests(client: openai.OpenAI, options: dict[str, Any], param: str, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**{"model": "smollm2", "messages": MESSAGES, "stream": stream, **options})
    assert error.value.param == param
    assert error.value.type == "invalid_request_error"
    assert param in error.value.message
    assert error.value.request_id


def test_too_many_choices_are_refused_before_a_prompt_is_looked_at(client: openai.OpenAI) -> None:
    for prompt, n in (([""] * 1025, 1), ([""] * 9, 128)):
        with pytest.raises(openai.BadRequestError, match="more than 1024 choices") as error:
            client.completions.create(model="smollm2", prompt=prompt, n=n)
        assert error.value.param == "prompt"


def test_a_prompt_that_is_too_long(client: openai.OpenAI) -> None:
    limit = ENGINE["max_model_len"]
    for prompt, max_tokens in (
        ([5] * limit, 1),
        ([5] * (limit - 4), 5),
        ("hello " * limit, 1),
        ("hello " * 150_000, 1),
        ([[5], [5] * limit], 1),
    ):
        with pytest.raises(openai.BadRequestError) as error:
            client.completions.create(model="smollm2", prompt=prompt, max_tokens=max_tokens)
        assert error.value.code == "context_length_exceeded"
        assert str(error.value.param).startswith("prompt")
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="smollm2", messages=[{"role": "user", "content": "hello " * limit}])
    assert (error.value.code, error.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="smollm2", messages=MESSAGES, extra_body={"min_tokens": limit})
    assert (error.value.code, error.value.param) == ("context_length_exceeded", "min_tokens")


def test_the_last_token_of_the_context_can_be_used(client: openai.OpenAI) -> None:
    limit = ENGINE["max_model_len"]
    answer = client.completions.create(model="smollm2", prompt=[5] * (limit - 1), max_tokens=1)
    assert answer.choices[0].finish_reason in ("stop", "length")


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": ["a"] * 1000, "n": 2}, "prompt"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"prompt": ["a"] * 1000, "best_of": 2}, "prompt"),
        ({"logprobs": 100}, "logprobs"),
        ({"suffix": "x"}, "suffix"),
    ],
)
def test_bad_completions(client: openai.OpenAI, options: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(**{"model": "smollm2", "prompt": "Hi", **options})
    assert error.value.param == param


def test_an_unknown_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as error:
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    assert (error.value.code, error.value.param) == ("model_not_found", "model")
    assert "'smollm2'" in error.value.message


def test_keys(server: Server) -> None:
    for key in ("wrong", "secret-", "secret-11"):
        with server.client(api_key=key) as client, pytest.raises(openai.AuthenticationError) as error:
            client.models.list()
        assert error.value.code == "invalid_api_key"
    with server.client(api_key=OTHER_KEY) as client:
        assert client.models.list().data


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"messages": [{"role": "user", "content": "\\ud83d"}]}'])
def test_what_is_not_json(server: Server, body: bytes) -> None:
    response = server.http.post("/v1/chat/completions", content=body, headers=JSON)
    assert response.status_code == 400
    assert set(response.json()) == {"error"}
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_a_body_that_is_too_large(server: Server) -> None:
    body = json.dumps({"prompt": "a" * 2**20}).encode()
    assert server.http.post("/v1/completions", content=body, headers=JSON).status_code == 413
    parts = iter([body[:1000], body[1000:]])  # no content-length
    response = server.http.post("/v1/completions", content=parts, headers=JSON)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"
    large = server.post("/v1/completions", prompt=[5] * 200_000)
    assert large.json()["error"]["code"] == "context_length_exceeded"


def test_errors_are_counted_and_nothing_runs(server: Server) -> None:
    before = server.wait_until_idle()
    server.post("/v1/completions", prompt="Hi", n=0)
    after = server.metrics()
    name = "sol:request_errors_total invalid_request_error 400"
    assert after[name] - before.get(name, 0) == 1
    for key in ("vllm:prompt_tokens_total", "vllm:generation_tokens_total"):
        assert after[key] == before[key]
