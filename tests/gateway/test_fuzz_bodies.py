"""Requests that nobody should send: each gets an answer that says what is wrong with it, never a 500, and leaves
nothing behind. Bodies that are almost right, bodies that are no JSON, bytes that are no HTTP, and what schemathesis
makes of the API's description."""

from __future__ import annotations

import json
import random
import re
import select
import socket
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
import pytest
import schemathesis
from api_description import DESCRIPTION
from gateway_thread import InThread, running_in_thread
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error

from sol.gateway.parsing import PATHS

FILTERS: Final[list[dict[str, Any]]] = [
    {"name": "size", "kind": "size", "max_bytes": 300_000, "max_messages": 50, "max_output_tokens": 10_000},
    {"name": "words", "kind": "words", "words": ["river god"], "direction": "both", "action": "redact"},
    {"name": "regex", "kind": "regex", "patterns": [r"\bproject-[0-9]{4}\b"], "direction": "both"},
    {"name": "pii", "kind": "pii", "direction": "both"},
    {"name": "injection", "kind": "injection", "shadow": True},
]
SECTIONS: Final[dict[str, Any]] = {
    "filters": FILTERS,
    "limits": {"default_tenant": {"requests_per_minute": 10**9, "tokens_per_minute": 10**12}},
    "prices": {"m": {"input": 1, "output": 2}},
    "routing": {
        "health": {"interval": 3600},  # who draws random numbers in another thread disturbs Hypothesis
        "tasks": [
            {"name": "code", "when": [{"contains": ["def "]}, {"pattern": "SELECT.*FROM"}], "drafters": ["ngram"]},
            {
                "name": "long",
                "when": [{"min_input_tokens": 1000, "headers": {"x-product": "digest"}}],
                "engines": ["b"],
            },
        ],
    },
}

nothing = st.none() | st.booleans()
numbers = st.integers() | st.integers(-(10**40), 10**40) | st.floats(allow_nan=False, allow_infinity=False)
words = st.text(max_size=20) | st.sampled_from(
    ["", "m", "alias", "river god", "project-1234", "\0", "\u200b", "😀", "def ", "4111 1111 1111 1111", "user", "text"]
)
junk = st.recursive(
    nothing | numbers | words,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=4),
    max_leaves=12,
)
tool_call = st.fixed_dictionaries({"function": st.fixed_dictionaries({"arguments": junk}) | junk})
message = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["system", "user", "assistant", "tool"]) | junk,
        "content": words | st.lists(st.fixed_dictionaries({"type": words, "text": junk}) | junk, max_size=3) | junk,
        "name": junk,
        "tool_calls": st.lists(tool_call, max_size=2) | junk,
        "tool_call_id": junk,
    },
)  # fmt: skip
FIELDS: Final[dict[str, st.SearchStrategy[Any]]] = {
    "messages": st.lists(message, max_size=4) | junk,
    "prompt": words | st.lists(st.integers(-5, 300_000), max_size=5) | st.lists(words, max_size=3) | junk,
    "input": words | st.lists(message, max_size=3) | junk,
    "tokens": st.lists(st.integers(-5, 70_000), max_size=5) | junk,
    "max_tokens": st.integers(-1, 20) | junk,
    "max_completion_tokens": st.integers(-1, 20) | junk,
    "max_output_tokens": junk,
    "n": st.integers(-1, 3) | junk,
    "best_of": st.integers(-1, 3) | junk,
    "stream": st.booleans() | junk,
    "stream_options": st.fixed_dictionaries(
        {}, optional={"include_usage": st.booleans() | junk, "continuous_usage_stats": st.booleans() | junk}
    )
    | junk,
    **dict.fromkeys(
        ("temperature", "top_p", "top_k", "stop", "seed", "logit_bias", "logprobs", "top_logprobs", "echo", "user",
         "response_format", "tools", "tool_choice", "functions", "documents", "chat_template", "priority",
         "service_tier", "ignore_eos", "min_tokens", "speculation", "metadata", "system", "instructions"),
        junk,
    ),
}  # fmt: skip
body = st.fixed_dictionaries(
    {"model": st.sampled_from(["m", "m", "m", "alias"]) | junk},
    optional=FIELDS,
)
header_values = st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=30)
headers = st.dictionaries(
    st.sampled_from(
        ["authorization", "x-request-id", "idempotency-key", "x-stainless-retry-count", "x-stainless-read-timeout",
         "x-request-timeout", "x-sol-task", "x-product", "content-type", "traceparent"]
    ),
    header_values | st.sampled_from(["0", "1", "-1", "1e308", "nan", "inf", "1e-9", "Bearer x"]),
    max_size=3,
)  # fmt: skip


