"""`sol up`: engines and gateway from one file, as processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from sol.cli import build_parser
from sol.engines import free_port
from sol.errors import ConfigError, EngineStartError
from sol.gateway.config import make_config
from sol.gateway.up import plan, up

SIMULATE = f"{sys.executable} -m sol simulate --profile h100-8b --served-model-name toy"


def file_of(*engines: dict[str, Any], port: int = 0, **sections: Any) -> dict[str, Any]:
    names = [engine["name"] for engine in engines]
    models = [{"name": "toy", "engines": names}]
    return {"server": {"port": port}, "models": models, "engines": list(engines), **sections}


def simulated(name: str, **options: Any) -> dict[str, Any]:
    return {"name": name, "driver": "sol", "spec": {"command": SIMULATE}, **options}


@contextmanager
def running(directory: Path, config: dict[str, Any], *flags: str) -> Iterator[subprocess.Popen[str]]:
    path = directory / "gateway.yaml"
    path.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "sol", "up", "--config", str(path), "--log-dir", str(directory / "logs"), *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ready_url(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert "the gateway is ready at" in line, process.communicate()
    return line.split()[-1]


def ask(url: str, **options: Any) -> httpx.Response:
    body = {"model": "toy", "prompt": "Once upon a time", "max_tokens": 4, **options}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)


def test_engines_and_gateway_start_serve_recover_and_end_together(tmp_path: Path, talking_llama: Path) -> None:
    real = {"model": str(talking_llama), "max_model_len": 256, "max_num_seqs": 2, "gpu_memory_utilization": 0.05}
    config = {
        "server": {"port": 0},
        "models": [{"name": "toy", "engines": ["simulated"]}, {"name": "real", "engines": ["real"]}],
        "engines": [simulated("simulated"), {"name": "real", "driver": "sol", "spec": real}],
        "routing": {"health": {"interval": 0.2}},
    }
    with running(tmp_path, config) as process:
        url = ready_url(process)
        children = psutil.Process(process.pid).children(recursive=True)
        assert ask(url).json()["usage"]["completion_tokens"] == 4
        answer = ask(url, model="real", temperature=0)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == "real"
        assert "real is ready at" in (tmp_path / "logs" / "real.log").read_text()

        server = next(child for child in children if "simulate" in " ".join(child.cmdline()))
        server.kill()
        deadline = time.monotonic() + 120
        status = 0
        while status != 200 and time.monotonic() < deadline:
            status = ask(url).status_code
            time.sleep(0.1)
        assert status == 200, "it was started again, and the gateway found it"

        children += psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=60)
        assert process.returncode == 0, log
        assert "simulated has died (killed by SIGKILL)" in log
        assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


def test_the_gateway_drains_before_the_engines_end(tmp_path: Path) -> None:
    slow = f"{SIMULATE} --host 127.0.0.1 --step-seconds 0.05"
    with running(tmp_path, file_of(simulated("a", spec={"command": slow}))) as process:
        url = ready_url(process)
        body = {"model": "toy", "prompt": "x", "max_tokens": 40, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGINT)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert process.wait(timeout=60) == 0


def test_an_engine_that_does_not_start_ends_it_all(tmp_path: Path) -> None:
    broken = simulated("broken", spec={"command": f"{SIMULATE} --profile nothing"})
    with running(tmp_path, file_of(simulated("fine"), broken)) as process:
        output, log = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "ready" not in output
    assert "sol: error: broken did not start: it ended (exit code 2) before it was ready" in log
    assert "invalid choice: 'nothing'" in log


def test_ctrl_c_while_engines_load_ends_them(tmp_path: Path) -> None:
    loading = simulated("loading", spec={"command": f"{SIMULATE} --startup-seconds 600"})
    with running(tmp_path, file_of(loading)) as process:
        log = tmp_path / "logs" / "loading.log"
        for _ in range(600):
            if log.exists():
                break
            time.sleep(0.05)
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
        assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


def test_check_says_what_would_be_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    spec = {"model": "org/model", "tensor_parallel_size": 2, "env": {"CUDA_VISIBLE_DEVICES": "0,1"}}
    engine = {"name": "big", "driver": "vllm", "url": f"http://127.0.0.1:{port}", "spec": spec}
    (tmp_path / "gateway.yaml").write_text(yaml.safe_dump(file_of(engine)))
    args = build_parser().parse_args(["up", "--config", str(tmp_path / "gateway.yaml"), "--check"])
    assert args.run(args) == 0
    assert (
        f"big: CUDA_VISIBLE_DEVICES=0,1 vllm serve org/model --host 127.0.0.1 --port {port} --served-model-name toy "
        "--tensor-parallel-size 2\n"
    ) in capsys.readouterr().out
    args = build_parser().parse_args(["up", "--config", "x", "--start-timeout", "0"])
    with pytest.raises(ConfigError, match="--start-timeout must be more than 0"):
        args.run(args)


def test_names_urls_and_logs_of_a_plan(tmp_path: Path) -> None:
    config = file_of(
        {"name": "a/1", "driver": "vllm", "spec": {"model": "m"}},
        {"name": "a:1", "driver": "vllm", "spec": {"model": "m", "served_model_name": "own"}},
        {"name": "tgi", "driver": "tgi", "spec": {"model": "m"}},
        {"name": "named", "driver": "sglang", "served_name": "x", "spec": {"model": "m"}},
        {"name": "elsewhere", "driver": "vllm", "url": "http://10.0.0.1:8000"},
    )
    planned = plan(make_config(config, "test"), tmp_path)
    engines = planned.config.engines
    assert [engine.served_name for engine in engines] == ["toy", "own", None, "x", None]
    assert [engine.url for engine in engines[:4]] == [keeper.command.url for keeper in planned.keepers]
    assert engines[4].url == "http://10.0.0.1:8000"
    assert len({engine.url for engine in engines}) == 5
    names = [
        dict(zip(k.command.argv, k.command.argv[1:], strict=False)).get("--served-model-name") for k in planned.keepers
    ]
    assert names == ["toy", "own", None, "x"]
    assert len({keeper.service.log for keeper in planned.keepers}) == 4
    assert {keeper.service.log.parent for keeper in planned.keepers if keeper.service.log} == {tmp_path}


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"driver": "sol", "spec": {"model": "m", "modle": 1}}, "engines[e].spec: modle: there is no such option"),
        ({"driver": "sol", "spec": {"model": "m", "pipeline_parallel_size": 2}}, "engines[e]: Sol has nothing for"),
        ({"spec": {"model": "m"}}, "engines[e]: driver openai is any endpoint"),
        ({"driver": "sol", "url": "http://10.0.0.1:80", "spec": {"model": "m"}}, "started on this machine"),
        ({"driver": "sol", "url": "http://127.0.0.1", "spec": {"model": "m"}}, "not of the form"),
        ({"driver": "sol", "served_name": "x", "spec": {"model": "m", "served_model_name": "y"}}, "differ"),
    ],
)
def test_engines_that_cannot_be_started(engine: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(make_config(file_of({"name": "e", **engine}), "test"), tmp_path)
    assert message in caught.value.message
    assert (caught.value.param or "").startswith("engines[e]")


def test_two_engines_of_one_port(tmp_path: Path) -> None:
    engines = [{"name": n, "driver": "sol", "url": "http://127.0.0.1:8123", "spec": {"model": "m"}} for n in "ab"]
    with pytest.raises(ConfigError, match="has the port of another engine"):
        plan(make_config(file_of(*engines), "test"), tmp_path)


def test_a_busy_port_of_the_gateway_is_said_before_engines_load(tmp_path: Path) -> None:
    async def main() -> None:
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            planned = plan(make_config(file_of(simulated("a"), port=port), "test"), tmp_path / "logs")
            with pytest.raises(ConfigError, match="is in use"):
                await asyncio.to_thread(up, planned)

    asyncio.run(main())
    assert not (tmp_path / "logs").exists()


def test_up_as_a_function_raises_what_the_engine_s_start_raised(tmp_path: Path) -> None:
    planned = plan(make_config(file_of(simulated("a", spec={"command": "false {port}"})), "test"), tmp_path)
    with pytest.raises(EngineStartError, match="a did not start"):
        up(planned)
    assert os.listdir(tmp_path) == ["a.log"]
