"""Spans as a collector gets them, and W3C Trace Context in and on to the engine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from gateway_harness import CHAT, Running, running

from sol.errors import ConfigError
from sol.gateway.config import make_config
from sol.gateway.gateway import Gateway

pytest.importorskip("opentelemetry.sdk", reason="OpenTelemetry is not installed (the extra otel)")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SERVER, CLIENT = 2, 3
"""Kinds of spans, as the protocol has them."""


class Collector:
    def __init__(self) -> None:
        self.url = ""
        self.spans: list[Any] = []
        self.resource: dict[str, str] = {}
        self.keys: list[str | None] = []

    def named(self, name: str) -> Any:
        (found,) = [span for span in self.spans if span.name == name]
        return found


@contextmanager
def collector() -> Iterator[Collector]:
    """Takes spans by OTLP over HTTP."""
    found = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            message = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
            for each in message.resource_spans:
                found.resource = {item.key: item.value.string_value for item in each.resource.attributes}
                found.spans += [span for scope in each.scope_spans for span in scope.spans]
            found.keys.append(self.headers["x-key"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.url = f"http://127.0.0.1:{server.server_port}/v1/traces"
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def attributes(span: Any) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        return [plain(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)

    return {item.key: plain(item.value) for item in span.attributes}


def recorded(traceparent: str) -> bool:
    return bool(int(traceparent.rpartition("-")[2], 16) & 1)


async def ask(gateway: Running, headers: dict[str, str] | None = None, **body: Any) -> str:
    """The traceparent that the engine was sent; empty: none."""
    await gateway.http.post("/v1/chat/completions", json={**CHAT, **body}, headers=headers)
    await gateway.settled(1)
    return gateway.outcomes[-1][0].headers.get("traceparent", "")


async def test_a_call_is_a_span_with_one_for_each_stage_and_one_for_the_engine() -> None:
    with collector() as found:
        traces = {"endpoint": found.url, "headers": {"x-key": "k"}, "service_name": "front"}
        async with running(1, observe={"traces": traces}) as gateway:
            sent = await ask(gateway, {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=b"}, stream=True)
            assert gateway.outcomes[-1][0].headers["tracestate"] == "a=b"
    server, client = found.named("POST /v1/chat/completions"), found.named("chat m")
    assert {span.trace_id.hex() for span in found.spans} == {TRACE}
    assert (server.kind, server.parent_span_id.hex()) == (SERVER, PARENT)
    assert (client.kind, client.parent_span_id) == (CLIENT, server.span_id)
    assert sent == f"00-{TRACE}-{client.span_id.hex()}-01"
    stages = [span for span in found.spans if span not in (server, client)]
    assert [span.name for span in stages][:2] == ["recorder", "authenticate"]
    assert {"limit", "queue", "route"} <= {span.name for span in stages}
    for span in (*stages, client):
        assert span.parent_span_id == server.span_id
        assert server.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= server.end_time_unix_nano
    assert [event.name for event in client.events] == ["first byte"]
    assert attributes(server)["sol.outcome"] == "ok"
    assert "route only_one engine a" in attributes(server)["sol.decisions"]
    assert attributes(client) == {"sol.engine": "a", "sol.attempts": 1}
    assert found.resource["service.name"] == "front"
    assert found.keys == ["k"]


async def test_attributes_of_generative_ai_are_there_where_they_are_asked_for() -> None:
    with collector() as found:
        async with running(1, observe={"traces": {"endpoint": found.url, "genai": True}}) as gateway:
            await ask(gateway, temperature=0.5)
    client = attributes(found.named("chat m"))
    assert {
        "gen_ai.operation.name": "chat", "gen_ai.request.model": "m", "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 6, "gen_ai.usage.output_tokens": 6,
    }.items() <= client.items()  # fmt: skip
    assert "gen_ai.request.seed" not in client
    assert not [name for span in found.spans for name, value in attributes(span).items() if "river" in str(value)]


async def test_a_failure_of_engines_is_an_error_and_a_clients_mistake_is_none() -> None:
    with collector() as found:
        fault = {"kind": "reset", "after_events": 2}
        async with running(1, faults=[fault], observe={"traces": {"endpoint": found.url}}) as gateway:
            await ask(gateway, stream=True)
            await ask(gateway, model="none")
            await gateway.settled(2)
    ok, broken = sorted((span for span in found.spans if span.kind == SERVER), key=lambda span: span.status.code)
    assert (attributes(ok)["sol.outcome"], ok.status.code) == ("client_error", 0)
    assert (attributes(broken)["sol.outcome"], broken.status.code) == ("broken", 2)
    assert attributes(broken)["error.type"] == "upstream_failed"


async def test_a_trace_that_is_not_recorded_goes_on_all_the_same() -> None:
    with collector() as found:
        async with running(1, observe={"traces": {"endpoint": found.url, "sample": 0}}) as gateway:
            sent = await ask(gateway)
            assert not recorded(sent)
            sent = await ask(gateway, {"traceparent": f"00-{TRACE}-{PARENT}-00"})
            assert sent.startswith(f"00-{TRACE}-")
            assert not recorded(sent)
    assert found.spans == []


async def test_a_span_that_cannot_be_made_costs_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with collector() as found:
        async with running(1, observe={"traces": {"endpoint": found.url}}) as gateway:
            tracer = gateway.gateway.observe.tracer
            assert tracer is not None
            monkeypatch.setattr(tracer._tracer, "start_span", None)
            answer = await gateway.http.post("/v1/chat/completions", json=CHAT)
            assert answer.status_code == 200
            await gateway.settled(1)


async def test_a_collector_that_is_away_costs_no_request_and_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    from sol.gateway.observe import traces

    monkeypatch.setattr(traces, "_LAST_SPANS_SECONDS", 0.1)
    with collector() as found:
        url = found.url
    async with running(1, observe={"traces": {"endpoint": url}}) as gateway:
        assert (await gateway.http.post("/v1/chat/completions", json=CHAT)).status_code == 200


async def test_without_traces_a_clients_context_passes_as_it_came() -> None:
    async with running(1) as gateway:
        assert await ask(gateway) == ""
        assert await ask(gateway, {"traceparent": f"00-{TRACE}-{PARENT}-01"}) == f"00-{TRACE}-{PARENT}-01"


def test_nothing_of_opentelemetry_is_loaded_until_somebody_asks_for_traces() -> None:
    script = (
        "import sys\nfrom sol.gateway.config import make_config\nfrom sol.gateway.gateway import Gateway\n"
        "Gateway(make_config({'models': [{'name': 'm', 'engines': ['a']}],"
        " 'engines': [{'name': 'a', 'url': 'http://127.0.0.1:1'}]}))\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_traces_without_opentelemetry_are_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "sol.gateway.observe.traces", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    data = {
        "models": [{"name": "m", "engines": ["a"]}], "engines": [{"name": "a", "url": "http://127.0.0.1:1"}],
        "observe": {"traces": {"endpoint": "http://127.0.0.1:4318/v1/traces"}},
    }  # fmt: skip
    with pytest.raises(ConfigError, match="pip install"):
        Gateway(make_config(data))
    sys.modules.pop("sol.gateway.observe.traces", None)
