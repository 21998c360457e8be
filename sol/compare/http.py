"""Blocks from two endpoints: the same prompts, seeds and arrivals for both, one endpoint at a time.

Only one side has load at any moment, so that two servers on one machine do not measure each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from sol.bench.client import watch_client
from sol.bench.data import Conversation, Data
from sol.bench.endpoint import Endpoint
from sol.bench.load import ClosedLoop, Load, at_rate
from sol.bench.metrics import e2e, tpot, ttft
from sol.bench.records import RequestRecord, Stage
from sol.bench.run import Limits, Stop, Tally, measure
from sol.bench.tokens import num_output_tokens, token_times
from sol.compare.samples import Answer, Block, Pair, Round
from sol.errors import ConfigError, EndpointError

Side = Literal["a", "b"]

_WARM_UP: Final = 1_000_000_007
"""Number of the first conversation that is only for warming up: no block gets there."""

_ORDERS: Final[tuple[tuple[Side, Side], ...]] = (("a", "b"), ("b", "a"))

Watcher = Callable[[str, Tally], Awaitable[None]]
"""A progress display: runs beside each round and is cancelled with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundLoad:
    """What one round is. Raises `ConfigError`."""

    prompts: int = 8
    """Conversations."""
    concurrency: int = 4
    """At a time; has no meaning with a `rate`."""
    rate: float | None = None
    """Conversations a second, whatever the server does."""
    arrivals: Literal["poisson", "constant"] = "poisson"

    def __post_init__(self) -> None:
        if not 1 <= self.prompts <= 1_000_000:
            raise ConfigError(f"prompts must be 1 to 1000000, not {self.prompts}", param="prompts")
        self.make(0)

    def make(self, seed: int, concurrency: int | None = None) -> Load:
        """Of one round; the same seed has the same arrivals."""
        if concurrency is None and self.rate is not None:
            return at_rate(self.rate, arrivals=self.arrivals, num_conversations=self.prompts, seed=seed)
        return ClosedLoop(concurrency=concurrency or self.concurrency, num_conversations=self.prompts)

    def describe(self) -> dict[str, Any]:
        return {
            "prompts": self.prompts,
            "concurrency": None if self.rate is not None else self.concurrency,
            "rate": self.rate,
            "arrivals": None if self.rate is None else self.arrivals,
        }


class Seeded:
    """Data whose requests carry a seed that follows from their number, and keys that tell the number."""

    def __init__(self, data: Data, seed: int, *, send: bool = True) -> None:
        """`send`: whether to put `seed` into the bodies at all."""
        self._data = data
        self._seed = seed
        self._send = send

    def conversation(self, index: int) -> Conversation:
        found = self._data.conversation(index)
        turns = found.turns
        if self._send:
            number = (self._seed * 1_000_003 + index) % 2**31
            turns = [replace(turn, body={"seed": number, **turn.body}) for turn in turns]
        return Conversation(key=f"{index}:{found.key}", turns=turns)

    def describe(self) -> dict[str, Any]:
        return {**self._data.describe(), "seeds_sent": self._send}


class HttpSampler:
    """Blocks of two endpoints, both from `sol.bench.prepare`."""

    def __init__(
        self,
        a: Endpoint,
        b: Endpoint,
        data: Data,
        load: RoundLoad,
        *,
        seed: int = 0,
        send_seeds: bool = True,
        limits: Limits | None = None,
        stop: Stop | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        self.endpoints: dict[Side, Endpoint] = {"a": a, "b": b}
        self.data = Seeded(data, seed, send=send_seeds)
        self.load = load
        self._seed = seed
        limits = limits or Limits()
        # Every request is to be finished: one that the end of its round cut off would count as a failure of its side.
        self._limits = replace(limits, drain_seconds=max(limits.drain_seconds, limits.request_seconds))
        self._stop = stop or Stop()
        self._watcher = watcher

    async def warm_up(self) -> None:
        """A round of each side that is not counted: kernels are compiled, caches filled, clocks raised.

        Raises `EndpointError` if all of a side's requests fail: there is nothing to compare then.
        """
        for side in self.endpoints:
            found = await self._round(side, _WARM_UP, 0, f"{side.upper()} warms up")
            if found is not None and found.answers and not any(answer.ok for answer in found.answers):
                first = found.answers[0]
                raise EndpointError(
                    f"{side.upper()} ({self.endpoints[side].url}) answered none of the {len(found.answers)} requests "
                    f"to warm up: {first.error}: {first.message}"
                )

    async def block(self, number: int) -> Block | None:
        pairs = []
        for half, order in enumerate(_ORDERS):
            rounds: dict[Side, Round] = {}
            place = (2 * number + half) * self.load.prompts
            for side in order:
                found = await self._round(side, place, place, f"block {number + 1}, {side.upper()}")
                if found is None:
                    return None
                rounds[side] = found
            pairs.append(Pair(a=rounds["a"], b=rounds["b"], a_first=half == 0))
        return Block(number=number, pairs=pairs)

    async def again(self, side: Side, place: int, concurrency: int) -> Round | None:
        """The conversations of the round at `place` once more, so many at a time; None if stopped."""
        return await self._round(side, place, place, f"{side.upper()} again", concurrency)

    async def _round(
        self, side: Side, place: int, seed: int, name: str, concurrency: int | None = None
    ) -> Round | None:
        tally = Tally()
        async with _watched(self._watcher, name, tally):
            stage = await measure(
                self.endpoints[side],
                self.load.make(self._seed + seed, concurrency),
                self.data,
                limits=self._limits,
                stop=self._stop,
                tally=tally,
                keep_text=True,
                first=place,
            )
        if self._stop.is_set:
            return None
        return round_of(stage)


def round_of(stage: Stage) -> Round:
    """What a stage of `Seeded` data says."""
    client = watch_client(stage, (0.0, stage.seconds), stage.records)
    return Round(
        answers=[_answer(record, stage) for record in stage.records],
        seconds=stage.seconds,
        client_limited="; ".join(client.reasons) or None,
    )


def _answer(record: RequestRecord, stage: Stage) -> Answer:
    place, _, key = record.key.partition(":")
    response = token_times(record, stage.counting)
    tokens = num_output_tokens(record, stage.counting)
    streamed = record.streamed and len(record.times) > 0
    return Answer(
        key=key,
        place=int(place),
        turn=record.turn,
        e2e=e2e(record) if record.times else None,
        ttft=ttft(record) if streamed else None,
        tpot=tpot(record, response, tokens) if streamed else None,
        output_tokens=tokens,
        error=record.error,
        message=record.message,
        text=record.text if record.ok else None,
        token_ids=tuple(record.token_ids) if record.token_ids and record.ok else None,
    )


def client_limits(blocks: Sequence[Block]) -> list[str]:
    """Why rounds were limited by the client, one entry a round."""
    rounds = (one for block in blocks for pair in block.pairs for one in (pair.a, pair.b))
    return [one.client_limited for one in rounds if one.client_limited is not None]


@asynccontextmanager
async def _watched(watcher: Watcher | None, name: str, tally: Tally) -> AsyncIterator[None]:
    if watcher is None:
        yield
        return
    watching = asyncio.ensure_future(watcher(name, tally))
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
