"""JSON Schemas of what the server answers, for its OpenAPI document. Field for field what the routes build: objects say
which fields are always there, and may have others."""

from __future__ import annotations

from typing import Any, Final

Schema = dict[str, Any]


def _object(required: Schema, optional: Schema | None = None) -> Schema:
    return {"type": "object", "properties": {**required, **(optional or {})}, "required": list(required)}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _map(values: Schema) -> Schema:
    return {"type": "object", "additionalProperties": values}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


_TEXT: Final = {"type": "string"}
_BOOL: Final = {"type": "boolean"}
_COUNT: Final = {"type": "integer", "minimum": 0}
_NUMBER: Final = {"type": "number"}
_TIME: Final = {"type": "integer", "description": "Unix seconds."}
_STOP_REASON: Final = {
    "anyOf": [_TEXT, {"type": "integer"}, {"type": "null"}],
    "description": "The stop string or token id that ended the choice.",
}
_FINISH: Final = {"enum": ["stop", "length", "tool_calls"]}
_HEAD: Final = {"id": _TEXT, "created": _TIME, "model": _TEXT, "system_fingerprint": _TEXT}
_ENTRY: Final = {"token": _TEXT, "logprob": _NUMBER, "bytes": _list({"type": "integer", "minimum": 0, "maximum": 255})}
_PROMPT_LOGPROBS: Final = _list(
    _or_null(_map(_object({"logprob": _NUMBER, "rank": {"type": "integer"}, "decoded_token": _TEXT})))
)

SCHEMAS: Final[dict[str, Schema]] = {
    "Error": _object(
        {
            "error": _object(
                {"message": _TEXT, "type": _TEXT, "param": _or_null(_TEXT), "code": _or_null(_TEXT)},
            )
        }
    ),
    "Usage": _object(
        {
            "prompt_tokens": _COUNT,
            "completion_tokens": _COUNT,
            "total_tokens": _COUNT,
            "prompt_tokens_details": _object({"cached_tokens": _COUNT}),
        },
        {"completion_tokens_details": _object({"reasoning_tokens": _COUNT}), "speculation": {"type": "object"}},
    ),
    "ToolCall": _object(
        {"id": _TEXT, "type": {"const": "function"}, "function": _object({"name": _TEXT, "arguments": _TEXT})}
    ),
    "ChatLogprobs": _object(
        {
            "content": _list(_object({**_ENTRY, "top_logprobs": _list(_object(_ENTRY))})),
            "refusal": {"type": "null"},
        }
    ),
    "ChatCompletion": _object(
        {
            **_HEAD,
            "object": {"const": "chat.completion"},
            "choices": _list(
                _object(
                    {
                        "index": _COUNT,
                        "message": _object(
                            {"role": {"const": "assistant"}, "content": _or_null(_TEXT), "refusal": {"type": "null"}},
                            {"tool_calls": _list(_ref("ToolCall")), "reasoning_content": _TEXT, "reasoning": _TEXT},
                        ),
                        "logprobs": _or_null(_ref("ChatLogprobs")),
                        "finish_reason": _FINISH,
                        "stop_reason": _STOP_REASON,
                    }
                )
            ),
            "usage": _ref("Usage"),
        },
        {"prompt_logprobs": _PROMPT_LOGPROBS},
    ),
    "CompletionLogprobs": _object(
        {
            "tokens": _list(_TEXT),
            "token_logprobs": _list(_or_null(_NUMBER)),
            "top_logprobs": _list(_or_null(_map(_NUMBER))),
            "text_offset": _list(_COUNT),
        }
    ),
    "Completion": _object(
        {
            **_HEAD,
            "object": {"const": "text_completion"},
            "choices": _list(
                _object(
                    {
                        "index": _COUNT,
                        "text": _TEXT,
                        "logprobs": _or_null(_ref("CompletionLogprobs")),
                        "finish_reason": _FINISH,
                        "stop_reason": _STOP_REASON,
                    },
                    {"prompt_logprobs": _PROMPT_LOGPROBS},
                )
            ),
            "usage": _ref("Usage"),
        }
    ),
    "Response": _object(
        {
            "id": _TEXT,
            "object": {"const": "response"},
            "created_at": _TIME,
            "status": {"enum": ["completed", "incomplete"]},
            "error": {"type": "null"},
            "incomplete_details": _or_null(_object({"reason": _TEXT})),
            "model": _TEXT,
            "output": _list(_object({"id": _TEXT, "type": _TEXT, "status": _TEXT})),
            "previous_response_id": _or_null(_TEXT),
            "store": _BOOL,
            "usage": _object(
                {
                    "input_tokens": _COUNT,
                    "input_tokens_details": _object({"cached_tokens": _COUNT}),
                    "output_tokens": _COUNT,
                    "output_tokens_details": _object({"reasoning_tokens": _COUNT}),
                    "total_tokens": _COUNT,
                }
            ),
        }
    ),
    "DeletedResponse": _object({"id": _TEXT, "object": {"const": "response"}, "deleted": {"const": True}}),
    "Model": _object(
        {
            "id": _TEXT,
            "object": {"const": "model"},
            "created": _TIME,
            "owned_by": _TEXT,
            "root": _TEXT,
            "parent": {"type": "null"},
            "max_model_len": _COUNT,
            "drafters": _list(_TEXT),
        }
    ),
    "Models": _object({"object": {"const": "list"}, "data": _list(_ref("Model"))}),
    "Tokens": _object(
        {
            "count": _COUNT,
            "max_model_len": _COUNT,
            "tokens": _list(_COUNT),
            "token_strs": _or_null(_list(_TEXT)),
        }
    ),
    "Text": _object({"prompt": _TEXT}),
    "Status": _object({"status": {"const": "ok"}}),
    "Version": _object({"version": _TEXT}),
    "Load": _object({"server_load": _COUNT}),
    "UsageOfRequest": _object({"usage": _ref("Usage")}),
}
