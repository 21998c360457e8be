"""How servers drain, come back, queue and turn away; and who may call them from where."""

from __future__ import annotations

import json
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
from running_server import ORIGIN, Server, start_server, tiny_options


class Stream:
    """A stream of a completion that is read in a thread."""

    def __init__(self, server: Server, **body: Any) -> None:
        self.lines: list[str] = []
        self.started = threading.Event()
        self.status = 0
        self._server = server
        self._body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True, **body}
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        with self._server.http.stream("POST", "/v1/completions", json=self._body) as response:
            self.status = response.status_code
            for line in response.iter_lines():
                if line:
                    self.lines.append(line)
                    self.started.set()
        self.started.set()

    def join(self) -> str:
        """The last line."""
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.lines[-1]


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 120  # a guard: an engine that starts on a busy machine takes its time
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def held_stream(server: Server) -> tuple[Stream, psutil.Process]:
    """A stream that has begun, and its engine, which is suspended in the middle of it."""
    engine = server.engine()
    for _ in range(20):
        stream = Stream(server)
        assert stream.started.wait(120)
        engine.suspend()
        if not stream.lines[-1].endswith("[DONE]"):
            return stream, engine
        engine.resume()  # the stream was over before the engine could be held
        stream.join()
    raise AssertionError("no stream lasted until its engine was held")


# ── draining ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_server_that_drains_finishes_what_it_has_and_takes_nothing_new(talking_llama: Path) -> None:
    with start_server(**tiny_options(talking_llama)) as server:
        server.wait_until_ready()
        stream, engine = held_stream(server)
        assert server.http.get("/load").json() == {"server_load": 1}
        address = httpx.URL(server.url)
        with socket.create_connection((address.host, address.port)) as half:
            half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n")
            half.sendall(b"Content-Length: 99\r\n\r\n{")
            wait_for(lambda: server.http.get("/load").json()["server_load"] == 2)
            server.process.send_signal(signal.SIGTERM)
            half.settimeout(20)
            assert half.recv(65536).startswith(b"HTTP/1.1 503 "), "a body that does not come holds up nothing"
        wait_for(lambda: server.http.get("/ready").status_code == 503)
        assert server.http.get("/live").status_code == 200
        refused = server.post("/v1/completions", prompt="a")
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        engine.resume()
        assert stream.join() == "data: [DONE]"
        assert server.process.wait(20) == 0


@pytest.mark.parametrize("how", ["timeout", "second signal"])
def test_draining_has_an_end(talking_llama: Path, how: str) -> None:
    with start_server(**tiny_options(talking_llama), drain_timeout=0.3 if how == "timeout" else 3600) as server:
        server.wait_until_ready()
        stream, engine = held_stream(server)
        server.process.send_signal(signal.SIGTERM)
        if how == "second signal":
            wait_for(lambda: server.http.get("/ready").status_code == 503)
            server.process.send_signal(signal.SIGTERM)
        assert "shutting down" in stream.join()
        engine.resume()
        assert server.process.wait(20) == 0


# ── an engine that dies ──────────────────────────────────────────────────────────────────────────────────────────


def test_an_engine_that_dies_or_hangs_is_started_again_but_not_for_ever(talking_llama: Path) -> None:
    with start_server(**tiny_options(talking_llama), restart_engine=2, stall_timeout=5.0) as server:
        server.wait_until_ready()
        expected = server.post("/v1/completions", prompt="Once", temperature=0).json()["choices"]

        stream, engine = held_stream(server)
        engine.kill()
        assert "SIGKILL" in stream.join()
        wait_for(lambda: server.http.get("/ready").status_code == 503)
        assert server.http.get("/live").status_code == 200, "nobody else has to do anything"
        wait_for(lambda: server.http.get("/ready").status_code == 200)
        assert server.engine().pid != engine.pid
        assert server.post("/v1/completions", prompt="Once", temperature=0).json()["choices"] == expected
        assert server.metrics()["sol:engine_alive"] == 1

        stream, engine = held_stream(server)  # and it stays suspended
        assert '"engine_dead"' in stream.join()
        wait_for(lambda: server.http.get("/ready").status_code == 200)
        assert server.engine().pid != engine.pid
        assert server.post("/v1/completions", prompt="Once", temperature=0).json()["choices"] == expected

        server.engine().kill()
        wait_for(lambda: server.http.get("/live").status_code == 503)
        assert server.post("/v1/completions", prompt="Once").json()["error"]["code"] == "engine_dead"
        assert server.stop() == 1


# ── priorities, deadlines, the queue ─────────────────────────────────────────────────────────────────────────────


def test_an_urgent_request_overtakes_by_field_and_by_service_tier(tiny_server: Server) -> None:
    for urgent in ({"priority": -5}, {"service_tier": "priority"}):
        stream, engine = held_stream(tiny_server)
        answers: list[str] = []

        def ask(name: str, fields: dict[str, Any], answers: list[str] = answers) -> None:
            response = tiny_server.post("/v1/completions", prompt="Once", max_tokens=2, **fields)
            answers.append(name if response.status_code == 200 else response.text)

        threads = [threading.Thread(target=ask, args=("plain", {}))]
        threads[0].start()
        wait_for(lambda: tiny_server.http.get("/load").json()["server_load"] == 2)
        threads.append(threading.Thread(target=ask, args=("urgent", urgent)))
        threads[1].start()
        wait_for(lambda: tiny_server.http.get("/load").json()["server_load"] == 3)
        time.sleep(0.05)  # until both are with the engine
        engine.resume()
        for thread in threads:
            thread.join(30)
        assert stream.join() == "data: [DONE]"
        assert answers == ["urgent", "plain"]
    assert tiny_server.metrics()["vllm:num_preemptions_total"] >= 1


