"""How servers start, stop and fail."""

from __future__ import annotations

import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from running_server import Server, start_server

from sol.config import EngineConfig
from sol.errors import ConfigError, ModelNotFoundError
from sol.models.source import ModelFiles
from sol.server.app import serve
from sol.server.config import ServerConfig

LONG: dict[str, Any] = {
    "model": "smollm2",
    "messages": [{"role": "user", "content": "Tell me a very long story."}],
    "max_tokens": 400,
    "stream": True,
    "extra_body": {"ignore_eos": True},
}


def test_a_busy_port_is_an_error_at_once() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} is in use") as error:
            serve(ServerConfig(port=port))
    assert error.value.param == "port"


def test_an_address_of_another_machine() -> None:
    for host in ("192.0.2.1", "no-such-host.invalid"):
        with pytest.raises(ConfigError) as error:
            serve(ServerConfig(host=host, port=0))
        assert error.value.param == "host"


def test_a_model_that_does_not_exist(tmp_path: Path) -> None:
    urls: list[str] = []
    config = ServerConfig(engine=EngineConfig(model=str(tmp_path / "nothing")), host="localhost", port=0)
    with pytest.raises(ModelNotFoundError):
        serve(config, on_listening=urls.append)
    with pytest.raises(httpx.ConnectError):
        httpx.get(urls[0])


def test_an_engine_that_is_killed_in_mid_stream(smollm2: ModelFiles) -> None:
    with start_server() as server, server.client() as client:
        server.wait_until_ready()
        assert client.models.list().data  # no keys: any will do
        with client.chat.completions.create(**LONG) as stream:
            for _ in range(3):
                next(stream)
            server.engine().kill()
            with pytest.raises(openai.APIError) as error:
                list(stream)
        assert "SIGKILL" in error.value.message
        assert error.value.code == "engine_dead"
        for path in ("/live", "/ready", "/health"):
            assert server.http.get(path).status_code == 503
        assert server.http.get("/version").status_code == 200
        metrics = server.metrics()
        assert metrics["sol:engine_alive"] == 0
        assert metrics["vllm:num_requests_running"] == 0
        assert metrics["vllm:request_success_total error"] == 1
        with pytest.raises(openai.InternalServerError) as refused:
            client.chat.completions.create(**{**LONG, "stream": False})
        assert refused.value.status_code == 503
        assert server.stop() == 1


def test_an_engine_that_makes_no_progress_and_a_stop_in_mid_stream(smollm2: ModelFiles) -> None:
    with start_server(stall_timeout=0.5) as server:
        server.wait_until_ready()
        engine = server.engine()
        ended, lines = threading.Event(), list[str]()
        body = {key: value for key, value in LONG.items() if key != "extra_body"}

        def read() -> None:
            with server.http.stream("POST", "/v1/chat/completions", json={**body, "ignore_eos": True}) as response:
                lines.extend(line for line in response.iter_lines() if line)
            ended.set()

        reading = threading.Thread(target=read)
        reading.start()
        server.wait_until(lambda m: m["vllm:num_requests_running"] == 1)
        engine.suspend()
        _wait_for_status(server, "/live", 503)
        assert "no progress" in server.http.get("/health").json()["error"]["message"]
        engine.resume()
        _wait_for_status(server, "/live", 200)
        assert not ended.is_set()
        assert server.stop(signal.SIGINT) == 0
        reading.join(10)
        assert ended.is_set()
        assert "shutting down" in lines[-1]
        assert lines[-1].startswith('data: {"error": {')
        assert "data: [DONE]" not in lines
        psutil.wait_procs([engine], timeout=5)
        assert not engine.is_running()


def test_a_stop_while_the_model_loads(smollm2: ModelFiles) -> None:
    with start_server() as server:
        assert server.http.get("/live").status_code == 200
        assert server.http.get("/ready").status_code == 503
        children: list[psutil.Process] = []
        while not children:
            children = psutil.Process(server.process.pid).children()
        assert "ready" not in server.messages
        assert server.stop() == 0
        _, alive = psutil.wait_procs(children, timeout=10)
        assert not alive


def _wait_for_status(server: Server, path: str, status: int) -> None:
    deadline = time.monotonic() + 20
    while server.http.get(path).status_code != status:
        assert time.monotonic() < deadline
        time.sleep(0.05)
