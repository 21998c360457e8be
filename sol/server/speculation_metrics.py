"""What speculation does, for Prometheus and for the server's log.

vLLM's metrics have its names, labels and meaning (positions count from 0); `sol:speculation_*` adds drafters and time.
From them: acceptance rate = accepted / draft tokens; mean acceptance length = 1 + accepted / drafts; survival at a
position = accepted / draft tokens there; the believed speed-up = plain seconds / decode seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import zip_longest

from prometheus_client import CollectorRegistry, Counter

from sol.engine.types import DrafterStats, EngineStats
from sol.speculation.usage import acceptance_rate, add_counts, mean_acceptance_length

logger = logging.getLogger("sol.server")

LOG_SECONDS = 10.0


class SpeculationMetrics:
    """The counters of an engine with `drafters`, all of them there from the beginning."""

    def __init__(
        self, registry: CollectorRegistry, model_name: str, drafters: Sequence[str], num_speculative_tokens: int
    ) -> None:
        self._model_name = model_name

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, ("model_name", *labels), registry=registry)

        self._drafts = counter("vllm:spec_decode_num_drafts", "Times that drafts of a request were verified.")
        self._draft_tokens = counter("vllm:spec_decode_num_draft_tokens", "Drafted tokens that were verified.")
        self._accepted_tokens = counter("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.")
        self._accepted_at = counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted tokens, by position among the drafts.", "position"
        )
        self._of_drafter = [
            counter(f"sol:speculation_{name}", text, "drafter")
            for name, text in (
                ("drafts", "Times that drafts of a request were verified."),
                ("draft_tokens", "Drafted tokens that were verified."),
                ("accepted_tokens", "Drafted tokens that were accepted."),
                ("proposed_tokens", "Tokens drafted, verified or not."),
                ("failures", "Times that a drafter failed and was put aside."),
                ("drafting_seconds", "Time spent drafting."),
            )
        ]
        self._of_drafter_at = [
            counter(f"sol:speculation_{name}_per_pos", text, "drafter", "position")
            for name, text in (
                ("draft_tokens", "Verified drafts, by position among them."),
                ("accepted_tokens", "Accepted drafts, by position among them."),
            )
        ]
        self._decode_seconds = counter(
            "sol:speculation_decode_seconds", "Time of steps that emitted tokens, drafting included."
        )
        self._plain_seconds = counter(
            "sol:speculation_plain_seconds", "What plain decoding would have taken for the same tokens, as believed."
        )
        self._samples: dict[tuple[int, tuple[str, ...]], Counter] = {}
        """By family and labels: finding one here takes a fraction of what the library needs, and steps are many."""
        zeros = [0] * num_speculative_tokens
        blank = DrafterStats(num_drafted_per_position=zeros, num_accepted_per_position=zeros)
        self.observe(EngineStats(drafters=dict.fromkeys(drafters, blank)))

    def observe(self, stats: EngineStats) -> None:
        """Count what is new since the last message."""
        for drafter, counts in stats.drafters.items():
            self._add(self._drafts, counts.num_drafts)
            self._add(self._draft_tokens, counts.num_draft_tokens)
            self._add(self._accepted_tokens, counts.num_accepted_tokens)
            amounts = (
                counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens, counts.num_proposed_tokens,
                counts.num_failures, counts.seconds,
            )  # fmt: skip
            for family, amount in zip(self._of_drafter, amounts, strict=True):
                self._add(family, amount, drafter)
            drafted, accepted = self._of_drafter_at
            for position, amount in enumerate(counts.num_drafted_per_position):
                self._add(drafted, amount, drafter, str(position))
            for position, amount in enumerate(counts.num_accepted_per_position):
                self._add(accepted, amount, drafter, str(position))
                self._add(self._accepted_at, amount, str(position))
        self._add(self._decode_seconds, stats.decode_seconds)
        self._add(self._plain_seconds, stats.plain_seconds)

    def _add(self, family: Counter, amount: float, *labels: str) -> None:
        key = id(family), labels
        sample = self._samples.get(key)
        if sample is None:  # it is there from now on, even with 0
            sample = self._samples[key] = family.labels(self._model_name, *labels)
        if amount:
            sample.inc(amount)


class SpeculationLog:
    """A line in the log for each `LOG_SECONDS` in which drafts were verified or a drafter failed, and none otherwise.

    `call_later(seconds, callback)` is the event loop's.
    """

    def __init__(self, call_later: Callable[[float, Callable[[], None]], object]) -> None:
        self._call_later = call_later
        self._sums: EngineStats | None = None
        """Of the seconds that run; None outside of them."""

    def observe(self, stats: EngineStats) -> None:
        """Take in what is new since the last message."""
        if self._sums is None:
            if not any(counts.num_drafts or counts.num_failures for counts in stats.drafters.values()):
                return
            self._sums = EngineStats()
            self._call_later(LOG_SECONDS, self._write)
        sums = self._sums
        sums.num_generated_tokens += stats.num_generated_tokens
        sums.decode_seconds += stats.decode_seconds
        sums.plain_seconds += stats.plain_seconds
        for name, counts in stats.drafters.items():
            sums.drafters[name] = _add(sums.drafters.get(name) or DrafterStats(), counts)

    def _write(self) -> None:
        sums, self._sums = self._sums, None
        if sums is not None:
            logger.info("%s", describe(sums))


def describe(sums: EngineStats) -> str:
    """What the drafters did, in one line."""
    total = add_counts(sums.drafters.values())
    parts = [
        f"speculation: drafted {total.num_draft_tokens:,} tokens in {total.num_drafts:,} drafts, "
        f"accepted {total.num_accepted_tokens:,}"
    ]
    length = mean_acceptance_length(total)
    if length is not None:
        parts.append(f"mean acceptance length {length:.2f}")
    if sums.decode_seconds and sums.plain_seconds:
        parts.append(f"{sums.plain_seconds / sums.decode_seconds:.2f} times as fast as plain decoding, by its estimate")
    line = ", ".join(parts)
    for name, counts in sums.drafters.items():
        line += f"; {name}: {_describe_drafter(counts, sums)}"
    return line


def _describe_drafter(counts: DrafterStats, sums: EngineStats) -> str:
    parts = []
    rate = acceptance_rate(counts)
    if rate is None:
        parts.append("no drafts verified")
    else:
        parts.append(f"{rate:.1%} of {counts.num_draft_tokens:,} accepted")
        survival = " ".join(f"{share:.2f}" for share in _survival(counts))
        if survival:
            parts.append(f"survival by position {survival}")
    # Seconds a token, of drafter and target, over everything that was computed in the meantime.
    if counts.seconds and counts.num_proposed_tokens and sums.plain_seconds and sums.num_generated_tokens:
        ratio = (sums.plain_seconds / sums.num_generated_tokens) / (counts.seconds / counts.num_proposed_tokens)
        shown = f"{ratio:.1f}" if ratio < 100 else f"{ratio:,.0f}"
        parts.append(f"drafts {shown} times as fast as the target decodes")
    if counts.num_failures:
        parts.append(f"failed {counts.num_failures} times" if counts.num_failures > 1 else "failed once")
    return ", ".join(parts)


def _survival(counts: DrafterStats) -> list[float]:
    """At each position, the share of its verified drafts that were accepted."""
    at = zip_longest(counts.num_drafted_per_position, counts.num_accepted_per_position, fillvalue=0)
    return [accepted / drafted for drafted, accepted in at if drafted]


def _add(first: DrafterStats, second: DrafterStats) -> DrafterStats:
    return DrafterStats(
        num_drafts=first.num_drafts + second.num_drafts,
        num_draft_tokens=first.num_draft_tokens + second.num_draft_tokens,
        num_accepted_tokens=first.num_accepted_tokens + second.num_accepted_tokens,
        num_drafted_per_position=_add_lists(first.num_drafted_per_position, second.num_drafted_per_position),
        num_accepted_per_position=_add_lists(first.num_accepted_per_position, second.num_accepted_per_position),
        num_proposed_tokens=first.num_proposed_tokens + second.num_proposed_tokens,
        seconds=first.seconds + second.seconds,
        num_failures=first.num_failures + second.num_failures,
    )


def _add_lists(first: Sequence[int], second: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip_longest(first, second, fillvalue=0)]