@pytest.fixture(scope="module")
def front() -> Iterator[InThread]:
    with running_in_thread(2, laws={"step_seconds": 0.0002}, text={"output_tokens_mean": 4.0}, **SECTIONS) as front:
        yield front


@pytest.fixture(scope="module")
def http(front: InThread) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=front.url, timeout=20, verify=False) as client:
        yield client


def check(response: httpx.Response) -> None:
    """An answer, or an error in OpenAI's form that is the client's."""
    # 504: what was asked with a deadline of a moment.
    allowed = response.status_code < 500 or response.json()["error"]["code"] == "deadline_exceeded"
    assert allowed, (response.status_code, response.text)
    if response.status_code >= 400:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert response.content.endswith(b"data: [DONE]\n\n"), response.content[-300:]


def nothing_is_left(front: InThread) -> None:
    def look(it: Any) -> bool:
        return bool(it.server.app.num_open == 0 and not any(engine.in_flight for engine in it.gateway.fleet))

    for _ in range(2000):
        if front.look(look):
            break
    assert front.look(look)
    assert front.look(lambda it: [engine.breaker.num_opened for engine in it.gateway.fleet]) == [0, 0]


def post(http: httpx.Client, path: str, data: bytes, sent: dict[str, str]) -> httpx.Response:
    raw = [(name.encode(), value.strip().encode("latin-1")) for name, value in sent.items()]
    return http.post(path, content=data, headers=raw)


QUICK = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
LONG = settings(max_examples=2_000, deadline=None, suppress_health_check=list(HealthCheck))


def ask(front: InThread, http: httpx.Client, path: str, data: dict[str, Any], sent: dict[str, str]) -> None:
    check(post(http, path, json.dumps(data).encode("utf-8", "replace"), sent))


@QUICK
@given(path=st.sampled_from(sorted(PATHS)), data=body, sent=headers)
def test_bodies_that_are_almost_right(front: InThread, http: httpx.Client, path: str, data: Any, sent: Any) -> None:
    ask(front, http, path, data, sent)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@LONG
@given(path=st.sampled_from(sorted(PATHS)), data=body, sent=headers)
def test_many_bodies_that_are_almost_right(
    front: InThread, http: httpx.Client, path: str, data: Any, sent: Any
) -> None:
    ask(front, http, path, data, sent)


@QUICK
@given(data=body, seed=st.integers(0, 2**32))
def test_bodies_whose_bytes_were_changed(front: InThread, http: httpx.Client, data: Any, seed: int) -> None:
    random_ = random.Random(seed)
    spoilt = bytearray(json.dumps(data).encode())
    for _ in range(random_.randint(1, 4)):
        at = random_.randrange(len(spoilt) + 1)
        what = random_.random()
        if what < 0.4:
            spoilt[at : at + 1] = random_.randbytes(1)
        elif what < 0.7:
            del spoilt[at : at + random_.randint(1, 10)]
        else:
            spoilt[at:at] = random_.choice(
                [b'"', b"{", b"}", b"[", b"\\u", b"\xff", b"\0", b"1e999", b"NaN", b"\\ud800"]
            )
    check(post(http, "/v1/chat/completions", bytes(spoilt), {}))


def nested(depth: int) -> list[str]:
    return [
        '{"model":"m","messages":[{"role":"user","content":%s}]}' % ('[{"content":' * depth + '"x"' + "}]" * depth),
        '{"model":"m","messages":[{"role":"user","content":"x"}],"tools":%s}' % ("[" * depth + "]" * depth),
        '{"model":"m","prompt":%s}' % ("[" * depth + "]" * depth),
        '{"model":"alias","stream":true,"prompt":"x","user":%s}' % ('{"a":' * depth + "1" + "}" * depth),
        '{"model":"m","prompt":"x","response_format":%s}' % ('{"a":' * depth + "1" + "}" * depth),
    ]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize"])
def test_bodies_that_are_deep(front: InThread, http: httpx.Client, path: str) -> None:
    """Around whatever depth something gives up: the decoder, a filter, the encoder, the engine."""
    for depth in (*range(50, 1050, 50), 10_000):
        for text in nested(depth):
            check(post(http, path, text.encode(), {}))
    nothing_is_left(front)


