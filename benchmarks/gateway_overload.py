"""Four simulated engines at 120% of what they can do: what becomes of each class, with the gateway's queue and without.

    python benchmarks/gateway_overload.py [--quick] [--json FILE] [--plot FILE]

Engines, clock and requests are virtual (`sol.simulate`), the queue and what it learns of engines are the gateway's own:
an hour of load takes minutes, and every run gives the same figures. Without the queue each request goes to the engine
with the fewest open ones, at once, which is what most balancers do. The plot (SVG) is the one in docs/gateway.md.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from common import Report, arguments

from sol.bench.svg import Series, plot
from sol.gateway.queue.config import CLASSES, ClassesConfig, QueueConfig
from sol.gateway.queue.credits import Credits
from sol.gateway.queue.dispatcher import Dispatcher
from sol.gateway.queue.errors import QueueFullError
from sol.gateway.queue.fair import Waiter
from sol.gateway.queue.service import ServiceLaw
from sol.gateway.routing.prompts import Prompts
from sol.simulate.engine import SimulatedRequest
from sol.simulate.laws import profile
from sol.simulate.virtual import VirtualServer

NUM_ENGINES: Final = 4
LOAD: Final = 1.2
TARGETS: Final = {"realtime": 0.5, "interactive": 2.0}
"""p95 of the time to first token, in seconds."""
QUANTUM: Final = 0.005
"""The engines' clocks go on together, in steps of so many seconds."""
TICK: Final = 0.05
LOOK: Final = 2.0
"""How often engines are asked how they are, as the gateway's prober does."""
SHOWN: Final = 3.0
"""Seconds that the plot shows: without the queue there are many more, and the rest would be a line at the bottom."""
WARM_UP: Final = 0.2
"""Of the run; not counted."""


@dataclass(frozen=True)
class Mix:
    """What a class asks for: lognormal lengths, and its share of all requests."""

    share: float
    prompt: float
    output: float


MIXES: Final[Mapping[str, Mix]] = {
    "realtime": Mix(0.30, 300, 80),
    "interactive": Mix(0.40, 800, 200),
    "batch": Mix(0.30, 3000, 400),
}


@dataclass(eq=False)
class Request:
    class_name: str
    at: float
    prompt_tokens: int
    output_tokens: int
    engine: int = -1
    simulated: SimulatedRequest | None = None
    refused: bool = False

    @property
    def first_token(self) -> float | None:
        return None if self.simulated is None else self.simulated.first_token_time

    @property
    def finish(self) -> float | None:
        return None if self.simulated is None else self.simulated.finish_time


