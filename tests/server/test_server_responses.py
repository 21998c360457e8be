"""`/v1/responses` as the official client uses it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from running_server import Server

from sol.server.responses_store import ResponseStore, StoredResponse


@pytest.fixture
def client(tiny_server: Server) -> Iterator[openai.OpenAI]:
    with tiny_server.client() as client:
        yield client


def ask(client: openai.OpenAI, text: Any = "Once", **options: Any) -> Any:
    options = {"model": "tiny", "temperature": 0, "max_output_tokens": 6, **options}
    return client.responses.create(input=text, **options)


def chat(client: openai.OpenAI, *messages: tuple[str, str]) -> str:
    whole: list[Any] = [{"role": role, "content": content} for role, content in messages]
    answer = client.chat.completions.create(model="tiny", messages=whole, temperature=0, max_tokens=6)
    assert answer.choices[0].message.content is not None
    return answer.choices[0].message.content


def test_an_answer_is_the_one_of_a_chat(client: openai.OpenAI) -> None:
    response = ask(client, instructions="Be brief.", metadata={"a": "b"}, extra_body={"ignore_eos": True})
    assert response.output_text == chat(client, ("system", "Be brief."), ("user", "Once"))
    assert (response.object, response.status, response.model) == ("response", "incomplete", "tiny")
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage.output_tokens == 6
    assert response.usage.total_tokens == response.usage.input_tokens + 6
    assert response.metadata == {"a": "b"}
    assert response.output[0].role == "assistant"
    assert response.error is None


def test_a_conversation_that_the_server_keeps(client: openai.OpenAI) -> None:
    first = ask(client, "Once", instructions="Be brief.")
    second = ask(client, "And?", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    expected = chat(client, ("user", "Once"), ("assistant", first.output_text), ("user", "And?"))
    assert second.output_text == expected, "instructions hold for one response"
    third = ask(client, "So?", previous_response_id=second.id)
    # The same by hand, with what the client got sent back as it came.
    items = [
        {"role": "user", "content": "Once"},
        *[item.to_dict() for item in first.output],
        {"role": "user", "content": [{"type": "input_text", "text": "And?"}]},
        *[item.to_dict() for item in second.output],
        {"type": "message", "role": "user", "content": "So?"},
    ]
    assert ask(client, items, store=False).output_text == third.output_text
    assert client.responses.retrieve(third.id).output_text == third.output_text
    client.responses.delete(third.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(third.id)
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, previous_response_id=third.id)
    assert error.value.param == "previous_response_id"


def test_what_is_not_stored_is_not_kept_and_room_is_bounded(client: openai.OpenAI) -> None:
    unstored = ask(client, store=False)
    assert unstored.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unstored.id)
    oldest, *newer = [ask(client) for _ in range(4)]
    for response in newer:
        assert client.responses.retrieve(response.id).id == response.id
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(oldest.id)


def test_events(client: openai.OpenAI) -> None:
    whole = ask(client, include=["message.output_text.logprobs"], top_logprobs=2)
    with client.responses.stream(
        model="tiny", input="Once", temperature=0, max_output_tokens=6,
        include=["message.output_text.logprobs"], top_logprobs=2,
    ) as stream:  # fmt: skip
        events = list(stream)
        last = stream.get_final_response() if events[-1].type == "response.completed" else events[-1].response
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done",
        f"response.{whole.status}",
    ]  # fmt: skip
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == whole.output_text == last.output_text
    (part,) = whole.output[0].content
    assert len(part.logprobs) == whole.usage.output_tokens
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)
    assert [entry.token for event in deltas for entry in event.logprobs] == [entry.token for entry in part.logprobs]
    assert last.usage.output_tokens == whole.usage.output_tokens
    assert client.responses.retrieve(last.id).output_text == whole.output_text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "function_call_output", "output": "b"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "a", "output": 5}]}, "messages[0].content"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "b"}]}, "input[0].arguments"),
        ({"input": [{"type": "reasoning", "content": [{"type": "output_text"}]}]}, "input[0].content"),
        ({"input": [{"type": "computer_call"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        ({"input": ["a"]}, "input[0]"),
        ({"tools": [{"type": "web_search", "name": "a"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a"}] * 2}, "tools[1].name"),
        ({"tools": [{"type": "function", "name": "a"}]}, "tools"),  # its template knows none
        ({"tool_choice": "required"}, "tool_choice"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options"),
        ({"model": "other"}, "model"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(tiny_server: Server, fields: dict[str, Any], param: str) -> None:
    response = tiny_server.post("/v1/responses", **{"input": "Once", **fields})
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"] == param


def test_conversations_take_bounded_memory() -> None:
    def stored(name: str, length: int) -> StoredResponse:
        return StoredResponse({"id": name}, ({"role": "user", "content": "x" * length},))

    store = ResponseStore(max_responses=10, max_characters=100)
    store.put(stored("a", 60))
    store.put(stored("b", 30))
    assert store.get("a") is not None  # used more recently now
    store.put(stored("c", 30))
    assert (store.get("a") is None, store.get("b") is None, store.get("c") is None) == (False, True, False)
    store.put(stored("too large", 101))
    assert len(store) == 0
    store.put(stored("d", 100))
    assert store.delete("d")
    assert not store.delete("d")
    store.put(stored("e", 100))
    assert store.get("e") is not None
