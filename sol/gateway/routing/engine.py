"""One engine as the gateway knows it, live: its open requests, how fast it answers, whether it is well."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from sol.engines.drivers import DRIVERS
from sol.engines.signals import Signals
from sol.gateway.call import Call
from sol.gateway.routing.breaker import Breaker, Verdict
from sol.gateway.routing.config import RoutingConfig
from sol.gateway.routing.health import Health
from sol.gateway.routing.latency import LatencyModel
from sol.gateway.routing.prompts import Prompts
from sol.version import __version__

if TYPE_CHECKING:
    from sol.gateway.config import EngineEntry

__all__ = ["Engine", "Flight", "Verdict"]

_MANY_TIMES = 10
_USUAL_HEADERS = {"user-agent": f"sol-gateway/{__version__}", "accept": "*/*", "accept-encoding": "identity"}


class Engine:
    def __init__(self, entry: EngineEntry, config: RoutingConfig) -> None:
        assert entry.url is not None
        self.name = entry.name
        self.driver = DRIVERS[entry.driver]
        self.base_url = entry.url
        self.served_name = entry.served_name
        self.max_in_flight = entry.max_in_flight
        self.has_metrics = (entry.metrics_path or self.driver.metrics_path) is not None
        self.credits: int | None = None
        """Requests that it takes well at once, as the queue has learned; None: nothing speaks against more."""
        self.prompt_room = math.inf
        """Tokens of prompts that may be before those of somebody who can wait."""
        self.headers = {**_USUAL_HEADERS, **{name.lower(): value for name, value in entry.headers.items()}}
        """Of every request to it."""
        if entry.api_key is not None:
            self.headers["authorization"] = f"Bearer {entry.api_key}"
        self._signal_age = config.signal_age
        self.health = Health(config.health)
        self.breaker = Breaker(config.breaker)
        self.latency = LatencyModel()
        self.prompts = Prompts()
        self.on_begun: Callable[[], None] | None = None
        """Called when a stream has begun, and somebody else's prompt may be sent."""
        self.signals: Signals | None = None
        """What it last said of itself; look at its age."""
        self._others = 0.0
        """Open requests that were not the gateway's own, by these signals."""
        self.in_flight = 0
        """The gateway's open requests."""
        self.in_flight_by_class: dict[str, int] = {}
        """Of these, how many are of each class."""
        self.num_refused = 0
        """Requests that it answered with 429 or 503, ever."""
        self._streams: dict[Flight, None] = {}
        """Of the open requests, those whose answer has begun."""
        self.last_byte_at = 0.0
        """time.monotonic() of the last bytes of any answer."""
        self._busy_since = 0.0
        """When the first of the open requests was sent."""
        self._progress: float | None = None
        """Its counter of steps or tokens."""
        self._progress_at = 0.0
        """When that was last seen to have moved."""
        self._unanswered: dict[Flight, None] = {}
        """The oldest first."""

    @property
    def num_streaming(self) -> int:
        return len(self._streams)

    @property
    def is_full(self) -> bool:
        return self.max_in_flight is not None and self.in_flight >= self.max_in_flight

    @property
    def has_credit(self) -> bool:
        return self.credits is None or self.in_flight < self.credits

    @property
    def has_prompt_room(self) -> bool:
        return self.prompts.tokens <= self.prompt_room

    def fresh_signals(self, now: float) -> Signals | None:
        """What it lately said of itself; None: nothing, or too long ago to go by."""
        signals = self.signals
        return signals if signals is not None and signals.age(now) <= self._signal_age else None

    def load(self, now: float) -> float:
        """Open requests, with those of others where it has lately said that it has any."""
        return self.in_flight if self.fresh_signals(now) is None else self.in_flight + self._others

    def scraped(self, signals: Signals, own: int) -> None:
        """What it says of itself; `own`: how many requests of the gateway's were open when it was asked."""
        self.signals = signals
        self._others = max(0.0, (signals.running or 0.0) + (signals.waiting or 0.0) - own)
        if signals.progress is not None and signals.progress != self._progress:
            self._progress, self._progress_at = signals.progress, signals.read_at

    def is_stalled(self, now: float, seconds: float) -> bool:
        """Whether it has work and made no progress for so long, as far as that can be seen.

        Streams that have begun must bring bytes, but for those whose client takes nothing. A request without an answer
        may wait, or its prompt be long: only an engine that counts its steps can be seen to stand still over it, and
        only after many times what it should take.
        """
        if now - max(self._busy_since, self.last_byte_at, self._progress_at) <= seconds or not self.in_flight:
            return False
        if not all(flight.waits_for_client() for flight in self._streams):
            return True
        if self._progress is None or not self._unanswered:
            return False
        oldest = next(iter(self._unanswered))
        expected = self.latency.expect(oldest.call.input_tokens, self.load(now), now)
        return now - oldest.started_at > max(seconds, _MANY_TIMES * expected)

    def is_well(self, now: float) -> bool:
        """Whether nothing speaks against asking it."""
        return self.health.is_well and self.breaker.allows(now)

    def begin(self, call: Call) -> Flight:
        flight = Flight(self, call)
        if not self.in_flight:
            self._busy_since = flight.started_at
        self.in_flight += 1
        self.in_flight_by_class[flight.class_name] = self.in_flight_by_class.get(flight.class_name, 0) + 1
        flight.prompt_load = self.prompts.sent(flight.prompt_tokens)
        self._unanswered[flight] = None
        return flight

    def presume_begun(self, now: float) -> None:
        """Answers that come as a whole have no beginning that could be seen: count their prompts as computed when that
        should be so."""
        for flight in self._unanswered:
            call = flight.call
            if not flight.prompt_tokens or call.stream:
                continue
            if now - flight.started_at >= self.latency.expect(call.input_tokens, self.load(now), now):
                self.prompts.gone(flight.prompt_tokens)
                flight.prompt_tokens = 0

    def begun(self, flight: Flight) -> None:
        self._unanswered.pop(flight, None)
        self._streams[flight] = None

    def ended(self, flight: Flight) -> None:
        self._unanswered.pop(flight, None)
        self._streams.pop(flight, None)
        self.in_flight -= 1
        self.in_flight_by_class[flight.class_name] -= 1


