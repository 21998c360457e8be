"""JSON Schemas of forced calls: what a grammar holds the model to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_VALUES: Final = frozenset({"const", "enum", "default", "examples"})
"""Keywords whose values are data, not schemas."""
_NAMED: Final = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose values are objects of schemas by names that anybody chose."""


def arguments_schema(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Of one tool's arguments: an object, of no properties if the tool has none."""
    if parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {**parameters, "type": "object"}


def calls_schema(tools: Mapping[str, Mapping[str, Any] | None], *, parallel: bool) -> dict[str, Any]:
    """Of an array of one or more calls, `{"name": …, "parameters": {…}}`, of these tools (name → parameters).

    Each tool's schema becomes a definition of the whole, and the references inside of it are changed to that place.
    """
    definitions = {
        f"tool{i}": _moved(arguments_schema(parameters), f"#/$defs/tool{i}")
        for i, parameters in enumerate(tools.values())
    }
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/tool{i}"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for i, name in enumerate(tools)
    ]
    schema: dict[str, Any] = {"type": "array", "items": {"anyOf": calls}, "minItems": 1, "$defs": definitions}
    if not parallel:
        schema["maxItems"] = 1
    return schema


def _moved(schema: Any, place: str) -> Any:
    """`schema` as part of another one, at `place` (a JSON pointer as a reference)."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            moved[key] = place + value[1:]
        elif key in _VALUES:
            moved[key] = value
        elif key in _NAMED and isinstance(value, Mapping):
            moved[key] = {name: _moved(inner, place) for name, inner in value.items()}
        else:
            moved[key] = _moved(value, place)
    return moved
