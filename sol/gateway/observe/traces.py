"""OpenTelemetry spans of calls, written when a call has ended: until then a call carries two open spans and no more.

    POST /v1/chat/completions                 server: the whole call
        authenticate, limit, filter, …        one for each stage
        chat llama                            client: engines, asked until one answered

A client's `traceparent` is the first one's parent, and engines are told the last one's as theirs (W3C Trace Context).
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from typing import Any, Final, NamedTuple

from sol.errors import ConfigError
from sol.gateway.call import Call, Outcome
from sol.gateway.errors import error_code
from sol.gateway.observe.config import TraceOptions
from sol.gateway.observe.metrics import OBSERVE, RELAY
from sol.version import __version__

try:
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError:
    raise ConfigError(
        "observe.traces needs OpenTelemetry; pip install 'sol-inference[otel]', or remove the section",
        param="observe.traces",
    ) from None

logger = logging.getLogger("sol.gateway")

_LAST_SPANS_SECONDS: Final = 5.0
_OPERATIONS: Final = {
    "/v1/chat/completions": "chat", "/v1/completions": "text_completion", "/v1/responses": "chat",
    "/v1/embeddings": "embeddings",
}  # fmt: skip
_PARAMETERS: Final = {
    "temperature": "gen_ai.request.temperature", "top_p": "gen_ai.request.top_p", "top_k": "gen_ai.request.top_k",
    "max_tokens": "gen_ai.request.max_tokens", "seed": "gen_ai.request.seed",
    "frequency_penalty": "gen_ai.request.frequency_penalty", "presence_penalty": "gen_ai.request.presence_penalty",
}  # fmt: skip
_PROVIDER: Final = "sol"
"""Who offers the API that the client sees."""


def make_tracer(options: TraceOptions) -> Tracer:
    return Tracer(options, OTLPSpanExporter(endpoint=options.endpoint, headers=dict(options.headers)))


class _Clock:
    """From moments of `time.monotonic()` to nanoseconds since 1970, for one call: its spans agree with each other,
    whatever is done to the system's clock meanwhile."""

    __slots__ = ("_offset",)

    def __init__(self) -> None:
        self._offset = time.time_ns() - time.monotonic_ns()

    def ns(self, monotonic: float) -> int:
        return self._offset + int(monotonic * 1e9)


class _Traced(NamedTuple):
    span: trace.Span
    clock: _Clock


