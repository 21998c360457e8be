"""Trials on real servers: each configuration is started, warmed up, put under load and stopped."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from sol.bench.data import Data
from sol.bench.endpoint import Endpoint, prepare
from sol.bench.load import ClosedLoop, Load, at_rate
from sol.bench.metrics import summarise
from sol.bench.options import BenchOptions
from sol.bench.records import Stage
from sol.bench.run import Limits, measure
from sol.bench.slo import Slo
from sol.bench.tokens import num_output_tokens
from sol.compare.likelihoods import Position, compare_positions, read_positions
from sol.engines.drivers import DRIVERS
from sol.engines.service import Service
from sol.errors import ConfigError, EndpointError, EngineStartError
from sol.tune.engines import Target
from sol.tune.roofline import Roofline
from sol.tune.space import Config, Space
from sol.tune.trial import Probe, TrialCrash

_WARMUP_REQUESTS: Final = 8
_WARMUP_CONCURRENCY: Final = 4
_TEXT_SECONDS: Final = 300.0
"""For the logprobs of one text."""
_DYING_SECONDS: Final = 1.0
_LAST_LINES: Final = 5


T = TypeVar("T")


class ServerRunner:
    """A `Runner` for `target`. Servers' logs go to `logs`, one file for each."""

    def __init__(
        self,
        target: Target,
        space: Space,
        slo: Slo,
        load: BenchOptions,
        *,
        logs: Path,
        roofline: Roofline | None = None,
        texts: Sequence[str] = (),
        start_timeout: float = 600.0,
        api_key: str | None = None,
    ) -> None:
        """`load` has the prompts, the seed and the limits; its loads are ours. `texts` are what lossy configurations
        are compared on."""
        self._target, self._space, self._slo, self._load = target, space, slo, load
        self._logs, self._roofline, self._texts = logs, roofline, texts
        self._start_timeout, self._api_key = start_timeout, api_key
        self._driver = DRIVERS[target.engine]
        self._count = itertools.count(1)
        self._base: list[list[Position]] | None = None

    @property
    def slo(self) -> Slo:
        return self._slo

    def refuses(self, config: Config) -> str | None:
        seqs, tokens = config.get("max_num_seqs"), config.get("max_num_batched_tokens")
        if seqs is not None and tokens is not None and tokens < seqs:
            return f"max_num_batched_tokens ({tokens}) is less than max_num_seqs ({seqs}): the engine refuses that"
        try:
            self._driver.command(self._target.spec(config), port=1)
        except ConfigError as error:
            return error.message
        return None if self._roofline is None else self._roofline.refuses(config)

    def most(self, config: Config) -> float:
        return math.inf if self._roofline is None else self._roofline.most(config)

    @asynccontextmanager
    async def start(self, config: Config) -> AsyncIterator[RunningServer]:
        async with self._service(config) as service:
            endpoint = await self._endpoint(service)
            data = await _or_crash(service, self._load.data(endpoint, []))
            running = RunningServer(endpoint, data, service, self._slo, self._load)
            output_tokens = await running.warm_up()
            if self._roofline is not None and self._roofline.output_tokens is None:
                self._roofline.output_tokens = output_tokens
            yield running

    async def divergence(self, config: Config) -> float | None:
        """One server after the other: two of them may not fit into the memory."""
        if not self._texts:
            return None
        lossless = {p.name: p.lossless if p.lossy else config[p.name] for p in self._space.parameters}
        if self._base is None:
            try:
                self._base = await self._positions(lossless)
            except TrialCrash as crash:
                raise TrialCrash(f"what its answers are to be compared with does not run: {crash}") from None
        if self._base is None:
            return None
        theirs = await self._positions(config)
        if theirs is None:
            return None
        return compare_positions(self._base, theirs).kl.value

    async def _positions(self, config: Config) -> list[list[Position]] | None:
        async with self._service(config) as service:
            endpoint = await self._endpoint(service)
            return await _or_crash(service, read_positions(endpoint, self._texts, _TEXT_SECONDS))

    @asynccontextmanager
    async def _service(self, config: Config) -> AsyncIterator[Service]:
        number = next(self._count)
        command = self._driver.command(self._target.spec(config), directory=self._logs)
        service = command.service(
            log=self._logs / f"server-{number}.log", name=f"server {number}", start_timeout=self._start_timeout
        )
        try:
            await service.start(self._start_timeout)
        except EngineStartError as error:
            raise TrialCrash(_brief(error.message)) from None
        try:
            yield service
        finally:
            await service.stop()

    async def _endpoint(self, service: Service) -> Endpoint:
        body = {"temperature": 0.0, **({"ignore_eos": True} if self._load.ignores_eos else {})}
        endpoint = Endpoint(url=service.url, api_key=self._api_key, body=body)
        try:
            return await prepare(endpoint)
        except EndpointError as error:
            if await _gone(service):
                raise _death(service) from None
            raise TrialCrash(error.message) from None


