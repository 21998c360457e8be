"""Chat messages as clients send them (OpenAI's schema) and as chat templates want them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from sol.errors import RequestError

_ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_REASONING: Final = ("reasoning_content", "reasoning")
"""vLLM's names, the older one first, which is the one that templates read."""


class CallArguments(dict[str, Any]):
    """The arguments of a call as chat templates have them. Most write them with `tojson`; for those that join them with
    text they are that text."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, other: object) -> str:
        return str(self) + other if isinstance(other, str) else NotImplemented

    def __radd__(self, other: object) -> str:
        return other + str(self) if isinstance(other, str) else NotImplemented


def flatten_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as chat templates want them: `content` a string, OpenAI's `developer` as `system`, the arguments of tool
    calls as objects, and the name of the tool in each message of one, which some templates need.

    Text parts are joined by a newline, as vLLM joins them. Raises `RequestError` naming what is wrong.
    """
    if not messages:
        raise RequestError("messages must not be empty", param="messages")
    flat = [_flatten_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    names: dict[str, str] = {}
    for message in flat:
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        if message["role"] == "tool" and message["tool_call_id"] in names:
            message.setdefault("name", names[message["tool_call_id"]])
    return flat


def _flatten_message(message: Mapping[str, Any], path: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        instead = "; an answer to a call has the role tool" if role == "function" else ""
        raise RequestError(
            f"{path}.role must be one of {', '.join(_ROLES)}, not {str(role)[:80]!r}{instead}", param=f"{path}.role"
        )
    content = message.get("content")
    calls = _flatten_calls(message["tool_calls"], path) if role == "assistant" and message.get("tool_calls") else None
    if content is None and role == "assistant" and ("content" in message or calls):
        content = ""  # an answer without a text, sent back as it came
    flat: dict[str, Any] = {"role": _ROLES[role], "content": _flatten_content(content, path)}
    if calls:
        flat["tool_calls"] = calls
    for key, value in message.items():
        if key in ("role", "content") or (key == "tool_calls" and calls):
            continue
        if key in ("name", "tool_call_id") or (key in _REASONING and role == "assistant"):
            if value is not None and not isinstance(value, str):
                raise RequestError(f"{path}.{key} must be a string", param=f"{path}.{key}")
            if value is not None:
                flat[_REASONING[0] if key in _REASONING else key] = value
        # What a client gets in one answer it sends back in the next request, empty fields and all.
        elif value not in (None, [], {}):
            raise RequestError(f"{path}.{key[:80]} is not supported; remove it", param=f"{path}.{key[:80]}")
    if role == "tool" and not flat.get("tool_call_id"):
        raise RequestError(
            f"{path}.tool_call_id is required of a message of the role tool: the id of the call that it answers",
            param=f"{path}.tool_call_id",
        )
    return flat


def _flatten_calls(calls: Any, path: str) -> list[dict[str, Any]]:
    param = f"{path}.tool_calls"
    if not isinstance(calls, list):
        raise RequestError(f"{param} must be a list of calls", param=param)
    flat = [_flatten_call(call, f"{param}[{i}]") for i, call in enumerate(calls)]
    ids = [call["id"] for call in flat]
    for i, call_id in enumerate(ids):
        if call_id in ids[:i]:
            raise RequestError(
                f"{param}[{i}].id is {call_id[:80]!r}, as that of another call of this message",
                param=f"{param}[{i}].id",
            )
    return flat


def _flatten_call(call: Any, path: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or call.get("type", "function") != "function":
        raise RequestError(
            f"{path} must be a call, {{'id': …, 'type': 'function', 'function': {{'name': …, 'arguments': …}}}}",
            param=path,
        )
    for holder, key, name in ((call, "id", f"{path}.id"), (function, "name", f"{path}.function.name")):
        if not isinstance(holder.get(key), str) or not holder[key]:
            raise RequestError(f"{name} is required, a string that is not empty", param=name)
    for holder, known, place in (
        (call, ("id", "type", "function", "index"), path),
        (function, ("name", "arguments"), f"{path}.function"),
    ):
        for key, value in holder.items():
            if key not in known and value is not None:
                raise RequestError(f"{place}.{key[:80]} is not supported; remove it", param=f"{place}.{key[:80]}")
    arguments = _arguments(function.get("arguments"), f"{path}.function.arguments")
    return {"id": call["id"], "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _arguments(value: Any, param: str) -> CallArguments | str:
    """The arguments of a call, which clients send as the text of a JSON object: as an object. What a model wrote that
    is none stays as it is, so that a conversation about its mistake can go on."""
    if value in (None, ""):
        return CallArguments()
    if isinstance(value, dict):
        return CallArguments(value)
    if not isinstance(value, str):
        raise RequestError(f"{param} must be a JSON object as a string, not {str(value)[:80]!r}", param=param)
    try:
        found: Any = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return CallArguments(found) if isinstance(found, dict) else value


def _flatten_content(content: Any, path: str) -> str:
    if isinstance(content, str):
        return content
    param = f"{path}.content"
    if not isinstance(content, list) or not content:
        raise RequestError(f"{param} must be a string or a list of text parts", param=param)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise RequestError(
                f"{param}[{i}] must be a text part, {{'type': 'text', 'text': …}}; this model reads text only",
                param=f"{param}[{i}]",
            )
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{param}[{i}].text must be a string", param=f"{param}[{i}].text")
        texts.append(part["text"])
    return "\n".join(texts)
