"""Server-sent events of an answer, as JSON and back."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

import msgspec


class PlainDelta(msgspec.Struct, forbid_unknown_fields=True):
    """One with any other field is none."""

    content: str


class PlainChoice(msgspec.Struct):
    """Its text is in one place: one that also has a `message` is none."""

    index: int = 0
    delta: PlainDelta | None = None
    text: str | None = None
    message: None = None
    finish_reason: str | None = None


class PlainChunk(msgspec.Struct):
    """What nearly all chunks are: one choice, and one text. Of anything else, decoding fails."""

    choices: Annotated[list[PlainChoice], msgspec.Meta(min_length=1, max_length=1)]


decode_plain: Final = msgspec.json.Decoder(PlainChunk).decode
decode: Final = msgspec.json.Decoder().decode
_encode: Final = msgspec.json.Encoder().encode
_LINE_END: Final = re.compile(rb"\r\n|\n|\r")


def with_choices(event: bytes, chunk: dict[str, Any], choices: list[Any]) -> bytes:
    """The event with other choices; empty if it says nothing any more."""
    if not choices and not chunk.get("usage"):
        return b""
    return framed(event, to_json({**chunk, "choices": choices}))


def is_empty(choice: dict[str, Any]) -> bool:
    """Whether a chunk's choice says nothing, so that clients need not see it."""
    if choice.get("finish_reason") is not None:
        return False
    if choice.get("text") == "":
        return True
    delta = choice.get("delta")
    return isinstance(delta, dict) and not delta.get("content") and all(value in ("", None) for value in delta.values())


def data_of(event: bytes) -> bytes | None:
    """What the `data` lines of an event say, without its comments and names."""
    if event.startswith(b"data: ") and event.endswith(b"\n\n") and event.count(b"\n") == 2:
        return event[6:-2]
    lines = [line for line in _LINE_END.split(event) if line.startswith(b"data")]
    values = [line[5:].removeprefix(b" ") for line in lines if line[4:5] in (b":", b"")]
    return b"\n".join(values).strip() if values else None


def framed(event: bytes, data: bytes) -> bytes:
    """The event with other data; what else it says stays."""
    if event.startswith(b"data: ") and event.count(b"\n") == 2:
        return b"data: %b\n\n" % data
    others = [line for line in _LINE_END.split(event) if line and not line.startswith(b"data")]
    return b"".join(line + b"\n" for line in others) + b"data: %b\n\n" % data


def to_json(value: Any) -> bytes:
    """JSON without the characters that some clients take for the end of a line."""
    data = _encode(value)
    if b"\xe2\x80" in data or b"\xc2\x85" in data:
        data = data.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
        data = data.replace(b"\xc2\x85", b"\\u0085")
    return data
