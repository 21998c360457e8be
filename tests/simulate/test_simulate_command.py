"""`sol simulate`: options from profiles, files and flags, and the process's life."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from sol.cli import build_parser, main
from sol.cli.simulate import chosen_config
from sol.errors import ConfigError
from sol.simulate import PROFILES, profile
from sol.simulate.config import SimulateConfig
from sol.simulate.server import in_thread

PAGE = (Path(__file__).parents[2] / "docs" / "measure.md").read_text()


def chosen(*words: str) -> SimulateConfig:
    return chosen_config(build_parser().parse_args(["simulate", *words]))


def test_flags_stand_above_a_file_and_a_file_above_the_profile(tmp_path: Path) -> None:
    plain = chosen()
    assert plain == SimulateConfig(laws=profile("h100-8b"))
    file = tmp_path / "options.yaml"
    file.write_text(
        "profile: cpu-small\nstep-seconds: 0.5\nmax_num_seqs: 3\nport: 9\nserved_model_name: x\n"
        "output_tokens_mean: 40\ncontext_token_seconds: 4e-8\n"
        "faults:\n  - {kind: stall, start: 3, seconds: 1}\n"
    )
    config = chosen("--config", str(file), "--max-num-seqs", "4", "--no-enable-prefix-caching",
                    "--fault", '{"kind": "error", "status": 503}')  # fmt: skip
    expected = profile(
        "cpu-small", step_seconds=0.5, context_token_seconds=4e-8, max_num_seqs=4, enable_prefix_caching=False
    )
    assert config.laws == expected
    assert (config.port, config.served_model_names, config.text.output_tokens_mean) == (9, ("x",), 40)
    assert [fault.kind for fault in config.faults] == ["stall", "error"]
    assert chosen("--config", str(file), "--profile", "fast").laws.num_blocks == PROFILES["fast"]["num_blocks"]
    more = tmp_path / "faults.json"
    more.write_text(json.dumps([{"kind": "refuse", "start": 1}]))
    assert chosen("--faults", str(more)).faults[0].kind == "refuse"
    assert chosen("--max-model-len", "4K", "--noise", "lognormal").laws.max_model_len == 4096
    assert chosen("--served-model-name", "a", "b").served_model_names == ("a", "b")


def test_every_profile_can_be_run() -> None:
    for name in PROFILES:
        assert profile(name).expected_e2e(100, 100) > profile(name).expected_ttft(100) > 0


@pytest.mark.parametrize(
    ("content", "param"),
    [
        ("port: high", "port"),
        ("prot: 1", "prot"),
        ("profile: [a]", "profile"),
        ("profile: huge", "profile"),
        ("step_seconds: fast", "step_seconds"),
        ("near_tie_rate: 2", "near_tie_rate"),
        ("served_model_name: []", "served_model_name"),
        ("faults: {kind: stall}", "faults"),
        ("faults: [{kind: flood}]", "kind"),
        ("drain_seconds: -1", "drain_seconds"),
        ("host: ''", "host"),
        ("- a", "config"),
        ("a: [", "config"),
    ],
)
def test_a_file_that_cannot_work_is_refused_by_name(tmp_path: Path, content: str, param: str) -> None:
    file = tmp_path / "options.yml"
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        chosen("--config", str(file))
    assert caught.value.param == param


def test_files_that_are_not_there_or_not_json_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--config", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml cannot be read" in capsys.readouterr().err
    (tmp_path / "bad.json").write_text("{")
    assert main(["simulate", "--faults", str(tmp_path / "bad.json")]) == 2
    assert "bad.json is not JSON" in capsys.readouterr().err


def test_a_busy_port_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        assert main(["simulate", "--port", str(port)]) == 2
    assert f"port {port} is in use" in capsys.readouterr().err


def test_it_runs_in_a_thread_for_who_has_no_event_loop() -> None:
    config = SimulateConfig(port=0)
    with in_thread(config) as server, in_thread(config) as other:
        assert json.load(urllib.request.urlopen(f"{server.url}/health")) == {"status": "ok"}
        assert server.url != other.url
        with (
            pytest.raises(ConfigError, match="in use"),
            in_thread(SimulateConfig(port=int(server.url.rpartition(":")[2]))),
        ):
            pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))


def test_what_it_prints_works_as_printed_and_sigterm_lets_streams_end() -> None:
    words = ["--port", "0", "--profile", "fast", "--step-seconds", "0.01", "--control-port", "0"]
    with subprocess.Popen(
        [sys.executable, "-m", "sol", "simulate", *words], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            match = re.fullmatch(r"simulated is simulated at (\S+); faults are set at (\S+)/simulate/faults\n", first)
            assert match is not None
            url, control = match.groups()
            process.stdout.readline()
            curl = process.stdout.readline()
            body: dict[str, Any] = json.loads(curl.partition("-d '")[2].rstrip()[:-1])
            request = urllib.request.Request(
                f"{url}/v1/completions", json.dumps({**body, "max_tokens": 40, "ignore_eos": True}).encode()
            )
            with urllib.request.urlopen(request, timeout=30) as response:
                assert response.readline().startswith(b"data: {")
                process.send_signal(signal.SIGTERM)
                assert response.read().endswith(b"data: [DONE]\n\n")
            assert process.wait(30) == 0
            assert control != url
        finally:
            process.kill()


def test_connections_break_in_the_process_that_users_run() -> None:
    """The command's event loop is uvloop, whose sockets and transports are its own."""
    with subprocess.Popen(
        [sys.executable, "-m", "sol", "simulate", "--port", "0", "--control-port", "0", "--fault",
         '{"kind": "reset", "after_events": 1, "count": 1}'],
        stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            words = process.stdout.readline().split()
            url, faults = words[4].rstrip(";"), words[-1]
            port = int(url.rpartition(":")[2])
            body = b'{"prompt": "x", "stream": true, "max_tokens": 3}'
            request = b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(request)
                with pytest.raises(ConnectionResetError):
                    receive_all(client)
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(request)
                assert receive_all(client, until=b"[DONE]").count(b"data: {") == 3
                set_fault(faults, b'{"kind": "crash"}')
                with pytest.raises(ConnectionResetError):
                    receive_all(client)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port))
            urllib.request.urlopen(urllib.request.Request(faults, method="DELETE"))
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(request)
                assert receive_all(client, until=b"[DONE]").count(b"data: {") == 3
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()


