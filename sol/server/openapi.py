"""`/openapi.json`: the API as an OpenAPI 3.1 document, made from the types that requests are checked with.

What the types cannot say is said here: the forms of fields that functions check, and the ranges that `SamplingParams`
knows. What depends on several fields at once (`top_logprobs` needs `logprobs`) or on the model is not said; such a
request is a 400 that names the field.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Final

from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sol.sampling_params import MAX_CHOICES, MAX_LOGPROBS
from sol.server.middleware import needs_key
from sol.server.openapi_answers import SCHEMAS, Schema
from sol.server.protocol import (
    HARMLESS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    OneOf,
    TokenizeBody,
)
from sol.server.responses_input import LOGPROBS, ResponsesBody
from sol.server.scheduling import (
    DEADLINE_HEADER,
    LEAST_URGENT,
    MAX_SALT_CHARACTERS,
    MOST_URGENT,
    READ_TIMEOUT_HEADER,
    TIERS,
)
from sol.server.state import ServerState
from sol.server.usages import USAGE_KEY_HEADER
from sol.version import __version__

_REF: Final = "#/components/schemas/{model}"
_NULL: Final = {"type": "null"}
_TOKEN_ID: Final = {"type": "integer", "minimum": 0}
_TOKEN_IDS: Final = {"type": "array", "items": _TOKEN_ID, "minItems": 1}
_STOP_STRING: Final = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}
_JSON_SCHEMA: Final = {"type": ["object", "boolean", "string", "null"], "description": "A JSON Schema, or its text."}
_ROLES: Final = ("system", "developer", "user", "assistant", "tool")


def _part(*kinds: str) -> Schema:
    properties = {"type": {"enum": list(kinds)}, "text": {"type": "string"}}
    return {"type": "object", "properties": properties, "required": ["type", "text"]}


def _message(part: Schema, **properties: Schema) -> Schema:
    content = [{"type": "string"}, {"type": "array", "items": part, "minItems": 1}, _NULL]
    return {
        "type": "object",
        "properties": {"role": {"enum": list(_ROLES)}, "content": {"anyOf": content}, **properties},
        "required": ["role"],
    }


_MESSAGES: Final = {
    "type": "array",
    "items": _message(
        _part("text"),
        name={"type": ["string", "null"]},
        tool_call_id={"type": ["string", "null"]},
        tool_calls={"anyOf": [{"type": "array", "items": {"$ref": "#/components/schemas/ToolCall"}}, _NULL]},
        reasoning_content={"type": ["string", "null"]},
        reasoning={"type": ["string", "null"]},
    ),
    "minItems": 1,
}
_INPUT_PART: Final = _part("input_text", "output_text", "text")
_ID: Final = {"type": "string", "minLength": 1}


def _item(kind: str, **properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": {"type": {"const": kind}, "id": {"type": "string"}, **properties},
        "required": ["type", *properties],
    }


_INPUT_ITEM: Final = {
    "anyOf": [
        _message(_INPUT_PART, type={"enum": ["message"]}, id={"type": "string"}),
        _item("function_call", call_id=_ID, name=_ID, arguments={"type": "string"}),
        _item(
            "function_call_output",
            call_id=_ID,
            output={"anyOf": [{"type": "string"}, {"type": "array", "items": _INPUT_PART, "minItems": 1}]},
        ),
        _item("reasoning", content={"type": "array", "items": _part("reasoning_text")}),
    ]
}

_FORMS: Final[Mapping[str, Schema]] = {
    "stop": {"anyOf": [_STOP_STRING, {"type": "array", "items": _STOP_STRING, "maxItems": MAX_STOP_STRINGS}, _NULL]},
    "logit_bias": {
        "anyOf": [
            {
                "type": "object",
                "propertyNames": {"pattern": "^[0-9]{1,10}$"},
                "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            },
            _NULL,
        ]
    },
    "prompt": {
        "anyOf": [
            {"type": "string"},
            {"type": "array", "items": {"type": "string"}, "minItems": 1},
            _TOKEN_IDS,
            {"type": "array", "items": _TOKEN_IDS, "minItems": 1},
        ]
    },
    "input": {"anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "items": _INPUT_ITEM, "minItems": 1}]},
    "schema": _JSON_SCHEMA,
    "json": _JSON_SCHEMA,
    "guided_json": _JSON_SCHEMA,
    "include_obfuscation": {"enum": [False, None]},
    "include": {"anyOf": [{"type": "array", "items": {"const": LOGPROBS}}, _NULL]},
    "tokens": {"type": "array", "items": _TOKEN_ID},
    "stop_token_ids": {"anyOf": [{"type": "array", "items": _TOKEN_ID}, _NULL]},
    "service_tier": {"enum": [*TIERS, None]},
    "cache_salt": {"anyOf": [{"type": "string", "minLength": 1, "maxLength": MAX_SALT_CHARACTERS}, _NULL]},
    "truncation": {"enum": ["disabled", None]},
    "background": {"enum": [False, None]},
}
"""Of fields that a function checks."""

RANGES: Final[Mapping[str, Schema]] = {
    "n": {"minimum": 1, "maximum": MAX_CHOICES},
    "temperature": {"minimum": 0, "maximum": 100},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "maximum": 2**63 - 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "seed": {"minimum": -(2**63), "maximum": 2**63 - 1},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"minimum": 0.01, "maximum": 100},
    "min_tokens": {"minimum": 0},
    "max_tokens": {"minimum": 0},
    "max_completion_tokens": {"minimum": 1},
    "max_output_tokens": {"minimum": 1},
    "prompt_logprobs": {"minimum": 0, "maximum": MAX_LOGPROBS},
    "logprobs": {"minimum": 0, "maximum": MAX_LOGPROBS},
    "top_logprobs": {"minimum": 0, "maximum": MAX_LOGPROBS},
    "priority": {"minimum": MOST_URGENT, "maximum": LEAST_URGENT},
}
"""Of numbers."""

_BODIES: Final[tuple[type[Body], ...]] = (ChatBody, CompletionBody, ResponsesBody, TokenizeBody, DetokenizeBody)


def _schemas() -> dict[str, Schema]:
    _, top = models_json_schema([(body, "validation") for body in _BODIES], ref_template=_REF)
    schemas: dict[str, Schema] = top["$defs"]
    for name, schema in schemas.items():
        schema.pop("title", None)
        for field, described in schema["properties"].items():
            described.pop("title", None)
            if described.get("default", ...) is None:
                del described["default"]  # that null is "not given" holds for all
            if field in _FORMS:
                default = {key: described[key] for key in ("default",) if key in described}
                described.clear()
                described.update({**_FORMS[field], **default})
            for variant in (described, *described.get("anyOf", ())):
                if variant.get("type") in ("integer", "number"):
                    variant.update(RANGES.get(field, {}))
            if field == "messages":
                nullable = "anyOf" in described
                described.clear()
                described.update({"anyOf": [_MESSAGES, _NULL]} if nullable else _MESSAGES)
        if name in {body.__name__ for body in _BODIES}:
            for field, allowed in HARMLESS.items():
                values = {"enum": list(allowed.values)} if isinstance(allowed, OneOf) else {}
                schema["properties"].setdefault(field, values)
            schema["additionalProperties"] = False
    return {**schemas, **SCHEMAS}


def _ref(name: str) -> Schema:
    return {"$ref": _REF.format(model=name)}


def _answer(schema: str, *, streams: bool = False) -> Schema:
    content: Schema = {"application/json": {"schema": _ref(schema)}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string", "description": "With stream: true."}}
    return {"description": "The answer.", "content": content}


def _text(kind: str) -> Schema:
    return {"description": "The answer.", "content": {kind: {"schema": {"type": "string"}}}}


def _header(name: str, description: str, **schema: Any) -> Schema:
    return {"name": name, "in": "header", "description": description, "schema": {"type": "string", **schema}}


_ERROR: Final = {"description": "An error.", "content": {"application/json": {"schema": _ref("Error")}}}
_REQUEST_ID: Final = _header("x-request-id", "Comes back in the answer, and stands in logs and traces.")
_WORK_HEADERS: Final = (
    _REQUEST_ID,
    _header(DEADLINE_HEADER, "Milliseconds from now in which the answer is of use.", pattern="^[0-9]{1,9}$"),
    _header(READ_TIMEOUT_HEADER, "The same in seconds, as a hint: what OpenAI's clients send."),
    _header(USAGE_KEY_HEADER, "By which /v1/usage/{key} tells what the request came to, should its client leave."),
)


def _operation(summary: str, answer: Schema, body: type[Body] | None = None, *path: str) -> Schema:
    operation: Schema = {"summary": summary, "responses": {"200": answer, "default": _ERROR}}
    parameters: list[Schema] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}} for name in path
    ]
    if body is not None:
        content = {"application/json": {"schema": _ref(body.__name__)}}
        operation["requestBody"] = {"required": True, "content": content}
    operation["parameters"] = [*parameters, *(_WORK_HEADERS if body is not None else (_REQUEST_ID,))]
    return operation


_PATHS: Final[Mapping[str, Mapping[str, Schema]]] = {
    "/": {"get": _operation("A page to talk to the model with.", _text("text/html"))},
    "/v1/chat/completions": {"post": _operation("Answer a chat.", _answer("ChatCompletion", streams=True), ChatBody)},
    "/v1/completions": {
        "post": _operation("Go on with a text or token ids.", _answer("Completion", streams=True), CompletionBody)
    },
    "/v1/responses": {
        "post": _operation(
            "Answer a conversation that may be stored.", _answer("Response", streams=True), ResponsesBody
        )
    },
    "/v1/responses/{response_id}": {
        "get": _operation("Read a stored response.", _answer("Response"), None, "response_id"),
        "delete": _operation("Delete a stored response.", _answer("DeletedResponse"), None, "response_id"),
    },
    "/v1/models": {"get": _operation("The model, by each of its names.", _answer("Models"))},
    "/v1/models/{name}": {"get": _operation("One of them.", _answer("Model"), None, "name")},
    "/tokenize": {"post": _operation("Token ids of a text or of a chat.", _answer("Tokens"), TokenizeBody)},
    "/detokenize": {"post": _operation("The text of token ids.", _answer("Text"), DetokenizeBody)},
    "/live": {"get": _operation("503 when only a restart helps.", _answer("Status"))},
    "/ready": {"get": _operation("503 when work would be turned away.", _answer("Status"))},
    "/health": {"get": _operation("The same as /ready.", _answer("Status"))},
    "/ping": {"get": _operation("The same as /ready.", _answer("Status"))},
    "/v1/usage/{key}": {
        "get": _operation("What an abandoned request came to.", _answer("UsageOfRequest"), None, "key")
    },
    "/version": {"get": _operation("Sol's version.", _answer("Version"))},
    "/load": {"get": _operation("How many requests for work are open.", _answer("Load"))},
    "/metrics": {"get": _operation("Metrics in Prometheus's text format.", _text("text/plain"))},
    "/openapi.json": {
        "get": _operation("This document.", {"description": "It.", "content": {"application/json": {"schema": {}}}})
    },
}


@functools.cache
def _document(with_keys: bool) -> Schema:
    document: Schema = {
        "openapi": "3.1.0",
        "info": {
            "title": "Sol",
            "version": __version__,
            "description": "OpenAI's API, and vLLM's fields where OpenAI has none. Null means that a field is not "
            "given. Fields of those APIs that are not listed are taken where they say nothing (null, false or empty).",
        },
        "paths": _PATHS,
        "components": {"schemas": _schemas()},
    }
    if with_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["paths"] = {
            path: {
                method: {**operation, "security": [{"key": []}]} if needs_key(path) else operation
                for method, operation in operations.items()
            }
            for path, operations in _PATHS.items()
        }
    return document


def openapi_document(*, with_keys: bool) -> Schema:
    """OpenAPI 3.1; `with_keys` says that the server asks for API keys. Do not change it: it is shared."""
    return _document(with_keys)


async def openapi(request: Request) -> Response:
    state: ServerState = request.app.state.sol
    return JSONResponse(openapi_document(with_keys=bool(state.config.api_keys)))
