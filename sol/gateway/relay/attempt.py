"""One engine, asked once: a request sent, an answer passed to the client as it comes, and what became of it.

What is received is told to the engine's `Flight`, from which routing learns. An attempt that ends before anything was
passed to the client, and that cannot have cost the client an answer, raises `Unanswered`: somebody else may be asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable
from typing import Final

import msgspec

from sol.gateway.call import Call, Usage
from sol.gateway.errors import (
    DeadlineError,
    GatewayError,
    UpstreamError,
    UpstreamTimeoutError,
    error_body,
    error_event,
)
from sol.gateway.parsing import COMPLETIONS
from sol.gateway.relay.config import RelayConfig
from sol.gateway.relay.request import Door, asks_for_running_usage, body_for, hides_usage, lines_for
from sol.gateway.relay.sse import EventScanner, usage_in
from sol.gateway.reply import Reply
from sol.gateway.routing.engine import Engine, Flight, Verdict
from sol.gateway.upstream.connection import Response
from sol.gateway.upstream.errors import ConnectTimeoutError, MalformedError, UnreachableError, UpstreamHttpError

_KEPT: Final = frozenset(
    {b"content-type", b"cache-control", b"retry-after", b"retry-after-ms", b"x-should-retry", b"openai-processing-ms"}
)
"""Of an engine's response headers."""
_REFUSALS: Final = frozenset({429, 503})
_MAX_USAGE_BYTES: Final = 2**20
_LAST_WORD_SECONDS: Final = 2.0
_USAGE_SECONDS: Final = 1.0
_USAGE_PAUSES: Final = (0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.3)
"""Between questions for the usage of what was given up: an engine needs a moment to see that it was."""
_keys: Final = random.Random()  # noqa: S311  (seeded by the system; nothing is kept secret by it)
_JSON: Final = (b"content-type", b"application/json")


class Unanswered(Exception):
    """The engine did not take the request, or died before it said a word. `error` is what to tell a client when nobody
    else is there. `closed`: it took the connection and closed it, which may have been an old one that it was about to
    give up."""

    def __init__(self, error: GatewayError, *, closed: bool = False) -> None:
        super().__init__(error.message)
        self.error = error
        self.closed = closed


class StreamFailed(UpstreamError):
    """The engine said in its stream that it failed: the client knows, and the stream is ended."""


class ClientStalled(Exception):
    """The client takes nothing of what it is sent."""


