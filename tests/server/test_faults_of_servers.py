"""What has broken other servers in production, as it looks from a client's side: a probe that waits for the engine, bad
requests that leave something behind, work that nobody waits for, metrics that clients can grow."""

from __future__ import annotations

import secrets
import threading
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from running_server import KEY, Server

LONG: dict[str, Any] = {"prompt": "Once", "max_tokens": 40, "ignore_eos": True}
GUARD = 60

VLLM_NAMES = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "prompt_tokens",
    "generation_tokens",
    "request_success",
    "iteration_tokens_total",
    "num_preemptions",
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos",
)
"""Which dashboards, autoscalers and the Gateway API's inference extension read; counters without `_total`."""


class HeldStream:
    """A stream whose engine is suspended, as if a step took very long. Both go on at the end of the block."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._engine = server.engine()
        self._lines: list[str] = []
        self._thread = threading.Thread(target=self._read)

    def _read(self) -> None:
        with self._server.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
            self._lines.extend(line for line in response.iter_lines() if line)

    def __enter__(self) -> HeldStream:
        self._engine.suspend()
        self._thread.start()
        wait_for_load(self._server, 1)
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.resume()
        self._thread.join(GUARD)
        assert self._lines[-1] == "data: [DONE]"


def wait_for_load(server: Server, count: int) -> None:
    server.wait_until(lambda _: server.http.get("/load").json() == {"server_load": count})


def series(server: Server) -> set[str]:
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    return {f"{sample.name} {sorted(sample.labels.items())}" for family in families for sample in family.samples}


def test_the_names_that_others_read(tiny_server: Server) -> None:
    families = {family.name: family for family in text_string_to_metric_families(tiny_server.http.get("/metrics").text)}
    assert {f"vllm:{name}" for name in VLLM_NAMES} <= families.keys()
    for name in VLLM_NAMES:
        assert all(sample.labels["model_name"] == "tiny" for sample in families[f"vllm:{name}"].samples), name


def test_nothing_but_work_waits_for_a_long_step(tiny_server: Server) -> None:
    """Others' probes waited behind a long prefill, and healthy servers were killed."""
    with HeldStream(tiny_server):
        for path in ("/live", "/ready", "/health", "/ping", "/version", "/load", "/metrics", "/v1/models"):
            assert tiny_server.http.get(path).status_code == 200, path
        assert tiny_server.http.get("/load").json() == {"server_load": 1}
        tokens = tiny_server.post("/tokenize", prompt="Once upon a time").json()
        assert tokens["count"] > 0
        # What is wrong is said at once, too, and not when its turn would have come.
        too_long = tiny_server.post("/v1/completions", prompt=[5] * (tokens["max_model_len"] + 1))
        assert (too_long.status_code, too_long.json()["error"]["code"]) == (400, "context_length_exceeded")
        unknown = tiny_server.post("/v1/completions", prompt="a", model="other")
        assert unknown.status_code == 404
    tiny_server.wait_until_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_a_retry_after_a_time_out_of_the_clients_own_is_all_that_runs(tiny_server: Server, stream: bool) -> None:
    before = tiny_server.wait_until_idle()
    body = {"prompt": "Twice", "max_tokens": 3, "ignore_eos": True, "stream": stream}
    with HeldStream(tiny_server):
        for _ in range(2):
            with pytest.raises(httpx.ReadTimeout):
                tiny_server.http.post("/v1/completions", json=body, timeout=0.05)
        # The server has noticed, though its engine says nothing: who holds the line is the first stream alone.
        wait_for_load(tiny_server, 1)
    assert tiny_server.http.post("/v1/completions", json=body).status_code == 200
    after = tiny_server.wait_until_idle()
    grown = {key: after[key] - before.get(key, 0) for key in after}
    assert grown["vllm:request_success_total abort"] == 2
    assert grown["vllm:request_success_total length"] == 2
    assert grown["vllm:generation_tokens_total"] == LONG["max_tokens"] + 3


def _bad_requests(server: Server) -> list[httpx.Response]:
    """Some of everything that clients do wrong, with names that nobody has sent before."""
    name = secrets.token_hex(8)
    post, get = server.post, server.http.get
    completions, chat = "/v1/completions", "/v1/chat/completions"
    return [
        post(completions, prompt="a", model=name),
        post(completions, prompt="a", **{f"field_{name}": 1}),
        post(completions, prompt="a", temperature=-1),
        post(completions, prompt=[10**9]),
        post(completions, prompt="a", user=name, cache_salt=""),
        post(chat, messages=[{"role": name, "content": "a"}]),
        post(chat, messages=[]),
        post(f"/v1/{name}"),
        get(f"/{name}?{name}={name}"),
        get("/v1/responses/" + name),
        get("/v1/models", headers={"authorization": f"Bearer {name}"}),
        get(completions),
        server.http.request("DELETE", completions),
        server.http.post(completions, content=b"{", headers={"content-type": "application/json"}),
        server.http.post(completions, content=b"a", headers={"content-type": f"text/{name}"}),
    ]


def test_what_clients_do_wrong_leaves_nothing_behind(tiny_server: Server) -> None:
    """Others' breakers opened, their metrics grew by what clients made up, and requests that were refused stayed."""
    refused = _bad_requests(tiny_server)
    assert [response.status_code for response in refused if not 400 <= response.status_code < 500] == []
    for response in refused:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}, response.request.url
        assert "retry-after" not in response.headers
    known = series(tiny_server)
    for _ in range(20):
        _bad_requests(tiny_server)
    assert series(tiny_server) == known
    for path in ("/live", "/ready"):
        assert httpx.get(tiny_server.url + path).status_code == 200
    tiny_server.wait_until_idle()
    assert tiny_server.http.get("/load").json() == {"server_load": 0}
    assert tiny_server.post("/v1/completions", prompt="a", max_tokens=1).status_code == 200


def test_errors_that_a_client_should_retry_say_when(tiny_server: Server) -> None:
    """503 is "no capacity now": OpenAI's client obeys `retry-after`, and gives up on waits of more than two minutes."""
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(tiny_server.post("/v1/completions", prompt="a", max_tokens=1))

    with HeldStream(tiny_server):
        waiting = [threading.Thread(target=ask) for _ in range(2)]
        for thread in waiting:
            thread.start()
        wait_for_load(tiny_server, 3)
        refused = tiny_server.post("/v1/completions", prompt="a", max_tokens=1)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
        assert 1 <= int(refused.headers["retry-after"]) <= 120
        assert refused.headers["x-request-id"]
    for thread in waiting:
        thread.join(GUARD)
    assert [answer.status_code for answer in answers] == [200, 200]
    assert KEY not in refused.text
