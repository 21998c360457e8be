"""Where a request and an answer hold text, whose it is, and how it is put back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

Container = dict[str, Any] | list[Any]

_ROLES: Final = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


_ELSEWHERE: Final = (
    ("tools", "system"),
    ("functions", "system"),
    ("response_format", "system"),
    ("documents", "tool"),
    ("chat_template", "user"),
    ("chat_template_kwargs", "user"),
)
"""Fields whose strings, however deep, are in the prompt, and whose word that is."""


_TOP: Final = (
    ("system", "system"),
    ("instructions", "system"),
    ("prompt", "user"),
    ("suffix", "user"),
    ("input", "user"),
    ("messages", "user"),
)
"""Fields that hold texts, by themselves, in lists or in messages, and whose they are where they do not say so."""


class Field(NamedTuple):
    """`container[key]` is `text`."""

    where: str
    role: str
    text: str
    container: Container
    key: str | int


def request_fields(body: dict[str, Any]) -> Iterator[Field]:
    """All texts of a chat, completion, embedding or Responses request. A role that nobody knows is the user's."""
    for name, role in _TOP:
        if name in body:
            yield from _texts(body, name, role, name)
    # Descriptions of tools, schemas, documents and templates reach the model's prompt as well.
    for name, role in _ELSEWHERE:
        if name in body:
            yield from _all_strings(body, name, role)


_UNREADABLE: Final = ("prompt_token_ids", "prompt_embeds")
"""Fields of engines' own in which a prompt comes as something else than text."""


def unreadable_prompt(body: dict[str, Any]) -> str | None:
    """The field in which a prompt, or a part of it, comes as token ids or embeddings; None where all is text."""
    for name in ("prompt", "input"):
        value = body.get(name)
        if isinstance(value, list) and any(_has_token_ids(item) for item in value):
            return name
    return next((name for name in _UNREADABLE if body.get(name)), None)


def _has_token_ids(item: Any) -> bool:
    return isinstance(item, int) or (isinstance(item, list) and any(isinstance(part, int) for part in item))


_TEXT_KEYS: Final = ("text", "content", "refusal", "reasoning_content", "reasoning", "arguments", "output")


def _texts(container: Container, key: str | int, role: str, where: str, depth: int = 0) -> Iterator[Field]:
    """Of a string, a list, a message or a part of one. Deeper than any API nests there is nothing that engines read."""
    value = container[key] if isinstance(container, list) else container.get(key)  # type: ignore[index, arg-type]
    if isinstance(value, str):
        if value:
            yield Field(where, role, value, container, key)
    elif depth > 8:
        return
    elif isinstance(value, list):
        for index, item in enumerate(value):
            if isinstance(item, (str, dict, list)):
                yield from _texts(value, index, role, f"{where}[{index}]", depth + 1)
    elif isinstance(value, dict):
        role = _role(value, role)
        content = value.get("content")
        if len(value) == 2 and "role" in value and isinstance(content, str):  # nearly all messages
            if content:
                yield Field(f"{where}.content", role, content, value, "content")
            return
        for name in _TEXT_KEYS:
            if name in value:
                yield from _texts(value, name, role, f"{where}.{name}", depth + 1)
        calls = value.get("tool_calls")
        if isinstance(calls, list):
            for index, call in enumerate(calls):
                if isinstance(call, dict) and isinstance(call.get("function"), dict):
                    place = f"{where}.tool_calls[{index}].function.arguments"
                    yield from _texts(call["function"], "arguments", role, place, depth + 1)
        if isinstance(value.get("function_call"), dict):
            place = f"{where}.function_call.arguments"
            yield from _texts(value["function_call"], "arguments", role, place, depth + 1)


def _role(item: dict[str, Any], role: str) -> str:
    if "role" in item:
        named = item["role"]
        return _ROLES.get(named, "user") if isinstance(named, str) else "user"
    # Items of the Responses API that are no messages.
    return {"function_call_output": "tool", "function_call": "assistant"}.get(str(item.get("type")), role)


def _all_strings(body: dict[str, Any], name: str, role: str) -> Iterator[Field]:
    waiting: list[tuple[str, Container, str | int]] = [(name, body, name)] if name in body else []
    while waiting:
        where, container, key = waiting.pop()
        value = container[key]  # type: ignore[index]
        if isinstance(value, str):
            if value:
                yield Field(where, role, value, container, key)
        elif isinstance(value, dict):
            waiting += [(f"{where}.{inner}", value, inner) for inner in reversed(value)]
        elif isinstance(value, list):
            waiting += [(f"{where}[{index}]", value, index) for index in reversed(range(len(value)))]


class Channel(NamedTuple):
    """One text of a choice. In a stream it comes in pieces, each in a field of the same name."""

    name: str
    """content, reasoning_content, text, refusal, arguments …"""
    tool: int = -1
    """The tool call that arguments belong to; -1: none."""


CHOICE_TEXTS: Final = ("reasoning_content", "reasoning", "content", "refusal")


CONTENT: Final = Channel("content")
TEXT: Final = Channel("text")


def choice_fields(choice: dict[str, Any]) -> list[tuple[Channel, dict[str, Any], str]]:
    """The texts of a choice, of a whole answer or of a chunk: each `container[key]` is a string, perhaps empty."""
    holder = choice.get("delta")
    if not isinstance(holder, dict):
        holder = choice.get("message")
    if not isinstance(holder, dict):
        return [(TEXT, choice, "text")] if isinstance(choice.get("text"), str) else []
    content = holder.get("content")
    if len(holder) == 1 and isinstance(content, str) and "text" not in choice:  # nearly all chunks
        return [(CONTENT, holder, "content")]
    found = [(Channel(name), holder, name) for name in CHOICE_TEXTS if isinstance(holder.get(name), str)]
    if isinstance(choice.get("text"), str):
        found.append((TEXT, choice, "text"))
    calls = holder.get("tool_calls")
    if isinstance(calls, list):
        for place, call in enumerate(calls):
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and isinstance(function.get("arguments"), str):
                index = call.get("index")
                number = index if isinstance(index, int) else place
                found.append((Channel("arguments", number), function, "arguments"))
    function = holder.get("function_call")
    if isinstance(function, dict) and isinstance(function.get("arguments"), str):
        found.append((Channel("function_call"), function, "arguments"))
    return found
