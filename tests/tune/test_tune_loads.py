"""The search for the greatest rate, on servers whose greatest rate is known."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field

import pytest
from simulated_tuning import SHORT, SLO, goal

from sol.errors import ConfigError
from sol.simulate import profile
from sol.tune import Probe, SimulatedRunner
from sol.tune.loads import RateSearch, Rung, rungs_of


@dataclass
class Queue:
    """Meets the SLO up to `capacity`; above it a load is felt once it lasts `patience` seconds."""

    capacity: float
    patience: float = 0.0
    latency: float = 1.0
    lengths: list[tuple[float, int]] = field(default_factory=list)

    async def one_at_a_time(self, num_requests: int) -> Probe:
        return self._probe(0.0, num_requests, True)

    async def at_rate(self, rate: float, num_requests: int) -> Probe:
        self.lengths.append((rate, num_requests))
        return self._probe(rate, num_requests, rate <= self.capacity or num_requests / rate < self.patience)

    def _probe(self, rate: float, num_requests: int, meets: bool) -> Probe:
        return Probe(
            rate=rate, num_requests=num_requests, meets=meets, goodput=rate, good_tokens_per_second=rate,
            attainment=1.0, clauses={}, mean_e2e=self.latency,
        )  # fmt: skip


def greatest(server: Queue, rung: Rung, **options: float) -> Probe | None:
    search = RateSearch(server, goal(), [], lambda probe: None)

    async def run() -> Probe | None:
        await search.alone(4)
        return await search.greatest(rung, **{"start": 1.0, "factor": 2.0, "least": 0.05, **options})

    return asyncio.run(run())


@pytest.mark.parametrize("capacity", [0.06, 0.9, 1.0, 7.3, 4000.0])
@pytest.mark.parametrize("start", [0.1, 1.0, 50.0])
def test_it_is_found_to_the_tolerance_from_wherever_the_search_starts(capacity: float, start: float) -> None:
    server = Queue(capacity)
    found = greatest(server, Rung(10, 0.02), start=start)
    assert found is not None
    assert capacity / 1.02 <= found.rate <= capacity
    assert len(server.lengths) <= 30


def test_below_the_least_rate_there_is_none() -> None:
    server = Queue(0.04)
    assert greatest(server, Rung(10, 0.02)) is None
    assert min(rate for rate, _ in server.lengths) == 0.05


def test_what_cannot_beat_another_is_not_searched_finely() -> None:
    coarse, fine = Queue(7.3), Queue(7.3)
    assert greatest(coarse, Rung(10, 0.001), beat=20.0) is not None
    assert greatest(fine, Rung(10, 0.001)) is not None
    assert len(coarse.lengths) < len(fine.lengths) - 4


def test_a_load_that_meets_the_slo_lasts_several_latencies() -> None:
    """A burst of ten that is over in a moment says nothing of ten thousand a second."""
    server = Queue(5.0, patience=3.0)
    found = greatest(server, Rung(10, 0.05))
    assert found is not None
    assert found.rate <= 5.0
    assert all(number >= 4 * rate for rate, number in server.lengths)


def test_rungs_grow_by_three_and_hold_enough_for_the_percentiles() -> None:
    assert [rung.num_requests for rung in rungs_of(300, least=20)] == [33, 100, 300]
    assert [rung.num_requests for rung in rungs_of(300, least=200)] == [300]
    assert rungs_of(300, least=20)[-1].tolerance < rungs_of(300, least=20)[0].tolerance
    with pytest.raises(ConfigError, match="at least 200 for the percentiles of this SLO, not 100"):
        rungs_of(100, least=200)


def test_the_simulated_server_alone_takes_what_its_laws_say() -> None:
    laws = profile("h100-8b")

    async def run() -> Probe:
        async with SimulatedRunner(laws, goal().slo, SHORT).start({}) as server:
            return await server.one_at_a_time(40)

    alone = asyncio.run(run())
    requests = [SHORT.request(index) for index in range(40)]
    longest = max(laws.expected_e2e(prompt, output) for prompt, output, _ in requests)
    assert alone.mean_e2e is not None
    assert 0 < alone.mean_e2e < longest
    assert alone.attainment == 1.0
    assert set(alone.clauses) == {clause.text for clause in goal().slo.clauses}, SLO
    assert alone.rate == 0
    assert math.isfinite(alone.goodput)
