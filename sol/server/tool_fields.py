"""The fields of a request that are about tools, as OpenAI's two APIs have them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

MAX_TOOLS: Final = 128
MAX_NAME_CHARACTERS: Final = 128
NAME_PATTERN: Final = rf"^[A-Za-z0-9_.\-]{{1,{MAX_NAME_CHARACTERS}}}$"
_MODES: Final = ("auto", "none", "required")


@dataclass(frozen=True, slots=True)
class ToolChoice:
    mode: Literal["auto", "none", "required", "named"]
    name: str = ""
    """Of the tool that must be called, if it is named."""


def _name(name: str) -> str:
    if re.fullmatch(NAME_PATTERN, name) is None:
        raise ValueError(
            f"must be 1 to {MAX_NAME_CHARACTERS} letters, digits, underscores, dots or hyphens, not {name!r:.80}"
        )
    return name


def _parameters(schema: dict[str, Any]) -> dict[str, Any]:
    """What a template or a model can be handed; whether the schema can be held to, compiling it shows."""
    if schema.get("type", "object") != "object":
        raise ValueError(f"must be a JSON Schema of an object, not of type {schema['type']!r:.80}")
    for key, kind, name in (("properties", dict, "an object"), ("required", list, "a list")):
        if not isinstance(schema.get(key, kind()), kind):
            raise ValueError(f"must be a JSON Schema: its {key} must be {name}, not {schema[key]!r:.80}")
    return schema


_NAME_FORM: Final = {"type": "string", "pattern": NAME_PATTERN}
_PARAMETERS_FORM: Final = {
    "type": "object",
    "properties": {"type": {"const": "object"}, "properties": {"type": "object"}, "required": {"type": "array"}},
}


class FunctionDefinition(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())

    name: Annotated[str, AfterValidator(_name), WithJsonSchema(_NAME_FORM)]
    description: str | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(_parameters), WithJsonSchema(_PARAMETERS_FORM)] | None = None
    strict: bool | None = None


class ChatTool(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["function"]
    function: FunctionDefinition


class ResponsesTool(FunctionDefinition):
    """The same with one level less."""

    type: Literal["function"]


def _tool_choice(value: Any) -> ToolChoice | None:
    match value:
        case None:
            return None
        case "auto" | "none" | "required":
            return ToolChoice(value)
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return ToolChoice("named", name)
    raise ValueError(f"must be one of {', '.join(_MODES)}, or name a function that is one of tools, not {value!r:.80}")


_NAMED_FORM: Final = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
        "name": {"type": "string"},
    },
    "required": ["type"],
    "anyOf": [{"required": ["function"]}, {"required": ["name"]}],
}
ToolChoiceField = Annotated[
    ToolChoice | None,
    PlainValidator(_tool_choice),
    WithJsonSchema({"anyOf": [{"enum": list(_MODES)}, _NAMED_FORM, {"type": "null"}]}),
]


ChatTools = Annotated[list[ChatTool], Field(max_length=MAX_TOOLS)]
ResponsesTools = Annotated[list[ResponsesTool], Field(max_length=MAX_TOOLS)]