class Tracer:
    """Spans go to `exporter` in a thread of their own; where it does not keep up, the newest are dropped."""

    def __init__(self, options: TraceOptions, exporter: SpanExporter) -> None:
        self._genai = options.genai
        resource = Resource.create({"service.name": options.service_name, "service.version": __version__})
        self._provider = TracerProvider(resource=resource, sampler=ParentBased(TraceIdRatioBased(options.sample)))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("sol.gateway", __version__)
        self._w3c = TraceContextTextMapPropagator()
        self._open: dict[Call, _Traced] = {}

    async def close(self) -> None:
        """Send what waits, if that takes no longer than five seconds."""
        # A thread that nobody waits for at the process's end: a collector may be away.
        thread = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        thread.start()
        await asyncio.to_thread(thread.join, _LAST_SPANS_SECONDS)

    def begin(self, call: Call) -> None:
        clock = _Clock()
        span = self._tracer.start_span(
            f"{call.method} {call.path}",
            context=self._w3c.extract(call.headers),
            kind=trace.SpanKind.SERVER,
            start_time=clock.ns(call.arrived),
        )
        self._open[call] = _Traced(span, clock)

    def end(self, call: Call, outcome: Outcome, name: str) -> str | None:
        """`name`: the outcome's. Returns the trace's id, as it is written everywhere."""
        traced = self._open.pop(call, None)
        if traced is None:
            return None
        span, clock = traced
        context = span.get_span_context()
        if span.is_recording():
            self._end_stages(call, outcome, traced)
            span.set_attributes(_http_attributes(call, outcome))
            span.set_attributes(_attributes(call, name))
            _set_error(span, outcome)
        span.end(clock.ns(outcome.ended_at))
        return trace.format_trace_id(context.trace_id)

    def begin_relay(self, call: Call) -> _Traced | None:
        """The span of which the engine's are children. None: the call is not traced."""
        traced = self._open.get(call)
        if traced is None:
            return None
        parent, clock = traced
        operation = _OPERATIONS.get(call.path, call.path.rpartition("/")[2])
        context = trace.set_span_in_context(parent)
        span = self._tracer.start_span(
            f"{operation} {call.model}",
            context=context,
            kind=trace.SpanKind.CLIENT,
            start_time=clock.ns(time.monotonic()),
        )
        # Not the client's: its tracestate belongs to its traceparent.
        headers = {name: value for name, value in call.headers.items() if name not in ("traceparent", "tracestate")}
        self._w3c.inject(headers, trace.set_span_in_context(span))
        call.headers = headers
        return _Traced(span, clock)

    def end_relay(self, traced: _Traced, call: Call, outcome: Outcome) -> None:
        span, clock = traced
        if span.is_recording():
            if call.backend is not None:
                span.set_attribute("sol.engine", call.backend)
            span.set_attribute("sol.attempts", call.attempt)
            if outcome.first_byte_at is not None:
                span.add_event("first byte", timestamp=clock.ns(outcome.first_byte_at))
            if self._genai:
                span.set_attributes(_genai_attributes(call, outcome))
            _set_error(span, outcome)
        span.end(clock.ns(outcome.ended_at))

    def _end_stages(self, call: Call, outcome: Outcome, traced: _Traced) -> None:
        parent, clock = traced
        context = trace.set_span_in_context(parent)
        ends = [*(at for _, at in call.trail[1:]), outcome.ended_at]
        for (stage, began), ended in zip(call.trail, ends, strict=True):
            if stage not in (RELAY, OBSERVE):
                span = self._tracer.start_span(stage, context=context, start_time=clock.ns(began))
                span.end(clock.ns(ended))


class RelaySpanStage:
    """The last stage where there are traces: what comes after it is the engines' time."""

    name = RELAY

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._open: dict[Call, _Traced] = {}

    async def enter(self, call: Call) -> None:
        try:
            traced = self._tracer.begin_relay(call)
        except Exception:  # it is not the call's fault, and the call does not need it
            logger.exception("a span could not be begun")
            return
        if traced is not None:
            self._open[call] = traced

    async def leave(self, call: Call, outcome: Outcome) -> None:
        traced = self._open.pop(call, None)
        if traced is not None:
            self._tracer.end_relay(traced, call, outcome)


def _http_attributes(call: Call, outcome: Outcome) -> dict[str, Any]:
    return {
        "http.request.method": call.method,
        "url.path": call.path,
        "http.response.status_code": outcome.status,
    }


def _attributes(call: Call, name: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "sol.request_id": call.id,
        "sol.outcome": name,
        "sol.model": call.model,
        "sol.class": call.class_name,
        "sol.decisions": [f"{each.stage} {each.rule} {each.action} {each.detail}".rstrip() for each in call.decisions],
    }
    if call.principal is not None:
        found["sol.tenant"], found["sol.key_id"] = call.principal.tenant, call.principal.key_id
    return found


def _genai_attributes(call: Call, outcome: Outcome) -> dict[str, Any]:
    """https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/; never what was asked or answered."""
    found: dict[str, Any] = {"gen_ai.provider.name": _PROVIDER, "gen_ai.request.model": call.model}
    if call.path in _OPERATIONS:
        found["gen_ai.operation.name"] = _OPERATIONS[call.path]
    for name, attribute in _PARAMETERS.items():
        value = call.json.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            found[attribute] = value
    if outcome.usage is not None:
        found["gen_ai.usage.input_tokens"] = outcome.usage.prompt_tokens
        found["gen_ai.usage.output_tokens"] = outcome.usage.completion_tokens
    return found


def _set_error(span: trace.Span, outcome: Outcome) -> None:
    """A client's mistake is none of the gateway's; neither is that it left."""
    if outcome.error is None:
        return
    span.set_attribute("error.type", error_code(outcome.error))
    if outcome.status >= 500 or outcome.status < 400:
        span.set_status(trace.StatusCode.ERROR)
