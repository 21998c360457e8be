"""The items of `/v1/responses`: those that come in as chat messages, and those of an answer, whole or as events."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from typing import Any

from sol.errors import RequestError
from sol.server.parsing import shorten
from sol.text.answer_parts import Answer, Arguments, CallBegin, Content, Part, Reasoning

_TEXT_PARTS = ("input_text", "output_text", "text")
_KEYS = {
    "message": frozenset({"type", "role", "content", "id", "status"}),
    "function_call": frozenset({"type", "call_id", "name", "arguments", "id", "status"}),
    "function_call_output": frozenset({"type", "call_id", "output", "id", "status"}),
    "reasoning": frozenset({"type", "content", "summary", "id", "status"}),
}
_FORMS = (
    "a message, {'role': …, 'content': …}, a function_call, a function_call_output or a reasoning item of an answer"
)
Event = tuple[str, dict[str, Any]]
"""A kind and its fields."""


def messages_of(items: list[Any]) -> list[dict[str, Any]]:
    """Chat messages. Reasoning, text and calls that follow one another are one message of the assistant's.

    Raises `RequestError` for items that are something else.
    """
    messages: list[dict[str, Any]] = []
    open_keys: set[str] = set()
    """What the last message, an assistant's, may still get."""
    for i, item in enumerate(items):
        message = _message(item, f"input[{i}]")
        key = next((key for key in ("reasoning_content", "tool_calls") if key in message), "content")
        if message["role"] == "assistant" and key in open_keys:
            if key == "tool_calls":
                messages[-1].setdefault(key, []).extend(message[key])
            else:
                messages[-1][key] = message[key]
        else:
            messages.append(message)
        following = {"reasoning_content": {"content", "tool_calls"}, "content": {"tool_calls"}}
        open_keys = following.get(key, {"tool_calls"}) if message["role"] == "assistant" else set()
    return messages


def _message(item: Any, path: str) -> dict[str, Any]:
    kind = item.get("type") or "message" if isinstance(item, dict) else None
    if not isinstance(kind, str) or kind not in _KEYS:
        raise RequestError(f"{path} must be {_FORMS}, not {shorten(kind or item)}", param=path)
    for key, value in item.items():
        if key not in _KEYS[kind] and value not in (None, [], {}):
            raise RequestError(f"{path}.{key[:80]} is not supported; remove it", param=f"{path}.{key[:80]}")
    match kind:
        case "function_call":
            function = {"name": _string(item, "name", path), "arguments": item.get("arguments")}
            if not isinstance(function["arguments"], str):
                raise RequestError(f"{path}.arguments must be a string", param=f"{path}.arguments")
            call = {"id": _string(item, "call_id", path), "type": "function", "function": function}
            return {"role": "assistant", "content": None, "tool_calls": [call]}
        case "function_call_output":
            content = _content(item.get("output"), f"{path}.output")
            return {"role": "tool", "tool_call_id": _string(item, "call_id", path), "content": content}
        case "reasoning":
            return {"role": "assistant", "content": None, "reasoning_content": _reasoning(item, path)}
    return {"role": item.get("role"), "content": _content(item.get("content"), f"{path}.content")}


def _string(item: dict[str, Any], key: str, path: str) -> str:
    value = item.get(key)
    if not isinstance(value, str) or not value:
        raise RequestError(f"{path}.{key} is required, a string that is not empty", param=f"{path}.{key}")
    return value


def _reasoning(item: dict[str, Any], path: str) -> str:
    texts = []
    for key, kind in (("content", "reasoning_text"), ("summary", "summary_text")):
        parts = item.get(key) or []
        for part in parts if isinstance(parts, list) else [parts]:
            if not isinstance(part, dict) or part.get("type") != kind or not isinstance(part.get("text"), str):
                raise RequestError(
                    f"{path}.{key} must be a list of parts {{'type': '{kind}', 'text': …}}", param=f"{path}.{key}"
                )
            texts.append(part["text"])
    return "\n".join(texts)


def _content(content: Any, path: str) -> Any:
    if isinstance(content, list):
        return [_part(part, f"{path}[{i}]") for i, part in enumerate(content)]
    return content


def _part(part: Any, path: str) -> dict[str, Any]:
    """As a text part of a chat; what a client got with a text (annotations, logprobs) it may send back."""
    if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS or not isinstance(part.get("text"), str):
        raise RequestError(
            f"{path} must be a part {{'type': 'input_text', 'text': …}}; this model reads text only", param=path
        )
    return {"type": "text", "text": part["text"]}


