"""One response while the engine makes it: writes what steps give, and suffers the faults that were drawn for it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from sol.errors import SolError
from sol.server.errors import error_body
from sol.server.metrics import Timeline
from sol.simulate import responses
from sol.simulate.faults import Fault
from sol.simulate.http import Exchange
from sol.simulate.responses import DONE, Choice, Schema

_STREAM_HEADERS: Final = (
    ("content-type", "text/event-stream; charset=utf-8"),
    ("cache-control", "no-cache"),
    ("x-accel-buffering", "no"),
)
_TYPES: Final = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error",
    503: "service_unavailable_error",
}  # fmt: skip
_MALFORMED: Final = b'data: {"id":"malformed","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"cont\n\n'


class Generation:
    """`on_end(generation, reason)` is called once: "finished", or why its requests have to be aborted."""

    def __init__(
        self,
        exchange: Exchange,
        choices: Sequence[Choice],
        schema: Schema,
        *,
        stream: bool,
        include_usage: bool,
        speculates: bool,
        faults: Sequence[Fault],
        on_end: Callable[[Generation, str], None],
    ) -> None:
        self.exchange = exchange
        self.choices = choices
        self.faults = faults
        self.timelines = [Timeline(choice.request.arrival_time) for choice in choices]
        self._schema = schema
        self._stream = stream
        self._include_usage = include_usage
        self._speculates = speculates
        self._in_stream = sorted(
            (f for f in faults if f.in_stream and f.after_bytes is None), key=lambda fault: fault.after_events
        )
        cutting = [fault for fault in faults if fault.after_bytes is not None]
        self._cutter = min(cutting, key=lambda fault: fault.after_bytes or 0, default=None)
        self._on_end = on_end
        self._num_open = len(choices)
        self._num_events = self._num_bytes = 0
        self._ended = False
        exchange.on_leave = self._client_left

    def take(self, items: Iterable[tuple[Choice, int, int]]) -> None:
        """What one step gave: (choice, tokens, of them drafted)."""
        if self._ended:
            return
        events: list[bytes] = []
        if self._stream and not self.exchange.started:
            if self._strike():
                return
            self.exchange.start_stream(_STREAM_HEADERS)
            events = self._schema.opening(self.choices)
        for choice, num_tokens, num_accepted in items:
            if self._stream:
                events += self._schema.chunks(choice, num_tokens, num_accepted)
            else:
                choice.num_sent += num_tokens
            if choice.num_sent == len(choice.answer.token_ids):
                self._num_open -= 1
        if not self._stream:
            if self._num_open == 0:
                self._respond()
            return
        if self._num_open == 0:
            if self._include_usage:
                events.append(self._schema.usage_chunk(self.usage()))
            events.append(DONE)
        if self._write(events) and self._num_open == 0:
            self.exchange.finish()
            self._end("finished")

    def fail(self, error: SolError) -> None:
        """The engine cannot go on with it."""
        if self._ended:
            return
        if self.exchange.started:
            self.exchange.write(error_event(error))
            self.exchange.finish()
        else:
            respond_error(self.exchange, error)
        self._end("error")

    def reset(self) -> None:
        """The process is gone."""
        self._ended = True
        self.exchange.reset()

    def _write(self, events: Sequence[bytes]) -> bool:
        """False if a fault ended the response."""
        if not self._in_stream and self._cutter is None:
            if events:
                self.exchange.write(b"".join(events))
            return True
        for event in events:
            if self._strike():
                return False
            if self._cutter is not None and self._num_bytes + len(event) > (self._cutter.after_bytes or 0):
                if rest := event[: (self._cutter.after_bytes or 0) - self._num_bytes]:
                    self.exchange.write(rest)
                self._break(self._cutter)
                return False
            self.exchange.write(event)
            self._num_events += 1
            self._num_bytes += len(event)
        return True

    def _strike(self) -> bool:
        """Faults whose place in the stream has come; True if one of them ended the response."""
        while self._in_stream and self._in_stream[0].after_events <= self._num_events:
            fault = self._in_stream[0]
            exchange = self.exchange
            if fault.kind == "reset":
                self._break(fault)
                return True
            if not exchange.started and fault.kind != "pause":
                exchange.start_stream(_STREAM_HEADERS)
            del self._in_stream[0]
            if fault.kind == "pause":
                exchange.hold(fault.seconds or 0.0)
            elif fault.kind == "malformed":
                exchange.write(_MALFORMED)
            elif fault.kind == "error_event":
                exchange.write(error_event(SolError(fault.message or "simulated failure in mid-stream")))
                exchange.finish()
                self._end("fault")
                return True
            else:
                self._break(fault)
                return True
        return False

    def _break(self, fault: Fault) -> None:
        """`reset` or `truncate`, here and now."""
        if fault.kind == "reset":
            self.exchange.reset()
        elif fault.clean:
            self.exchange.finish()
        else:
            self.exchange.cut()
        self._end("fault")

    def _respond(self) -> None:
        """What is not streamed, with the same faults as they look there."""
        exchange = self.exchange
        body = self._schema.whole(self.choices, self.usage())
        size = len(body) // 2
        if self._cutter is not None:
            size = min(size, self._cutter.after_bytes or 0)
        for fault in [*self._in_stream, *([] if self._cutter is None else [self._cutter])]:
            if fault.kind == "reset":
                exchange.reset()
            elif fault.kind == "pause":
                exchange.hold(fault.seconds or 0.0)
                continue
            elif fault.kind == "error_event":
                respond_error(exchange, SolError(fault.message or "simulated failure"))
            elif fault.kind == "malformed" or fault.clean:
                exchange.respond(200, body[:size], "application/json")
            else:
                exchange.respond_partly(body, size, "application/json")
            self._end("fault")
            return
        exchange.respond(200, body, "application/json")
        self._end("finished")

    def usage(self) -> dict[str, Any] | None:
        """What the engine says of it so far."""
        usage = responses.usage(self.choices, speculates=self._speculates)
        for fault in self.faults:
            if fault.kind == "wrong_usage":
                if fault.factor == 0:
                    return None
                usage["completion_tokens"] = round(usage["completion_tokens"] * fault.factor)
                usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
        return usage

    def _client_left(self) -> None:
        if not self._ended:
            self._end("abort")

    def _end(self, reason: str) -> None:
        self._ended = True
        self._on_end(self, reason)


def error_event(error: SolError) -> bytes:
    """A whole server-sent event."""
    return f"data: {json.dumps(error_body(error))}\n\n".encode()


def respond_error(exchange: Exchange, error: SolError) -> None:
    headers = [] if error.retry_after is None else [("retry-after", str(error.retry_after))]
    exchange.respond(error.status, json.dumps(error_body(error)).encode(), "application/json", headers)


def respond_fault(exchange: Exchange, fault: Fault) -> None:
    """The error response of a fault of kind `error`."""
    headers = []
    if fault.retry_after is not None:
        headers.append(("retry-after", str(math.ceil(fault.retry_after))))
        if fault.retry_after % 1:
            headers.append(("retry-after-ms", str(round(fault.retry_after * 1000))))
    default = "invalid_request_error" if fault.status < 500 else "internal_server_error"
    message = fault.message or f"simulated failure with status {fault.status}"
    error = {"message": message, "type": _TYPES.get(fault.status, default), "param": None, "code": "simulated"}
    exchange.respond(fault.status, json.dumps({"error": error}).encode(), "application/json", headers)
