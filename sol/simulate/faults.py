"""Faults on schedule: what goes wrong, when, for which requests. No socket and no clock: whoever has them asks here.

A fault is active from `start` to `end` (seconds from when it was set), for at most `count` requests, for a `share` of
them drawn with a seed, for those with a `header` (`name` or `name=value`), on one `path`. Kinds:

    of one request    error, hang, reset, truncate, error_event, malformed, pause, wrong_usage, network
    of the engine     stall (no step ends), slow (steps take `factor` times as long, growing)
    of the process    not_ready, unhealthy (`period`: it flaps), stale_metrics, refuse, crash

`error`, `hang`, `reset` and `network` may also be given the `path` of a route that does not generate, like /health.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from sol.config import literal_choices
from sol.errors import ConfigError
from sol.simulate.noise import mix, uniform

Kind = Literal[
    "error", "hang", "reset", "truncate", "error_event", "malformed", "pause", "wrong_usage", "network",
    "stall", "slow", "not_ready", "unhealthy", "stale_metrics", "refuse", "crash",
]  # fmt: skip

REQUEST_KINDS: Final = frozenset(
    {"error", "hang", "reset", "truncate", "error_event", "malformed", "pause", "wrong_usage", "network"}
)
_IN_STREAM: Final = frozenset({"reset", "truncate", "error_event", "malformed", "pause"})

_FIELDS: Final[Mapping[str, frozenset[str]]] = {
    "error": frozenset({"status", "retry_after", "message"}),
    "hang": frozenset(),
    "reset": frozenset({"after_events", "after_bytes"}),
    "truncate": frozenset({"after_events", "after_bytes", "clean"}),
    "error_event": frozenset({"after_events", "message"}),
    "malformed": frozenset({"after_events"}),
    "pause": frozenset({"after_events", "seconds"}),
    "wrong_usage": frozenset({"factor"}),
    "network": frozenset({"seconds", "bytes_per_second"}),
    "stall": frozenset({"seconds"}),
    "slow": frozenset({"factor", "growth_per_second"}),
    "not_ready": frozenset({"seconds"}),
    "unhealthy": frozenset({"seconds", "period"}),
    "stale_metrics": frozenset({"seconds"}),
    "refuse": frozenset({"seconds"}),
    "crash": frozenset({"seconds", "startup_seconds"}),
}
"""What a kind takes beside when and for whom. `seconds` of a state is its length: `end` in other words."""

_OPTIONAL: Final = frozenset({"end", "retry_after", "seconds", "bytes_per_second", "period"})
_STATES: Final = frozenset({"stall", "not_ready", "unhealthy", "stale_metrics", "refuse", "crash"})
GENERATING: Final = ("/v1/completions", "/v1/chat/completions")
_ANYWHERE: Final = frozenset({"error", "hang", "reset", "network"})
_SELECTION: Final = frozenset({"share", "count", "header", "path"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong. Raises `ConfigError` for values that mean nothing together."""

    kind: Kind
    start: float = 0.0
    end: float | None = None
    """None: until it is removed."""
    share: float = 1.0
    """Of the requests that fit otherwise, 0 to 1."""
    count: int | None = None
    header: str | None = None
    path: str | None = None
    """The route, like /v1/completions; None: every route that generates."""
    status: int = 500
    retry_after: float | None = None
    """Seconds, in `Retry-After` (rounded up) and, where it is no whole number, `retry-after-ms`."""
    message: str | None = None
    after_events: int = 0
    """Chunks of a stream that the client still gets. A response that is not streamed is hit as it is sent."""
    after_bytes: int | None = None
    """Instead: bytes of the response's body, which may end within an event."""
    clean: bool = False
    """Of a truncated stream: end the response's encoding properly, so that nothing but the missing end tells."""
    seconds: float | None = None
    factor: float = 2.0
    """wrong_usage: of completion_tokens, 0 leaves the usage out; slow: of each step's duration …"""
    growth_per_second: float = 0.0
    """… to which this is added every second, as a leak would."""
    bytes_per_second: float | None = None
    period: float | None = None
    """Seconds of one turn of flapping: half of it unhealthy, half healthy."""
    startup_seconds: float = 0.0
    """After a crash: how long the process is there but not ready."""

    def __post_init__(self) -> None:
        kind: object = self.kind
        if not isinstance(kind, str) or kind not in _FIELDS:
            raise ConfigError(f"kind must be one of {', '.join(_FIELDS)}, not {self.kind!r}", param="kind")
        allowed = _FIELDS[self.kind] | {"kind", "start", "end"}
        if self.kind in REQUEST_KINDS:
            allowed |= _SELECTION
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if item.name not in allowed and value != item.default:
                takes = ", ".join(sorted(allowed - {"kind"}))
                raise ConfigError(f"{item.name} means nothing to a fault of kind {self.kind}: it takes {takes}",
                                  param=item.name)  # fmt: skip
        for name in ("start", "end", "share", "retry_after", "seconds", "factor", "growth_per_second",
                     "bytes_per_second", "period", "startup_seconds"):  # fmt: skip
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            self._require(name, _is_number(value) and 0 <= value < math.inf, "a number of at least 0")
        self._require("share", self.share <= 1, "0 to 1")
        self._require("count", self.count is None or (_is_int(self.count) and self.count >= 1), "at least 1")
        self._require("after_events", _is_int(self.after_events) and self.after_events >= 0, "at least 0")
        size = self.after_bytes
        self._require("after_bytes", size is None or (_is_int(size) and size >= 0), "at least 0")
        if size is not None and self.after_events:
            raise ConfigError("after_events and after_bytes both say where; give one", param="after_bytes")
        self._require("status", _is_int(self.status) and 400 <= self.status <= 599, "an error's, 400 to 599")
        self._require("clean", isinstance(self.clean, bool), "true or false")
        for name in ("header", "path", "message"):
            value = getattr(self, name)
            self._require(name, value is None or (isinstance(value, str) and bool(value)), "a string, not empty")
        allowed_path = self.kind in _ANYWHERE or self.path in (None, *GENERATING)
        self._require("path", allowed_path, f"one of {' and '.join(GENERATING)} for a fault of this kind")
        self._require("bytes_per_second", self.bytes_per_second is None or self.bytes_per_second > 0, "more than 0")
        self._require("period", self.period is None or self.period > 0, "more than 0 seconds")
        self._require("end", self.end is None or self.end > self.start, f"later than its start ({self.start})")
        if self.kind == "slow":
            self._require("factor", self.factor > 0, "more than 0")
        if self.kind in _STATES and self.seconds is not None and self.end is not None:
            raise ConfigError("seconds and end both say when it is over; give one", param="seconds")
        if self.kind == "pause" and self.seconds is None:
            raise ConfigError("seconds is required: how long the stream pauses (a hang is for ever)", param="seconds")
        if self.kind == "network" and self.seconds is None and self.bytes_per_second is None:
            raise ConfigError("a slow network needs seconds (of delay) or bytes_per_second", param="seconds")

    def _require(self, name: str, holds: bool, allowed: str) -> None:
        if not holds:
            raise ConfigError(f"{name} must be {allowed}, not {getattr(self, name)!r}", param=name)

    @property
    def until(self) -> float:
        """When it is over, like `start`; infinity: never."""
        if self.kind in _STATES and self.seconds is not None:
            return self.start + self.seconds
        return math.inf if self.end is None else self.end

    @property
    def in_stream(self) -> bool:
        """Whether it waits for `after_events`."""
        return self.kind in _IN_STREAM

    @property
    def is_state(self) -> bool:
        return self.kind not in REQUEST_KINDS


