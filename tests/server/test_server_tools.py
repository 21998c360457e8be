"""Tools and reasoning as the official client uses them. A tiny model writes what a grammar makes it write."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from running_server import KEY, Server, start_server, tiny_options

TEMPLATE = """
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call with <tool_call></tool_call>.<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}
{%- for call in message.tool_calls %}<tool_call>{"name": "{{ call.function.name }}", "arguments":
{{- " " ~ call.function.arguments | tojson }}}</tool_call>{% endfor %}
{%- if message.tool_call_id %} for {{ message.tool_call_id }}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking %}<think>
{% endif %}{% endif %}"""
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
            "$defs": {"city": {"enum": ["Paris", "Rome"]}},
        },
        "strict": True,
    },
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "get_time"}}
MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def calling_llama(talking_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template knows tools and reasoning."""
    directory = tmp_path_factory.mktemp("calling_llama") / "model"
    shutil.copytree(talking_llama, directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.fixture(scope="module")
def server(calling_llama: Path) -> Iterator[Server]:
    with start_server(**tiny_options(calling_llama), api_keys=[KEY]) as server:
        server.wait_until_ready()
        yield server
        assert server.stop() == 0


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


def ask(client: openai.OpenAI, says: str | None = None, **options: Any) -> Any:
    """An answer, which is `says`, if that is given."""
    if says is not None:
        options["extra_body"] = {"structured_outputs": {"choice": [says]}, **options.get("extra_body", {})}
    options = {"model": "tiny", "messages": MESSAGES, "max_tokens": 200, "seed": 1, **options}
    return client.chat.completions.create(**options)


def assemble(chunks: Any) -> tuple[dict[str, Any], str]:
    """The message that the deltas of a stream add up to, and the finish reason."""
    message: dict[str, Any] = {}
    reason = ""
    for chunk in chunks:
        for choice in chunk.choices:
            for key, value in choice.delta.to_dict().items():
                if key != "tool_calls":
                    message[key] = message.get(key, "") + value
                    continue
                for call in value:
                    calls = message.setdefault("tool_calls", [])
                    if call["index"] == len(calls):
                        assert call["function"]["arguments"] == "", "a name comes before its arguments"
                        calls.append({"id": call["id"], "type": call["type"], "function": call["function"]})
                    else:
                        assert call.keys() == {"index", "function"}
                        calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            reason = choice.finish_reason or reason
    return message, reason


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_named_tool_is_called(client: openai.OpenAI, temperature: float) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    answer = ask(client, tools=[TIME, WEATHER], tool_choice=choice, temperature=temperature)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert call.id.startswith("call_")
    jsonschema.validate(json.loads(call.function.arguments), WEATHER["function"]["parameters"])
    assert answer.choices[0].message.content is None
    assert answer.choices[0].finish_reason == "tool_calls"


def test_a_call_is_required(client: openai.OpenAI) -> None:
    answer = ask(client, tools=[TIME, WEATHER], tool_choice="required", n=4, temperature=1, parallel_tool_calls=False)
    ids = set()
    for choice in answer.choices:
        (call,) = choice.message.tool_calls
        ids.add(call.id)
        arguments = json.loads(call.function.arguments)
        assert arguments == {} if call.function.name == "get_time" else arguments["city"] in ("Paris", "Rome")
        assert choice.finish_reason == "tool_calls"
    assert len(ids) == 4


def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"tools": [TIME, WEATHER], "tool_choice": "required", "temperature": 1, "seed": 5}
    whole = ask(client, **asked).choices[0]
    with ask(client, stream=True, **asked) as stream:
        message, reason = assemble(stream)
    expected = [call.function.to_dict() for call in whole.message.tool_calls]
    assert [call["function"] for call in message["tool_calls"]] == expected
    assert reason == whole.finish_reason == "tool_calls"
    assert message["content"] == ""


