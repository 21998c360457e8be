"""A started server: ready, failing, stopped, killed, and what is left of it afterwards (nothing)."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from sol.engines import Service, free_port
from sol.errors import ConfigError, EngineStartError

SERVER = """
import http.server, os, signal, subprocess, sys, time
port, status, stubborn = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "stubborn"
if stubborn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: (print("ends in order", flush=True), os._exit(7)))
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, 1); time.sleep(600)"])
print("child", child.pid, os.environ.get("EXTRA"), flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(status if self.path == "/health" else 404); self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
"""Takes a port, what /health answers, and whether it ends on SIGTERM. Has a child that ignores SIGTERM."""


def service(status: int = 200, kind: str = "obedient", **options: object) -> Service:
    port = free_port()
    command = [sys.executable, "-c", SERVER, str(port), str(status), kind]
    return Service(command, url=f"http://127.0.0.1:{port}", name="server", **options)  # type: ignore[arg-type]


def child_of(service: Service) -> int:
    """What the server wrote before it listened may still be on its way through the pipe."""
    for _ in range(500):
        words = service.tail().split()
        if len(words) >= 3:
            return int(words[words.index("child") + 1])
        time.sleep(0.02)
    raise AssertionError(service.tail())


async def gone(pid: int) -> bool:
    """Whether it ends soon. A zombie that nobody reaps has ended."""
    for _ in range(200):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        await asyncio.sleep(0.05)
    return False


async def test_it_is_ready_then_ends_in_order_and_leaves_no_process() -> None:
    async with service(env={"EXTRA": "given"}) as server:
        assert server.running
        assert server.returncode is None
        pid, child = server.pid, child_of(server)
        assert pid is not None
        assert psutil.pid_exists(child)
        assert "given" in server.tail()
        exited = server.on_exit
    assert not server.running
    assert server.returncode == 7
    assert await exited == await server.on_exit == 7
    assert server.tail(1) == "ends in order"
    assert await gone(pid)
    assert await gone(child)
    await server.stop()


async def test_one_that_ignores_sigterm_is_killed_with_its_children() -> None:
    server = service(kind="stubborn")
    await server.start(30)
    child = child_of(server)
    await asyncio.gather(server.stop(grace=0.1), server.stop(grace=0.1))
    assert server.returncode == -signal.SIGKILL
    assert await gone(child)


async def test_one_that_ends_early_says_why_at_once() -> None:
    command = [sys.executable, "-c", "import sys; print('x' * 10); sys.exit('no such model')"]
    server = Service(command, url=f"http://127.0.0.1:{free_port()}", name="broken")
    with pytest.raises(EngineStartError, match="no such model") as caught:
        await server.start(60)
    assert caught.value.name == "broken"
    assert caught.value.returncode == 1
    assert caught.value.tail == "x" * 10 + "\nno such model"
    assert "exit code 1" in caught.value.message
    with pytest.raises(RuntimeError, match="starts once"):
        await server.start(60)


async def test_one_that_never_gets_ready_is_stopped() -> None:
    for seconds in (1, 4, 16):  # on a busy machine it may take longer than the first until it answers at all
        server = service(status=503)
        with pytest.raises(EngineStartError, match=f"it was not ready after {seconds} s") as caught:
            await server.start(seconds)
        assert not server.running
        if "/health still answered 503" in caught.value.message:
            break
    else:
        pytest.fail(caught.value.message)
    assert await gone(child_of(server))


async def test_a_program_that_is_not_there() -> None:
    server = Service(["/no/such/program", "--api-key", "hidden"], url=f"http://127.0.0.1:{free_port()}")
    with pytest.raises(EngineStartError, match="cannot be run: No such file") as caught:
        await server.start(1)
    assert "hidden" not in caught.value.message
    assert "--api-key" in caught.value.message
    assert not server.running
    await server.stop()


async def test_a_port_that_another_server_holds_is_not_taken_for_ours() -> None:
    async with service() as first:
        second = Service(first.command, url=first.url)
        with pytest.raises(EngineStartError, match="something else listens"):
            await second.start(1)
        assert second.pid is None


async def test_a_cancelled_start_leaves_nothing() -> None:
    server = service(status=503)
    starting = asyncio.create_task(server.start(60))
    for _ in range(1000):
        if len(server.tail().split()) >= 3:  # the whole line, with the child's number
            break
        await asyncio.sleep(0.02)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert await server.on_exit == -signal.SIGKILL
    assert await gone(child_of(server))


async def test_a_reader_of_on_exit_that_is_cancelled_takes_it_from_nobody() -> None:
    async with service() as server:
        waiting = asyncio.create_task(asyncio.wait_for(server.on_exit, 0.01))
        with pytest.raises(TimeoutError):
            await waiting
        remaining = server.on_exit
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        assert await remaining == -signal.SIGKILL
        assert not server.running


async def test_a_log_file_is_appended_to_and_read_from_this_start_on(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "server.log"
    log.parent.mkdir()
    log.write_text("from a former start\n")
    async with service(log=log) as server:
        child_of(server)
        assert server.tail().startswith("child")
    assert log.read_text().startswith("from a former start\nchild")
    assert server.tail(1) == "ends in order"


async def test_much_output_is_kept_in_part() -> None:
    talk = "import sys\nfor i in range(20000): print('line', i)\nsys.exit(3)"
    server = Service([sys.executable, "-c", talk], url=f"http://127.0.0.1:{free_port()}")
    with pytest.raises(EngineStartError) as caught:
        await server.start(60)
    assert caught.value.tail.splitlines()[-1] == "line 19999"
    assert len(server.tail(10**9)) < 128 * 1024
    assert server.tail(0) == ""


async def test_our_death_by_sigkill_ends_the_server_and_its_children() -> None:
    parent = """
    import asyncio, os, sys
    sys.path.insert(0, sys.argv[1])
    from test_service import child_of, service
    async def main():
        server = service()
        await server.start(60)
        print(server.pid, child_of(server), flush=True)
        await asyncio.sleep(600)
    asyncio.run(main())
    """
    process = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", textwrap.dedent(parent), str(Path(__file__).parent)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process.stdout:
        line = await asyncio.to_thread(process.stdout.readline)
    pid, child = (int(word) for word in line.split())
    guard = os.getpgid(pid)
    assert guard not in (pid, process.pid, os.getpgid(0))
    process.kill()
    process.wait()
    assert await gone(pid)
    assert await gone(child)  # it ignores SIGTERM: the guard kills it after some seconds
    assert await gone(guard)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"command": []}, "command is empty"),
        ({"url": "127.0.0.1:80"}, "url must be like"),
        ({"url": "https://127.0.0.1:80"}, "url must be like"),
        ({"ready_path": "health"}, "begin with a slash"),
    ],
)
def test_options_that_cannot_work(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Service(**{"command": ["true"], "url": "http://127.0.0.1:80", **options})  # type: ignore[arg-type]


def test_the_guard_of_no_group_refuses() -> None:
    guard = Path(sys.modules["sol.engines.service"].__file__ or "").with_name("guard.py")
    result = subprocess.run([sys.executable, str(guard), str(os.getpid())], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "group of its own" in result.stderr


def test_a_free_port_is_of_this_machine() -> None:
    assert 0 < free_port() < 65536
    with pytest.raises(ConfigError, match="not an address"):
        free_port("192.0.2.1")


@pytest.mark.parametrize("env", [{"A=B": "x"}, {"A": "x\0y"}])
async def test_variables_that_no_process_can_have_leave_no_guard_behind(env: dict[str, str]) -> None:
    before = {child.pid for child in psutil.Process().children()}
    server = service(env=env)
    with pytest.raises(EngineStartError, match="cannot be run"):
        await server.start(10)
    assert not server.running
    left = [child for child in psutil.Process().children() if child.pid not in before]
    assert not [child for child in left if child.status() != psutil.STATUS_ZOMBIE]