@pytest.mark.parametrize(
    ("data", "param"),
    [
        (b"", None),
        (b"null", None),
        (b"[]", None),
        (b'{"model":"m"', None),
        (b'{"model":"m","prompt":"\\ud800"}', None),
        (b'{"prompt":"x"}', "model"),
        (b'{"model":7,"prompt":"x"}', "model"),
        (b'{"model":"' + b"m" * 600 + b'","prompt":"x"}', "model"),
        (b'{"model":"m","prompt":"x","stream":"yes"}', "stream"),
        (b'{"model":"m","prompt":"x","max_tokens":-1}', "max_tokens"),
        (b'{"model":"m","prompt":"x","max_tokens":1' + b"0" * 400 + b"}", "max_tokens"),
        (b'{"model":"m","prompt":"x","max_tokens":4,"n":1' + b"0" * 30 + b"}", "n"),
        (b'{"model":"m","prompt":"x","n":1' + b"0" * 30 + b"}", "n"),
        (b'{"model":"m","prompt":"x","stream":true,"stream_options":7}', "stream_options"),
        (b'{"model":"m","prompt":"x","stream_options":{"include_usage":true}}', "stream_options"),
        (b'{"model":"m","prompt":{}}', "prompt"),
    ],
)
def test_what_is_wrong_is_a_400_that_names_it(
    front: InThread, http: httpx.Client, data: bytes, param: str | None
) -> None:
    response = post(http, "/v1/completions", data, {"content-type": "application/json"})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert len(response.content) < 2000


def talk(front: InThread, data: bytes, wait: float = 10.0) -> bytes:
    """Send bytes to the port and read what comes; after `wait` seconds of silence, say that nothing more is sent."""
    address = urlsplit(front.url)
    assert address.hostname is not None
    with socket.create_connection((address.hostname, address.port or 80), timeout=10) as connection:
        try:
            connection.sendall(data)
            select.select([connection], [], [], wait)
            connection.shutdown(socket.SHUT_WR)
            parts = []
            while part := connection.recv(65536):
                parts.append(part)
        except ConnectionError:
            return b""
        return b"".join(parts)


BODY: Final = b'{"model":"m","prompt":"a","max_tokens":2}'
GOOD: Final = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%b"
) % (len(BODY), BODY)


def test_bytes_that_are_no_http(front: InThread, http: httpx.Client) -> None:
    assert talk(front, GOOD).startswith(b"HTTP/1.1 200 ")
    length = b"content-length: %d" % len(BODY)
    head, _, rest = GOOD.partition(length)
    strange = [
        b"", b"\r\n\r\n", b"\0" * 100, b"GET\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        head + b"content-length: -1" + rest, head + b"content-length: 1e3" + rest,
        head + length + b"\r\ncontent-length: 7" + rest, head + b"content-length: 99999999999999999999" + rest,
        head + b"content-length: 100" + rest,  # and then no more comes
        head + b"transfer-encoding: chunked" + rest, head + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        head + b"transfer-encoding: chunked\r\n" + length + rest,
        head + b"x-long: " + b"a" * 300_000 + b"\r\n" + length + rest,
        GOOD.replace(b"/v1/completions", b"/v1/%00%ff/../completions"), GOOD.replace(b"HTTP/1.1", b"HTTP/9.9"),
        GOOD.replace(b"POST", b"BREW"), GOOD.replace(b"POST", b"CONNECT"), GOOD.replace(b"host: x", b"h\xf6st: \xff"),
    ]  # fmt: skip
    random_ = random.Random(0)
    for _ in range(60):
        spoilt = bytearray(GOOD)
        for _ in range(random_.randint(1, 5)):
            spoilt[random_.randrange(len(spoilt))] = random_.randrange(256)
        strange.append(bytes(spoilt[: random_.choice([len(spoilt), random_.randrange(len(spoilt))])]))
    for data in strange:
        answer = talk(front, data, 0.01)
        statuses = re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)
        assert all(status[:1] in b"24" for status in statuses), (data[:200], answer[:300])
    assert http.get("/live").status_code == 200
    assert talk(front, GOOD).startswith(b"HTTP/1.1 200 ")
    nothing_is_left(front)


def test_paths_and_methods_that_there_are_not(front: InThread, http: httpx.Client) -> None:
    for path in ("/", "/v1", "/v1/chat/completions/", "/v1/models/none", "/metrics/..", "/%00", "/v1//completions"):
        for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
            check(http.request(method, path))
    for path in PATHS:
        assert http.get(path).status_code == 405
    for method in ("POST", "PUT", "DELETE"):
        assert http.request(method, "/v1/models").status_code == 405


schema = schemathesis.openapi.from_dict(DESCRIPTION)


@schema.parametrize()
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_what_schemathesis_makes_of_the_description(case: schemathesis.Case[Any], front: InThread) -> None:
    case.call_and_validate(base_url=front.url, checks=[not_a_server_error])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@schema.parametrize()
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
def test_much_of_what_schemathesis_makes_of_the_description(case: schemathesis.Case[Any], front: InThread) -> None:
    case.call_and_validate(base_url=front.url, checks=[not_a_server_error])


def test_nothing_is_left_of_all_this(front: InThread) -> None:
    nothing_is_left(front)
