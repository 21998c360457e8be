"""What is told of requests: lines of the log, spans."""

from __future__ import annotations

import json
import logging
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from sol.server.observe import Answered, JsonFormatter
from sol.server.traces import Tracer

SECRET = "The secret word is plover"


class LoggingServer:
    """As `sol serve` starts it; `log` has what was written to stderr once it has ended."""

    def __init__(self, model: Path, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sol", "serve", str(model), "--port", "0", *words],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        ready = None
        while ready is None:
            line = self.process.stdout.readline()
            assert line, "the server ended"
            ready = re.search(r"is ready at (\S+) after", line)
        self.http = httpx.Client(base_url=ready.group(1), timeout=60)

    def stop(self) -> list[str]:
        self.http.close()
        self.process.send_signal(signal.SIGTERM)
        _, err = self.process.communicate(timeout=30)
        assert self.process.returncode == 0
        return err.splitlines()


@pytest.fixture(scope="module", params=["none", "some"])
def lines(talking_llama: Path, request: pytest.FixtureRequest) -> tuple[str, list[dict[str, Any]]]:
    words = ["--log-format", "json", "--enable-log-requests"]
    if request.param == "some":
        words += ["--max-log-len", "10"]
    server = LoggingServer(talking_llama, *words)
    body = {"prompt": SECRET, "max_tokens": 3, "ignore_eos": True}
    assert server.http.post("/v1/completions", json=body, headers={"x-request-id": "whole"}).status_code == 200
    with server.http.stream(
        "POST", "/v1/completions", json={**body, "max_tokens": 400, "stream": True}, headers={"x-request-id": "left"}
    ) as response:
        next(response.iter_raw(1))
    server.http.post("/v1/responses", json={"input": SECRET, "n": 5}, headers={"x-request-id": "refused"})
    server.http.get("/live", headers={"x-request-id": "probe"})
    written = [json.loads(line) for line in server.stop() if line.startswith("{")]
    return request.param, [line for line in written if line["logger"] == "sol.server.requests"]


def test_a_line_a_request_and_of_texts_what_was_asked_for(lines: tuple[str, list[dict[str, Any]]]) -> None:
    texts, written = lines
    by_id = {line["request_id"]: line for line in written}
    assert by_id.keys() == {"whole", "left", "refused"}
    whole, left, refused = by_id["whole"], by_id["left"], by_id["refused"]
    assert (whole["status"], whole["path"], whole["completion_tokens"]) == (200, "/v1/completions", 3)
    assert whole["prompt_tokens"] > 3
    assert 0 < whole["first_byte_seconds"] <= whole["seconds"]
    assert (whole["client_left"], left["client_left"], refused["client_left"]) == (False, True, False)
    assert 0 < left["completion_tokens"] <= 400
    assert (refused["status"], "prompt_tokens" in refused) == (400, False)
    assert "plover" not in json.dumps(written)
    assert whole.get("prompts") == (None if texts == "none" else [SECRET[:10]])


def test_a_record_with_an_exception_is_one_line_of_json() -> None:
    try:
        raise ValueError("no luck")
    except ValueError:
        record = logging.LogRecord("sol", logging.ERROR, "f", 1, "it %s\n", ("broke",), sys.exc_info())
    line = JsonFormatter().format(record)
    assert "\n" not in line
    read = json.loads(line)
    assert (read["level"], read["message"]) == ("error", "it broke\n")
    assert "ValueError: no luck" in read["exception"]


def answered(**fields: Any) -> Answered:
    values: dict[str, Any] = {
        "request_id": "abc", "method": "POST", "path": "/v1/chat/completions", "status": 200, "began": 100.0,
        "first_byte": 100.5, "ended": 102.0, "whole": True, "choices": [], "headers": {},
    }  # fmt: skip
    return Answered(**(values | fields))


def test_spans_continue_what_the_client_began() -> None:
    exporter = InMemorySpanExporter()
    tracer = Tracer("m", exporter)
    trace_id, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    tracer.answered(answered(headers={"traceparent": f"00-{trace_id}-{parent}-01"}))
    tracer.answered(answered(path="/tokenize", status=503))
    tracer.close()
    chat, other = exporter.get_finished_spans()
    assert chat.name == "chat m"
    assert f"{chat.context.trace_id:032x}" == trace_id
    assert chat.parent is not None
    assert f"{chat.parent.span_id:016x}" == parent
    assert chat.end_time is not None
    assert chat.start_time is not None
    assert chat.end_time - chat.start_time == pytest.approx(2e9, abs=1e6)
    assert chat.attributes is not None
    assert chat.attributes["sol.request_id"] == "abc"
    assert chat.attributes["gen_ai.operation.name"] == "chat"
    assert (chat.status.is_ok, other.status.is_ok) == (True, False)
    assert other.parent is None
    assert other.name == "POST /tokenize"
