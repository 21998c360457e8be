"""A gateway and the engines of its file that have a `spec`, started together and stopped in order: the gateway drains
first, then the engines end."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import uvloop

from sol.engines.drivers import driver_named
from sol.engines.keeper import Keeper, start_all, stop_all
from sol.engines.service import free_port
from sol.engines.spec import EngineSpec, engine_spec
from sol.errors import ConfigError
from sol.gateway.config import EngineEntry, GatewayConfig
from sol.gateway.serve import GatewayServer, bind

_LOCAL = frozenset({"127.0.0.1", "localhost", "::1", "0.0.0.0", "::"})  # noqa: S104  (compared, not bound)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be started, and the gateway's configuration once it is."""

    config: GatewayConfig
    keepers: tuple[Keeper, ...]


def plan(config: GatewayConfig, log_directory: Path, *, start_timeout: float = 600.0) -> Plan:
    """Turn every engine with a `spec` into a command, with the port of its `url` or a free one.

    Each engine's output goes to `NAME.log` in `log_directory`. Raises `ConfigError` for a spec that its engine cannot
    do, naming the engine and the field; starts nothing.
    """
    entries: list[EngineEntry] = []
    keepers: list[Keeper] = []
    taken: set[int] = set()
    for entry in config.engines:
        if entry.spec is None:
            entries.append(entry)
            continue
        where = f"engines[{entry.name}]"
        spec = engine_spec(entry.spec, f"{where}.spec")
        host, port = _address(entry, where, taken)
        try:
            name = _served_name(entry, spec, config)
            if name is not None:
                spec = spec.model_copy(update={"served_model_name": name})
            command = driver_named(entry.driver).command(spec, host=host, port=port, directory=log_directory)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error.message}", param=f"{where}.{error.param}") from None
        taken.add(port)
        entries.append(entry.model_copy(update={"url": command.url, "served_name": name or entry.served_name}))
        log = log_directory / f"{_file_name(entry.name, config)}.log"
        keepers.append(Keeper(command, name=entry.name, log=log, start_timeout=start_timeout))
    return Plan(config.model_copy(update={"engines": tuple(entries)}), tuple(keepers))


def _address(entry: EngineEntry, where: str, taken: set[int]) -> tuple[str, int]:
    if entry.url is None:
        host, port = "127.0.0.1", 0
        while port == 0 or port in taken:  # a free one is free until somebody listens
            port = free_port(host)
        return host, port
    parts = urlsplit(entry.url)
    if parts.scheme != "http" or parts.hostname not in _LOCAL or parts.port is None or parts.path:
        raise ConfigError(
            f"{where}.url {entry.url} is not of the form http://127.0.0.1:8000: an engine with a spec is started on "
            "this machine; leave the url out for a free port, or leave the spec out if the engine runs elsewhere",
            param=f"{where}.url",
        )
    if parts.port in taken:
        raise ConfigError(f"{where}.url {entry.url} has the port of another engine", param=f"{where}.url")
    return parts.hostname, parts.port


def _served_name(entry: EngineEntry, spec: EngineSpec, config: GatewayConfig) -> str | None:
    """What the engine is to call its model, so that it knows the name that the gateway sends: `served_name`, the
    spec's, or the first model's that it serves. None where nobody tells it."""
    if spec.served_model_name is not None:
        if entry.served_name not in (None, spec.served_model_name):
            raise ConfigError(
                f"served_name {entry.served_name!r} and served_model_name {spec.served_model_name!r} of the spec "
                "differ; give one of them",
                param="served_name",
            )
        return spec.served_model_name
    if spec.command is not None or entry.driver == "tgi":  # TGI answers to any name
        return None
    models = (model.name for model in config.models if entry.name in model.engines)
    return entry.served_name or next(models, None)


def _file_name(name: str, config: GatewayConfig) -> str:
    """The engine's name as a file's, of its own."""
    plain = [re.sub(r"[^A-Za-z0-9._-]", "_", entry.name).lstrip(".") or "_" for entry in config.engines]
    index = [entry.name for entry in config.engines].index(name)
    return plain[index] if plain.count(plain[index]) == 1 else f"{plain[index]}-{index}"


def up(planned: Plan, *, on_ready: Callable[[str], None] | None = None) -> int:
    """Start the engines and then the gateway, serve until SIGINT or SIGTERM (in the main thread), then stop the gateway
    as `sol gateway` does and the engines after it. Returns the process's exit code.

    An engine that dies later is started again. A second signal waits for no request, a third for no engine.
    Raises `EngineStartError` when the first start of an engine fails, and `ConfigError` as `serve` does.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_up(planned, on_ready))


async def _up(planned: Plan, on_ready: Callable[[str], None] | None) -> int:
    # What cannot work is said now, and not after engines were loaded for minutes.
    planned_server = GatewayServer(planned.config)
    bind(planned.config.server.host, planned.config.server.port).close()
    stop = asyncio.Event()
    server: GatewayServer | None = None
    ending: asyncio.Task[None] | None = None

    def on_signal() -> None:
        if ending is not None:
            ending.cancel()  # kills what is left
        elif server is not None:
            server.stop()
        stop.set()

    with _signals(on_signal):
        try:
            if not await _started(planned.keepers, stop):
                return 0
            async with planned_server as server:
                if on_ready is not None:
                    on_ready(server.url)
                await server.stopped.wait()
            return 0
        finally:
            ending = asyncio.create_task(stop_all(planned.keepers))
            with contextlib.suppress(asyncio.CancelledError):
                await ending


async def _started(keepers: tuple[Keeper, ...], stop: asyncio.Event) -> bool:
    """Whether they were started; not if `stop` came first."""
    starting = asyncio.create_task(start_all(keepers))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            return True
        return False
    finally:
        starting.cancel()
        stopping.cancel()
        await asyncio.gather(starting, stopping, return_exceptions=True)


@contextlib.contextmanager
def _signals(act: Callable[[], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, act)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