class OutputItems:
    """The items of an answer while its parts come, and the events that tell of them.

    A text, a reasoning and a call is an item each; an answer of nothing is an empty text.
    """

    def __init__(self, new_call_id: Callable[[], str]) -> None:
        self._new_call_id = new_call_id
        self.items: list[dict[str, Any]] = []
        """The last one gets its text when it ends."""
        self._texts: list[str] = []
        """Of the last one."""
        self._events: list[Event] = []

    def feed(self, part: Part, logprobs: list[dict[str, Any]] | None = None) -> None:
        """`logprobs` are those of a text's tokens."""
        match part:
            case Content(text):
                self._text_of("message", "output_text")["logprobs"] += logprobs or []
                self._texts.append(text)
                self._tell_delta("output_text", content_index=0, delta=text, logprobs=logprobs or [])
            case Reasoning(text):
                self._text_of("reasoning", "reasoning_text")
                self._texts.append(text)
                self._tell_delta("reasoning_text", content_index=0, delta=text)
            case CallBegin(_, name):
                self._open(
                    {
                        "id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "status": "in_progress",
                        "call_id": self._new_call_id(), "name": name, "arguments": "",
                    }
                )  # fmt: skip
            case Arguments(_, text):
                self._texts.append(text)
                self._tell_delta("function_call_arguments", delta=text)

    def finish(self, status: str) -> None:
        """The answer is whole; `status` is that of its last item."""
        if not self.items:
            self._text_of("message", "output_text")
        self._close(status)

    def take_events(self) -> list[Event]:
        """Those that were not taken yet."""
        events, self._events = self._events, []
        return events

    @property
    def in_text(self) -> bool:
        """The last item is a text."""
        return not self.items or self.items[-1]["type"] == "message"

    def _text_of(self, kind: str, part_kind: str) -> dict[str, Any]:
        """The part that a text goes to, in the item that is open or in a new one."""
        if not self.items or self.items[-1]["type"] != kind:
            prefix = {"message": "msg", "reasoning": "rs"}[kind]
            item: dict[str, Any] = {"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress"}
            extra: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
            self._open({**item, **extra, "content": []})
            part: dict[str, Any] = {"type": part_kind, "text": ""}
            if kind == "message":
                part |= {"annotations": [], "logprobs": []}
            self._tell("response.content_part.added", content_index=0, part=_copy(part))
            self.items[-1]["content"].append(part)
        content: dict[str, Any] = self.items[-1]["content"][0]
        return content

    def _open(self, item: dict[str, Any]) -> None:
        if self.items:
            self._close("completed")
        self.items.append(item)
        self._events.append(("response.output_item.added", {"output_index": len(self.items) - 1, "item": _copy(item)}))

    def _close(self, status: str) -> None:
        item = self.items[-1]
        item["status"] = status
        text, self._texts = "".join(self._texts), []
        if item["type"] == "function_call":
            item["arguments"] = text
            self._tell("response.function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        else:
            part = item["content"][0]
            part["text"] = text
            fields = {"text": text} | ({"logprobs": part["logprobs"]} if "logprobs" in part else {})
            self._tell(f"response.{part['type']}.done", content_index=0, **fields)
            self._tell("response.content_part.done", content_index=0, part=part)
        self._events.append(("response.output_item.done", {"output_index": len(self.items) - 1, "item": item}))

    def _tell_delta(self, what: str, **fields: Any) -> None:
        self._tell(f"response.{what}.delta", **fields)

    def _tell(self, kind: str, **fields: Any) -> None:
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        self._events.append((kind, {**place, **fields}))


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    """As it is at its beginning."""
    return {key: list(value) if isinstance(value, list) else value for key, value in item.items()}


def answer_message(items: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """An answer's items as the one chat message that a conversation goes on from."""
    answer = Answer()
    calls = []
    for item in items:
        match item["type"]:
            case "message":
                answer.content += item["content"][0]["text"]
            case "reasoning":
                answer.reasoning += item["content"][0]["text"]
            case "function_call":
                function = {"name": item["name"], "arguments": item["arguments"]}
                calls.append({"id": item["call_id"], "type": "function", "function": function})
    message: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if calls:
        message["tool_calls"] = calls
    return message
