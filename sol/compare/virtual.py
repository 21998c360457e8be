"""Two simulated servers on virtual clocks as a source of blocks: what the comparison's own errors are measured with.

sampler = VirtualSampler(laws, slower(laws, 1.05), seed=1)
asyncio.run(compare(sampler, Plan(effect=0.05))).verdict      # "worse", in most of the cases
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from sol.compare.samples import Answer, Block, Pair, Round
from sol.simulate import EngineLaws, Fault, SimulatedRequest, VirtualServer


def slower(laws: EngineLaws, factor: float) -> EngineLaws:
    """The same engine, all of whose steps take `factor` times as long."""
    times = {
        item.name: getattr(laws, item.name) * factor
        for item in dataclasses.fields(laws)
        if item.name.endswith("_seconds")
    }
    return dataclasses.replace(laws, **times)


class VirtualSampler:
    """Blocks of two virtual servers.

    Both run on one machine whose speed wanders: from round to round it takes a factor of standard deviation
    `round_sigma` (of the logarithm), independently, and besides a slow wave that goes on through rounds, of standard
    deviation `drift_sigma`, which neighbouring rounds share. Without both, only the laws' own noise is there.
    """

    def __init__(
        self,
        a: EngineLaws,
        b: EngineLaws,
        *,
        prompts: int = 8,
        concurrency: int = 4,
        round_sigma: float = 0.05,
        drift_sigma: float = 0.05,
        seed: int = 0,
    ) -> None:
        self._rng = np.random.default_rng([seed, 0xC03A])
        seeds = self._rng.integers(2**31, size=2).tolist()
        self._servers = tuple(
            _Server(dataclasses.replace(laws, seed=own)) for laws, own in zip((a, b), seeds, strict=True)
        )
        self._prompts = prompts
        self._concurrency = concurrency
        self._round_sigma = round_sigma
        self._drift_sigma = drift_sigma
        self._drift = float(self._rng.normal())

    async def block(self, number: int) -> Block:
        return Block(number=number, pairs=[self._pair(2 * number + half, a_first=half == 0) for half in (0, 1)])

    def _pair(self, number: int, *, a_first: bool) -> Pair:
        lengths = [
            (number * self._prompts + i, int(self._rng.integers(50, 400)), int(self._rng.integers(20, 100)))
            for i in range(self._prompts)
        ]
        rounds: dict[int, Round] = {}
        for side in (0, 1) if a_first else (1, 0):
            rounds[side] = self._servers[side].round(lengths, self._concurrency, self._weather())
        return Pair(a=rounds[0], b=rounds[1], a_first=a_first)

    def _weather(self) -> float:
        """By how much the machine is slower in the next round."""
        self._drift = 0.95 * self._drift + math.sqrt(1 - 0.95**2) * float(self._rng.normal())
        return math.exp(self._drift_sigma * self._drift + self._round_sigma * float(self._rng.normal()))


class _Server:
    """A virtual server under a closed loop, one round after another on its own clock."""

    def __init__(self, laws: EngineLaws) -> None:
        self._left: Iterator[tuple[int, int, int]] = iter(())
        self._taken: list[tuple[int, SimulatedRequest]] = []
        self._server = VirtualServer(laws, on_finish=self._next)

    def round(self, lengths: list[tuple[int, int, int]], concurrency: int, factor: float) -> Round:
        server = self._server
        begin = server.now
        (slow,) = server.faults.add([Fault(kind="slow", factor=factor)], begin)
        self._left, self._taken = iter(lengths), []
        for _ in range(concurrency):
            self._submit(begin)
        server.run()
        server.faults.remove(slow.id)
        return Round(answers=[_answer(*taken) for taken in self._taken], seconds=server.now - begin)

    def _next(self, _finished: SimulatedRequest) -> None:
        self._submit(self._server.now)

    def _submit(self, at: float) -> None:
        if (asked := next(self._left, None)) is not None:
            place, prompt_tokens, output_tokens = asked
            # The seed is the prompt's: both sides have the same luck with its drafts.
            request = self._server.submit(at, prompt_tokens=prompt_tokens, output_tokens=output_tokens, seed=place)
            self._taken.append((place, request))


def _answer(place: int, request: SimulatedRequest) -> Answer:
    return Answer(
        key=str(place),
        place=place,
        e2e=request.e2e,
        ttft=request.ttft,
        tpot=request.tpot,
        output_tokens=request.output_tokens,
    )
