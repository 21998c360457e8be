"""What an engine says of its load on its metrics page, in the Prometheus text format.

https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

_LABELS = r'\{(?:[^"}]|"(?:[^"\\]|\\.)*")*\}'
_COPIES = re.compile(r',?\s*(?:tp_rank|pp_rank|moe_ep_rank)="[^"]*"')
"""Labels of ranks that work on the same requests: their series say the same thing several times. Ranks of data
parallelism (`dp_rank`, `engine`) have requests of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """An engine's load at one moment. None: it does not say (which is not 0)."""

    running: float | None = None
    """Requests in its batch."""
    waiting: float | None = None
    """Requests that wait for a place there."""
    kv_usage: float | None = None
    """Share of the KV cache in use, 0 to 1; of several caches, the fullest."""
    prefix_queries: float | None = None
    prefix_hits: float | None = None
    """Prompt tokens looked up in the prefix cache since the start, and found there."""
    prefix_hit_rate: float | None = None
    """0 to 1, as the engine computes it, over whatever time it does; from the two above where it has those."""
    draft_tokens: float | None = None
    accepted_tokens: float | None = None
    """Drafts that were verified since the start, and accepted."""
    acceptance_rate: float | None = None
    """0 to 1, likewise."""
    generated_tokens: float | None = None
    """Since the start, of engines that count them as they come (others do when a request ends)."""
    progress: float | None = None
    """A count of the engine's steps or tokens: while requests run and it stands still, the engine hangs."""
    read_at: float
    """When it was read, by the caller's clock."""

    def age(self, now: float) -> float:
        """Seconds since it was read. What is old must not decide anything."""
        return now - self.read_at


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricNames:
    """What an engine calls each. Of several names the first that is there counts; several versions of an engine
    differ."""

    running: Sequence[str] = ()
    waiting: Sequence[str] = ()
    kv_usage: Sequence[str] = ()
    prefix_queries: Sequence[str] = ()
    prefix_hits: Sequence[str] = ()
    prefix_hit_rate: Sequence[str] = ()
    draft_tokens: Sequence[str] = ()
    accepted_tokens: Sequence[str] = ()
    acceptance_rate: Sequence[str] = ()
    generated_tokens: Sequence[str] = ()
    progress: Sequence[str] = ()
    _pattern: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = [re.escape(name) for signal in _SIGNALS for name in getattr(self, signal)]
        # One pass of the regular expression engine over a page of 100 KB that is mostly histograms.
        pattern = rf"^({'|'.join(names)})({_LABELS})?[ \t]+([^\s]+)" if names else r"(?!)"
        object.__setattr__(self, "_pattern", re.compile(pattern, re.MULTILINE))

    @property
    def is_any(self) -> bool:
        """Whether there is a name at all."""
        return any(getattr(self, signal) for signal in _SIGNALS)

    def read(self, text: str, now: float) -> Signals:
        """The signals on a metrics page. Text that is none gives None for all."""
        found: dict[str, dict[str, float]] = {}
        for name, labels, number in self._pattern.findall(text):
            try:
                value = float(number)
            except ValueError:
                continue
            if math.isfinite(value):
                series = found.setdefault(name, {})
                key = _COPIES.sub("", labels)
                series[key] = max(value, series.get(key, value))
        values: dict[str, float] = {}
        for signal in _SIGNALS:
            series = next((found[name] for name in getattr(self, signal) if name in found), {})
            if series:
                values[signal] = max(series.values()) if signal in _SHARES else sum(series.values())
        _add_rate(values, "prefix_hit_rate", "prefix_hits", "prefix_queries")
        _add_rate(values, "acceptance_rate", "accepted_tokens", "draft_tokens")
        return Signals(**values, read_at=now)


_SIGNALS = (
    "running", "waiting", "kv_usage", "prefix_queries", "prefix_hits", "prefix_hit_rate", "draft_tokens",
    "accepted_tokens", "acceptance_rate", "generated_tokens", "progress",
)  # fmt: skip
_SHARES = frozenset({"kv_usage", "prefix_hit_rate", "acceptance_rate"})


def _add_rate(values: dict[str, float], rate: str, part: str, whole: str) -> None:
    if rate not in values and part in values and values.get(whole, 0) > 0:
        values[rate] = values[part] / values[whole]