def set_fault(url: str, body: bytes) -> None:
    urllib.request.urlopen(url, body).close()


def receive_all(client: socket.socket, until: bytes | None = None) -> bytes:
    client.settimeout(30)
    received = b""
    while until is None or until not in received:
        more = client.recv(65536)
        if not more:
            break
        received += more
    return received


def test_a_process_that_hangs_ends_with_the_second_signal() -> None:
    words = ["--port", "0", "--drain-seconds", "1000", "--fault", '{"kind": "stall"}']
    with subprocess.Popen(
        [sys.executable, "-m", "sol", "simulate", *words], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[4].rstrip(";")
            with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as client:
                body = b'{"prompt": "x"}'
                client.sendall(b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
                while json.load(urllib.request.urlopen(f"{url}/simulate/state"))["num_open"] == 0:
                    pass
                process.send_signal(signal.SIGINT)
                with pytest.raises(subprocess.TimeoutExpired):
                    process.wait(0.3)
                process.send_signal(signal.SIGINT)
                assert b"503" in client.recv(65536)
            assert process.wait(30) == 0
        finally:
            process.kill()


def test_flags_and_documentation_agree() -> None:
    parser = build_parser()
    subparsers = next(action for action in parser._actions if hasattr(action, "choices") and action.choices)
    assert subparsers.choices is not None
    known = {
        flag
        for action in subparsers.choices["simulate"]._actions
        for flag in action.option_strings
        if flag.startswith("--") and not flag.startswith("--no-")
    }
    section = PAGE.partition("## A server with known latencies")[2].partition("\n## ")[0]
    documented = set(re.findall(r"`(--[a-z0-9-]+)`", section))
    assert known - documented == {"--help"}
    assert documented <= known
    for name in PROFILES:
        assert f"`{name}`" in section
