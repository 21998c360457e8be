"""A line of JSON for each request, written by a thread: a reader of logs that stands still must not hold up streams."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
import select
import threading
import time
from collections import deque
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from sol.errors import ConfigError, SolError
from sol.gateway.call import Call, Outcome
from sol.gateway.errors import error_code
from sol.gateway.observe.config import LogOptions
from sol.gateway.observe.metrics import BEFORE, outcome_name

_WAITING_BYTES: Final = 16 * 2**20
"""Lines that may wait for their reader; what comes on top is lost, and counted."""
_MOST_TEXT: Final = 16_384
"""Characters of a prompt in a line."""
_MOST_NAME: Final = 200
_CLOSE_SECONDS: Final = 2.0
_LOOK_SECONDS: Final = 0.5
_encode: Final = msgspec.json.Encoder().encode


class LineWriter:
    """Whole lines to a file descriptor, in order. `put` waits for nothing and never raises."""

    def __init__(self, descriptor: int, *, owned: bool = False) -> None:
        """`owned`: `close` closes it."""
        self._descriptor = descriptor
        self._owned = owned
        self._waiting: deque[bytes] = deque()
        self._size = 0
        """Of what was put and not written; both threads change it, under the lock."""
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = False
        self._close_at = math.inf
        self._thread: threading.Thread | None = None
        self.lost = 0

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="log of requests", daemon=True)
        self._thread.start()

    def put(self, line: bytes) -> None:
        with self._lock:
            if self._size + len(line) > _WAITING_BYTES:
                self.lost += 1
                return
            self._size += len(line)
        self._waiting.append(line)
        if not self._wake.is_set():
            self._wake.set()

    def close(self) -> None:
        """What waits is written first, if that takes no longer than two seconds."""
        self._close_at = time.monotonic() + _CLOSE_SECONDS
        self._closing = True
        self._wake.set()
        thread = self._thread
        if thread is not None:
            thread.join(_CLOSE_SECONDS)
        if self._owned and (thread is None or not thread.is_alive()):
            os.close(self._descriptor)

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            lines = []
            with contextlib.suppress(IndexError):
                while True:
                    lines.append(self._waiting.popleft())
            if lines:
                data = b"".join(lines)
                written = self._write(data)
                with self._lock:
                    self._size -= len(data)
                    self.lost += 0 if written else len(lines)
            if self._closing and not self._waiting:
                return

    def _write(self, data: bytes) -> bool:
        view = memoryview(data)
        try:
            while view:
                try:
                    view = view[os.write(self._descriptor, view) :]
                except BlockingIOError:  # a pipe that somebody else has set so: half a line would spoil the next
                    select.select([], [self._descriptor], [], _LOOK_SECONDS)
                    if self._closing and time.monotonic() > self._close_at:
                        return False
        except OSError:
            return False  # the disk is full, or nobody reads; later lines may fare better
        return True


class RequestLog:
    """Raises `ConfigError` for a file that cannot be appended to."""

    def __init__(self, options: LogOptions) -> None:
        self._sample = options.sample
        self._prompts = options.prompts
        self._random = random.Random()  # noqa: S311
        if options.file is None:
            self.writer = LineWriter(2)
        else:
            self.writer = LineWriter(_open(options.file), owned=True)

    def ended(self, call: Call, outcome: Outcome, name: str, trace_id: str | None) -> None:
        """`name`: the outcome's."""
        if name == "ok" and self._sample < 1 and self._random.random() >= self._sample:
            return
        principal, usage, trail = call.principal, outcome.usage, call.trail
        line: dict[str, Any] = {
            "time": _now(),
            "level": "INFO",
            "message": "request",
            "request_id": call.id,
            "trace_id": trace_id,
            "path": call.path,
            "tenant": principal.tenant if principal is not None else None,
            "key_id": principal.key_id if principal is not None else None,
            "model": call.model[:_MOST_NAME],
            "class": call.class_name,
            "stream": call.stream,
            "outcome": name,
            "status": outcome.status,
            "engine": call.backend,
            "attempts": call.attempt,
            "seconds": round(outcome.ended_at - call.arrived, 6),
            "first_byte_seconds": (
                round(outcome.first_byte_at - call.arrived, 6) if outcome.first_byte_at is not None else None
            ),
        }
        if usage is not None:
            line["prompt_tokens"] = usage.prompt_tokens
            line["cached_tokens"] = usage.cached_tokens
            line["completion_tokens"] = usage.completion_tokens
            line["estimated"] = usage.estimated
        if outcome.error is not None:
            line["error"] = error_code(outcome.error)
            if self._prompts or not 400 <= outcome.status < 500:
                line["error_message"] = _message(outcome.error)  # of a client's mistake, it may quote the client
            line["stage"] = trail[-1][0] if trail else None
        line["stages"] = {
            began[0]: round(next_at - began[1], 6)
            for began, next_at in zip(trail, [*(at for _, at in trail[1:]), outcome.ended_at], strict=True)
        }
        if call.decisions:
            line["decisions"] = [
                {"stage": each.stage, "rule": each.rule, "action": each.action, "detail": each.detail}
                for each in call.decisions
            ]
        if self._prompts:
            line["prompt"] = _prompt(call)
        self.writer.put(_line(line))

    def refused(self, request_id: str, path: str, status: int, error: Exception) -> None:
        """A request that never was a call."""
        line: dict[str, Any] = {
            "time": _now(),
            "level": "INFO",
            "message": "request",
            "request_id": request_id,
            "path": path,
            "outcome": outcome_name(Outcome(status=status, error=error)),
            "status": status,
            "error": error_code(error),
            "stage": BEFORE,
        }
        if self._prompts or status >= 500:
            line["error_message"] = _message(error)
        self.writer.put(_line(line))


class JsonFormatter(logging.Formatter):
    """Messages of the program as lines of JSON, beside those of requests."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        request_id = getattr(record, "request_id", None)
        if request_id is not None:
            line["request_id"] = request_id
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _line(line).decode().rstrip("\n")


def _line(fields: dict[str, Any]) -> bytes:
    try:
        return _encode(fields) + b"\n"
    except UnicodeEncodeError:  # half a surrogate pair, as in the name of a file that is not UTF-8
        return _encode(_encodable(fields)) + b"\n"


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {name: _encodable(item) for name, item in value.items()}
    return [_encodable(item) for item in value] if isinstance(value, list) else value


def _message(error: Exception) -> str:
    return error.message if isinstance(error, SolError) else f"{type(error).__name__}"


def _prompt(call: Call) -> str:
    parts, size = [], 0
    for text in call.text():
        parts.append(text[: _MOST_TEXT - size])
        size += len(parts[-1])
        if size >= _MOST_TEXT:
            break
    return "\n".join(parts)


def _now() -> str:
    return datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="milliseconds")


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
    except OSError as error:
        raise ConfigError(
            f"observe.log.file {path} cannot be appended to ({error.strerror}); choose a file in a directory that may "
            "be written",
            param="observe.log.file",
        ) from None
