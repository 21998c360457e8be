"""gateway.yaml: what it takes, and how it says what is wrong; keys; the command."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from sol.cli import main
from sol.errors import AuthenticationError, ConfigError, RequestError
from sol.gateway.auth import ANONYMOUS, Authenticator
from sol.gateway.config import KeyEntry, parse_config, read_config
from sol.gateway.parsing import make_call

GOOD = """
models:
  - name: llama
    aliases: [gpt-4o]
    engines: [a, b]
engines:
  - {name: a, url: "http://127.0.0.1:8000/", driver: vllm, api_key: "${SECRET_OF_A}", headers: {x-team: "${TEAM}-1"}}
  - {name: b, url: "http://127.0.0.1:8001", served_name: meta/llama}
keys:
  - {key_env: CLIENT_KEY, tenant: shop, models: [llama]}
"""


def test_a_file_is_read_with_what_the_environment_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_A", "s3cret")
    monkeypatch.setenv("TEAM", "blue")
    path = tmp_path / "gateway.yaml"
    path.write_text(GOOD)
    config = read_config(path, {"server": {"port": 0}})
    engine = config.engines[0]
    assert (engine.url, engine.api_key, engine.headers["x-team"]) == ("http://127.0.0.1:8000", "s3cret", "blue-1")
    assert config.server.port == 0
    assert "s3cret" not in repr(config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD, r"engines\[a\]\.api_key: the environment has no variable SECRET_OF_A; set it"),
        ("models: 3\nengines: []", "models: "),
        ("[]", "must hold sections"),
        ("a: [", "is not YAML"),
        ("models: []\nmodels: []", "'models' is there twice"),
        ("engines: [{name: a, url: http://x}]", "models: is missing"),
        (
            "models: [{name: m, engines: [b]}]\nengines: [{name: a, url: http://x}]",
            "there is no engine 'b'; there are a",
        ),
        ("models: [{name: m, engines: [a, a]}]\nengines: [{name: a, url: http://x}]", "'a' is there twice"),
        ("models: [{name: m, engines: [a]}]\nengines: [{name: a}]", "needs a url, or a spec"),
        ("models: [{name: m, engines: [a]}]\nengines: [{name: a, url: x}]", r"engines\[a\]\.url: must be a URL"),
        ('models: [{name: m, engines: [a]}]\nengines: [{name: a, url: "http://x:80;"}]', "must be a URL like"),
        ('models: [{name: m, engines: [a]}]\nengines: [{name: a, url: "http://x/?key=1"}]', "must be a URL like"),
        ("models: [{name: m, engines: [a]}]\nengines: [{name: a, url: http://x/v1}]", "without /v1 at the end"),
        (
            "models: [{name: m, engines: [a]}]\nengines: [{name: a, url: http://x, driver: vlm}]",
            r"engines\[a\]\.driver: .*'vllm'.*, not 'vlm'",
        ),
        (
            "models: [{name: m, engines: [a]}]\nengines: [{name: a, url: http://x, prot: 3}]",
            r"engines\[a\]\.prot: there is no such option",
        ),
        (
            "models: [{name: m, engines: [a]}]\nengines: [{name: a, url: http://x}]\nkeys: [{tenant: t}]",
            r"keys\[0\]: needs one of key_sha256, key_env and key",
        ),
        (
            "models: [{name: m, engines: [a]}]\nengines: [{name: a, url: http://x}]\nkeys: [{key: k, models: [x]}]",
            "there is no model 'x'",
        ),
        (
            "models: [{name: m, engines: [a]}]\nengines: [{name: a, url: http://x}]\n"
            "routing: {tasks: [{name: t, engines: [z]}]}",
            "there is no engine 'z'",
        ),
        (
            "models: [{name: m, engines: [a]}]\nengines: [{name: a, url: http://x}]\n"
            "routing: {tasks: [{name: t, drafters: [n], when: [{pattern: '('}]}]}",
            "is not a regular expression",
        ),
        (
            "models: [{name: m, engines: [a]}]\nengines: [{name: a, url: http://x}]\n"
            "routing: {tasks: [{name: t, drafters: [n], when: [{}]}]}",
            "a rule without a condition",
        ),
        (
            "models: [{name: m, engines: [a]}]\nengines: [{name: a, url: http://x}]\nserver: {port: 99999}",
            r"server\.port: .*, not 99999",
        ),
        (
            "models: [{name: m, engines: [a]}]\nengines: [{name: a, url: http://x, metrics_path: /m}]",
            "metrics_path: of the driver openai no metric's name is known",
        ),
        (
            "models: [{name: m, engines: [a]}]\nengines: [{name: a, url: http://x}]\n"
            "queue: {enabled: false}\nsla: {levels: [{deadline: 3}]}",
            "deadline is kept by the queue",
        ),
        (
            "models: [{name: m, engines: [a]}]\nengines: [{name: a, url: http://x}]\n"
            "queue: {enabled: false}\nclasses: {batch: {preempt: abort_and_retry}}",
            "classes: batch: preempt needs the queue",
        ),
        (
            "models: [{name: m, engines: [a]}]\nengines: [{name: a, url: http://x}]\n"
            "degradation: [{action: shed, when: {burn_rate: 2, kv_usage: 0.9}}]",
            "nobody will ever know burn_rate or kv_usage here .* there are utilisation, wait_seconds",
        ),
        (
            "models: [{name: m, engines: [a]}]\nengines: [{name: a, url: http://x}]\n"
            "sla: {levels: [{deadline: 3}]}\ndegradation: [{action: shed, when: {burn_rate: 2}}]",
            "nobody will ever know burn_rate here",
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_place_and_a_remedy(
    text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SECRET_OF_A", "TEAM"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=message) as caught:
        parse_config(text)
    assert caught.value.param is not None


async def test_keys_are_found_by_their_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "from-the-environment")
    digest = hashlib.sha256(b"hashed").hexdigest()
    keys = [
        KeyEntry(key_env="A_KEY", tenant="one"),
        KeyEntry(key_sha256=digest.upper(), tenant="two", id="second", limits="small"),
    ]
    authenticator = Authenticator(keys)
    first = await authenticator.authenticate({"authorization": "Bearer from-the-environment"})
    assert (first.tenant, first.key_id[:7]) == ("one", "sha256:")
    second = await authenticator.authenticate({"authorization": "bearer  hashed "})
    assert (second.tenant, second.key_id, second.limits) == ("two", "second", "small")
    for headers in ({}, {"authorization": "Basic aGFzaGVk"}, {"authorization": "Bearer "}, {"authorization": digest}):
        with pytest.raises(AuthenticationError):
            await authenticator.authenticate(headers)
    assert await Authenticator([]).authenticate({}) is ANONYMOUS
    with pytest.raises(ConfigError, match="the same key"):
        Authenticator([*keys, KeyEntry(key="hashed")])
    with pytest.raises(ConfigError, match="no variable NOT_THERE"):
        Authenticator([KeyEntry(key_env="NOT_THERE")])


def test_a_call_knows_what_its_request_says() -> None:
    def made(body: str, path: str = "/v1/chat/completions", **headers: str) -> Any:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        return make_call(path, names, body.encode(), call_id="x", arrived=100.0)

    one = made('{"model":"m","stream":true,"max_completion_tokens":7,"n":3}', x_stainless_read_timeout="60.0")
    assert (one.stream, one.output_tokens, one.deadline) == (True, 21, 160.0)
    assert made('{"model":"m"}', x_stainless_read_timeout="nan").deadline is None
    assert made('{"model":"m","prompt":["a","b"],"max_tokens":5}').output_tokens == 10
    assert made('{"model":"m","prompt":[1,2,3],"max_tokens":5}').output_tokens == 5
    assert made('{"model":"m","prompt":[1,2,3]}').input_tokens == 3
    texts = made(
        '{"model":"m","instructions":"be brief","messages":[{"role":"user","content":"hello"},{"role":"user","content":'
        '[{"type":"text","text":"there"},{"type":"image_url","image_url":{"url":"x"}}]}, 7, {"content": null}]}'
    )
    assert list(texts.text()) == ["be brief", "hello", "there"]
    texts.rewrite({**texts.json, "model": "other"})
    assert b'"other"' in texts.body
    for wrong in ("0", "-1", "x", "inf"):
        with pytest.raises(RequestError):
            made('{"model":"m"}', x_request_timeout=wrong)


def test_the_command_checks_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text("models: [{name: m, engines: [a]}]\nengines: [{name: a, url: http://127.0.0.1:1}]\n")
    assert main(["gateway", "--config", str(path), "--check"]) == 0
    assert "m on a; it asks for no key" in capsys.readouterr().out
    path.write_text("models: [{name: m, engines: [a]}]\nengines: [{name: a, spec: {model: x}}]\n")
    assert main(["gateway", "--config", str(path), "--check"]) == 2
    assert "`sol up` starts engines" in capsys.readouterr().err
    assert main(["gateway", "--config", str(tmp_path / "none.yaml")]) == 2
    assert "cannot be read" in capsys.readouterr().err