def parse_fault(data: object) -> Fault:
    """A fault as JSON or YAML has it. Raises `ConfigError`."""
    if not isinstance(data, dict):
        raise ConfigError(f"a fault must be an object like {{'kind': 'error'}}, not {data!r:.80}", param="faults")
    known = {item.name for item in dataclasses.fields(Fault)}
    for name in data:
        if name not in known:
            raise ConfigError(f"unknown field {name!r:.80} of a fault: remove it, or correct its name", param="faults")
    if "kind" not in data:
        raise ConfigError(f"kind is required: one of {', '.join(literal_choices(Kind))}", param="kind")
    return Fault(**data)


class ActiveFault:
    """A fault that was set at some time of the clock."""

    def __init__(self, fault_id: int, fault: Fault, set_at: float) -> None:
        self.id = fault_id
        self.fault = fault
        self.start = set_at + fault.start
        self.end = set_at + fault.until
        self.hits = 0
        """Requests that it met."""
        self.begun = False
        """Of a crash: whether it has happened."""

    def covers(self, now: float) -> bool:
        return self.start <= now < self.end

    def as_dict(self, now: float) -> dict[str, Any]:
        given = {
            item.name: value
            for item in dataclasses.fields(Fault)
            if (value := getattr(self.fault, item.name)) != item.default
        }
        return {"id": self.id, **given, "active": self.covers(now), "hits": self.hits}


