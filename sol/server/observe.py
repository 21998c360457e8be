"""What is told of each request when it has been answered: a line of the log, a span.

A line has the request's id, what it came to and how long it took; of its text nothing, unless that is asked for.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sol.server.generation import CHOICES, Choice, Usage
from sol.server.middleware import REQUEST_ID, is_work

logger = logging.getLogger("sol.server.requests")

FIELDS = "fields"
"""The attribute of a log record that holds what `JsonFormatter` writes beside the message."""


@dataclass(slots=True)
class Answered:
    """A request for work, when all of its answer is out, or its client has left."""

    request_id: str
    method: str
    path: str
    status: int | None
    """None: its client left before there was an answer."""
    began: float
    """Monotonic second."""
    first_byte: float | None
    ended: float
    whole: bool
    """Its answer is out, to its last byte."""
    choices: Sequence[Choice]
    """None where it did not come so far."""
    headers: dict[str, str]


class Observer(Protocol):
    def answered(self, request: Answered) -> None: ...


class ObserveMiddleware:
    """Tells `observers` of every request for work."""

    def __init__(self, app: ASGIApp, observers: Sequence[Observer]) -> None:
        self._app = app
        self._observers = observers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not is_work(scope):
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        status: int | None = None
        first_byte: float | None = None
        whole = False

        async def watch(message: Message) -> None:
            nonlocal status, first_byte, whole
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                first_byte = first_byte or time.monotonic()
                whole = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            request = Answered(
                request_id=scope[REQUEST_ID],
                method=scope["method"],
                path=scope["path"],
                status=status,
                began=began,
                first_byte=first_byte,
                ended=time.monotonic(),
                whole=whole,
                choices=scope.get(CHOICES, []),
                headers={key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]},
            )
            for observer in self._observers:
                observer.answered(request)


class RequestLog:
    """A line a request. `max_log_len` characters of each prompt stand in it; 0: none."""

    def __init__(self, decode: Callable[[list[int]], str], max_log_len: int) -> None:
        self._decode = decode
        self._max_log_len = max_log_len

    def answered(self, request: Answered) -> None:
        fields: dict[str, Any] = {
            "request_id": request.request_id,
            "method": request.method,
            "path": request.path,
            "status": request.status,
            "seconds": round(request.ended - request.began, 6),
            "client_left": not request.whole,
        }
        if request.first_byte is not None:
            fields["first_byte_seconds"] = round(request.first_byte - request.began, 6)
        if request.choices:
            usage = Usage.of(request.choices)
            fields["prompt_tokens"], fields["completion_tokens"] = usage.prompt_tokens, usage.completion_tokens
            fields["cached_tokens"] = usage.cached_tokens
            if self._max_log_len:
                fields["prompts"] = self._prompts(request.choices)
        words = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in fields.items())
        logger.info(" ".join(words), extra={FIELDS: fields})

    def _prompts(self, choices: Sequence[Choice]) -> list[str]:
        prompts = {choice.prompt_index: choice.request.prompt_token_ids for choice in choices}
        # Every token but those of no text has a character: more of them than characters are not needed.
        return [self._decode(ids[: self._max_log_len])[: self._max_log_len] for ids in prompts.values()]


class JsonFormatter(logging.Formatter):
    """A line of JSON a record: `time` (UTC), `level`, `logger`, and its fields, or its `message` if it has none."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"time": moment, "level": record.levelname.lower(), "logger": record.name}
        fields = getattr(record, FIELDS, None)
        line |= {"message": record.getMessage()} if fields is None else fields
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)