def _never() -> bool:
    return False


class Flight:
    """A call on its way to an engine and back. `end` is called once, whatever happens."""

    __slots__ = (
        "_engine", "_load", "_trial", "call", "class_name", "prompt_load", "prompt_tokens", "started_at",
        "waits_for_client",
    )  # fmt: skip

    def __init__(self, engine: Engine, call: Call) -> None:
        self._engine = engine
        self.call = call
        self.class_name = call.class_name
        self.prompt_tokens = call.input_tokens
        """Those that the engine has before it; 0 once its answer has begun."""
        self.prompt_load = 0
        self.started_at = now = time.monotonic()
        self._load = engine.load(now)
        self._trial = engine.breaker.begin(now)
        self.waits_for_client: Callable[[], bool] = _never
        """Whether nothing is read of its stream, because its client takes nothing."""

    def first_byte(self) -> None:
        """The stream has begun."""
        engine, now = self._engine, time.monotonic()
        engine.begun(self)
        engine.prompts.begun(self.prompt_tokens, self.prompt_load, now - self.started_at, now)
        self.prompt_tokens = 0
        engine.latency.observe(self.call.input_tokens, self._load, now - self.started_at, now)
        if engine.on_begun is not None:
            engine.on_begun()

    def refused(self) -> None:
        """The engine has no place for it, and says so."""
        self._engine.num_refused += 1

    def end(self, verdict: Verdict) -> None:
        engine = self._engine
        engine.ended(self)
        engine.prompts.gone(self.prompt_tokens)
        self.prompt_tokens = 0
        engine.breaker.end(verdict, time.monotonic(), trial=self._trial)
