"""Server-sent events as bytes: where they end, how many there are, and the few that say something to the gateway.

Chunks are not decoded. What must be known of each is found by searching it for a few bytes; only the last events, which
hold the usage, and events of errors are parsed as JSON.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from sol.gateway.call import Usage

_DONE: Final = re.compile(rb"(?:^|\n)data: ?\[DONE\]")
"""At the beginning of a line: within an answer's text, line breaks are escaped."""
_RUNNING: Final = re.compile(rb', ?"usage": ?\{[^{}]*\}\}(?=\r?\n\r?\n)')
"""The usage at the end of a chunk."""
_COMMA: Final = ord(",")
_NO_CHOICES: Final = (b'"choices":[]', b'"choices": []')
_ERROR: Final = (b'data: {"error"', b'data:{"error"', b'data: {"object":"error"', b'data: {"object": "error"')
_MOST_TOKENS: Final = 10**12
"""Of one request. More is nonsense, which a ledger must not be charged with."""
MAX_EVENT_BYTES: Final = 16 * 2**20
"""One event larger than that is no chunk of an answer."""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    speculation: dict[str, Any] | None = None


class _Inner(msgspec.Struct):
    usage: _Usage | None = None


class _Body(msgspec.Struct):
    usage: _Usage | None = None
    response: _Inner | None = None
    """Where the Responses API's last event has it."""


_decode = msgspec.json.Decoder(_Body).decode


def usage_in(data: bytes) -> Usage | None:
    """The usage in a JSON body or a chunk; None where it has none, or none that makes sense."""
    try:
        body = _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    usage = body.usage or (body.response.usage if body.response is not None else None)
    if usage is None:
        return None
    prompt = usage.prompt_tokens if usage.prompt_tokens is not None else usage.input_tokens
    completion = usage.completion_tokens if usage.completion_tokens is not None else usage.output_tokens
    details = usage.prompt_tokens_details or usage.input_tokens_details
    cached = details.cached_tokens if details is not None else None
    if prompt is None and completion is None:
        return None
    if not (0 <= (prompt or 0) <= _MOST_TOKENS and 0 <= (completion or 0) <= _MOST_TOKENS):
        return None
    return Usage(
        prompt_tokens=prompt or 0,
        completion_tokens=completion or 0,
        cached_tokens=max(0, cached or 0),
        speculation=usage.speculation,
    )


class EventScanner:
    """What `feed` gets are an answer's bytes as they come; what it returns are whole events, to be passed on.

    `hide_usage`: leave out the chunk without choices that has the usage, for a client that did not ask for it.
    `hide_running`: leave out of the other chunks how far their choice is, likewise.
    """

    def __init__(self, *, hide_usage: bool, hide_running: bool = False) -> None:
        self._hide_usage = hide_usage
        self._hide_running = hide_running
        self._nothing = b"}" if hide_usage else b',"usage":null}'
        self._rest = b""
        self._last = b""
        """The newest events: the usage may be in these."""
        self.num_events = 0
        self.done = False
        """`[DONE]` has come."""
        self.failed = False
        """The engine said itself that it failed."""
        self.usage: Usage | None = None

    @property
    def pending(self) -> int:
        """Bytes of an event that is not whole."""
        return len(self._rest)

    def feed(self, data: bytes) -> bytes:
        """Raises ValueError for what cannot be a stream of events."""
        if self._rest:
            data = self._rest + data
        if data.endswith(b"\n\n"):  # nearly always
            self._rest = b""
        else:
            end = data.rfind(b"\n\n") + 2
            crlf = data.rfind(b"\r\n\r\n") + 4
            end = max(end if end > 1 else 0, crlf if crlf > 3 else 0)
            self._rest = data[end:]
            if len(self._rest) > MAX_EVENT_BYTES:
                raise ValueError(f"an event of more than {MAX_EVENT_BYTES} bytes")
            data = data[:end]
            if not data:
                return data
        number = data.count(b"\n\n") or data.count(b"\r\n\r\n")
        self.num_events += number
        # One search each for what is rarely there, before those that look closer.
        if b"[DONE]" in data and _DONE.search(data):
            self.done = True
        if b'"error"' in data and any(mark in data for mark in _ERROR):
            self.failed = True
        if b"[]" in data and any(mark in data for mark in _NO_CHOICES):
            return self._without_usage(data)
        if self.usage is None:
            # The end may come alone, after the chunk that has the usage.
            self._last = self._last + data if self.done else data
        if not self._hide_running:
            return data
        return self._without_running(data) if number == 1 else _RUNNING.sub(self._nothing, data)

    def _without_running(self, event: bytes) -> bytes:
        """Of one event, what `_RUNNING.sub` makes of it, without searching all of it."""
        at = event.rfind(b'"usage"')
        if at < 2:
            return event
        start = at - 1 if event[at - 1] == _COMMA else at - 2
        found = _RUNNING.match(event, start)
        return event if found is None else event[:start] + self._nothing + event[found.end() :]

    def without_done(self, data: bytes) -> bytes:
        return b"".join(event for event in _events(data) if not _DONE.match(event))

    def finish(self) -> bytes:
        """The stream is over: some servers leave out the last blank line. Returns what is left, if it is an event."""
        rest, self._rest = self._rest, b""
        whole = rest.strip()
        if _DONE.fullmatch(whole):
            self.done = True
            return whole + b"\n\n"
        return b""

    def find_usage(self) -> Usage | None:
        """The usage, wherever the engine put it: in a chunk of its own, or in the last one of a choice."""
        self.usage = self.usage_so_far()
        return self.usage

    def usage_so_far(self) -> Usage | None:
        """The same while more may come."""
        if self.usage is not None:
            return self.usage
        found = (usage_in(_payload(event)) for event in reversed(_events(self._last)))
        return next((usage for usage in found if usage is not None), None)

    def _without_usage(self, data: bytes) -> bytes:
        kept = []
        for event in _events(data):
            found = None
            if any(mark in event for mark in _NO_CHOICES):
                found = usage_in(_payload(event))
                if found is not None:
                    self.usage = found
            if found is None and self._hide_running:
                event = _RUNNING.sub(self._nothing, event)
            if found is None or not self._hide_usage:
                kept.append(event)
        return b"".join(kept)


def _events(data: bytes) -> list[bytes]:
    separator = b"\n\n" if b"\n\n" in data else b"\r\n\r\n"
    return [event + separator for event in data.split(separator) if event]


def _payload(event: bytes) -> bytes:
    """The `data:` of an event; other fields, like `event:`, stand on other lines."""
    lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines)
