"""OpenTelemetry spans of requests, one each, written when a request has been answered.

A client's `traceparent` is the span's parent (W3C Trace Context), so what a gateway or an application began goes on
here. Names are those of the GenAI conventions; no text.
https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
"""

from __future__ import annotations

import threading
import time
from typing import Any

from sol.errors import ConfigError
from sol.server.generation import Usage
from sol.server.observe import Answered
from sol.version import __version__

try:
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError:
    raise ConfigError(
        "otlp_traces_endpoint needs OpenTelemetry; pip install 'sol-inference[otel]', or leave the option out",
        param="otlp_traces_endpoint",
    ) from None

_LAST_SPANS_SECONDS = 5.0
_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/responses": "chat", "/v1/completions": "text_completion"}


class Tracer:
    """Spans go out in a thread of their own; where the collector does not keep up, the newest are dropped."""

    def __init__(self, model_name: str, exporter: SpanExporter) -> None:
        self._model_name = model_name
        resource = Resource.create({"service.name": "sol", "service.version": __version__})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("sol.server", __version__)
        self._w3c = TraceContextTextMapPropagator()

    @classmethod
    def to_endpoint(cls, model_name: str, endpoint: str) -> Tracer:
        """OTLP over HTTP; further settings by OpenTelemetry's environment variables."""
        return cls(model_name, OTLPSpanExporter(endpoint=endpoint))

    def close(self) -> None:
        """Send what waits, if that takes no longer than five seconds."""
        # A thread that nobody waits for at the process's end: a collector may be away.
        thread = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        thread.start()
        thread.join(_LAST_SPANS_SECONDS)

    def answered(self, request: Answered) -> None:
        operation = _OPERATIONS.get(request.path)
        span = self._tracer.start_span(
            f"{request.method} {request.path}" if operation is None else f"{operation} {self._model_name}",
            context=self._w3c.extract(request.headers),
            kind=trace.SpanKind.SERVER,
            start_time=_wall_ns(request.began),
        )
        if span.is_recording():
            span.set_attributes(self._attributes(request, operation))
            if request.first_byte is not None:
                span.add_event("first byte", timestamp=_wall_ns(request.first_byte))
            if request.status is not None and request.status >= 500:
                span.set_status(trace.StatusCode.ERROR)
        span.end(_wall_ns(request.ended))

    def _attributes(self, request: Answered, operation: str | None) -> dict[str, Any]:
        found: dict[str, Any] = {
            "http.request.method": request.method,
            "url.path": request.path,
            "sol.request_id": request.request_id,
            "sol.client_left": not request.whole,
        }
        if request.status is not None:
            found["http.response.status_code"] = request.status
        if operation is not None:
            found |= {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "sol",
                "gen_ai.request.model": self._model_name,
            }
        if request.choices:
            usage, params = Usage.of(request.choices), request.choices[0].request.params
            found |= {
                "gen_ai.request.temperature": params.temperature,
                "gen_ai.request.top_p": params.top_p,
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
            }
            if params.max_tokens is not None:
                found["gen_ai.request.max_tokens"] = params.max_tokens
            first = request.choices[0].timeline
            if first.scheduled:
                found["sol.queue_seconds"] = max(0.0, first.scheduled - first.arrival)
        return found


def _wall_ns(monotonic: float) -> int:
    """Nanoseconds since 1970 of a moment of `time.monotonic()`."""
    return time.time_ns() - time.monotonic_ns() + int(monotonic * 1e9)
