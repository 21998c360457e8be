"""What an engine is sent: the client's bytes, with the least that has to be different."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from sol.gateway.call import Call
from sol.gateway.parsing import COMPLETIONS
from sol.gateway.upstream.head import header_lines

if TYPE_CHECKING:
    from sol.gateway.routing.engine import Engine
    from sol.gateway.upstream.pool import Origin

_WITH_USAGE: Final = b'{"stream_options":{"include_usage":true},'
_WITH_RUNNING_USAGE: Final = b'{"stream_options":{"include_usage":true,"continuous_usage_stats":true},'
_COUNT_IN_CHUNKS: Final = frozenset({"sol", "vllm"})
"""Drivers of engines that say in each chunk how far its choice is, if they are asked to: so it is known to the token
what a client got that left."""
_PASSED_ON: Final = ("traceparent", "tracestate")
"""Of the client's headers. The rest is between it and the gateway; its key above all."""


def hides_usage(call: Call) -> bool:
    """Whether the stream's usage is asked for by the gateway alone, which needs it to account for the call."""
    if not call.stream or call.path not in COMPLETIONS:
        return False
    options = call.json.get("stream_options")
    return not (isinstance(options, dict) and options.get("include_usage"))


def asks_for_running_usage(call: Call, engine: Engine) -> bool:
    """Whether the gateway alone asks for the usage in each chunk. With several choices it could not be summed up."""
    if engine.driver.name not in _COUNT_IN_CHUNKS or not call.stream or call.path not in COMPLETIONS:
        return False
    data = call.json
    options, prompt = data.get("stream_options"), data.get("prompt")
    if isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int):
        return False
    return data.get("n") in (None, 1) and not (isinstance(options, dict) and "continuous_usage_stats" in options)


def body_for(call: Call, engine: Engine, model: str) -> bytes:
    """`model`: what the engine calls it."""
    data = call.json
    changed: dict[str, Any] = {}
    if data.get("model") != model:
        changed["model"] = model
    if call.drafter is not None and engine.driver.name == "sol" and not call.no_drafts:
        given = data.get("speculation")
        changed["speculation"] = {**(given if isinstance(given, dict) else {}), "drafter": call.drafter}
    if call.no_drafts and engine.driver.name == "sol":
        given = data.get("speculation")
        changed["speculation"] = {**(given if isinstance(given, dict) else {}), "enabled": False}
        changed["speculation"].pop("drafter", None)
    running = asks_for_running_usage(call, engine)
    if running or hides_usage(call):
        options = data.get("stream_options")
        if options is None and "stream_options" not in data and not changed:
            # Without decoding what was decoded: a body may be hundreds of kilobytes.
            return (_WITH_RUNNING_USAGE if running else _WITH_USAGE) + call.body[call.body.index(b"{") + 1 :]
        if options is None or isinstance(options, dict):  # anything else is for the engine to refuse
            changed["stream_options"] = {**(options or {}), "include_usage": True}
            if running:
                changed["stream_options"]["continuous_usage_stats"] = True
    return msgspec.json.encode({**data, **changed}) if changed else call.body


class Door:
    """Where an engine's requests go, and how they begin."""

    def __init__(self, engine: Engine, origin: Origin) -> None:
        self.origin = origin
        self._lines = header_lines({"content-type": "application/json", **engine.headers})
        self._openings: dict[str, bytes] = {}

    def opening(self, path: str) -> bytes:
        """Of a request to one of the API's paths, of which there are few."""
        found = self._openings.get(path)
        if found is None:
            found = self._openings[path] = self.origin.opening("POST", path, self._lines)
        return found

    def asking(self, target: str) -> bytes:
        """Of a GET."""
        return self.origin.opening("GET", target, self._lines)


def lines_for(call: Call, usage_key: str | None) -> bytes:
    """Those of one request. `usage_key`: by what the engine is asked for the usage of a call that was given up; None:
    it cannot be."""
    lines = b"x-request-id: %b\r\n" % call.id.encode()
    if usage_key is not None:
        lines += b"x-sol-usage-key: %b\r\n" % usage_key.encode()
    headers = call.headers
    for name in _PASSED_ON:
        if name in headers:
            lines += b"%b: %b\r\n" % (name.encode(), headers[name].encode("latin-1"))
    return lines
