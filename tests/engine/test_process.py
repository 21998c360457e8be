from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine_child import MAX_MODEL_LEN
from token_runner import expected_output, make_request

from sol.config import EngineConfig
from sol.engine.process import ProcessClient
from sol.engine.types import RequestOutput
from sol.errors import ConfigError, EngineDeadError, UnsupportedModelError

CHILD = str(Path(__file__).with_name("engine_child.py"))


@pytest.fixture(autouse=True)
def _private_tmp(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test leaves a directory, or a child, behind."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as directory:
        monkeypatch.setattr(tempfile, "tempdir", directory)
        monkeypatch.setenv("TMPDIR", directory)
        yield
        assert not sockets_directories()


def sockets_directories() -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob("sol-*"))


def start(mode: str = "slow", **config: object) -> ProcessClient:
    return ProcessClient(EngineConfig(**config), command=[sys.executable, CHILD, mode])  # type: ignore[arg-type]


@contextlib.contextmanager
def running(mode: str = "slow", **config: object) -> Iterator[ProcessClient]:
    client = start(mode, **config)
    try:
        yield client
    finally:
        client.close()
        assert not alive(client.pid)


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


def collect(client: ProcessClient, count: int) -> dict[str, RequestOutput]:
    """All outputs of `count` requests, each merged into one."""
    merged: dict[str, RequestOutput] = {}
    while sum(output.finish_reason is not None for output in merged.values()) < count:
        for output in client.receive().outputs:
            if output.request_id in merged:
                output.new_token_ids = merged[output.request_id].new_token_ids + output.new_token_ids
                before = merged[output.request_id].logprobs
                output.logprobs = None if output.logprobs is None else (before or []) + output.logprobs
            merged[output.request_id] = output
    return merged


def test_requests_cross_the_border_unchanged() -> None:
    requests = [
        make_request("plain", [1, 2, 3], max_tokens=9),
        make_request("seeded", [1, 2, 3], seed=77, choice_index=2, eos=True, max_tokens=60, min_tokens=3),
        make_request("full", list(range(40)), max_tokens=8, logprobs=3, stop_token_ids=[5, 6], logit_bias={3: -1.5}),
    ]
    with running() as client:
        assert client.info.model == "token-runner"
        assert client.info.max_model_len == MAX_MODEL_LEN
        client.add(requests)
        outputs = collect(client, 3)
    for request in requests:
        output = outputs[request.request_id]
        assert (output.new_token_ids, output.finish_reason) == expected_output(request, MAX_MODEL_LEN)
    logprobs = outputs["full"].logprobs
    assert logprobs is not None
    assert [entry.top[2][0] for entry in logprobs] == outputs["full"].new_token_ids
    assert outputs["plain"].first_token_time >= requests[0].arrival_time


def test_the_config_reaches_the_engine() -> None:
    with running(max_model_len=123, block_size=8) as client:
        assert (client.info.max_model_len, client.info.block_size) == (123, 8)


def test_abort_ends_a_request_and_spares_the_others() -> None:
    with running() as client:
        client.add([make_request("long", [1], max_tokens=None), make_request("short", [2], max_tokens=300)])
        client.receive()
        client.abort(["long", "nobody"])
        outputs = collect(client, 2)
        assert outputs["long"].finish_reason == "abort"
        assert outputs["short"].finish_reason == "length"


def test_one_unreadable_request_fails_alone() -> None:
    bad = make_request("bad", [1, 2])
    bad.prompt_token_ids = [1, 2.5]  # type: ignore[list-item]
    worse = make_request("worse", [1])
    worse.params.top_p = -3.0
    with running() as client:
        client.add([bad, make_request("good", [1, 2], max_tokens=3), worse])
        outputs = collect(client, 3)
    assert outputs["bad"].finish_reason == outputs["worse"].finish_reason == "error"
    assert "prompt_token_ids" in (outputs["bad"].error or "")
    assert "top_p" in (outputs["worse"].error or "")
    assert outputs["good"].finish_reason == "length"


def test_a_request_that_cannot_be_sent_is_the_callers_error() -> None:
    bad = make_request("bad", [1])
    bad.prompt_token_ids = [object()]  # type: ignore[list-item]
    with running() as client, pytest.raises(TypeError):
        client.add([bad])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_engine_is_noticed_by_a_blocked_receive(number: signal.Signals) -> None:
    with running() as client:
        errors: list[EngineDeadError] = []

        def receive() -> None:
            try:
                while True:
                    client.receive()
            except EngineDeadError as error:
                errors.append(error)

        thread = threading.Thread(target=receive)
        thread.start()
        client.add([make_request("endless", [1], max_tokens=None)])
        os.kill(client.pid, number)
        thread.join(20)
        assert not thread.is_alive()
        assert number.name in str(errors[0])
        for _ in range(2):
            with pytest.raises(EngineDeadError, match=number.name):
                client.receive()
        with pytest.raises(EngineDeadError, match=number.name):
            client.add([make_request("late", [1])])
        client.abort(["endless"])


