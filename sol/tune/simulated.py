"""Trials on the simulated server, in process, on its virtual clock: an hour of load in a second, and no noise but the
load's own."""

from __future__ import annotations

import dataclasses
import math
from array import array
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from sol.bench.lengths import Lengths
from sol.bench.load import at_rate
from sol.bench.metrics import judge
from sol.bench.records import RequestRecord, Stage
from sol.bench.slo import Slo
from sol.errors import ConfigError
from sol.simulate.blocks import named_hashes
from sol.simulate.engine import SimulatedRequest
from sol.simulate.laws import EngineLaws
from sol.simulate.virtual import VirtualServer
from sol.tune.space import Config, Parameter, Space
from sol.tune.trial import Probe

FIELDS = ("max_num_seqs", "max_num_batched_tokens", "block_size", "enable_prefix_caching", "num_speculative_tokens")
"""What of the laws is an engine's option; the rest is the machine's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests by their lengths alone. A share of each prompt may be the beginning of one of `num_prefixes`."""

    input_tokens: Lengths = dataclasses.field(
        default_factory=lambda: Lengths.parse("lognormal:512:0.6", "input_tokens")
    )
    output_tokens: Lengths = dataclasses.field(
        default_factory=lambda: Lengths.parse("lognormal:128:0.5", "output_tokens")
    )
    prefix_tokens: int = 0
    num_prefixes: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("prefix_tokens", 0), ("num_prefixes", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, not {getattr(self, name)}", param=name)

    def describe(self) -> dict[str, Any]:
        return {
            "input_tokens": self.input_tokens.text,
            "output_tokens": self.output_tokens.text,
            "prefix_tokens": self.prefix_tokens,
            "num_prefixes": self.num_prefixes,
            "seed": self.seed,
        }

    def request(self, index: int) -> tuple[int, int, int]:
        """(prompt tokens, output tokens, group of the prefix)."""
        rng = np.random.default_rng([self.seed, 0x7E57, index])
        prompt, output = self.input_tokens.draw(rng), self.output_tokens.draw(rng)
        return max(prompt, self.prefix_tokens + 1), output, int(rng.integers(self.num_prefixes))


def simulated_space(laws: EngineLaws) -> Space:
    """Powers of two around what the laws have. Block sizes share one KV cache: its tokens stay what they are."""
    seqs = tuple(value for value in (4, 8, 16, 32, 64, 128, 256, 512) if value <= max(64, 2 * laws.max_num_seqs))
    return Space(
        [
            Parameter(name="max_num_seqs", values=seqs, demand="grows"),
            Parameter(name="max_num_batched_tokens", values=(128, 256, 512, 1024, 2048, 8192), demand="grows"),
            Parameter(name="block_size", values=(16, 32), demand="none"),
            Parameter(name="enable_prefix_caching", values=(False, True), demand="none"),
            Parameter(name="num_speculative_tokens", values=(0, 1, 2, 4, 8), demand="grows"),
        ]
    )


class SimulatedRunner:
    """A `Runner` for `laws`, whose options of the engine each configuration replaces."""

    def __init__(self, laws: EngineLaws, slo: Slo, workload: Workload | None = None) -> None:
        self._laws = laws
        self._slo = slo
        self._workload = workload or Workload()
        self._requests: list[tuple[int, int, int]] = []

    @property
    def slo(self) -> Slo:
        return self._slo

    def default(self) -> Config:
        """What the laws have."""
        return {name: getattr(self._laws, name) for name in FIELDS}

    def laws(self, config: Config) -> EngineLaws:
        """Raises `ConfigError` for what no engine could be."""
        unknown = [name for name in config if name not in FIELDS]
        if unknown:
            raise ConfigError(f"a simulated server has no option {unknown[0]!r}; it has {', '.join(FIELDS)}",
                              param=unknown[0])  # fmt: skip
        block_size = config.get("block_size", self._laws.block_size)
        blocks = max(1, self._laws.num_blocks * self._laws.block_size // block_size)
        return dataclasses.replace(self._laws, **{**config, "num_blocks": blocks})

    def refuses(self, config: Config) -> str | None:
        try:
            laws = self.laws(config)
        except ConfigError as error:
            return error.message
        if laws.max_num_batched_tokens < laws.max_num_seqs:
            return (
                f"max_num_batched_tokens ({laws.max_num_batched_tokens}) is less than max_num_seqs "
                f"({laws.max_num_seqs}): not all of them could have a token in a step"
            )
        return None

    def most(self, config: Config) -> float:
        return math.inf  # the laws would say; but who tunes a real server does not know them

    async def divergence(self, config: Config) -> float | None:
        return None

    @asynccontextmanager
    async def start(self, config: Config) -> AsyncIterator[SimulatedServer]:
        yield SimulatedServer(self.laws(config), self._slo, self)

    def requests(self, number: int) -> Iterator[tuple[int, int, int]]:
        """The first so many, always the same."""
        while len(self._requests) < number:
            self._requests.append(self._workload.request(len(self._requests)))
        yield from self._requests[:number]

    @property
    def workload(self) -> Workload:
        return self._workload


class SimulatedServer:
    """Each load begins with an empty server, as if it had just been started."""

    def __init__(self, laws: EngineLaws, slo: Slo, runner: SimulatedRunner) -> None:
        self._laws = laws
        self._slo = slo
        self._runner = runner

    async def at_rate(self, rate: float, num_requests: int) -> Probe:
        arrivals = at_rate(rate, num_conversations=num_requests, seed=self._runner.workload.seed).arrivals
        server = VirtualServer(self._laws)
        for when, (prompt, output, group) in zip(arrivals, self._runner.requests(num_requests), strict=True):
            self._submit(server, float(when), prompt, output, group)
        return self._judge(server.run(), rate, float(arrivals[-1]), closed=False)

    async def one_at_a_time(self, num_requests: int) -> Probe:
        waiting = list(self._runner.requests(num_requests))[::-1]
        done: list[SimulatedRequest] = []

        def follow(request: SimulatedRequest) -> None:
            done.append(request)
            if waiting:
                self._submit(server, server.now, *waiting.pop())

        server = VirtualServer(self._laws, on_finish=follow)
        self._submit(server, 0.0, *waiting.pop())
        server.run()
        return self._judge(done, 0.0, done[-1].arrival_time, closed=True)

    def _submit(self, server: VirtualServer, when: float, prompt: int, output: int, group: int) -> None:
        prefix = self._runner.workload.prefix_tokens
        hashes = named_hashes(f"prefix-{group}", prefix, self._laws.block_size) if prefix else ()
        server.submit(when, prompt_tokens=prompt, output_tokens=output, block_hashes=hashes)

    def _judge(self, finished: list[SimulatedRequest], rate: float, load_seconds: float, *, closed: bool) -> Probe:
        stage = Stage(load={}, counting="segments", started_at=0.0, closed_loop=closed)
        stage.records = [_record(index, request) for index, request in enumerate(finished)]
        stage.seconds = max(record.end for record in stage.records)
        stage.load_seconds = load_seconds
        mean_e2e = sum(request.e2e for request in finished) / len(finished)
        judged = judge(stage, self._slo)
        return Probe.of(judged, rate=rate, seconds=stage.seconds, error_rate=0.0, mean_e2e=mean_e2e)


def _record(index: int, request: SimulatedRequest) -> RequestRecord:
    assert request.finish_time is not None
    arrival = request.arrival_time
    record = RequestRecord(index=index, key=request.request_id, turn=0, intended=arrival, started=arrival)
    record.connected = record.sent = arrival
    record.times = request.token_times
    record.counts = record.characters = array("l", request.token_counts)
    record.first_content = request.first_token_time
    record.end = request.finish_time
    record.num_chunks = len(request.token_times)
    record.prompt_tokens = request.prompt_tokens
    record.cached_tokens = request.cached_tokens
    record.completion_tokens = request.num_output
    return record
