"""`observe` in gateway.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from sol.gateway.section import Expanded, Section

Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class MetricsOptions(Section):
    """The page /metrics."""

    token: Annotated[Expanded, Field(min_length=1)] | None = Field(default=None, repr=False)
    """What Prometheus sends as `Authorization: Bearer …` (its `authorization.credentials`); None: all may read."""
    by_tenant: bool | None = None
    """Whether tenants' tokens and costs are on the page; None: where a token guards it."""

    @property
    def shows_tenants(self) -> bool:
        return self.token is not None if self.by_tenant is None else self.by_tenant


class LogOptions(Section):
    """What is written down, on stderr."""

    format: Literal["text", "json"] = "text"
    """Of messages; lines of requests are JSON in any case."""
    requests: bool = False
    """A line for each request, when it has ended."""
    sample: Share = 1.0
    """The share of answered requests that get a line; those that failed or were refused all do."""
    prompts: bool = False
    """Whether the line holds what the client wrote."""
    file: Path | None = None
    """Where lines of requests are appended instead. It may be truncated while it is in use."""


class TraceOptions(Section):
    """OpenTelemetry spans, sent by OTLP over HTTP."""

    endpoint: Expanded
    """Of a collector, whole: http://127.0.0.1:4318/v1/traces."""
    headers: dict[str, Expanded] = Field(default_factory=dict, repr=False)
    service_name: str = Field(default="sol-gateway", min_length=1)
    sample: Share = 1.0
    """The share of traces that begin here; those that a client has begun are recorded if it records them."""
    genai: bool = False
    """Whether spans have OpenTelemetry's attributes for generative AI, whose names may still change."""

    @field_validator("endpoint")
    @classmethod
    def _a_url(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")) or not url.partition("://")[2].strip("/"):
            raise ValueError("must be a URL like http://127.0.0.1:4318/v1/traces")
        return url


class ObserveConfig(Section):
    metrics: MetricsOptions = Field(default_factory=MetricsOptions)
    log: LogOptions = Field(default_factory=LogOptions)
    traces: TraceOptions | None = None
    """None: there are no spans, and nothing of OpenTelemetry is loaded."""
