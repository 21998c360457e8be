"""Observation as the first stage of the pipeline: it is entered before all others and left after them."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from sol.gateway.call import Call, Outcome
from sol.gateway.errors import error_status
from sol.gateway.observe.access import RequestLog
from sol.gateway.observe.config import ObserveConfig
from sol.gateway.observe.metrics import BEFORE, OBSERVE, Open, RequestMetrics, outcome_name
from sol.gateway.observe.text import family

if TYPE_CHECKING:
    from sol.gateway.observe.traces import Tracer

logger = logging.getLogger("sol.gateway")

_request_id: contextvars.ContextVar[str | None] = contextvars.ContextVar("request_id", default=None)


class ObserveStage:
    """`canonical`: of each name or alias of a model, its name. Raises `ConfigError` for what cannot be written to, and
    for traces without OpenTelemetry."""

    name = OBSERVE

    def __init__(self, config: ObserveConfig, canonical: Mapping[str, str]) -> None:
        self.metrics = RequestMetrics(canonical)
        self.tracer: Tracer | None = None
        if config.traces is not None:
            # OpenTelemetry is loaded by who configures it.
            from sol.gateway.observe.traces import make_tracer

            self.tracer = make_tracer(config.traces)
        self._log = RequestLog(config.log) if config.log.requests else None
        self._open: dict[Call, Open] = {}

    async def start(self) -> None:
        if self._log is not None:
            self._log.writer.start()

    async def close(self) -> None:
        if self.tracer is not None:
            await self.tracer.close()
        if self._log is not None:
            await asyncio.to_thread(self._log.writer.close)

    async def enter(self, call: Call) -> None:
        _request_id.set(call.id)
        self._open[call] = self.metrics.begun(call)
        call.pace = self.metrics.pace(call)
        if self.tracer is not None:
            try:
                self.tracer.begin(call)
            except Exception:  # it is not the call's fault, and the call does not need it
                logger.exception("a span could not be begun")

    async def leave(self, call: Call, outcome: Outcome) -> None:
        opened = self._open.pop(call, None)
        if opened is None:
            return
        call.pace = None  # it refers to the call
        name = outcome_name(outcome)
        self.metrics.ended(call, outcome, name, opened)
        trace_id = self._end_trace(call, outcome, name)
        if self._log is not None:
            self._log.ended(call, outcome, name, trace_id)

    def _end_trace(self, call: Call, outcome: Outcome, name: str) -> str | None:
        try:
            return self.tracer.end(call, outcome, name) if self.tracer is not None else None
        except Exception:
            logger.exception("a span could not be ended")
            return None

    def refused(self, request_id: str, path: str, error: Exception) -> None:
        """A request to an API that did not become a call."""
        status = error_status(error)
        self.metrics.refused(BEFORE, status, error)
        if self._log is not None:
            self._log.refused(request_id, path, status, error)

    def render(self) -> Iterator[Iterator[str]]:
        """The lines of metrics about observing."""
        if self._log is not None:
            yield family("sol_gateway_log_lines_lost_total", "counter", "Lines of requests that could not be written.",
                         [("", self._log.writer.lost)])  # fmt: skip


class RequestIds(logging.Filter):
    """Says of each message which request it is about, where it is about one."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = _request_id.get()
        return True


def set_up_logging(config: ObserveConfig) -> None:
    """The program's messages, on stderr, in the form that the configuration asks for."""
    handler: logging.Handler = logging.StreamHandler()
    if config.log.format == "json":
        from sol.gateway.observe.access import JsonFormatter

        handler.setFormatter(JsonFormatter())
        handler.addFilter(RequestIds())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    logging.basicConfig(handlers=[handler])
    logging.getLogger("sol").setLevel(logging.INFO)
