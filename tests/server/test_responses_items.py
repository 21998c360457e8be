"""Items of `/v1/responses` and the chat messages that they are."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from sol.errors import RequestError
from sol.server.responses_items import OutputItems, answer_message, messages_of
from sol.text.answer_parts import Arguments, CallBegin, Content, Part, Reasoning

CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
OTHER = {**CALL, "call_id": "2", "id": "fc_2", "status": "completed"}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look.", "logprobs": []}]}


def tool_call(call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "f", "arguments": "{}"}}


def test_what_the_assistant_did_in_one_turn_is_one_message() -> None:
    output = {"type": "function_call_output", "call_id": "1", "output": "Sun"}
    parts = {**output, "call_id": "2", "output": [{"type": "input_text", "text": "Rain"}]}
    user = {"role": "user", "content": "Hi"}
    said = [{"type": "text", "text": "I look."}]
    assert messages_of([user, THOUGHT, SAID, CALL, OTHER, output, parts, SAID, SAID, CALL, THOUGHT, CALL]) == [
        user,
        {
            "role": "assistant", "content": said, "reasoning_content": "Hm.",
            "tool_calls": [tool_call("1"), tool_call("2")],
        },
        {"role": "tool", "tool_call_id": "1", "content": "Sun"},
        {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "Rain"}]},
        {"role": "assistant", "content": said},
        {"role": "assistant", "content": said, "tool_calls": [tool_call("1")]},
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [tool_call("1")]},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("item", "param"),
    [
        (5, "input[0]"),
        ({"type": 5}, "input[0]"),
        ({**CALL, "name": ""}, "input[0].name"),
        ({**CALL, "arguments": {}}, "input[0].arguments"),
        ({**CALL, "colour": "red"}, "input[0].colour"),
        ({**THOUGHT, "encrypted_content": "x"}, "input[0].encrypted_content"),
        ({**THOUGHT, "content": "x"}, "input[0].content"),
        ({**THOUGHT, "summary": [{"type": "reasoning_text", "text": "a"}]}, "input[0].summary"),
    ],
)
def test_what_an_item_cannot_be(item: Any, param: str) -> None:
    with pytest.raises(RequestError) as error:
        messages_of([item])
    assert error.value.param == param


def play(events: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """The items that a client puts together from events."""
    items: list[dict[str, Any]] = []
    for kind, fields in events:
        fields = json.loads(json.dumps(fields))
        if kind == "response.output_item.added":
            assert fields["output_index"] == len(items)
            items.append(fields["item"])
            continue
        item = items[fields["output_index"]]
        assert fields["output_index"] == len(items) - 1, "one after the other"
        match kind:
            case "response.content_part.added":
                item["content"].append(fields["part"])
            case "response.output_text.delta" | "response.reasoning_text.delta":
                item["content"][0]["text"] += fields["delta"]
                if "logprobs" in fields:
                    item["content"][0]["logprobs"] += fields["logprobs"]
            case "response.function_call_arguments.delta":
                item["arguments"] += fields["delta"]
            case "response.output_item.done":
                item["status"] = fields["item"]["status"]
                assert item == fields["item"]
            case _:
                assert kind.endswith(".done")
    return items


def test_events_add_up_to_the_items() -> None:
    ids = (f"call_{i}" for i in itertools.count())
    parts: list[Part] = [
        Reasoning("H"), Reasoning("m."), Content("I "), Content("look."), CallBegin(0, "f"), Arguments(0, '{"a"'),
        Arguments(0, ": 1}"), CallBegin(1, "g"), Arguments(1, "{"),
    ]  # fmt: skip
    output = OutputItems(lambda: next(ids))
    events = []
    for part in parts:
        output.feed(part, [{"token": "x"}] if isinstance(part, Content) else None)
        events += json.loads(json.dumps(output.take_events()))
    output.finish("incomplete")
    events += output.take_events()
    assert play(events) == output.items
    assert [item["status"] for item in output.items] == ["completed", "completed", "completed", "incomplete"]
    assert len(output.items[1]["content"][0]["logprobs"]) == 2
    assert answer_message(output.items) == {
        "role": "assistant", "content": "I look.", "reasoning_content": "Hm.",
        "tool_calls": [
            {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
            {"id": "call_1", "type": "function", "function": {"name": "g", "arguments": "{"}},
        ],
    }  # fmt: skip


def test_an_answer_of_nothing_is_an_empty_text() -> None:
    output = OutputItems(lambda: "")
    output.finish("completed")
    (item,) = play(output.take_events())
    assert item["content"] == [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]
    assert answer_message(output.items) == {"role": "assistant", "content": ""}