class RunningServer:
    """A server of a `ServerRunner`."""

    def __init__(self, endpoint: Endpoint, data: Data, service: Service, slo: Slo, load: BenchOptions) -> None:
        self._endpoint, self._data, self._service, self._slo, self._load = endpoint, data, service, slo, load
        self._limits = Limits(request_seconds=load.request_timeout, drain_seconds=load.drain_timeout)
        self._used = 0
        """Conversations: a prompt that was asked before may be in the prefix cache."""

    async def warm_up(self) -> float | None:
        """Mean output tokens of a request, as far as these tell."""
        stage = await self._run(ClosedLoop(concurrency=_WARMUP_CONCURRENCY, num_conversations=_WARMUP_REQUESTS))
        counts = [num_output_tokens(record, stage.counting) for record in stage.records if record.ok]
        return sum(counts) / len(counts) if counts else None

    async def one_at_a_time(self, num_requests: int) -> Probe:
        return await self._probe(ClosedLoop(concurrency=1, num_conversations=num_requests), 0.0)

    async def at_rate(self, rate: float, num_requests: int) -> Probe:
        return await self._probe(at_rate(rate, num_conversations=num_requests, seed=self._load.seed), rate)

    async def _probe(self, load: Load, rate: float) -> Probe:
        began = time.monotonic()
        summary = summarise(await self._run(load), slo=self._slo)
        assert summary.slo is not None
        return Probe.of(
            summary.slo,
            rate=rate,
            seconds=time.monotonic() - began,
            error_rate=summary.error_rate.value or 0.0,
            mean_e2e=summary.latencies["e2e"].mean.value,
            client_limited=summary.client.limited,
        )

    async def _run(self, load: Load) -> Stage:
        running = measure(self._endpoint, load, self._data, limits=self._limits, first=self._used)
        stage = await _or_crash(self._service, running)
        self._used += sum(record.turn == 0 for record in stage.records)
        return stage


async def _or_crash(service: Service, work: Coroutine[Any, Any, T]) -> T:
    """What `work` comes to, unless the server dies meanwhile."""
    task, died = asyncio.ensure_future(work), service.on_exit
    try:
        await asyncio.wait((task, died), return_when=asyncio.FIRST_COMPLETED)
        if died.done():
            raise _death(service)
        try:
            return await task
        except EndpointError:
            if await _gone(service):
                raise _death(service) from None
            raise
    finally:
        died.cancel()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _gone(service: Service) -> bool:
    """A connection may be lost a moment before its process is known to be gone."""
    await asyncio.wait((service.on_exit,), timeout=_DYING_SECONDS)
    return not service.running


def _death(service: Service) -> TrialCrash:
    return TrialCrash(_brief(f"it ended with code {service.returncode}: {service.tail(_LAST_LINES)}"))


def _brief(text: str) -> str:
    """One line, its end kept: that is where programs say what was wrong."""
    line = " ".join(text.split())
    return line if len(line) <= 400 else f"{line[:120]} … {line[-270:]}"