@dataclass
class Arm:
    """One way to run the same requests."""

    requests: list[Request]
    queue: bool
    servers: list[VirtualServer] = field(init=False)
    open: list[int] = field(init=False)
    credits: list[Credits] = field(init=False)
    now: float = 0.0

    def __post_init__(self) -> None:
        laws = profile("h100-8b", max_num_seqs=64, max_num_batched_tokens=2048, num_blocks=12_000)
        self.servers = [VirtualServer(laws) for _ in range(NUM_ENGINES)]
        self.open = [0] * NUM_ENGINES
        self.credits = [Credits(floor=4) for _ in range(NUM_ENGINES)]
        self.law = ServiceLaw()
        self.prompts = [Prompts() for _ in range(NUM_ENGINES)]
        self._loads: dict[SimulatedRequest, int] = {}
        self.rooms = [math.inf] * NUM_ENGINES
        self._unanswered: list[list[SimulatedRequest]] = [[] for _ in range(NUM_ENGINES)]
        self._running: dict[SimulatedRequest, tuple[Request, Waiter | None]] = {}
        self.dispatcher = Dispatcher(["m"], ClassesConfig(), QueueConfig(), self)

    # What the dispatcher asks about engines.

    def total(self, model: str, *, besides: Collection[str] = ()) -> float:
        return sum(math.inf if each.limit is None else each.limit for each in self.credits)

    def free(self, model: str, *, patient: bool, besides: Collection[str] = ()) -> float:
        return sum(self._free(index) for index in range(NUM_ENGINES) if not patient or self._has_room(index))

    def _has_room(self, index: int) -> bool:
        return self.prompts[index].tokens <= self.rooms[index]

    def held(self, model: str, classes: Collection[str]) -> int:
        return sum(self.dispatcher.in_flight[name] for name in classes)

    def granted(self, waiter: Waiter) -> None:
        pass

    def in_demand(self, model: str) -> None:
        for each in self.credits:
            each.in_demand = True

    def _free(self, index: int) -> float:
        limit = self.credits[index].limit
        return math.inf if limit is None else max(0, limit - self.open[index])

    def run(self, until: float) -> None:
        """All requests, and the time up to `until`."""
        coming: Iterator[Request] = iter(self.requests)
        request = next(coming, None)
        next_tick = next_look = 0.0
        while self.now < until:
            self.now += QUANTUM
            for index, server in enumerate(self.servers):
                ended = server.run(self.now)
                self._look_for_answers(index)
                for done in ended:
                    self._ended(index, done)
            while request is not None and request.at <= self.now:
                self._arrived(request)
                request = next(coming, None)
            if self.now >= next_tick:
                next_tick += TICK
                for index, credit in enumerate(self.credits):
                    credit.taken(self.open[index])
                    self.rooms[index] = self.prompts[index].room(self.now, QueueConfig().prompts_ahead)
                self.dispatcher.tick(self.now)
            if self.now >= next_look:
                next_look += LOOK
                for credit, server, in_flight in zip(self.credits, self.servers, self.open, strict=True):
                    credit.look(self.now, in_flight=in_flight, running=server.engine.num_running,
                                waiting=server.engine.num_waiting)  # fmt: skip

    def _arrived(self, request: Request) -> None:
        if not self.queue:
            self._send(request, None)
            return
        output = self.law.output_tokens(request.class_name, "", None)
        waiter = Waiter(
            model="m",
            class_name=request.class_name,
            cost=request.prompt_tokens + output,
            expected_seconds=self.law.seconds(request.prompt_tokens, output),
            first_seconds=self.law.prompt.expect(request.prompt_tokens),
            arrived=self.now,
            on_grant=lambda: self._send(request, waiter),
            on_refuse=lambda _: setattr(request, "refused", True),
        )
        try:
            self.dispatcher.offer(waiter, self.now)
        except QueueFullError:
            request.refused = True

    def _send(self, request: Request, waiter: Waiter | None) -> None:
        index = min(range(NUM_ENGINES), key=self._preference if self.queue else self.open.__getitem__)
        self.open[index] += 1
        request.engine = index
        request.simulated = self.servers[index].submit(
            max(self.now, self.servers[index].now), prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens,
        )  # fmt: skip
        self._running[request.simulated] = request, waiter
        self._loads[request.simulated] = self.prompts[index].sent(request.prompt_tokens)
        self._unanswered[index].append(request.simulated)

    def _preference(self, index: int) -> tuple[bool, bool, int]:
        """As the gateway's router: engines with a place, then those with few prompts before them."""
        return not self._free(index), not self._has_room(index), self.open[index]

    def _look_for_answers(self, index: int) -> None:
        waiting = []
        for each in self._unanswered[index]:
            if each.first_token_time is None:
                waiting.append(each)
            else:
                self.prompts[index].begun(each.prompt_tokens, self._loads.pop(each), each.ttft, self.now)
        self._unanswered[index] = waiting

    def _ended(self, index: int, done: SimulatedRequest) -> None:
        request, waiter = self._running.pop(done)
        self.open[index] -= 1
        if waiter is None:
            return
        assert waiter.granted_at is not None
        assert done.first_token_time is not None
        first = done.first_token_time - waiter.granted_at
        self.law.observe_output(request.class_name, "", done.num_output)
        self.law.observe_stream(done.prompt_tokens, first, done.num_output, done.e2e - done.ttft)
        target = TARGETS.get(request.class_name)
        self.credits[index].answered(slow=target is not None and first > target)
        self.dispatcher.leave(waiter, self.now)


def make_requests(rate: float, seconds: float, seed: int) -> list[Request]:
    """Poisson arrivals, `rate` requests a second."""
    random_ = random.Random(seed)
    requests: list[Request] = []
    for name, mix in MIXES.items():
        at = 0.0
        while (at := at + random_.expovariate(rate * mix.share)) < seconds:
            prompt = min(16_000, max(8, round(random_.lognormvariate(math.log(mix.prompt), 0.6))))
            output = min(2000, max(2, round(random_.lognormvariate(math.log(mix.output), 0.5))))
            requests.append(Request(name, at, prompt, output))
    return sorted(requests, key=lambda each: each.at)


