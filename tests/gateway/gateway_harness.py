"""A gateway over simulated engines, each on a port of its own, in the test's event loop."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from sol.gateway.call import Call, Outcome
from sol.gateway.config import make_config
from sol.gateway.gateway import Gateway
from sol.gateway.routing.engine import Engine
from sol.gateway.serve import GatewayServer
from sol.simulate import EngineLaws
from sol.simulate.config import SimulateConfig
from sol.simulate.faults import parse_fault
from sol.simulate.laws import TextLaws
from sol.simulate.server import SimulatedServer

LAWS: dict[str, Any] = {
    "max_model_len": 4096, "num_blocks": 4096, "step_seconds": 0.002, "sequence_seconds": 0.0,
    "prefill_token_seconds": 0.00001, "context_token_seconds": 0.0, "draft_token_seconds": 0.0005,
}  # fmt: skip

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Tell me of the river."}], "max_tokens": 6}
COMPLETION = {"model": "m", "prompt": "The water", "max_tokens": 6}


@dataclass
class Running:
    server: GatewayServer
    http: httpx.AsyncClient
    engines: list[SimulatedServer]
    outcomes: list[tuple[Call, Outcome]]
    """Of every call, in the order in which they ended."""

    @property
    def gateway(self) -> Gateway:
        return self.server.gateway

    def engine(self, name: str) -> Engine:
        return self.gateway.fleet.engines[name]

    async def settled(self, count: int) -> None:
        """Wait until so many calls have left the pipeline."""
        await until(lambda: len(self.outcomes) >= count)

    def records(self, index: int = 0) -> list[dict[str, Any]]:
        """What the engine says became of its requests."""
        return list(self.engines[index].service.records)


class Recorder:
    """A stage that remembers how calls ended."""

    name = "recorder"

    def __init__(self, outcomes: list[tuple[Call, Outcome]]) -> None:
        self._outcomes = outcomes

    async def enter(self, call: Call) -> None:
        pass

    async def leave(self, call: Call, outcome: Outcome) -> None:
        self._outcomes.append((call, outcome))


async def until(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for what no event tells of."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        await asyncio.sleep(0.005)


@asynccontextmanager
async def running(
    num_engines: int = 1,
    *,
    faults: Sequence[Mapping[str, Any]] = (),
    text: Mapping[str, Any] | None = None,
    laws: Mapping[str, Any] | None = None,
    engine: Mapping[str, Any] | None = None,
    **sections: Any,
) -> AsyncIterator[Running]:
    """Engines a, b, … of the model m. `faults` are the first engine's."""
    async with AsyncExitStack() as stack:
        engines = []
        for index in range(num_engines):
            config: dict[str, Any] = {"port": 0, "served_model_names": ("m",), "faults": ()}
            if index == 0:
                config["faults"] = tuple(parse_fault(dict(fault)) for fault in faults)
            simulated = SimulateConfig(
                laws=EngineLaws(**{**LAWS, **(laws or {})}), text=TextLaws(**(text or {})), **config
            )
            engines.append(await stack.enter_async_context(SimulatedServer(simulated)))
        names = "abcdefghij"[:num_engines]
        data = {
            "server": {"port": 0},
            "models": [{"name": "m", "aliases": ["alias"], "engines": list(names)}],
            "engines": [
                {"name": name, "url": each.url, "driver": "sol", **(engine or {})}
                for name, each in zip(names, engines, strict=True)
            ],
            **sections,
        }
        server = await stack.enter_async_context(GatewayServer(make_config(data)))
        outcomes: list[tuple[Call, Outcome]] = []
        server.gateway.pipeline.stages = (Recorder(outcomes), *server.gateway.pipeline.stages)
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=server.url, timeout=20, verify=False))
        yield Running(server, http, engines, outcomes)
        # Nothing that a call took is held after its end.
        await until(lambda: server.app.num_open == 0)
        for each in server.gateway.fleet:
            assert (each.in_flight, each.num_streaming) == (0, 0)
        assert len(server.gateway.single_flight) == 0
        assert server.gateway.relay.num_open == 0


def events(body: bytes | str) -> list[Any]:
    """The payloads of a stream: parsed, `[DONE]` as it is. Fails for what is not whole."""
    text = body if isinstance(body, str) else body.decode()
    assert text == "" or text.endswith("\n\n")
    payloads = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


def said(body: bytes | str) -> str:
    """The text of a chat's stream."""
    chunks = [event for event in events(body) if event != "[DONE]" and "choices" in event]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