class Faults:
    """All that are set. Times are those of the clock that the engine has, too."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._ids = itertools.count(1)
        self._active: dict[int, ActiveFault] = {}

    def add(self, faults: Iterable[Fault], now: float) -> list[ActiveFault]:
        added = [ActiveFault(next(self._ids), fault, now) for fault in faults]
        self._active.update((fault.id, fault) for fault in added)
        return added

    def remove(self, fault_id: int) -> bool:
        """Whether it was there."""
        return self._active.pop(fault_id, None) is not None

    def clear(self) -> None:
        self._active.clear()

    def all(self) -> list[ActiveFault]:
        return list(self._active.values())

    def meet(self, now: float, ordinal: int, path: str, headers: Mapping[str, str]) -> list[Fault]:
        """What happens to the `ordinal`-th request, in the order in which the faults were set. `headers` by lower-case
        name."""
        met = []
        for active in self._active.values():
            fault = active.fault
            if fault.is_state or not active.covers(now) or (fault.count is not None and active.hits >= fault.count):
                continue
            if fault.path != path and (fault.path is not None or path not in GENERATING):
                continue
            if not _has(headers, fault.header):
                continue
            if fault.share < 1 and uniform(mix(mix(self._seed, active.id), ordinal)) >= fault.share:
                continue
            active.hits += 1
            met.append(fault)
        return met

    def state(self, kind: Kind, now: float) -> ActiveFault | None:
        """The first that puts the process in this state now. One that flaps begins unhealthy."""
        for active in self._active.values():
            fault = active.fault
            if fault.kind == kind and active.covers(now):
                period = fault.period
                if period is None or (now - active.start) % period < period / 2:
                    return active
        return None

    def end_of_step(self, begin: float, duration: float) -> float:
        """When a step ends that began at `begin` and takes `duration` by the laws: no time passes in a stall."""
        slowed = 1.0
        stalls: list[tuple[float, float]] = []
        for active in self._active.values():
            fault = active.fault
            if fault.kind == "stall":
                stalls.append((active.start, active.end))
            elif fault.kind == "slow" and active.covers(begin):
                slowed *= fault.factor + fault.growth_per_second * (begin - active.start)
        work, at = duration * slowed, begin
        for stall_start, stall_end in sorted(stalls):
            if stall_end <= at:
                continue
            if stall_start >= at + work:
                break
            work -= max(0.0, stall_start - at)
            at = stall_end
        return at + work

    def next_change(self, now: float) -> float | None:
        """When the process's state may change next, for a timer."""
        times = [
            time
            for active in self._active.values()
            if active.fault.kind in ("refuse", "crash")
            for time in (active.start, active.end)
            if time > now
        ]
        return min(times, default=None)


def _has(headers: Mapping[str, str], wanted: str | None) -> bool:
    if wanted is None:
        return True
    name, equals, value = wanted.partition("=")
    found = headers.get(name.strip().lower())
    return found is not None and (not equals or found == value.strip())


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
