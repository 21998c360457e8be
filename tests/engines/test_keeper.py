"""Servers that are kept running: restarts, pauses, and who may start beside whom."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from sol.engines import ServerCommand, Service, free_port
from sol.engines.keeper import Keeper, start_all, start_groups, stop_all
from sol.errors import EngineStartError

SERVER = """
import http.server, pathlib, sys, time
port, runs, healthy = int(sys.argv[1]), pathlib.Path(sys.argv[2]), int(sys.argv[3])
with runs.open("a") as file: file.write("x")
if len(runs.read_text()) > healthy: sys.exit("no more")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self): self.send_response(200); self.end_headers()
    def log_message(self, *_): pass
print("serves", flush=True)
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
"""Starts as often as its third argument says; then it ends at once."""


def keeper(runs: Path, *, healthy: int = 99, env: dict[str, str] | None = None, log: Path | None = None) -> Keeper:
    port = free_port()
    argv = (sys.executable, "-c", SERVER, str(port), str(runs), str(healthy))
    command = ServerCommand(argv=argv, url=f"http://127.0.0.1:{port}", engine=None, env=env or {})
    return Keeper(command, name=runs.name, log=log, start_timeout=30, first_pause=0.01)


async def soon(true: Callable[[], bool]) -> None:
    for _ in range(1000):
        if true():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it did not come true")


async def test_one_that_is_killed_is_started_again_on_its_port(tmp_path: Path) -> None:
    kept = keeper(tmp_path / "a", log=tmp_path / "a.log")
    await kept.start()
    first = kept.service.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await soon(lambda: kept.num_restarts == 1 and (tmp_path / "a.log").read_text() == "serves\nserves\n")
    assert kept.service.pid != first
    assert kept.service.url == kept.command.url
    await kept.stop()
    assert not kept.service.running
    assert (tmp_path / "a").read_text() == "xx"


async def test_one_that_no_longer_starts_is_tried_again_with_growing_pauses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = keeper(tmp_path / "a", healthy=1)
    await kept.start()
    assert kept.service.pid is not None
    os.kill(kept.service.pid, signal.SIGKILL)
    await soon(lambda: kept.num_restarts >= 3)
    await kept.stop()
    starts = len((tmp_path / "a").read_text())
    assert starts >= 3
    text = caplog.text
    assert "a has died (killed by SIGKILL); it is started again in 0.01 s" in text
    assert "a did not start: it ended (exit code 1) before it was ready; it is started again in 0.02 s" in text
    assert "again in 0.04 s" in text
    assert "no more" in text
    await asyncio.sleep(0.2)
    assert len((tmp_path / "a").read_text()) == starts, "it was stopped"


async def test_where_the_first_start_of_one_fails_the_others_are_stopped(tmp_path: Path) -> None:
    good = keeper(tmp_path / "good", env={"CUDA_VISIBLE_DEVICES": "0"})
    bad = keeper(tmp_path / "bad", healthy=0, env={"CUDA_VISIBLE_DEVICES": "1"})
    with pytest.raises(EngineStartError, match="bad did not start"):
        await start_all([good, bad])
    assert not good.service.running
    assert not bad.service.running
    assert bad.num_restarts == 0
    await stop_all([good, bad])


async def test_a_cancelled_start_of_many_leaves_none(tmp_path: Path) -> None:
    keepers = [keeper(tmp_path / name, env={"CUDA_VISIBLE_DEVICES": name}) for name in ("a", "b")]
    starting = asyncio.create_task(start_all(keepers))
    await soon(lambda: all(kept.service.pid is not None for kept in keepers))
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    for kept in keepers:
        assert kept.service.pid is not None
        assert not kept.service.running
        assert not psutil.pid_exists(kept.service.pid)


def test_those_that_may_share_a_device_start_one_after_another(tmp_path: Path) -> None:
    def groups(*devices: str | None) -> list[str]:
        keepers = [
            keeper(tmp_path / str(index), env={} if text is None else {"CUDA_VISIBLE_DEVICES": text})
            for index, text in enumerate(devices)
        ]
        return ["".join(kept.name for kept in group) for group in start_groups(keepers)]

    assert groups("0", "1", "0") == ["02", "1"]
    assert groups("0,1", "2", "1,2", "3") == ["012", "3"]
    assert groups("0", None, "1") == ["012"]
    assert groups(None) == ["0"]
    assert groups() == []


async def test_whatever_a_restart_fails_with_it_is_tried_again(tmp_path: Path) -> None:
    class Unlucky(Keeper):
        """The first restart fails with what nobody foresaw."""

        num_made = 0

        def _new(self) -> Service:
            made = super()._new()
            self.num_made += 1
            if self.num_made == 2:

                async def fail(timeout: float = 0.0) -> None:  # noqa: ASYNC109
                    raise RuntimeError("can't start new thread")

                made.start = fail  # type: ignore[method-assign]
            return made

    plain = keeper(tmp_path / "a")
    kept = Unlucky(plain.command, name="a", start_timeout=30, first_pause=0.01)
    await kept.start()
    assert kept.service.pid is not None
    os.kill(kept.service.pid, signal.SIGKILL)
    await soon(lambda: kept.num_restarts == 2 and kept.service.running)
    await kept.stop()


async def test_one_that_cannot_be_stopped_keeps_no_other_from_its_orderly_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ended = []

    class Slow(Keeper):
        async def stop(self, grace: float = 10.0) -> None:
            for _ in range(10):
                await asyncio.sleep(0)
            ended.append(self.name)

    class Broken(Keeper):
        async def stop(self, grace: float = 10.0) -> None:
            raise PermissionError("not ours")

    command = keeper(tmp_path / "a").command
    await stop_all([Slow(command, name="a"), Broken(command, name="b"), Slow(command, name="c")])
    assert ended == ["a", "c"]
    assert "b could not be stopped" in caplog.text
