"""The simulated server on a virtual clock: hours of load in seconds, the same figures every time.

    server = VirtualServer(profile("h100-8b", seed=1))
    for i in range(1000):
        server.submit(i * 0.05, prompt_tokens=200, output_tokens=100)
    for request in server.run():
        print(request.ttft, request.tpot)

A closed loop submits from `on_finish`, which is called at the time of the clock at which a request ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from sol.errors import ConfigError
from sol.simulate.engine import SimulatedEngine, SimulatedRequest, Step
from sol.simulate.faults import Fault, Faults
from sol.simulate.laws import EngineLaws

_ENGINE_FAULTS = ("stall", "slow")


class VirtualServer:
    """An engine, its virtual clock and what goes wrong on it. Everything follows from the arguments.

    Faults may be stalls and slow-downs; others are of connections, which there are none of, and are refused.
    """

    def __init__(
        self,
        laws: EngineLaws,
        *,
        faults: Iterable[Fault] = (),
        on_finish: Callable[[SimulatedRequest], None] | None = None,
    ) -> None:
        self.faults = Faults(laws.seed)
        for fault in faults:
            if fault.kind not in _ENGINE_FAULTS:
                raise ConfigError(
                    f"a virtual server has no connections: a fault must be {' or '.join(_ENGINE_FAULTS)}, not "
                    f"{fault.kind}",
                    param="kind",
                )
            self.faults.add([fault], 0.0)
        self.engine = SimulatedEngine(laws, timing=self.faults.end_of_step)
        self._on_finish = on_finish
        self._finished: list[SimulatedRequest] = []
        self._num_submitted = 0

    @property
    def now(self) -> float:
        """Seconds since the beginning."""
        return self.engine.now

    def submit(
        self,
        at: float,
        *,
        prompt_tokens: int,
        output_tokens: int,
        block_hashes: Sequence[int] = (),
        seed: int | None = None,
        speculate: bool = True,
        request_id: str | None = None,
    ) -> SimulatedRequest:
        """A request arrives at `at`, not before `now`; it fills in as time goes on.

        Without a `seed` its place in the order of submission is one. Raises `RequestError` for one that the engine
        cannot hold.
        """
        ordinal = self._num_submitted
        request = SimulatedRequest(
            request_id=str(ordinal) if request_id is None else request_id,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            block_hashes=block_hashes,
            seed=ordinal if seed is None else seed,
            speculate=speculate,
        )
        self.engine.submit(request, at)
        self._num_submitted += 1
        return request

    def abort(self, request: SimulatedRequest) -> None:
        """Its client leaves now."""
        self.engine.abort(request, self.now)

    def run(self, until: float = math.inf) -> list[SimulatedRequest]:
        """Go on to `until`, or until nothing is left to do; the requests that finished meanwhile, in that order."""
        self.engine.advance(until, self._take)
        finished, self._finished = self._finished, []
        return finished

    def _take(self, step: Step) -> None:
        for request, _, _ in step.emissions:
            if request.finish_time is not None:
                self._finished.append(request)
                if self._on_finish is not None:
                    self._on_finish(request)
