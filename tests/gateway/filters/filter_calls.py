"""Calls as the gateway makes them, and what comes back through their output filters."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from sol.gateway.call import Call, Principal


def make_call(
    body: dict[str, Any], *, path: str = "/v1/chat/completions", tenant: str = "acme", class_name: str = "interactive"
) -> Call:
    return Call(
        id="r1",
        path=path,
        method="POST",
        headers={},
        body=msgspec.json.encode(body),
        json=body,
        model=body.get("model", "m"),
        stream=bool(body.get("stream")),
        arrived=time.monotonic(),
        principal=Principal(key_id="k", tenant=tenant),
        class_name=class_name,
    )


def chat(*contents: Any, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content} if isinstance(content, str) else content for content in contents]
    return {"model": "m", "messages": messages, **more}


def event(data: Any) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(data)


def chunk(delta: dict[str, Any], *, index: int = 0, finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": index, "delta": delta, "finish_reason": finish}
    head = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return event({**head, "choices": [choice], **more})


def events(data: bytes) -> list[Any]:
    """What a stream says; each event must be whole and of one line of JSON."""
    found = []
    for part in data.split(b"\n\n"):
        if part:
            assert part.startswith(b"data: ")
            assert b"\n" not in part
            found.append(part[6:].decode() if part == b"data: [DONE]" else msgspec.json.decode(part[6:]))
    return found


def joined(data: bytes, *path: str, index: int = 0) -> str:
    """The text of a choice, as a client puts it together."""
    text = []
    for item in events(data):
        for choice in item["choices"] if isinstance(item, dict) and "choices" in item else ():
            value: Any = choice if choice["index"] == index else {}
            for key in path or ("delta", "content"):
                value = value.get(key) or {}
            text.append(value or "")
    return "".join(text)
