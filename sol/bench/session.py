"""Several loads one after another against one endpoint, and a sweep that looks for the end of what it gives."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from sol.bench.cost import Cost, cost
from sol.bench.data import Data
from sol.bench.endpoint import Endpoint
from sol.bench.load import ClosedLoop, Load
from sol.bench.metrics import Summary, Trim, summarise
from sol.bench.records import Stage
from sol.bench.run import Limits, Stop, Tally, measure
from sol.bench.scrape import Scraper
from sol.bench.slo import Slo

MAX_CONCURRENCY: Final = 4096
_ENOUGH_GROWTH: Final = 1.05
_TOO_MANY_ERRORS: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How the loads of a session are run and judged."""

    trim: Trim = field(default_factory=Trim)
    limits: Limits = field(default_factory=Limits)
    slo: Slo | None = None
    price_per_hour: float | None = None
    metrics_path: str | None = "/metrics"
    """Of the endpoint's server; None: nothing is scraped."""
    gpus: bool = False
    scrape_interval: float = 1.0
    keep_text: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A load, what it left, and what that says."""

    load: Load
    stage: Stage
    summary: Summary
    cost: Cost | None


Watcher = Callable[[Load, Tally], Awaitable[None]]
"""A progress display: runs beside each load and is cancelled with it."""


async def run_loads(
    endpoint: Endpoint,
    loads: Sequence[Load],
    data: Data,
    settings: Settings,
    *,
    stop: Stop | None = None,
    watcher: Watcher | None = None,
) -> list[Measured]:
    """Each load with prompts that the ones before did not use. After `stop` what there is so far."""
    stop = stop or Stop()
    done: list[Measured] = []
    for load in loads:
        if stop.is_set:
            break
        done.append(await _run(endpoint, load, data, settings, stop, watcher, _first(done)))
    return done


async def sweep(
    endpoint: Endpoint,
    data: Data,
    settings: Settings,
    *,
    seconds: float | None,
    num_conversations: int | None = None,
    stop: Stop | None = None,
    watcher: Watcher | None = None,
) -> list[Measured]:
    """1, 2, 4, … at a time, until twice as many bring less than 5% more tokens a second, or errors for one in ten, or
    the client itself is the limit."""
    stop = stop or Stop()
    done: list[Measured] = []
    concurrency = 1
    while concurrency <= MAX_CONCURRENCY and not stop.is_set:
        # A number of requests is for one at a time; more at a time need more, or most of it were beginning and end.
        number = None if num_conversations is None else max(num_conversations, 4 * concurrency)
        load = ClosedLoop(concurrency=concurrency, seconds=seconds, num_conversations=number)
        done.append(await _run(endpoint, load, data, settings, stop, watcher, _first(done)))
        summary = done[-1].summary
        if (summary.error_rate.value or 0.0) > _TOO_MANY_ERRORS or summary.client.limited:
            break
        if len(done) > 1 and _tokens(done[-1]) < _ENOUGH_GROWTH * _tokens(done[-2]):
            break
        concurrency *= 2
    return done


def best(measured: Sequence[Measured]) -> Measured | None:
    """With an SLO the one with the greatest goodput of those that do not miss it, otherwise the greatest throughput."""
    if not measured:
        return None
    if measured[0].summary.slo is None:
        return max(measured, key=_tokens)
    kept = [one for one in measured if one.summary.slo is not None and one.summary.slo.verdict != "missed"]
    return max(kept, key=lambda one: (one.summary.slo and one.summary.slo.goodput.value) or 0.0, default=None)


async def _run(
    endpoint: Endpoint,
    load: Load,
    data: Data,
    settings: Settings,
    stop: Stop,
    watcher: Watcher | None,
    first: int,
) -> Measured:
    tally = Tally()
    scraper = Scraper(endpoint, path=settings.metrics_path, gpus=settings.gpus, interval=settings.scrape_interval)
    watching: asyncio.Future[Any] | None = None
    if watcher is not None:
        watching = asyncio.ensure_future(watcher(load, tally))
    try:
        stage = await measure(
            endpoint,
            load,
            data,
            limits=settings.limits,
            stop=stop,
            tally=tally,
            keep_text=settings.keep_text,
            first=first,
            companion=scraper,
        )
    finally:
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
    scraper.attach(stage)
    summary = summarise(stage, trim=settings.trim, slo=settings.slo)
    return Measured(load=load, stage=stage, summary=summary, cost=cost(summary, settings.price_per_hour))


def _first(done: Sequence[Measured]) -> int:
    return sum(sum(record.turn == 0 for record in one.stage.records) for one in done)


def _tokens(one: Measured) -> float:
    return one.summary.output_tokens_per_second.value or 0.0
