"""Bytes that nobody should send to a server: an answer that says what is wrong or a closed connection, never a 500, and
nothing left behind. benchmarks/server_fuzz.py sends more of them."""

from __future__ import annotations

import json
import random
import re
import socket
import sys
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from running_server import KEY, Server

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from fuzz_seeds import BODIES, GRAMMARS, WORDS
from fuzz_targets import mutate

ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize")
BODY = b'{"prompt":"a","max_tokens":2}'
GOOD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"authorization: Bearer %b\r\ncontent-length: %d\r\n\r\n%b"
) % (KEY.encode(), len(BODY), BODY)


def check(response: httpx.Response) -> None:
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert len(response.content) < 4000


def test_bodies_whose_bytes_were_changed(short_server: Server) -> None:
    random_ = random.Random(0)
    words = WORDS["bodies"] + WORDS["grammars"]
    bodies = [(ROUTES[int(body[:1])], body[1:].replace(b'"m"', b'"tiny"')) for body in BODIES]
    for grammar in GRAMMARS[:4]:
        fields = {"prompt": "x", "max_tokens": 9, "guided_json": json.loads(grammar[1:])}
        bodies.append((ROUTES[1], json.dumps(fields).encode()))
    answered = 0
    for number in range(400):
        path, data = random_.choice(bodies)
        if number >= 20:
            data = mutate(random_, data, words, [body for _, body in bodies])
        response = short_server.http.post(path, content=data, headers={"content-type": "application/json"})
        check(response)
        answered += response.status_code == 200
    assert answered > 10
    short_server.wait_until_idle()


def talk(server: Server, data: bytes) -> bytes:
    """Send bytes, say that nothing more is sent, and read what comes."""
    address = urlsplit(server.url)
    assert address.hostname is not None
    with socket.create_connection((address.hostname, address.port or 80), timeout=60) as connection:
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            parts = []
            while part := connection.recv(65536):
                parts.append(part)
        except ConnectionError:
            return b""
        return b"".join(parts)


def test_bytes_that_are_no_http(short_server: Server) -> None:
    length = b"content-length: %d" % len(BODY)
    head, _, rest = GOOD.partition(length)
    strange = [
        b"", b"\r\n\r\n", b"\0" * 100, b"GET\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        head + b"content-length: -1" + rest, head + b"content-length: 1e3" + rest,
        head + length + b"\r\ncontent-length: 7" + rest, head + b"content-length: 99999999999999999999" + rest,
        head + b"content-length: 100" + rest,
        head + b"transfer-encoding: chunked" + rest, head + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        head + b"transfer-encoding: chunked\r\n" + length + rest,
        head + b"x-long: " + b"a" * 300_000 + b"\r\n" + length + rest,
        GOOD.replace(b"/v1/completions", b"/v1/%00%ff/../completions"), GOOD.replace(b"HTTP/1.1", b"HTTP/9.9"),
        GOOD.replace(b"POST", b"BREW"), GOOD.replace(b"POST", b"CONNECT"), GOOD.replace(b"host: x", b"h\xf6st: \xff"),
        GOOD.replace(b"host: x", b"x-request-id: \xff\x01"), GOOD.replace(b"host: x", b"x-request-deadline-ms: \xff"),
    ]  # fmt: skip
    random_ = random.Random(0)
    for _ in range(60):
        spoilt = bytearray(GOOD)
        for _ in range(random_.randint(1, 5)):
            spoilt[random_.randrange(len(spoilt))] = random_.randrange(256)
        strange.append(bytes(spoilt[: random_.choice([len(spoilt), random_.randrange(len(spoilt))])]))
    for data in strange:
        answer = talk(short_server, data)
        statuses = re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)
        assert all(status[:1] in b"24" for status in statuses), (data[:200], answer[:300])
    assert short_server.http.get("/live").status_code == 200
    assert short_server.post("/v1/completions", prompt="a", max_tokens=2).status_code == 200
    short_server.wait_until_idle()
    assert short_server.http.get("/load").json() == {"server_load": 0}
