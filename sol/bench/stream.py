"""A response as it comes: server-sent events or one JSON object, written down in a `RequestRecord`.

Errors are of these kinds: `http_<status>` (the endpoint refused), `stream_error` (an event said so), `disconnected`,
`connect`, `timeout`, `malformed` (no HTTP, no JSON, no completion), `truncated` (a stream without a finish reason or
`[DONE]`), `empty` (a success without output), `client` (the client could not send) and `cancelled`.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec

from sol.bench.records import RequestRecord

_MAX_ERROR_BODY: Final = 64 * 2**10
_MAX_MESSAGE: Final = 500


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Segment(msgspec.Struct):
    tokens: int = 0
    origin: str = ""


class _ChunkSpeculation(msgspec.Struct):
    segments: list[_Segment] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    message: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    speculation: _ChunkSpeculation | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None
    speculation: dict[str, Any] | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None
    message: Any = None
    """vLLM before 0.10 sends an error's fields without an `error` around them."""
    object: str | None = None


_DECODER: Final = msgspec.json.Decoder(_Chunk)


class ResponseSink:
    """Takes one response. `done` is set when nothing more will come; the record says what became of it.

    `origin` is the clock's time at which the stage began.
    """

    def __init__(
        self, record: RequestRecord, done: asyncio.Future[None], origin: float, *, stream: bool, keep_text: bool
    ) -> None:
        self._record = record
        self._done = done
        self._origin = origin
        self._stream = stream
        self._keep_text = keep_text
        record.streamed = stream
        self._buffer = b""
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._said_done = False
        self._usage_tokens = 0
        """Completion tokens of the last usage in a chunk, to tell what each added."""

    # sol.bench.http.Sink

    def on_head(self, status: int, headers: dict[str, str]) -> None:
        self._record.status = status
        if status != 200:
            self._stream = False
        elif self._stream and not headers.get("content-type", "").startswith("text/event-stream"):
            self._stream = self._record.streamed = False  # it is read whole

    def on_body(self, data: bytes, now: float) -> None:
        if not self._stream:
            if self._record.status == 200 or len(self._buffer) < _MAX_ERROR_BODY:
                self._buffer += data
            return
        if not self._buffer and data.startswith(b"data: ") and data.find(b"\n\n") == len(data) - 2:
            self._take_event(data[6:-2], now - self._origin)  # one whole event, as most reads bring
            return
        if self._buffer:
            data = self._buffer + data
        # An event ends with an empty line; what follows the last one waits for the rest.
        *lines, self._buffer = data.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._take_event(line[5:].strip(), now - self._origin)

    def on_end(self, now: float) -> None:
        record = self._record
        if self._stream:
            if self._buffer.startswith(b"data:"):  # the last line of a server that leaves out its end
                self._take_event(self._buffer[5:].strip(), now - self._origin)
            if record.error is None and not self._said_done and record.finish_reason is None:
                self._fail("truncated", "the stream ended without a finish reason and without [DONE]")
        elif record.status == 200:
            self._take_whole(now - self._origin)
        else:
            self._fail(f"http_{record.status}", _error_text(self._buffer))
        if record.error is None and not record.times and not record.completion_tokens:
            self._fail("empty", "the response holds no output")
        self._finish(now)

    def on_failure(self, kind: str, message: str, now: float) -> None:
        self._fail(kind, message)
        self._finish(now)

    def give_up(self, kind: str, message: str, now: float) -> None:
        """The client does not wait any longer."""
        if not self._done.done():
            self._fail(kind, message)
            self._finish(now)

    def _finish(self, now: float) -> None:
        if self._keep_text:
            self._record.text = "".join(self._texts)
            self._record.token_ids = self._token_ids or None
        if not self._done.done():
            self._record.end = now - self._origin
            self._done.set_result(None)

    def _fail(self, kind: str, message: str) -> None:
        if self._record.error is None:
            self._record.error, self._record.message = kind, message[:_MAX_MESSAGE]

    def _take_event(self, data: bytes, now: float) -> None:
        if self._record.error is not None or not data:
            return
        if data == b"[DONE]":
            self._said_done = True
            return
        try:
            chunk = _DECODER.decode(data)
        except msgspec.DecodeError as error:  # also what has not the form of a chunk
            self._fail("malformed", f"an event that is no chunk of a completion ({error}): {data[:200]!r}")
            return
        if chunk.error is not None or (chunk.object == "error" and chunk.choices is None):
            self._fail("stream_error", _message_of(chunk.error if chunk.error is not None else chunk.message))
            return
        record = self._record
        total = None if chunk.usage is None else self._take_usage(chunk.usage)
        characters = tokens = 0
        for choice in chunk.choices or ():
            text, delta = choice.text or "", choice.delta
            if choice.finish_reason is not None:
                record.finish_reason = choice.finish_reason
            if delta is not None:
                text = delta.content or ""
                if delta.reasoning_content or delta.reasoning or delta.tool_calls:
                    characters += _hidden(delta)
            if text:
                characters += len(text)
                if record.first_content is None:
                    record.first_content = now
                if self._keep_text:
                    self._texts.append(text)
            if self._keep_text and choice.token_ids:
                self._token_ids += choice.token_ids
            if choice.speculation is not None:
                for segment in choice.speculation.segments or ():
                    if segment.origin != "prompt":
                        tokens += segment.tokens
            elif choice.token_ids is not None:
                tokens += len(choice.token_ids)
        if total is not None and chunk.choices:  # a usage without choices is the final sum, and no arrival
            tokens, self._usage_tokens = total - self._usage_tokens, total
        if characters or tokens > 0:
            self._arrival(now, tokens, characters)

    def _arrival(self, now: float, tokens: int, characters: int) -> None:
        record = self._record
        record.num_chunks += 1
        if record.times and record.times[-1] == now:
            record.counts[-1] += tokens
            record.characters[-1] += characters
        else:
            record.times.append(now)
            record.counts.append(tokens)
            record.characters.append(characters)

    def _take_usage(self, usage: _Usage) -> int | None:
        record = self._record
        record.prompt_tokens = usage.prompt_tokens if usage.prompt_tokens is not None else record.prompt_tokens
        if usage.completion_tokens is not None:
            record.completion_tokens = usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            record.cached_tokens = usage.prompt_tokens_details.cached_tokens
        record.speculation = usage.speculation or record.speculation
        return usage.completion_tokens

    def _take_whole(self, now: float) -> None:
        try:
            whole = _DECODER.decode(self._buffer)
        except msgspec.DecodeError as error:
            self._fail("malformed", f"the response is no completion ({error}): {self._buffer[:200]!r}")
            return
        if whole.error is not None or not whole.choices:
            self._fail("malformed", f"the response has no choices: {self._buffer[:200]!r}")
            return
        if whole.usage is not None:
            self._take_usage(whole.usage)
        choice = whole.choices[0]
        self._record.finish_reason = choice.finish_reason
        text = choice.text if choice.text is not None else (choice.message and choice.message.content) or ""
        if self._keep_text:
            self._texts.append(text)
            self._token_ids += choice.token_ids or ()
        self._arrival(now, self._record.completion_tokens or 0, len(text))


def _hidden(delta: _Delta) -> int:
    """Characters of what is output and no content: reasoning, calls of tools."""
    size = len(delta.reasoning_content or delta.reasoning or "")
    return size + len(msgspec.json.encode(delta.tool_calls)) if delta.tool_calls else size


def _error_text(body: bytes) -> str:
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body[:_MAX_MESSAGE].decode(errors="replace")
    return _message_of(value.get("error", value) if isinstance(value, dict) else value)


def _message_of(error: Any) -> str:
    """The words in an error of OpenAI's form, or all of it."""
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return str(error["message"])
    return error if isinstance(error, str) else msgspec.json.encode(error).decode()