def test_a_failing_step_fails_every_request_and_ends_the_process(capfd: pytest.CaptureFixture[str]) -> None:
    with running("failing") as client:
        client.add([make_request("a", [1], max_tokens=None), make_request("b", [2], max_tokens=None)])
        outputs = collect(client, 2)
        for output in outputs.values():
            assert output.finish_reason == "error"
            assert output.error == "the engine failed: ArithmeticError: out of luck"
        with pytest.raises(EngineDeadError, match="exit code 1"):
            client.receive()
    assert "Traceback" in capfd.readouterr().err


def test_output_of_the_child_goes_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    with running():
        pass
    out, err = capfd.readouterr()
    assert out == ""
    assert "what an engine prints" in err


def test_a_start_up_error_keeps_its_class() -> None:
    with pytest.raises(UnsupportedModelError, match="some/model is of no kind") as caught:
        start("unsupported", model="some/model")
    assert caught.value.param == "model"


def test_a_foreign_start_up_error_is_quoted(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(EngineDeadError, match="failed to start: ZeroDivisionError: no luck"):
        start("broken")
    assert "Traceback" in capfd.readouterr().err


def test_an_engine_that_dies_while_it_loads() -> None:
    with pytest.raises(EngineDeadError, match="exit code 7"):
        start("exits")


def test_a_program_that_is_no_engine() -> None:
    with pytest.raises(EngineDeadError, match="exit code 0"):
        ProcessClient(EngineConfig(), command=["/bin/true"])
    with pytest.raises(FileNotFoundError):
        ProcessClient(EngineConfig(), command=["/no/such/program"])


def test_a_socket_path_that_is_too_long(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(ConfigError, match="TMPDIR"):
        start()
    assert list(deep.iterdir()) == []


def test_close_wakes_receive_and_can_be_repeated() -> None:
    client = start()
    errors: list[EngineDeadError] = []

    def receive() -> None:
        with pytest.raises(EngineDeadError) as caught:
            client.receive()
        errors.append(caught.value)

    thread = threading.Thread(target=receive)
    thread.start()
    client.close()
    thread.join(20)
    assert not thread.is_alive()
    assert "closed" in str(errors[0])
    client.close()
    with pytest.raises(EngineDeadError, match="closed"):
        client.add([make_request("late", [1])])
    with pytest.raises(EngineDeadError, match="closed"):
        client.receive()
    client.abort(["late"])


def test_close_ends_an_engine_that_is_stuck_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sol.engine.process._ASK_SECONDS", 0.2)
    with running("stuck") as client:
        client.add([make_request("a", [1])])


def test_close_kills_an_engine_that_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sol.engine.process._ASK_SECONDS", 0.1)
    monkeypatch.setattr("sol.engine.process._TERMINATE_SECONDS", 0.1)
    with running() as client:
        os.kill(client.pid, signal.SIGSTOP)  # a stopped process takes no SIGTERM


def test_the_engine_ignores_ctrl_c() -> None:
    with running() as client:
        os.kill(client.pid, signal.SIGINT)
        client.add([make_request("a", [1], max_tokens=2)])
        assert collect(client, 1)["a"].finish_reason == "length"
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


@pytest.mark.parametrize("mode", ["slow", "loading", "importing"])
def test_the_engine_ends_with_its_parent(mode: str) -> None:
    with subprocess.Popen([sys.executable, CHILD, "parent", mode], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = wait_for_child(parent.pid)
        if mode == "slow":
            assert int(parent.stdout.readline()) == child  # the engine is ready
        elif mode == "loading":
            wait_until(lambda: not sockets_directories())  # both sides are connected
        else:
            wait_until(lambda: Path(tempfile.gettempdir(), "importing").exists())
        parent.send_signal(signal.SIGKILL)
    wait_until(lambda: not alive(child))


def test_a_signal_to_the_whole_group_leaves_nothing_behind() -> None:
    with subprocess.Popen([sys.executable, CHILD, "parent", "slow"], stdout=subprocess.PIPE, process_group=0) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        os.killpg(parent.pid, signal.SIGKILL)
    wait_until(lambda: not alive(child))


def wait_for_child(pid: int) -> int:
    children: list[str] = []

    def found() -> bool:
        children[:] = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return bool(children)

    wait_until(found)
    return int(children[0])


def test_the_engines_program_explains_itself() -> None:
    done = subprocess.run([sys.executable, CHILD, "slow"], input=b"", capture_output=True)
    assert done.returncode == 1
    assert b"Sol starts itself" in done.stderr
