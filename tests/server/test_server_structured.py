"""Structured output as clients ask for it. The model talks nonsense: what is right, the grammar did."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pydantic
import pytest
from running_server import Server

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SCHEMA_FIELD = "response_format.json_schema.schema"
MESSAGES: list[Any] = [{"role": "user", "content": "Who are you?"}]


class Colour(enum.StrEnum):
    RED = "red"
    GREEN = "green"


class Part(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=6)
    colour: Colour


class Order(pydantic.BaseModel):
    parts: list[Part] = pydantic.Field(max_length=2)
    note: str | None = pydantic.Field(max_length=5)
    express: bool


@pytest.fixture(scope="module")
def tiny_client(tiny_server: Server) -> Iterator[openai.OpenAI]:
    with tiny_server.client() as client:
        yield client


def response_format(schema: Any = SCHEMA) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}


def complete(server: Server, **fields: Any) -> dict[str, Any]:
    response = server.post("/v1/completions", prompt="It is", **{"max_tokens": 200, **fields})
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return dict(choice)


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_chat_answers_by_a_schema(tiny_client: openai.OpenAI, temperature: float) -> None:
    answer = tiny_client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        response_format=response_format(),
        temperature=temperature,
        seed=1,
        logprobs=True,
    )  # type: ignore[call-overload]
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    assert all(entry.logprob <= 0.0 for entry in choice.logprobs.content)


def test_a_stream_and_each_of_several_choices_are_held_to_it(tiny_client: openai.OpenAI) -> None:
    options: Any = {"model": "tiny", "messages": MESSAGES, "response_format": response_format(), "seed": 3, "n": 2}
    whole = [choice.message.content for choice in tiny_client.chat.completions.create(**options).choices]
    pieces = ["", ""]
    for chunk in tiny_client.chat.completions.create(stream=True, **options):
        for choice in chunk.choices:
            pieces[choice.index] += choice.delta.content or ""
    assert pieces == whole
    assert whole[0] != whole[1]
    for text in whole:
        jsonschema.validate(json.loads(text), SCHEMA)


def test_the_clients_parse_gives_pydantic_objects(tiny_client: openai.OpenAI) -> None:
    answer = tiny_client.chat.completions.parse(model="tiny", messages=MESSAGES, response_format=Order, seed=5)
    assert isinstance(answer.choices[0].message.parsed, Order)
    response = tiny_client.responses.parse(model="tiny", input="Order", text_format=Order, temperature=0)
    assert isinstance(response.output_parsed, Order)
    assert response.status == "completed"


def test_responses_say_the_format_again(tiny_server: Server) -> None:
    wanted = {"type": "json_schema", "name": "person", "schema": SCHEMA, "strict": True}
    response = tiny_server.post("/v1/responses", input="Who?", text={"format": wanted}, temperature=0)
    assert response.status_code == 200, response.text
    body = response.json()
    assert body["text"]["format"] == wanted
    jsonschema.validate(json.loads(body["output"][0]["content"][0]["text"]), SCHEMA)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": r"[A-Z]{2}-\d{3}"}}, r"[A-Z]{2}-\d{3}"),
        ({"structured_outputs": {"choice": ["yes", "no, never"]}}, "yes|no, never"),
        ({"structured_outputs": {"grammar": 'root ::= "(" [0-9]{2,4} ")"'}}, r"\(\d{2,4}\)"),
        ({"structured_outputs": {"grammar": 'start: "x" | "yy"'}}, "x|yy"),
        ({"structured_outputs": {"json": {"const": 7}}}, "7"),
        ({"structured_outputs": {"json": '{"enum": [true]}', "disable_fallback": True}}, "true"),
        ({"guided_json": {"enum": ["a", "b"]}}, '"[ab]"'),
        ({"guided_regex": "(ab){2}"}, "abab"),
        ({"guided_choice": ["left", "right"]}, "left|right"),
        ({"guided_grammar": 'root ::= "a" | "b"'}, "a|b"),
        ({"response_format": response_format({"type": "boolean"})}, "true|false"),
        ({"response_format": {"type": "text"}, "guided_choice": ["one"]}, "one"),
    ],
)
def test_each_way_to_ask_for_a_form(tiny_server: Server, fields: dict[str, Any], pattern: str) -> None:
    for temperature in (0, 1):
        choice = complete(tiny_server, **fields, temperature=temperature, seed=2)
        assert re.fullmatch(pattern, choice["text"]), choice["text"]
        assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "fields", [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}]
)
def test_any_object(tiny_server: Server, fields: dict[str, Any]) -> None:
    # A name that never ends would be right, too: the quotation mark and the brace are made likely.
    bias = {str(token): 100 for token in (tiny_server.post("/tokenize", prompt="{}").json()["tokens"])}
    choice = complete(tiny_server, **fields, logit_bias=bias, temperature=0)
    assert isinstance(json.loads(choice["text"]), dict)
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("fields", [{"ignore_eos": True}, {"min_tokens": 50}, {"stop_token_ids": [2]}])
def test_an_answer_ends_where_its_form_does(tiny_server: Server, fields: dict[str, Any]) -> None:
    choice = complete(tiny_server, guided_choice=["left", "right"], **fields)
    assert choice["text"] in ("left", "right")
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)


def test_stop_strings_and_max_tokens_still_cut(tiny_server: Server) -> None:
    assert complete(tiny_server, guided_regex="[a-c]x[a-c]", stop="x")["text"] in ("a", "b", "c")
    choice = complete(tiny_server, guided_regex="[a-z]{20}", max_tokens=2)
    assert (choice["finish_reason"], len(choice["text"]) < 20) == ("length", True)


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "'xml'"),
        ({"response_format": {"type": "json_schema"}}, SCHEMA_FIELD, "required"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, SCHEMA_FIELD,
         "required"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
         "response_format.json_schema.name", "required"),
        ({"response_format": {"type": "json_object", "json_schema": {"name": "a", "schema": {}}}},
         "response_format.type", "json_schema"),
        ({"response_format": {"type": "text", "colour": 1}}, "response_format.colour", "unknown field"),
        ({"response_format": "json_object"}, "response_format", "must be an object"),
        ({"response_format": response_format([1])}, SCHEMA_FIELD, "must be a JSON Schema"),
        ({"response_format": response_format({"type": "array", "uniqueItems": True})},
         SCHEMA_FIELD, "uniqueItems"),
        ({"response_format": response_format({"type": "string", "pattern": "(?!a)b"})},
         SCHEMA_FIELD, "look-around"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "regular expression"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "empty"),
        ({"structured_outputs": {"choice": "yes"}}, "structured_outputs.choice", "must be a list"),
        ({"structured_outputs": {"grammar": "root ::= rest"}}, "structured_outputs.grammar", "not supported"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "is not JSON"),
        ({"structured_outputs": {"json": 3}}, "structured_outputs.json", "must be a JSON Schema"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "unknown field"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice", "both"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs.regex",
         "response_format"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", "guided_json"),
        ({"guided_json": {"enum": ["x" * 200_000]}}, "guided_json", "at most"),
        ({"guided_choice": [1]}, "guided_choice[0]", "must be a string"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_refused_before_anything_is_generated(
    tiny_server: Server, fields: dict[str, Any], param: str, says: str
) -> None:
    before = tiny_server.metrics()["vllm:generation_tokens_total"]
    for path, body in (("completions", {"prompt": "a"}), ("chat/completions", {"messages": MESSAGES})):
        response = tiny_server.post(f"/v1/{path}", **body, **fields)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param), error
        assert says in error["message"]
    assert tiny_server.metrics()["vllm:generation_tokens_total"] == before


def test_an_expression_that_becomes_too_much_on_the_way_ends_its_request_alone(tiny_server: Server) -> None:
    """It compiles, and is too much for llguidance's limits once the model writes."""
    for stream in (False, True):
        fields = {"guided_regex": "(a?){3000}a{3000}", "max_tokens": 400, "stream": stream, "temperature": 0}
        response = tiny_server.post("/v1/completions", prompt="a", **fields)
        assert response.status_code in ((200, 400) if stream else (400,)), response.text  # its first token may be out
        assert "the grammar cannot be followed any further" in response.text
    assert complete(tiny_server, guided_choice=["one"])["text"] == "one"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "text.format"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_what_a_response_cannot_have_is_refused(tiny_server: Server, fields: dict[str, Any], param: str) -> None:
    response = tiny_server.post("/v1/responses", input="a", **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