def measure_capacity(seconds: float) -> float:
    """Requests a second of this mix that the engines finish when there are always more."""
    arm = Arm(make_requests(400.0, seconds, seed=1), queue=False)
    arm.run(seconds)
    counted = [each for each in arm.requests if each.finish is not None and each.finish > seconds / 3]
    # The mix of what has ended is not the mix of what came: what counts is work, in tokens.
    done = sum(each.prompt_tokens / 5 + each.output_tokens for each in counted)
    each = sum(mix.share * _mean_work(mix) for mix in MIXES.values())
    return done / (seconds * 2 / 3) / each


def _mean_work(mix: Mix) -> float:
    return mix.prompt / 5 * math.exp(0.6**2 / 2) + mix.output * math.exp(0.5**2 / 2)


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the plot here")
    options = parser.parse_args()
    seconds = 120.0 if options.quick else 600.0
    report = Report("gateway_overload", options.quick)
    capacity = measure_capacity(30.0)
    print(f"capacity {capacity:.1f} requests a second")
    requests_of = {name: make_requests(LOAD * capacity, seconds, seed=7) for name in ("gateway", "engines only")}
    series: list[Series] = []
    for name, requests in requests_of.items():
        arm = Arm(requests, queue=name == "gateway")
        arm.run(seconds)
        for class_name in CLASSES:
            if class_name in MIXES:
                _row(report, name, class_name, arm, seconds)
        realtime = [each for each in requests if each.class_name == "realtime" and each.first_token is not None]
        series.append(Series(name, *_p95_over_time(realtime, seconds)))
    rows = {(row["way"], row["class"]): row for row in report.rows}
    target = TARGETS["realtime"]
    report.at_most("realtime p95 TTFT with the queue, s", rows["gateway", "realtime"]["TTFT p95 s"], target)
    report.more_than("realtime p95 TTFT without it, s", rows["engines only", "realtime"]["TTFT p95 s"], target)
    report.more_than("batch requests a second with the queue", rows["gateway", "batch"]["finished a second"], 0.0)
    if options.plot is not None:
        series.append(Series("target", [0.0, seconds], [target, target]))
        y_label = f"s; what is {SHOWN:g} or more, at the top"
        svg = plot(
            "Realtime at 120% load: p95 TTFT", "seconds since the start", y_label, series, y_range=(0, SHOWN * 1.04)
        )
        options.plot.write_text(_page(svg))
    return report.finish(options.json)


def _row(report: Report, way: str, class_name: str, arm: Arm, seconds: float) -> None:
    begin = WARM_UP * seconds
    counted = [each for each in arm.requests if each.class_name == class_name and each.at >= begin]
    # One that has not begun counts with the time that it has waited so far: leaving it out would flatter.
    times = [(seconds if each.first_token is None else each.first_token) - each.at for each in counted]
    done = [each for each in arm.requests if each.class_name == class_name and (each.finish or 0) >= begin]
    report.row(**{
        "way": way,
        "class": class_name,
        "offered a second": len(counted) / (seconds - begin),
        "finished a second": len(done) / (seconds - begin),
        "TTFT p50 s": float(np.percentile(times, 50)),
        "TTFT p95 s": float(np.percentile(times, 95)),
        "output tokens a second": sum(each.output_tokens for each in done) / (seconds - begin),
    })  # fmt: skip


def _p95_over_time(requests: list[Request], seconds: float) -> tuple[list[float], list[float]]:
    width = seconds / 40
    xs, ys = [], []
    for index in range(40):
        times = [each.first_token - each.at for each in requests
                 if each.first_token is not None and index * width <= each.at < (index + 1) * width]  # fmt: skip
        if times:
            xs.append((index + 0.5) * width)
            ys.append(min(SHOWN, float(np.percentile(times, 95))))
    return xs, ys


def _page(svg: str) -> str:
    """The plot as a file of its own, in colours that both light and dark pages can show."""
    style = (
        "<style>text{font:11px sans-serif;fill:#777}.title{font-size:13px}.grid{stroke:#8883}"
        "polyline{fill:none;stroke-width:1.6}"
        ".c0{stroke:#2a7}.c1{stroke:#c44}.c2{stroke:#888;stroke-dasharray:4 3}"
        ".l0{fill:#2a7}.l1{fill:#c44}.l2{fill:#888}</style>"
    )
    head, _, rest = svg.partition(">")
    return f'{head} xmlns="http://www.w3.org/2000/svg" width="700">{style}{rest}\n'


if __name__ == "__main__":
    sys.exit(main())
