"""The gateway's beginning and end: stages that fail, draining, the process and its signals."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_harness import CHAT, LAWS, Running, events, running, until

from sol.errors import ConfigError, RequestError
from sol.gateway.call import Call, Outcome
from sol.gateway.pipeline import Pipeline
from sol.simulate import EngineLaws
from sol.simulate.config import SimulateConfig
from sol.simulate.server import in_thread


class Step:
    """A stage that writes down what is done to it."""

    def __init__(self, name: str, log: list[str], *, enter: Any = None, leave: Any = None) -> None:
        self.name = name
        self._log = log
        self._enter, self._leave = enter, leave

    async def enter(self, call: Call) -> None:
        self._log.append(f"+{self.name}")
        if self._enter is not None:
            await self._enter()

    async def leave(self, call: Call, outcome: Outcome) -> None:
        self._log.append(f"-{self.name} {outcome.status}")
        if self._leave is not None:
            await self._leave()


def a_call() -> Call:
    path = "/v1/completions"
    return Call(id="x", path=path, method="POST", headers={}, body=b"{}", json={}, model="m", stream=False, arrived=0)


async def refuse() -> None:
    raise RequestError("no")


async def fail() -> None:
    raise RuntimeError("broken")


async def test_stages_are_left_in_reverse_whatever_happens() -> None:
    async def answer(call: Call) -> Outcome:
        return Outcome(status=200)

    log: list[str] = []
    pipeline = Pipeline([Step("a", log), Step("b", log, leave=fail), Step("c", log)])
    assert (await pipeline.run(a_call(), answer)).status == 200
    assert log == ["+a", "+b", "+c", "-c 200", "-b 200", "-a 200"]

    log.clear()
    pipeline = Pipeline([Step("a", log), Step("b", log, enter=refuse), Step("c", log)])
    with pytest.raises(RequestError):
        await pipeline.run(a_call(), answer)
    assert log == ["+a", "+b", "-b 400", "-a 400"]

    log.clear()
    pipeline = Pipeline([Step("a", log), Step("b", log, enter=lambda: asyncio.sleep(60))])
    task = asyncio.create_task(pipeline.run(a_call(), answer))
    await until(lambda: "+b" in log)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert log == ["+a", "+b", "-b 499", "-a 499"]


async def test_a_stage_that_is_cut_off_while_it_is_left_is_left_again() -> None:
    log: list[str] = []
    pauses = iter([60.0, 0.0])
    pipeline = Pipeline([Step("a", log), Step("b", log, leave=lambda: asyncio.sleep(next(pauses)))])

    async def answer(call: Call) -> Outcome:
        return Outcome(status=200)

    task = asyncio.create_task(pipeline.run(a_call(), answer))
    await until(lambda: "-b 200" in log)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert log == ["+a", "+b", "-b 200", "-b 200", "-a 200"]


async def test_stages_that_were_opened_are_closed_where_a_later_one_cannot_be() -> None:
    log: list[str] = []

    class Lasting(Step):
        async def start(self) -> None:
            log.append(f"start {self.name}")
            if self._enter is not None:
                await self._enter()

        async def close(self) -> None:
            log.append(f"close {self.name}")
            if self._leave is not None:
                await self._leave()

    pipeline = Pipeline([Lasting("a", log), Step("b", log), Lasting("c", log, enter=fail)])
    with pytest.raises(RuntimeError):
        await pipeline.start()
    assert log == ["start a", "start c", "close a"]
    log.clear()
    await Pipeline([Lasting("a", log), Lasting("b", log, leave=fail)]).close()
    assert log == ["close b", "close a"]


async def test_a_stage_that_fails_is_a_500_that_tells_nothing() -> None:
    async with running() as it:
        it.gateway.pipeline.stages = (*it.gateway.pipeline.stages, Step("bad", [], enter=fail))
        response = await it.http.post("/v1/chat/completions", json=CHAT)
        assert response.status_code == 500
        assert "broken" not in response.text


def stream(it: Running, max_tokens: int) -> asyncio.Task[httpx.Response]:
    body = {**CHAT, "stream": True, "max_tokens": max_tokens}
    return asyncio.create_task(it.http.post("/v1/chat/completions", json=body))


async def test_draining_lets_calls_end_and_takes_no_new_ones() -> None:
    async with running(laws={"step_seconds": 0.01}) as it:
        open_one = stream(it, 60)
        await until(lambda: it.engine("a").num_streaming == 1)
        it.server.stop()
        assert (await it.http.get("/live")).status_code == 200
        ready = await it.http.get("/ready")
        assert (ready.status_code, ready.json()["error"]["code"]) == (503, "draining")
        refused = await it.http.post("/v1/chat/completions", json=CHAT)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        assert not it.server.stopped.is_set()
        assert events((await open_one).content)[-1] == "[DONE]"
        await asyncio.wait_for(it.server.stopped.wait(), 30)


async def test_what_does_not_end_in_time_is_told_that_it_ends() -> None:
    async with running(laws={"step_seconds": 0.01}, server={"port": 0, "drain_seconds": 0.1}) as it:
        streamed = stream(it, 2000)
        whole = asyncio.create_task(it.http.post("/v1/chat/completions", json={**CHAT, "max_tokens": 2000}))
        await until(lambda: it.engine("a").in_flight == 2 and it.engine("a").num_streaming == 1)
        it.server.stop()
        await asyncio.wait_for(it.server.stopped.wait(), 30)
        await it.server.app.abort()
        received = events((await streamed).content)
        assert received[-1]["error"]["code"] == "draining"
        assert "[DONE]" not in received
        assert (await whole).status_code == 503
        await it.settled(2)
        await until(lambda: it.engines[0].service.num_open == 0)


async def test_a_port_that_is_taken_is_said_at_once() -> None:
    async with running() as it:
        port = int(it.server.url.rpartition(":")[2])
        with pytest.raises(ConfigError, match=f"server.port {port} is in use"):
            async with running(server={"port": port}):
                pass


def test_the_process_drains_on_sigterm(tmp_path: Path) -> None:
    laws = EngineLaws(**{**LAWS, "step_seconds": 0.01})
    with in_thread(SimulateConfig(port=0, served_model_names=("m",), laws=laws)) as engine:
        path = tmp_path / "gateway.yaml"
        path.write_text(f"models: [{{name: m, engines: [a]}}]\nengines: [{{name: a, url: '{engine.url}'}}]\n")
        command = [sys.executable, "-m", "sol", "gateway", "--config", str(path), "--port", "0"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            url = line.split(" at ")[1].split(": ")[0]
            body = {**CHAT, "stream": True, "max_tokens": 40}
            with (
                httpx.Client(timeout=30) as http,
                http.stream("POST", f"{url}/v1/chat/completions", json=body) as answer,
            ):
                pieces = answer.iter_bytes()
                received = next(pieces)
                process.send_signal(signal.SIGTERM)
                received += b"".join(pieces)
            assert received.endswith(b"data: [DONE]\n\n")
            _, errors = process.communicate(timeout=30)
            assert process.returncode == 0, errors
            assert "Traceback" not in errors
        finally:
            process.kill()
            process.wait()