class Answer(msgspec.Struct, frozen=True):
    """A whole answer of an engine that was not passed on yet."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Attempt:
    def __init__(self, call: Call, engine: Engine, model: str, config: RelayConfig, reply: Reply, door: Door) -> None:
        self._call = call
        self._engine = engine
        self._model = model
        self._config = config
        self._reply = reply
        self._door = door
        self._sending = False
        self._scanner: EventScanner | None = None
        self._usage_key = f"{_keys.getrandbits(128):032x}" if engine.driver.name == "sol" else None

    async def run(self) -> Answer | None:
        """Ask the engine. A stream is passed to the client as it comes, and None returned; anything else is returned.

        Raises `Unanswered`, `ClientStalled`, or a GatewayError where the request may have been worked on. Once the
        client has been told a status, a failure of the engine is told to it as an event, and the error is raised.
        """
        flight = self._engine.begin(self._call)
        flight.waits_for_client = lambda: self._sending
        verdict: Verdict = "neutral"
        try:
            answer = await self._run(flight)
            if answer is not None and answer.status in _REFUSALS:
                flight.refused()
            verdict = "fault" if answer is not None and answer.status >= 500 else "ok"
            return answer
        except (Unanswered, UpstreamError, UpstreamTimeoutError) as error:
            # That a client is in a hurry is not the engine's fault.
            verdict = "neutral" if isinstance(error, DeadlineError) else "fault"
            if not isinstance(error, Unanswered):
                await self._ask_for_usage()
            raise
        except (asyncio.CancelledError, ClientStalled):
            await self._ask_for_usage()
            raise
        finally:
            self._account()
            self._call.usage_so_far = None  # it refers to this, and this to the call
            flight.end(verdict)

    async def _run(self, flight: Flight) -> Answer | None:
        call, config = self._call, self._config
        now = time.monotonic()
        until = now + config.first_byte_timeout
        if call.deadline is not None:
            until = min(until, call.deadline)
        response: Response | None = None
        try:
            async with asyncio.timeout_at(until) as limit:
                door = self._door
                response = await door.origin.post(
                    door.opening(call.path),
                    lines_for(call, self._usage_key),
                    body_for(call, self._engine, self._model),
                )
                if response.status == 200 and response.content_type == b"text/event-stream":
                    await self._stream(response, flight, limit)
                    return None
                body = await self._whole(response)
                if response.status < 400:
                    call.first_byte_at = time.monotonic()
                    call.usage = usage_in(body)
                    for output in call.output_filters:
                        body = output.feed(body) + output.finish()
                return self._answer(response, body)
        except ConnectTimeoutError as error:
            raise Unanswered(self._unreachable(str(error))) from None
        except UnreachableError as error:
            raise Unanswered(self._unreachable(f"cannot be reached ({error})")) from None
        except TimeoutError:
            raise self._timed_out(until) from None
        except UpstreamHttpError as error:
            raise self._broken(response, error) from None
        finally:
            if response is not None:
                response.close()  # of one that was not read to its end, this closes the connection: the engine stops

    async def _stream(self, response: Response, flight: Flight, limit: asyncio.Timeout) -> None:
        """Pass the stream on, until it is done or ends."""
        call, reply, config = self._call, self._reply, self._config
        self._scanner = scanner = EventScanner(
            hide_usage=hides_usage(call), hide_running=asks_for_running_usage(call, self._engine)
        )
        call.usage_so_far = self._so_far
        clock = asyncio.get_running_loop().time
        pace, engine, feed = call.pace, self._engine, scanner.feed
        rearm_at = 0.0

        def digest(data: bytes) -> bytes:
            """What the client gets of a piece of the stream."""
            nonlocal rearm_at
            engine.last_byte_at = now = clock()
            if now >= rearm_at:
                if call.first_byte_at is None:
                    call.first_byte_at = time.monotonic()
                    flight.first_byte()
                limit.reschedule(now + config.idle_timeout)
                rearm_at = now + config.idle_timeout / 8
            try:
                data = feed(data)
            except ValueError as error:
                raise UpstreamError(f"the engine {engine.name} sent {error}") from None
            if pace is not None:
                pace(now, scanner.num_events)
            return self._filter(data) if call.output_filters else data

        while not (scanner.done or reply.started) and (data := await response.read()):
            if data := digest(data):
                self._sending = True
                await reply.start(200, self._stream_headers(response))
                await reply.write(data)
                self._sending = False

        write_now = reply.write_now
        writing: Awaitable[None] | None = None

        def take(data: bytes) -> bool:
            """The hot path: done for every chunk, in the turn of the event loop that has read it."""
            nonlocal writing
            if data := digest(data):
                writing = write_now(data)
            return writing is None and not scanner.done

        while not scanner.done:  # whatever the engine does then, the client has its answer
            await response.pass_to(take)
            if writing is None:
                break
            self._sending = True
            await writing
            self._sending, writing = False, None
        rest = scanner.finish()
        if call.path in COMPLETIONS and not scanner.done and not scanner.failed:
            raise UpstreamError(f"the engine {engine.name} ended its answer before it was complete")
        if call.output_filters:
            rest = self._filter_end()
        self._sending = True
        if not reply.started:
            await reply.start(200, self._stream_headers(response))
        if rest:
            await reply.write(rest)
        if scanner.failed:
            await reply.end()
            raise StreamFailed(f"the engine {engine.name} failed in the middle of its answer")
        await reply.end()
        self._sending = False
        response.release()  # the end of the encoding may come later than the stream's

    def _filter(self, data: bytes) -> bytes:
        """Filters see events of the answer, not the `[DONE]`: they may hold text back, which comes before it."""
        assert self._scanner is not None
        if self._scanner.done:
            data = self._scanner.without_done(data)
        for output in self._call.output_filters:
            data = output.feed(data) if data else data
        return data

    def _filter_end(self) -> bytes:
        """What filters held back, each seen by those after it, and the end of the stream."""
        assert self._scanner is not None
        rest = b""
        for output in self._call.output_filters:
            rest = (output.feed(rest) if rest else b"") + output.finish()
        return rest + (b"data: [DONE]\n\n" if self._scanner.done else b"")

    async def _whole(self, response: Response) -> bytes:
        parts, size = [], 0
        while data := await response.read():
            self._engine.last_byte_at = time.monotonic()
            parts.append(data)
            size += len(data)
            if size > self._config.max_response_bytes:
                raise UpstreamError(
                    f"the engine {self._engine.name} answered with more than {self._config.max_response_bytes} bytes"
                )
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _answer(self, response: Response, body: bytes) -> Answer:
        """An engine's answer as OpenAI's clients read it: some engines' errors have another form."""
        status = response.status
        if status in (401, 403):
            error = UpstreamError(f"the engine {self._engine.name} refuses the gateway's credentials")
            return Answer(error.status, [_JSON], error_body(error))
        headers = self._headers(response)
        if status >= 400 and not _has_error_object(body):
            headers = [(name, value) for name, value in headers if name != b"content-type"] + [_JSON]
            error = UpstreamError(f"the engine {self._engine.name} answered with status {status}")
            body = error_body(error)
        return Answer(status, headers, body)

    def _stream_headers(self, response: Response) -> list[tuple[bytes, bytes]]:
        # nginx would hold the events back.
        return [*self._headers(response), (b"x-accel-buffering", b"no"), *self._call.response_headers]

    @staticmethod
    def _headers(response: Response) -> list[tuple[bytes, bytes]]:
        return [header for header in response.headers if header[0] in _KEPT]

    async def _ask_for_usage(self) -> None:
        """Of an engine of ours, what it did for a call that was given up: it stops when it sees the connection closed,
        and only then knows. Of other engines' work what has come is all that is known."""
        scanner = self._scanner
        if self._usage_key is None or (scanner is not None and scanner.done):
            return
        question = self._door.asking(f"/v1/usage/{self._usage_key}")
        with contextlib.suppress(TimeoutError, UpstreamHttpError):
            async with asyncio.timeout(_USAGE_SECONDS):
                for pause in _USAGE_PAUSES:
                    await asyncio.sleep(pause)
                    status, body = await self._door.origin.get(question, max_bytes=_MAX_USAGE_BYTES)
                    if status == 200:
                        self._call.usage = usage_in(body) or self._call.usage
                    if status != 404:
                        return

    def _account(self) -> None:
        """Set the call's usage: what the engine said, or an estimate of what it did."""
        call, scanner = self._call, self._scanner
        if call.usage is not None or call.first_byte_at is None or scanner is None:
            return  # also of a request that was sent and never answered: what the engine did for it nobody knows
        call.usage = scanner.find_usage() or self._estimate(scanner)

    def _so_far(self) -> Usage | None:
        """The usage of a stream that goes on."""
        scanner = self._scanner
        if scanner is None or self._call.first_byte_at is None:
            return None
        return scanner.usage_so_far() or self._estimate(scanner)

    def _estimate(self, scanner: EventScanner) -> Usage:
        return Usage(
            prompt_tokens=self._call.input_tokens,
            completion_tokens=max(0, scanner.num_events - (self._call.path == "/v1/chat/completions")),
            estimated=True,
        )

    def _unreachable(self, what: str) -> UpstreamError:
        return UpstreamError(f"the engine {self._engine.name} {what}")

    def _timed_out(self, until: float) -> Exception:
        name, call = self._engine.name, self._call
        if self._sending:
            return ClientStalled()
        if call.first_byte_at is not None:
            return UpstreamTimeoutError(f"the engine {name} fell silent for {self._config.idle_timeout:g} s")
        if until == call.deadline:
            return DeadlineError(f"the engine {name} had not answered when the client's time was over")
        return UpstreamTimeoutError(f"the engine {name} did not answer within {self._config.first_byte_timeout:g} s")

    def _broken(self, response: Response | None, error: UpstreamHttpError) -> Exception:
        """A connection that ended, or bytes that are no HTTP."""
        name = self._engine.name
        if response is None:
            # Not a word came. Engines drop the work of a connection that is gone, so nobody else answers this, too.
            what = "sent what is no HTTP" if isinstance(error, MalformedError) else "closed the connection"
            return Unanswered(UpstreamError(f"the engine {name} {what} without an answer"), closed=True)
        return UpstreamError(f"the connection to the engine {name} broke in the middle of its answer")


async def fail_stream(reply: Reply, error: Exception) -> None:
    """Tell a client whose stream has begun that it ends here: a whole event, and no `[DONE]`. One that takes nothing of
    what it was sent cannot be told: it is not waited for."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LAST_WORD_SECONDS):
            await reply.write(error_event(error))
            await reply.end()


def _has_error_object(body: bytes) -> bool:
    head = body[:64].replace(b" ", b"").replace(b"\n", b"")
    return head.startswith(b'{"error":{')
