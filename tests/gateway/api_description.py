"""The gateway's surface as an OpenAPI description, for schemathesis: what it makes of this is right, wrong, or both."""

from __future__ import annotations

from typing import Any

_TEXT = {"type": "string"}
_COUNT = {"type": "integer", "minimum": 1, "maximum": 8}
_PART = {
    "type": "object",
    "properties": {"type": {"enum": ["text", "input_text", "image_url"]}, "text": _TEXT},
    "required": ["type"],
}
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"enum": ["system", "user", "assistant", "tool"]},
        "content": {"oneOf": [_TEXT, {"type": "array", "items": _PART}, {"type": "null"}]},
        "name": _TEXT,
        "tool_calls": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"function": {"type": "object", "properties": {"name": _TEXT, "arguments": _TEXT}}},
            },
        },
    },
    "required": ["role", "content"],
}
_PROMPT = {
    "oneOf": [
        _TEXT,
        {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": 3},
        {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 40_000}, "minItems": 1, "maxItems": 8},
    ]
}
_SAMPLING: dict[str, Any] = {
    "model": {"enum": ["m", "alias"]},
    "max_tokens": _COUNT,
    "n": {"type": "integer", "minimum": 1, "maximum": 3},
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "seed": {"type": "integer"},
    "stop": {"oneOf": [_TEXT, {"type": "array", "items": _TEXT, "maxItems": 4}]},
    "stream": {"type": "boolean"},
    "stream_options": {"type": "object", "properties": {"include_usage": {"type": "boolean"}}},
    "user": _TEXT,
}
_HEADERS = [
    {"name": name, "in": "header", "schema": {"type": "string"}}
    for name in ("x-request-id", "idempotency-key", "x-stainless-retry-count", "x-request-timeout", "x-sol-task")
]
_ANSWERS = {"200": {"description": "an answer"}, "default": {"description": "an error"}}


def _post(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    described = {"type": "object", "properties": properties, "required": ["model", *required]}
    body = {"required": True, "content": {"application/json": {"schema": described}}}
    return {"post": {"parameters": _HEADERS, "requestBody": body, "responses": _ANSWERS}}


def _get(*parameters: dict[str, Any]) -> dict[str, Any]:
    return {"get": {"parameters": list(parameters), "responses": _ANSWERS}}


DESCRIPTION: dict[str, Any] = {
    "openapi": "3.1.0",
    "info": {"title": "gateway", "version": "1"},
    "paths": {
        "/v1/chat/completions": _post(
            {**_SAMPLING, "messages": {"type": "array", "items": _MESSAGE, "maxItems": 4}}, "messages"
        ),
        "/v1/completions": _post({**_SAMPLING, "prompt": _PROMPT, "echo": {"type": "boolean"}}, "prompt"),
        "/v1/responses": _post({"model": _TEXT, "input": {"oneOf": [_TEXT, {"type": "array", "items": _MESSAGE}]}}),
        "/v1/embeddings": _post({"model": _TEXT, "input": _PROMPT}, "input"),
        "/tokenize": _post({"model": _TEXT, "prompt": _TEXT}, "prompt"),
        "/detokenize": _post({"model": _TEXT, "tokens": {"type": "array", "items": {"type": "integer"}}}, "tokens"),
        "/v1/models": _get(),
        "/v1/models/{name}": _get({"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}),
        "/live": _get(),
        "/ready": _get(),
        "/version": _get(),
    },
}
