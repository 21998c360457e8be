"""Lines of requests, and the program's messages as JSON."""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_harness import CHAT, running

from sol.errors import ConfigError
from sol.gateway.config import make_config
from sol.gateway.gateway import Gateway
from sol.gateway.observe import access
from sol.gateway.observe.access import JsonFormatter, LineWriter
from sol.gateway.observe.stage import RequestIds


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def logged(path: Path, **options: Any) -> list[dict[str, Any]]:
    """The lines of a request that is answered, one that is refused by a stage, and one that never was a call."""
    log = {"requests": True, "file": str(path), **options}
    async with running(1, observe={"log": log}) as gateway:
        headers = {"x-request-id": "mine"}
        await gateway.http.post("/v1/chat/completions", json={**CHAT, "stream": True}, headers=headers)
        await gateway.http.post("/v1/chat/completions", json={**CHAT, "model": "none"})
        await gateway.http.post("/v1/chat/completions", json={**CHAT, "stream": "river"})
        await gateway.settled(2)
    return read(path)


async def test_a_line_says_who_asked_what_became_of_it_and_where_the_time_went(tmp_path: Path) -> None:
    answered, unknown, malformed = await logged(tmp_path / "log")
    assert {
        "request_id": "mine", "tenant": "default", "key_id": "anonymous", "model": "m", "class": "interactive",
        "stream": True, "outcome": "ok", "status": 200, "engine": "a", "attempts": 1, "completion_tokens": 6,
        "estimated": False, "path": "/v1/chat/completions",
    }.items() <= answered.items()  # fmt: skip
    assert 0 < answered["first_byte_seconds"] <= answered["seconds"]
    assert sum(answered["stages"].values()) == pytest.approx(answered["seconds"], abs=0.01)
    assert {"stage": "route", "rule": "only_one", "action": "engine", "detail": "a"} in answered["decisions"]
    assert {"outcome": "client_error", "status": 404, "error": "model_not_found"}.items() <= unknown.items()
    assert {"status": 400, "error": "invalid_request_error", "stage": "http"}.items() <= malformed.items()


async def test_what_clients_write_is_in_no_line_unless_asked_for(tmp_path: Path) -> None:
    await logged(tmp_path / "without")
    assert "river" not in (tmp_path / "without").read_text()
    answered, _, malformed = await logged(tmp_path / "with", prompts=True)
    assert answered["prompt"] == CHAT["messages"][0]["content"]  # type: ignore[index]
    assert "river" in malformed["error_message"]


async def test_sampling_leaves_out_answers_and_never_failures(tmp_path: Path) -> None:
    assert [line["outcome"] for line in await logged(tmp_path / "log", sample=0)] == ["client_error", "client_error"]


def test_a_file_that_cannot_be_written_is_an_error_at_the_start(tmp_path: Path) -> None:
    data = {
        "models": [{"name": "m", "engines": ["a"]}], "engines": [{"name": "a", "url": "http://127.0.0.1:1"}],
        "observe": {"log": {"requests": True, "file": str(tmp_path / "none" / "log")}},
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"observe\.log\.file"):
        Gateway(make_config(data))


def test_lines_come_whole_and_in_order_and_a_file_may_be_truncated(tmp_path: Path) -> None:
    path = tmp_path / "log"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    writer = LineWriter(descriptor, owned=True)
    writer.start()
    for number in range(1000):
        writer.put(b"%d\n" % number)
    while path.stat().st_size < 3890:
        pass
    os.truncate(path, 0)
    writer.put(b"after\n")
    writer.close()
    assert path.read_bytes() == b"after\n"
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)


def test_a_reader_that_stands_still_costs_lines_and_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "_WAITING_BYTES", 200_000)
    monkeypatch.setattr(access, "_CLOSE_SECONDS", 0.05)
    reading, writing = os.pipe()
    writer = LineWriter(writing)
    writer.start()
    line = b"x" * 999 + b"\n"
    for _ in range(500):
        writer.put(line)
    assert writer.lost >= 500 - 200 - 64 - 1  # what may wait, and what is in the pipe
    writer.close()  # does not wait for it
    received = b""
    while len(received) < (500 - writer.lost) * len(line):
        received += os.read(reading, 1 << 16)
    assert received == line * (500 - writer.lost)
    os.close(reading)
    for thread in threading.enumerate():
        if thread.name == "log of requests":
            thread.join()
    os.close(writing)


def test_a_disk_that_is_full_costs_the_lines_that_it_did_not_take() -> None:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    writer = LineWriter(descriptor, owned=True)
    writer.start()
    writer.put(b"a\n")
    writer.close()
    assert writer.lost == 1


def test_messages_of_the_program_say_which_request_they_are_about() -> None:
    record = logging.LogRecord("sol.gateway", logging.WARNING, "", 0, "engine %s is back", ("a",), None)
    RequestIds().filter(record)
    line = json.loads(JsonFormatter().format(record))
    assert {"level": "WARNING", "logger": "sol.gateway", "message": "engine a is back"}.items() <= line.items()
    assert "request_id" not in line
    record.request_id, record.args = "mine", (os.fsdecode(b"\xff"),)
    assert json.loads(JsonFormatter().format(record))["request_id"] == "mine"


async def test_an_unexpected_error_is_logged_with_the_request_that_met_it(caplog: pytest.LogCaptureFixture) -> None:
    async with running(1) as gateway:

        def fail(*_: object) -> None:
            raise RuntimeError("broken")

        gateway.gateway.relay._router.choose = fail  # type: ignore[method-assign, assignment]
        caplog.handler.addFilter(RequestIds())
        headers = {"x-request-id": "mine"}
        answer = await gateway.http.post("/v1/chat/completions", json=CHAT, headers=headers)
    assert answer.status_code == 500
    record = next(record for record in caplog.records if record.exc_info)
    line = json.loads(JsonFormatter().format(record))
    assert line["request_id"] == "mine"
    assert "RuntimeError: broken" in line["exception"]


def test_the_command_writes_json_and_nothing_else_where_it_is_told_to(tmp_path: Path) -> None:
    config = tmp_path / "gateway.yaml"
    config.write_text(
        "server: {port: 0}\nmodels: [{name: m, engines: [a]}]\nengines: [{name: a, url: 'http://127.0.0.1:9'}]\n"
        "observe: {log: {format: json, requests: true}}\n"
    )
    command = [sys.executable, "-m", "sol", "gateway", "--config", str(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        url = process.stdout.readline().split()[5].rstrip(":")
        answer = httpx.post(f"{url}/v1/chat/completions", json=CHAT, headers={"x-request-id": "mine"}, timeout=10)
        assert answer.status_code in (502, 503)
        process.terminate()
        lines = [json.loads(line) for line in process.stderr.read().splitlines()]
        assert process.wait() == 0
    assert [line["error"] for line in lines if line.get("request_id") == "mine"]
    assert [line for line in lines if line["message"].startswith("engine a is left out")]


def test_a_pipe_that_does_not_wait_gets_whole_lines_all_the_same() -> None:
    # Others who have stderr, too, may have made it so (O_NONBLOCK belongs to the pipe, not to who opened it).
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    writer = LineWriter(writes, owned=True)
    writer.start()
    lines = [b"%d %s\n" % (number, b"x" * 1000) for number in range(500)]
    for line in lines:
        writer.put(line)
    found = b""
    while len(found) < sum(map(len, lines)):
        assert select.select([reads], [], [], 20)[0], f"{writer.lost} lines are lost"
        found += os.read(reads, 2**16)
    writer.close()
    os.close(reads)
    assert found == b"".join(lines)
    assert writer.lost == 0