def test_a_full_queue_turns_away_at_once(tiny_server: Server) -> None:
    stream, engine = held_stream(tiny_server)
    waiting = [Stream(tiny_server, max_tokens=1) for _ in range(2)]
    wait_for(lambda: tiny_server.http.get("/load").json()["server_load"] == 3)
    time.sleep(0.05)
    refused = tiny_server.post("/v1/completions", prompt="Once", max_tokens=1)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "queue_full"
    assert int(refused.headers["retry-after"]) > 0
    engine.resume()
    assert {s.join() for s in [stream, *waiting]} == {"data: [DONE]"}
    tiny_server.wait_until_idle()
    assert tiny_server.post("/v1/completions", prompt="Once", max_tokens=1).status_code == 200


def test_what_cannot_be_answered_in_time_is_a_504(tiny_server: Server) -> None:
    tiny_server.wait_until_idle()
    with tiny_server.client() as client:
        create = client.chat.completions.create
        message: list[Any] = [{"role": "user", "content": "Hi"}]
        for streams in (False, True):
            with pytest.raises(openai.InternalServerError) as error:
                create(model="tiny", messages=message, stream=streams, extra_headers={"x-request-deadline-ms": "0.001"})
            assert error.value.status_code == 504
            assert error.value.code == "deadline_exceeded"
            assert error.value.response.headers["x-should-retry"] == "false"
        assert create(model="tiny", messages=message, max_tokens=2, extra_headers={"x-request-deadline-ms": "60000"})
        with pytest.raises(openai.BadRequestError) as bad:
            create(model="tiny", messages=message, extra_headers={"x-request-deadline-ms": "soon"})
        assert bad.value.param == "x-request-deadline-ms"
    response = tiny_server.http.post(
        "/v1/completions", json={"prompt": "a"}, headers={"x-stainless-read-timeout": "0.000001"}
    )
    assert response.status_code == 504
    tiny_server.wait_until_idle()


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"priority": 2**31}, "priority"), ({"service_tier": "gold"}, "service_tier"), ({"cache_salt": ""}, "cache_salt")],
)
def test_wishes_that_cannot_be_granted(tiny_server: Server, fields: dict[str, Any], param: str) -> None:
    response = tiny_server.post("/v1/completions", prompt="a", **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_prompts_are_shared_with_the_same_salt_only(tiny_server: Server) -> None:
    def cached(**fields: Any) -> int:
        body = tiny_server.post("/v1/completions", prompt=[5] * 40, max_tokens=1, **fields).json()
        return int(body["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [cached(cache_salt="one"), cached(cache_salt="one"), cached(cache_salt="two"), cached()] == [0, 32, 0, 0]


# ── who may call from where ──────────────────────────────────────────────────────────────────────────────────────


def test_pages_of_allowed_origins_only(tiny_server: Server) -> None:
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    anonymous = httpx.Client(base_url=tiny_server.url)
    with anonymous:
        allowed = anonymous.options("/v1/chat/completions", headers={"origin": ORIGIN, **asks})
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == ORIGIN
        assert "authorization" in allowed.headers["access-control-allow-headers"]
        other = anonymous.options("/v1/chat/completions", headers={"origin": "https://other.example", **asks})
        assert other.status_code == 400
        unauthorized = anonymous.get("/v1/models", headers={"origin": ORIGIN})
        assert unauthorized.status_code == 401, "the key is asked for all the same"
        assert unauthorized.headers["access-control-allow-origin"] == ORIGIN, "and a page can read why"
    answer = tiny_server.http.get("/v1/models", headers={"origin": ORIGIN})
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    assert (
        "access-control-allow-origin" not in tiny_server.http.get("/v1/models", headers={"origin": "https://o"}).headers
    )


@pytest.mark.parametrize("kind", ["text/plain", "", "application/x-www-form-urlencoded", "application/jsonx"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
def test_bodies_have_to_say_that_they_are_json(tiny_server: Server, path: str, kind: str) -> None:
    response = tiny_server.http.post(path, content=b'{"prompt": "a"}', headers={"content-type": kind})
    assert response.status_code == 415
    assert response.json()["error"]["code"] == "unsupported_media_type"


def test_json_with_a_charset_is_json(tiny_server: Server) -> None:
    kind = {"content-type": "Application/JSON; charset=utf-8"}
    assert tiny_server.http.post("/tokenize", content=b'{"prompt": "a"}', headers=kind).status_code == 200


def test_many_token_ids_keep_nobody_waiting(tiny_server: Server) -> None:
    body = json.dumps({"tokens": [5] * 3_000_000}).encode()
    done = threading.Event()

    def detokenize() -> None:
        response = tiny_server.http.post("/detokenize", content=body, headers={"content-type": "application/json"})
        assert response.status_code == 200
        assert len(response.json()["prompt"]) >= 3_000_000
        done.set()

    thread = threading.Thread(target=detokenize)
    thread.start()
    num_probes = 0
    with httpx.Client(base_url=tiny_server.url) as probes:
        while not done.is_set() and thread.is_alive():
            assert probes.get("/live").status_code == 200
            num_probes += 1
    thread.join()
    assert done.is_set()
    assert num_probes > 20, "the loop was blocked"


def test_an_answer_without_a_text_can_be_sent_back(tiny_server: Server) -> None:
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "And?"},
    ]
    assert tiny_server.post("/v1/chat/completions", messages=messages, max_tokens=1).status_code == 200
