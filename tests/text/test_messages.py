from __future__ import annotations

from typing import Any

import pytest

from sol.errors import RequestError
from sol.text.chat_template import ChatTemplate
from sol.text.messages import flatten_messages


def test_roles_and_contents() -> None:
    assert flatten_messages(
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "name": "Ann", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None, "annotations": []},
            {"role": "tool", "content": "d", "tool_call_id": "1"},
        ]
    ) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "name": "Ann", "content": "a\nb"},
        {"role": "assistant", "content": "c"},
        {"role": "tool", "content": "d", "tool_call_id": "1"},
    ]


def call(function: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    whole = {"name": "f", "arguments": '{"a": [1]}', **(function or {})}
    return {"id": "1", "type": "function", "function": whole, **fields}


def test_calls_and_reasoning_come_back_as_templates_read_them() -> None:
    calls = [call(index=0), call({"arguments": ""}, id="2"), call({"arguments": {"b": 2}}, id="3")]
    broken = call({"arguments": '{"a": '}, id="4")
    calls.append(broken)
    sent = [
        {"role": "assistant", "content": None, "tool_calls": calls, "reasoning": "Well.", "reasoning_content": "Well."},
        {"role": "assistant", "tool_calls": calls[:1]},
    ]
    expected = [call({"arguments": {"a": [1]}}), call({"arguments": {}}, id="2"), call({"arguments": {"b": 2}}, id="3")]
    expected.append(broken)
    assert flatten_messages(sent) == [
        {"role": "assistant", "content": "", "tool_calls": expected, "reasoning_content": "Well."},
        {"role": "assistant", "content": "", "tool_calls": expected[:1]},
    ]


def test_arguments_are_an_object_or_a_text_as_a_template_wants_them() -> None:
    (message,) = flatten_messages([{"role": "assistant", "tool_calls": [call({"arguments": '{"a": "é"}'})]}])
    for source in (
        "{{ messages[0].tool_calls[0].function.arguments | tojson }}",
        "{{ messages[0].tool_calls[0].function.arguments }}",
        "{{ messages[0].tool_calls[0].function.arguments + '' }}",
        "{{ '' + messages[0].tool_calls[0].function.arguments + '' }}",
        "{{ '' ~ messages[0].tool_calls[0].function.arguments }}",
        "{% for key, value in messages[0].tool_calls[0].function.arguments.items() %}"
        '{"{{ key }}": {{ value | tojson }}}{% endfor %}',
    ):
        assert ChatTemplate(source, {}).render([message]) == '{"a": "é"}', source


def test_an_answer_to_a_call_names_its_tool() -> None:
    messages = [
        {"role": "assistant", "tool_calls": [call(), call({"name": "g"}, id="2")]},
        {"role": "tool", "tool_call_id": "2", "content": "a"},
        {"role": "tool", "tool_call_id": "1", "content": "b", "name": "own"},
        {"role": "tool", "tool_call_id": "3", "content": "c"},
    ]
    assert [message.get("name") for message in flatten_messages(messages)] == [None, "g", "own", None]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"content": "a"}, "messages[1].role"),
        ({"role": "robot", "content": "a"}, "messages[1].role"),
        ({"role": ["user"], "content": "a"}, "messages[1].role"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "assistant"}, "messages[1].content"),
        ({"role": "user", "content": None}, "messages[1].content"),
        ({"role": "user", "content": []}, "messages[1].content"),
        ({"role": "user", "content": 5}, "messages[1].content"),
        ({"role": "user", "content": ["a"]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "messages[1].content[0].text"),
        ({"role": "user", "content": "a", "name": 5}, "messages[1].name"),
        ({"role": "assistant", "content": "a", "tool_calls": {"id": "1"}}, "messages[1].tool_calls"),
        ({"role": "assistant", "content": "a", "tool_calls": [{"id": "1"}]}, "messages[1].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [call(id="")]}, "messages[1].tool_calls[0].id"),
        ({"role": "assistant", "tool_calls": [call(), call()]}, "messages[1].tool_calls[1].id"),
        ({"role": "assistant", "tool_calls": [call(type="custom")]}, "messages[1].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [call(colour="red")]}, "messages[1].tool_calls[0].colour"),
        ({"role": "assistant", "tool_calls": [call({"name": 5})]}, "messages[1].tool_calls[0].function.name"),
        ({"role": "assistant", "tool_calls": [call({"strict": 1})]}, "messages[1].tool_calls[0].function.strict"),
        (
            {"role": "assistant", "tool_calls": [call({"arguments": [1]})]},
            "messages[1].tool_calls[0].function.arguments",
        ),
        ({"role": "assistant", "tool_calls": []}, "messages[1].content"),
        ({"role": "user", "content": "a", "tool_calls": [call()]}, "messages[1].tool_calls"),
        ({"role": "user", "content": "a", "reasoning": "b"}, "messages[1].reasoning"),
        ({"role": "assistant", "content": "a", "reasoning": 5}, "messages[1].reasoning"),
        ({"role": "tool", "content": "a"}, "messages[1].tool_call_id"),
        ({"role": "function", "content": "a", "name": "f"}, "messages[1].role"),
        ({"role": "user", "content": "a", "colour": "red"}, "messages[1].colour"),
    ],
)
def test_what_a_message_cannot_be(message: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as error:
        flatten_messages([{"role": "user", "content": "Hi"}, message])
    assert error.value.param == param
    assert param in error.value.message


def test_no_messages() -> None:
    with pytest.raises(RequestError) as error:
        flatten_messages([])
    assert error.value.param == "messages"
