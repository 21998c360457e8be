"""Chat messages as clients send them (OpenAI's schema) and as chat templates want them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from sol.errors import RequestError

_ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def flatten_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as chat templates want them: `content` a string, OpenAI's `developer` as `system`.

    Text parts are joined by a newline, as vLLM joins them. Raises `RequestError` naming what is wrong.
    """
    if not messages:
        raise RequestError("messages must not be empty", param="messages")
    return [_flatten_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _flatten_message(message: Mapping[str, Any], path: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise RequestError(
            f"{path}.role must be one of {', '.join(_ROLES)}, not {str(role)[:80]!r}", param=f"{path}.role"
        )
    content = message.get("content")
    if content is None and role == "assistant" and "content" in message:
        content = ""  # an answer without a text, sent back as it came
    flat: dict[str, Any] = {"role": _ROLES[role], "content": _flatten_content(content, path)}
    for key, value in message.items():
        if key in ("role", "content"):
            continue
        if key in ("name", "tool_call_id"):
            if value is not None and not isinstance(value, str):
                raise RequestError(f"{path}.{key} must be a string", param=f"{path}.{key}")
            if value is not None:
                flat[key] = value
        # What a client gets in one answer it sends back in the next request, empty fields and all.
        elif value not in (None, [], {}):
            raise RequestError(f"{path}.{key[:80]} is not supported; remove it", param=f"{path}.{key[:80]}")
    return flat


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
