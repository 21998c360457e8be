"""Command lines as people write them, and where their servers will listen."""

from __future__ import annotations

import shutil
import sys

import pytest

from sol.cli import build_parser
from sol.engines import command_from_text
from sol.engines import commands as commands_module
from sol.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "added", "engine"),
    [
        ("sol serve --speculation off", ["--host", "127.0.0.1", "--port", "9000"], "sol"),
        ("/opt/venv/bin/sol simulate", ["--host", "127.0.0.1", "--port", "9000"], "sol"),
        ("python -m sol serve m", ["--host", "127.0.0.1", "--port", "9000"], "sol"),
        ("vllm serve org/model", ["--host", "127.0.0.1", "--port", "9000"], "vllm"),
        ("python3 -m vllm.entrypoints.openai.api_server", ["--host", "127.0.0.1", "--port", "9000"], "vllm"),
        ("python -m sglang.launch_server --model-path m", ["--host", "127.0.0.1", "--port", "9000"], "sglang"),
        ("text-generation-launcher --model-id m", ["--hostname", "127.0.0.1", "--port", "9000"], "tgi"),
        ("trtllm-serve m --backend pytorch", ["--host", "127.0.0.1", "--port", "9000"], "tensorrt-llm"),
        ("numactl -N 0 taskset -c 0 llama-server -m m.gguf", ["--host", "127.0.0.1", "--port", "9000"], "llama.cpp"),
    ],
)
def test_a_known_engine_is_told_where_to_listen(
    text: str, added: list[str], engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    command = command_from_text(text, port=9000)
    assert list(command.argv) == [*text.split(), *added]
    assert command.url == "http://127.0.0.1:9000"
    assert command.engine == engine
    assert command.ready_path == "/health"


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("vllm serve m --port 8123", "http://127.0.0.1:8123"),
        ("vllm serve m --port=8123 --host=0.0.0.0", "http://localhost:8123"),
        ("llama-server --host ::1 --port 1 --port 8123", "http://[::1]:8123"),
        ("text-generation-launcher -p 8123 --hostname 127.0.0.2", "http://127.0.0.2:8123"),
    ],
)
def test_what_the_command_says_stays(text: str, url: str) -> None:
    command = command_from_text(text)
    assert command.url == url
    assert list(command.argv[: len(text.split())]) == text.split()
    assert command.argv.count("--port") + command.argv.count("--port=8123") == text.count("--port")


def test_without_a_port_a_free_one_is_taken_and_the_result_is_a_command_that_sol_understands() -> None:
    command = command_from_text("X=1 Y='a b' sol serve 'a model' --speculation off")
    args = build_parser().parse_args(command.argv[command.argv.index("serve") :])
    assert command.url == f"http://{args.host}:{args.port}"
    assert args.model == "a model"
    assert command.env == {"X": "1", "Y": "a b"}
    assert command.text.startswith("X=1 Y='a b' ")
    assert "'a model'" in command.text


def test_sol_is_found_where_its_environment_is_not_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    command = command_from_text("taskset -c 0 sol serve", port=9000)
    assert command.argv[:6] == ("taskset", "-c", "0", sys.executable, "-m", "sol")


def test_any_other_program_says_where_its_port_goes() -> None:
    command = command_from_text("my-server --listen {host}:{port} --model m", port=9000)
    assert command.argv == ("my-server", "--listen", "127.0.0.1:9000", "--model", "m")
    assert command.url == "http://127.0.0.1:9000"
    assert command.engine is None
    assert command.ready_path == "/v1/models"
    assert command_from_text("docker run -p {port}:80 image vllm serve m", port=9000).engine == "vllm"


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("my-server --model m", {}, "write {port} where its port goes"),
        ("", {}, "names no program"),
        ("A=1 B=2", {}, "names no program"),
        ("sol serve 'open", {}, "cannot be split"),
        ("sol serve --port x", {}, "--port x in the command is no port"),
        ("sol serve --port 0", {}, "--port 0 in the command is no port"),
        ("sol serve --port", {}, "is no port"),
        ("sol serve --port 70000", {}, "1 to 65535"),
        ("vllm serve --port 8000", {"port": 9000}, "but port 9000 was wanted"),
        ("vllm serve --host 0.0.0.0", {"host": "127.0.0.1"}, "but 127.0.0.1 was wanted"),
    ],
)
def test_commands_that_cannot_work(text: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        command_from_text(text, **options)  # type: ignore[arg-type]
    assert message in caught.value.message


def test_a_service_of_a_command_knows_where_to_look() -> None:
    command = command_from_text("A=1 vllm serve m", port=9000)
    service = command.service(name="b")
    assert (service.command, service.url, service.ready_path) == (command.argv, command.url, "/health")
    assert service.name == "b"


def test_flags_of_a_wrapper_are_not_the_server_s() -> None:
    found = commands_module.find_program(["wrapper", "--port", "1", "vllm", "serve", "m"])
    assert found is not None
    assert found[1] == 5
    assert command_from_text("wrapper --port 1 vllm serve m", port=9000).url == "http://127.0.0.1:9000"


def test_keys_are_not_shown() -> None:
    text = (
        "HF_TOKEN=a A_KEY=b MODE=c vllm serve m --api-key d e --hf-token=f --max-num-batched-tokens 8k "
        "--max_num_tokens=10 --ssl-keyfile g --password 'h i' --seed 3"
    )
    command = command_from_text(text, port=9000)
    assert command.env == {"HF_TOKEN": "a", "A_KEY": "b", "MODE": "c"}
    assert command.argv[3:6] == ("--api-key", "d", "e")
    assert command.text == (
        "HF_TOKEN=*** A_KEY=*** MODE=c vllm serve m --api-key *** *** --hf-token=*** --max-num-batched-tokens 8k "
        "--max_num_tokens=10 --ssl-keyfile g --password *** --seed 3 --host 127.0.0.1 --port 9000"
    )


def test_keys_that_a_container_is_given_are_not_shown() -> None:
    command = command_from_text(
        "docker run -e HF_TOKEN=one --env=API_KEY=two --env LEVEL=debug -p {port}:8000 image --model a/b --key=three"
    )
    assert not [word for word in ("one", "two", "three") if word in command.text]
    assert "HF_TOKEN=***" in command.text
    assert "--env=API_KEY=***" in command.text
    assert "LEVEL=debug" in command.text
    assert "-p" in command.text
    assert "image --model a/b" in command.text
