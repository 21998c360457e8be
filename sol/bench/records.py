"""What a measurement leaves behind: one `RequestRecord` a request, one `Stage` a load.

All times are seconds of one monotonic clock since the stage began. Nothing here is computed from anything else; the
figures of a report are (`sol.bench.metrics`).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any, Final, Literal

CANCELLED: Final = "cancelled"
"""The error of a request that the client itself broke off at the end of a run: no miss, and no latency either."""

TokenCounting = Literal["segments", "usage", "token_ids", "estimated", "chunks"]
"""Where the number of tokens of each chunk comes from.

`segments`   Sol's `stream_options.include_speculation`: exact.
`usage`      vLLM's `stream_options.continuous_usage_stats`: exact.
`token_ids`  vLLM's and SGLang's `return_token_ids`: exact.
`estimated`  the total is the final usage's, shared out over the chunks by their characters.
`chunks`     the endpoint says nothing of tokens: a chunk counts as one.
"""


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One HTTP request, from the moment it was due."""

    index: int
    """In the order in which requests were taken from the data."""
    key: str
    """What was asked: the same key means the same prompt."""
    turn: int
    """Of its conversation, from 0."""
    intended: float
    """When it was due: the schedule's time, or the time at which its slot or its conversation became free."""
    started: float = 0.0
    """When the client got round to it. What lies between is the client's own lag."""
    connected: float = 0.0
    """When there was a connection; `started` if an idle one was there."""
    sent: float = 0.0
    """When the request had been written to the socket."""
    first_content: float | None = None
    """The first chunk that is no reasoning."""
    end: float = 0.0
    """When the response was complete, or failed."""
    times: array[float] = field(default_factory=lambda: array("d"))
    """When output arrived. Chunks that one read brought are one arrival."""
    counts: array[int] = field(default_factory=lambda: array("l"))
    """Tokens of each arrival, 0 where the chunk did not say."""
    characters: array[int] = field(default_factory=lambda: array("l"))
    """Characters of each arrival."""
    streamed: bool = True
    """Whether the output came in events. If not, only its end has a time."""
    num_chunks: int = 0
    """Chunks with output, however many a read brought."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    """All three as the endpoint's usage has them."""
    speculation: dict[str, Any] | None = None
    """`usage.speculation` of a Sol server."""
    finish_reason: str | None = None
    status: int | None = None
    """HTTP's; None if there was no response."""
    error: str | None = None
    """A kind, see `sol.bench.stream`; None if the request succeeded."""
    message: str | None = None
    """What the endpoint or the system said of the error."""
    text: str | None = None
    """The output, where it is kept."""
    token_ids: list[int] | None = None
    """The output's, where the text is kept and the endpoint sends them."""

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def cancelled(self) -> bool:
        return self.error == CANCELLED


@dataclass(slots=True, eq=False)
class Heartbeats:
    """The client watching itself: a timer that is due every few milliseconds, and how late it was."""

    interval: float
    due: array[float] = field(default_factory=lambda: array("d"))
    lag: array[float] = field(default_factory=lambda: array("d"))
    in_flight: array[int] = field(default_factory=lambda: array("l"))
    """Requests that had started and not ended."""


@dataclass(slots=True, eq=False)
class Stage:
    """One load against one endpoint."""

    load: dict[str, Any]
    """What was asked for: `Load.describe()`."""
    counting: TokenCounting
    started_at: float
    """Unix time."""
    records: list[RequestRecord] = field(default_factory=list)
    heartbeats: Heartbeats = field(default_factory=lambda: Heartbeats(0.01))
    load_seconds: float = 0.0
    """How long the load was what it should be: until the last arrival, or until the first slot found no more work."""
    seconds: float = 0.0
    """Until the last response."""
    cpu_seconds: float = 0.0
    """Of the client's process."""
    closed_loop: bool = False
    interrupted: bool = False
    server: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """What was scraped alongside: samples (time, value) by name, see `sol.bench.scrape`."""
