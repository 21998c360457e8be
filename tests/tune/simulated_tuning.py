"""What the tests of the search share: small spaces, short loads, and runners in which things go wrong."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from sol.bench.lengths import Lengths
from sol.simulate import profile
from sol.tune import Config, Goal, Parameter, Running, SimulatedRunner, Space, TrialCrash, Workload

SLO = "ttft_p90<500ms,tpot_p90<25ms"

SHORT = Workload(
    input_tokens=Lengths.parse("lognormal:400:0.5", "input_tokens"),
    output_tokens=Lengths.parse("uniform:6:18", "output_tokens"),
    prefix_tokens=64,
    num_prefixes=3,
)


def small_space(**more: tuple[Any, ...]) -> Space:
    return Space([
        Parameter(name="max_num_seqs", values=(2, 8, 32, 128), demand="grows"),
        Parameter(name="max_num_batched_tokens", values=(128, 512, 2048), demand="grows"),
        Parameter(name="enable_prefix_caching", values=(False, True), demand="none"),
        Parameter(name="num_speculative_tokens", values=(0, 3), demand="differs"),
        *(Parameter(name=name, values=values, lossy=True, lossless=values[0]) for name, values in more.items()),
    ])  # fmt: skip


def goal(**options: Any) -> Goal:
    return Goal.of(SLO, **options)


class Troubled(SimulatedRunner):
    """The simulated server, where `dies` names a reason for it to die at its start, and `divergences` are known.

    Options that it does not have (a precision) are taken to change nothing but the divergence.
    """

    def __init__(
        self,
        *,
        dies: Callable[[Config], str | None] = lambda config: None,
        divergence: Callable[[Config], float | None] = lambda config: None,
        bound: Callable[[Config], float] | None = None,
        slo: str = SLO,
    ) -> None:
        super().__init__(profile("h100-8b"), Goal.of(slo).slo, SHORT)
        self._dies, self._divergence, self._bound = dies, divergence, bound
        self.started: list[Config] = []
        self.measured: list[Config] = []

    def laws(self, config: Config) -> Any:
        return super().laws({name: value for name, value in config.items() if name != "quantization"})

    def most(self, config: Config) -> float:
        return super().most(config) if self._bound is None else self._bound(config)

    async def divergence(self, config: Config) -> float | None:
        self.measured.append(config)
        return self._divergence(config)

    @asynccontextmanager
    async def start(self, config: Config) -> AsyncIterator[Running]:
        self.started.append(config)
        if (reason := self._dies(config)) is not None:
            raise TrialCrash(reason)
        async with super().start(config) as running:
            yield running
