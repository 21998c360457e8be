"""Servers as users run them: a process of their own on a free port, with the default model."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
from prometheus_client.parser import text_string_to_metric_families

from sol.config import DEFAULT_MODEL

_PROGRAM = """
import json, sys
from sol.config import EngineConfig
from sol.server.app import serve
from sol.server.config import ServerConfig

options = json.loads(sys.argv[1])
config = ServerConfig(engine=EngineConfig(**options.pop("engine")), port=0, **options)
tell = lambda key, value: print(json.dumps({key: value}), flush=True)
code = serve(
    config,
    on_listening=lambda url: tell("listening", url),
    on_ready=lambda ready: tell("ready", ready.url),
)
assert "torch" not in sys.modules and "transformers" not in sys.modules
sys.exit(code)
"""

ENGINE: dict[str, Any] = {
    "model": DEFAULT_MODEL,
    "max_model_len": 512,
    "kv_cache_memory_bytes": 384 * 2**20,
}
ORIGIN = "https://page.example"
KEY = "secret-1"
OTHER_KEY = "secret-2"


@dataclass
class Server:
    process: subprocess.Popen[str]
    messages: dict[str, str]
    url: str
    http: httpx.Client = field(init=False)
    """Sends the first key."""

    def __post_init__(self) -> None:
        self.http = httpx.Client(base_url=self.url, headers={"authorization": f"Bearer {KEY}"}, timeout=120)

    def wait_until_ready(self) -> None:
        while "ready" not in self.messages:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}")
            time.sleep(0.02)

    def client(self, **options: Any) -> openai.OpenAI:
        options = {"api_key": KEY, "max_retries": 0, "timeout": 120, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", **options)

    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=120)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def metrics(self) -> dict[str, float]:
        """Samples by name, labels other than `model_name` appended to it."""
        samples = {}
        for family in text_string_to_metric_families(self.http.get("/metrics").text):
            for sample in family.samples:
                labels = [value for key, value in sample.labels.items() if key != "model_name"]
                samples[" ".join([sample.name, *labels])] = sample.value
        return samples

    def wait_until(self, holds: Callable[[dict[str, float]], bool]) -> dict[str, float]:
        deadline = time.monotonic() + 30
        while not holds(metrics := self.metrics()):
            assert time.monotonic() < deadline, metrics
            time.sleep(0.02)
        return metrics

    def wait_until_idle(self) -> dict[str, float]:
        return self.wait_until(
            lambda m: (
                m["vllm:num_requests_running"] + m["vllm:num_requests_waiting"] + m["vllm:kv_cache_usage_perc"] == 0
            )
        )

    def engine(self) -> psutil.Process:
        (engine,) = psutil.Process(self.process.pid).children()
        return engine

    def stop(self, number: int = signal.SIGTERM) -> int:
        """The exit code."""
        self.process.send_signal(number)
        return self.process.wait(30)


def tiny_options(model: Path, **engine: Any) -> dict[str, Any]:
    """For `start_server`: of a tiny model, which is there at once and talks nonsense."""
    return {"engine": {"model": str(model), "kv_cache_memory_bytes": 2**22, **engine}, "served_model_names": ["tiny"]}


@contextlib.contextmanager
def start_server(**options: Any) -> Iterator[Server]:
    options = {"engine": ENGINE, "served_model_names": ["smollm2", "default"], **options}
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, json.dumps(options)], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    messages: dict[str, str] = {}
    listening = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            messages.update(json.loads(line))
            listening.set()
        listening.set()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert listening.wait(60)
        assert "listening" in messages, "the server ended before it listened"
        server = Server(process, messages, messages["listening"])
        with server.http:
            yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join()
        assert process.stdout is not None
        process.stdout.close()
