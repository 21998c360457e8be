"""The client looks at itself: was it the bottleneck? And do the figures agree with each other (Little's law)?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from sol.bench.records import RequestRecord, Stage

LATE_SECONDS: Final = 0.005
LATE_SHARE: Final = 0.1
"""A client is late if the 99th percentile of its own part before sending exceeds both: 5 ms, and a tenth of the median
time to the first output."""
STALL_SECONDS: Final = 0.02
STALL_SHARE: Final = 0.01
"""Of the time, in lags of more than 20 ms: then one sample in a hundred is the client's, and the 99th percentile."""
LONGEST_STALL_SECONDS: Final = 0.1
"""One such stall is longer than anything that should appear in a tail unexplained."""
BUSY_SHARE: Final = 0.9
"""Of one core. Beyond it work waits for work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """Seconds of the client's own lag in the measured window."""

    limited: bool
    reasons: tuple[str, ...]
    send_lag_p50: float | None
    send_lag_p99: float | None
    """From when a request was due to when the client began with it."""
    loop_lag_p99: float | None
    longest_stall: float
    stalled_share: float
    """Of the window's time."""
    busy_share: float
    """CPU seconds a second, of the whole run."""
    events_per_second: float


def watch_client(stage: Stage, window: tuple[float, float], due: Sequence[RequestRecord]) -> Client:
    begin, end = window
    span = max(end - begin, 1e-9)
    beats = np.array(stage.heartbeats.due)
    lags = np.array(stage.heartbeats.lag)
    # A stall counts if any of it lies within.
    inside = (beats + lags >= begin) & (beats <= end)
    lags = lags[inside]
    late = np.array([record.started - record.intended for record in due if record.started])
    firsts = [record.times[0] - record.intended for record in due if record.ok and record.times]
    longest = float(lags.max()) if len(lags) else 0.0
    stalled = float(lags[lags > STALL_SECONDS].sum()) / span
    busy = stage.cpu_seconds / stage.seconds if stage.seconds else 0.0
    send_p99 = float(np.quantile(late, 0.99)) if len(late) else None
    reasons = []
    if send_p99 is not None and send_p99 > max(LATE_SECONDS, LATE_SHARE * float(np.median(firsts)) if firsts else 0.0):
        reasons.append(f"1% of the requests were sent {1000 * send_p99:.1f} ms late or more")
    if stalled > STALL_SHARE:
        reasons.append(f"it stood still for {stalled:.1%} of the time, in stalls above {1000 * STALL_SECONDS:.0f} ms")
    if longest > LONGEST_STALL_SECONDS:
        reasons.append(f"it stood still for {1000 * longest:.0f} ms at once")
    if busy > BUSY_SHARE:
        reasons.append(f"it computed for {busy:.0%} of the time, on the one core it uses")
    if exhausted := sum(record.error == "client" for record in due):
        reasons.append(f"it could not open connections for {exhausted} requests")
    chunks = sum(record.num_chunks for record in stage.records if record.times and begin <= record.times[-1] <= end)
    return Client(
        limited=bool(reasons),
        reasons=tuple(reasons),
        send_lag_p50=float(np.median(late)) if len(late) else None,
        send_lag_p99=send_p99,
        loop_lag_p99=float(np.quantile(lags, 0.99)) if len(lags) else None,
        longest_stall=longest,
        stalled_share=stalled,
        busy_share=busy,
        events_per_second=chunks / span,
    )


def littles_law(stage: Stage, window: tuple[float, float]) -> Mapping[str, float | None]:
    """L = λ W. `in_flight` is the mean of what the client counted at regular times, `expected` is arrivals a second
    times mean seconds in the system, from the records; they come from different clocks' readings, so `ratio` far from 1
    means that one of them is wrong, or that the load was not steady."""
    begin, end = window
    beats = np.array(stage.heartbeats.due) + np.array(stage.heartbeats.lag)
    counted = np.array(stage.heartbeats.in_flight)[(beats >= begin) & (beats <= end)]
    inside = [record for record in stage.records if begin <= record.started <= end and record.end]
    if not len(counted) or not inside or end <= begin:
        return {"in_flight": None, "expected": None, "ratio": None}
    arrivals = len(inside) / (end - begin)
    seconds = sum(record.end - record.started for record in inside) / len(inside)
    in_flight, expected = float(counted.mean()), arrivals * seconds
    return {"in_flight": in_flight, "expected": expected, "ratio": in_flight / expected if expected else None}
