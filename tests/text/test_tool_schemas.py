"""Schemas of forced calls: what they allow is what the tools' own schemas allow."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from sol.text.tools.schemas import arguments_schema, calls_schema

TREE: dict[str, Any] = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "children": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["value"],
    "additionalProperties": False,
}
NAMED: dict[str, Any] = {
    "$ref": "#/$defs/pair",
    "$defs": {
        "pair": {
            "type": "object",
            "properties": {
                "$ref": {"type": "string"},  # a property of that name
                "enum": {"$ref": "#/$defs/word"},
                "const": {"const": {"$ref": "#/$defs/word"}},
            },
            "additionalProperties": False,
        },
        "word": {"enum": ["a", "b"]},
    },
}
TOOLS: dict[str, Any] = {"tree": TREE, "named": NAMED, "nothing": None}
ARGUMENTS: list[tuple[str, Any]] = [
    ("tree", {"value": 1, "children": [{"value": 2, "children": []}]}),
    ("tree", {"value": 1, "children": [{"value": "a"}]}),
    ("tree", {"children": []}),
    ("named", {"$ref": "x", "enum": "a", "const": {"$ref": "#/$defs/word"}}),
    ("named", {"enum": "c"}),
    ("named", {"const": "a"}),
    ("named", {"$ref": 5}),
    ("nothing", {}),
    ("nothing", {"a": 1}),
]


def allows(schema: Any, value: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


@pytest.mark.parametrize(("name", "arguments"), ARGUMENTS)
def test_a_call_may_pass_what_its_tool_takes(name: str, arguments: Any) -> None:
    schema = calls_schema(TOOLS, parallel=True)
    jsonschema.Draft202012Validator.check_schema(schema)
    allowed = allows(arguments_schema(TOOLS[name]), arguments)
    assert allows(schema, [{"name": name, "parameters": arguments}]) == allowed
    other = next(one for one in TOOLS if one != name)
    if arguments:
        assert not allows(schema, [{"name": other, "parameters": arguments}]), "not what another one takes"


def test_how_many_calls() -> None:
    call = {"name": "nothing", "parameters": {}}
    assert [allows(calls_schema(TOOLS, parallel=True), [call] * n) for n in range(4)] == [False, True, True, True]
    assert [allows(calls_schema(TOOLS, parallel=False), [call] * n) for n in range(3)] == [False, True, False]
    assert not allows(calls_schema(TOOLS, parallel=True), [{"name": "other", "parameters": {}}])
    assert not allows(calls_schema(TOOLS, parallel=True), [{**call, "id": "1"}])


def test_tools_are_not_changed() -> None:
    before = repr(TOOLS)
    calls_schema(TOOLS, parallel=True)
    assert repr(TOOLS) == before
