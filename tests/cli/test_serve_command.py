"""`sol serve` as a newcomer meets it: what it prints when it is ready works when it is pasted."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from pseudo_terminal import terminal

from sol.cli import build_parser, main
from sol.cli.serve import curl_line, python_snippet, server_config
from sol.errors import ConfigError
from sol.text.answer_format import REASONING_PARSERS, TOOL_PARSERS


def test_what_it_prints_works_as_printed(talking_llama: Path) -> None:
    words = (
        "serve",
        str(talking_llama),
        "--port",
        "0",
        "--served-model-name",
        'it\'s "mine"',
        "other",
        "--api-key",
        "s3cret",
    )
    with terminal(*words) as server:
        server.wait_for(r"http://127\.0\.0\.1:\d+ listens; loading ")
        server.wait_for(
            r"is ready at (http://127\.0\.0\.1:\d+) after [\d.]+ s: cpu, float32, up to 512 tokens a request"
        )
        shell = server.wait_for(r"In a shell:\s+(curl .*?)\r\n").split("In a shell:")[1].strip()
        python = server.wait_for(r'In Python:\s+(import .*?\["content"\]\)\r\n)'.replace(".*?", "(?:.|\\s)*?"))
        python = python.split("In Python:")[1].strip().replace("\r\n", "\n")
        done = subprocess.run([sys.executable, "-c", python], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
        if shutil.which("curl"):
            done = subprocess.run(shell, shell=True, capture_output=True, text=True, timeout=60, check=False)
            assert json.loads(done.stdout)["model"] == 'it\'s "mine"'
        assert "s3cret" in shell
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(30) == 0


def test_a_log_does_not_get_the_key(talking_llama: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "sol", "serve", str(talking_llama), "--port", "0", "--api-key", "s3cret"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    seen = ""
    while "print(json.load" not in seen:
        seen += process.stdout.readline()
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    seen += process.communicate(timeout=30)[0]
    assert process.returncode == 0
    assert "s3cret" not in seen
    assert seen.count("Bearer KEY") == 2


def test_without_keys_none_is_sent() -> None:
    assert "Authorization" not in curl_line("http://127.0.0.1:1", "m", None) + python_snippet("http://h:1", "m", None)


def test_a_busy_port_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 2
    assert re.fullmatch(rf"sol: error: port {port} is in use .*, or choose another\n", capsys.readouterr().err)


def test_a_model_that_is_not_there_ends_the_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(tmp_path), "--port", "0"]) == 2
    assert "sol: error: model" in capsys.readouterr().err


def test_a_model_that_is_to_call_tools_in_a_form_that_nobody_knows(
    talking_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(talking_llama), "--port", "0", "--enable-auto-tool-choice"]) == 2
    assert "tool-call-parser" in capsys.readouterr().err.replace("_", "-")


def test_parsers_of_answers_are_chosen_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = build_parser()
    words = ["--tool-call-parser", "llama3_json", "--enable-auto-tool-choice", "--reasoning-parser", "deepseek_r1"]
    config = server_config(parser.parse_args(["serve", *words]))
    assert (config.tool_call_parser, config.enable_auto_tool_choice) == ("llama3_json", True)
    assert config.reasoning_parser == "deepseek_r1"
    assert server_config(parser.parse_args(["serve"])).enable_auto_tool_choice is None
    (tmp_path / "a.json").write_text('{"tool_call_parser": "hermes", "enable_auto_tool_choice": false}')
    config = server_config(parser.parse_args(["serve", "--config", str(tmp_path / "a.json")]))
    assert (config.tool_call_parser, config.enable_auto_tool_choice) == ("hermes", False)
    for flag, known in (("--tool-call-parser", TOOL_PARSERS), ("--reasoning-parser", REASONING_PARSERS)):
        for name in ("auto", "none", *known):
            parser.parse_args(["serve", flag, name])
        with pytest.raises(SystemExit):
            parser.parse_args(["serve", flag, "other"])
        (tmp_path / "b.json").write_text(json.dumps({flag[2:].replace("-", "_"): "other"}))
        with pytest.raises(ConfigError, match="other"):
            server_config(parser.parse_args(["serve", "--config", str(tmp_path / "b.json")]))


def test_what_the_server_logs_is_on_stderr() -> None:
    program = (
        "import logging, sys, sol.server.app as app\n"
        "from sol.cli import main\n"
        "app.serve = lambda *args, **options: logging.getLogger('sol.server').info('drafted 5 tokens') or 0\n"
        "logging.getLogger('someone.else').info('chatter')\n"
        "sys.exit(main(['serve']))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d drafted 5 tokens\n", done.stderr)