def test_the_client_puts_a_stream_together(client: openai.OpenAI) -> None:
    """`stream` of the client reads arguments while they come and parses them."""
    with client.chat.completions.stream(
        model="tiny", messages=MESSAGES, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, seed=3
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    assert kinds.count("tool_calls.function.arguments.done") == len(final.choices[0].message.tool_calls or [])
    parsed: Any = (final.choices[0].message.tool_calls or [])[0].function.parsed_arguments
    assert parsed["city"] in ("Paris", "Rome")


@pytest.mark.parametrize("stream", [False, True])
def test_the_model_chooses_to_call(client: openai.OpenAI, stream: bool) -> None:
    answer = ask(client, f"I look.\n{CALL}\n{OTHER}", tools=[TIME, WEATHER], stream=stream)
    message, reason = (
        assemble(answer) if stream else (answer.choices[0].message.to_dict(), answer.choices[0].finish_reason)
    )
    assert message["content"] == "I look."
    weather, time = message["tool_calls"]
    assert weather["function"] == {"name": "weather", "arguments": '{"city": "Rome", "days": 2}'}
    assert time["function"] == {"name": "get_time", "arguments": "{}"}
    assert weather["id"] != time["id"]
    assert reason == "tool_calls"


def test_one_call_is_enough_when_several_are_not_wanted(client: openai.OpenAI) -> None:
    answer = ask(client, CALL + OTHER, tools=[TIME, WEATHER], parallel_tool_calls=False)
    assert [call.function.name for call in answer.choices[0].message.tool_calls] == ["weather"]
    assert answer.choices[0].finish_reason == "tool_calls"
    both = ask(client, CALL + OTHER, tools=[TIME, WEATHER])
    assert answer.usage.completion_tokens < both.usage.completion_tokens, "nothing is made that nobody wants"


def test_what_is_no_call_is_content(client: openai.OpenAI) -> None:
    text = '<tool_call>{"name": "rain", "arguments": {}}</tool_call>'
    choice = ask(client, text, tools=[WEATHER]).choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")
    for options in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        choice = ask(client, CALL, **options).choices[0]
        assert (choice.message.content, choice.message.tool_calls) == (CALL, None)


def test_an_answer_that_is_cut_in_a_call(client: openai.OpenAI) -> None:
    choice = ask(client, CALL, tools=[WEATHER], max_tokens=18).choices[0]
    assert choice.finish_reason == "length"
    assert '{"city": "Rome", "days": 2}'.startswith(choice.message.tool_calls[0].function.arguments)


def test_a_tools_answer_goes_back(client: openai.OpenAI, server: Server) -> None:
    message = ask(client, f"<think>Hm.</think>{CALL}", tools=[WEATHER]).choices[0].message
    (call,) = message.tool_calls
    messages = [*MESSAGES, message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": "Sun"}]
    answer = ask(client, "It is sunny.", tools=[WEATHER], messages=messages)
    assert answer.choices[0].message.content == "It is sunny."
    tokens = server.post("/tokenize", messages=messages, tools=[WEATHER]).json()["tokens"]
    text = server.post("/detokenize", tokens=tokens).json()["prompt"]
    assert '"description": "The weather in a city."' in text
    assert '"strict"' not in text, "models were not trained with it"
    assert "<think>Hm.</think>" in text
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Rome", "days": 2}}</tool_call>' in text
    assert f"Sun for {call.id}" in text
    assert (
        "weather"
        not in server.post("/detokenize", tokens=server.post("/tokenize", messages=MESSAGES).json()["tokens"]).text
    )


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_content_and_a_call(client: openai.OpenAI, stream: bool) -> None:
    answer = ask(client, f"<think>\nWell.\n</think>\n\nI look.\n{CALL}", tools=[WEATHER], stream=stream)
    message = assemble(answer)[0] if stream else answer.choices[0].message.to_dict()
    assert message["reasoning_content"] == message["reasoning"] == "Well."
    assert message["content"] == "I look."
    assert message["tool_calls"][0]["function"]["name"] == "weather"


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_begins_to_think(client: openai.OpenAI, stream: bool) -> None:
    """The grammar holds behind the reasoning, which may be anything: here it is cut, or made to end at once."""
    body = {"chat_template_kwargs": {"enable_thinking": True}}
    answer = ask(client, "Yes.", extra_body=body, max_tokens=5, stream=stream)
    message = assemble(answer)[0] if stream else answer.choices[0].message.to_dict()
    assert message["reasoning"]
    assert not message["content"]
    hidden = ask(client, "Yes.", extra_body={**body, "include_reasoning": False}, max_tokens=5).choices[0].message
    assert (hidden.content, hidden.to_dict().get("reasoning")) == ("", None)


def test_a_stream_with_logprobs_and_usage_of_calls(client: openai.OpenAI) -> None:
    with ask(
        client, CALL, tools=[WEATHER], logprobs=True, stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    ) as stream:  # fmt: skip
        chunks = list(stream)
    entries = [entry for chunk in chunks for c in chunk.choices if c.logprobs for entry in c.logprobs.content]
    assert len(entries) == chunks[-1].usage.completion_tokens
    assert "".join(entry.token for entry in entries).startswith(CALL)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [WEATHER, TIME, WEATHER]}, "tools[2].function.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "rain"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "auto", "tools": []}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        (
            {
                "tools": [
                    TIME,
                    {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"not": {}}}}}},
                ],
                "tool_choice": "required",
            },
            "tools[1].function.parameters",
        ),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(server: Server, fields: dict[str, Any], param: str) -> None:
    response = server.post("/v1/chat/completions", **{"messages": MESSAGES, **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def respond(client: openai.OpenAI, says: str | None = None, **options: Any) -> Any:
    """As `ask`, from the newer API."""
    if says is not None:
        options["extra_body"] = {"structured_outputs": {"choice": [says]}}
    options = {"model": "tiny", "input": "Hi", "max_output_tokens": 200, **options}
    return client.responses.create(**options)


def flat(tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", **tool["function"]}


@pytest.mark.parametrize("stream", [False, True])
def test_items_of_a_response(client: openai.OpenAI, stream: bool) -> None:
    says = f"<think>Well.</think>I look.{CALL}{OTHER}"
    events: list[Any] = []
    answer = respond(client, says, tools=[flat(WEATHER), flat(TIME)], stream=stream)
    if stream:
        events = list(answer)
        answer = events[-1].response
    reasoning, message, weather, time = answer.output
    assert reasoning.content[0].text == "Well."
    assert message.content[0].text == answer.output_text == "I look."
    assert (weather.type, weather.name, weather.arguments) == (
        "function_call", "weather", '{"city": "Rome", "days": 2}',
    )  # fmt: skip
    assert (time.name, time.arguments) == ("get_time", "{}")
    assert {item.status for item in answer.output} == {"completed"}
    assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens
    assert (answer.tool_choice, answer.parallel_tool_calls, len(answer.tools)) == ("auto", True, 2)
    if stream:
        assert [event.sequence_number for event in events] == list(range(len(events)))
        added = [event for event in events if event.type == "response.output_item.added"]
        done = [event for event in events if event.type == "response.output_item.done"]
        assert [event.output_index for event in added] == [event.output_index for event in done] == [0, 1, 2, 3]
        assert [event.item.to_dict() for event in done] == [item.to_dict() for item in answer.output]
        assert all(not getattr(event.item, "arguments", "") for event in added)
        deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta" and e.output_index == 2]
        assert "".join(deltas) == weather.arguments
        thought = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
        assert "".join(thought) == "Well."


def test_a_conversation_with_tools(client: openai.OpenAI) -> None:
    tools = [flat(WEATHER)]
    first = respond(client, f"<think>Hm.</think>I look.{CALL}", tools=tools)
    call = first.output[-1]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "Sun"}
    kept = respond(client, input=[output], previous_response_id=first.id, tools=tools, max_output_tokens=5)
    # The same by hand, with what the client got sent back as it came.
    items = [{"role": "user", "content": "Hi"}, *[item.to_dict() for item in first.output], output]
    by_hand = respond(client, input=items, tools=tools, max_output_tokens=5, store=False)
    assert by_hand.usage.input_tokens == kept.usage.input_tokens
    assert by_hand.usage.input_tokens > first.usage.input_tokens + 20


def test_a_response_that_must_call(client: openai.OpenAI) -> None:
    answer = respond(client, tools=[flat(WEATHER)], tool_choice={"type": "function", "name": "weather"}, temperature=1)
    (call,) = answer.output
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
    assert answer.tool_choice.name == "weather"
    cut = respond(client, tools=[flat(WEATHER)], tool_choice="required", temperature=1, max_output_tokens=14)
    assert cut.status == "incomplete"
    assert cut.output[-1].status == "incomplete"


def test_forms_that_the_owner_chooses(calling_llama: Path) -> None:
    """Not those that the template shows."""
    options = {"tool_call_parser": "mistral", "reasoning_parser": "none", "enable_auto_tool_choice": True}
    with start_server(**tiny_options(calling_llama), **options, api_keys=[KEY]) as server, server.client() as client:
        server.wait_until_ready()
        says = '<think>Hm.</think>[TOOL_CALLS]weather[ARGS]{"city": "Rome", "days": 2}'
        message = ask(client, says, tools=[WEATHER]).choices[0].message
        assert message.content == "<think>Hm.</think>"
        (call,) = message.tool_calls
        assert (len(call.id), call.function.arguments) == (9, '{"city": "Rome", "days": 2}')
        assert ask(client, CALL, tools=[WEATHER]).choices[0].message.content == CALL
        assert server.stop() == 0
