"""What is counted of every call: at its end, and of a stream at every chunk."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import Final

from sol.errors import SolError
from sol.gateway.call import Call, Outcome
from sol.gateway.errors import error_code
from sol.gateway.observe.text import Capped, Histogram, counted, family, histograms, labels
from sol.gateway.parsing import COMPLETIONS

# fmt: off
FIRST_TOKEN_BUCKETS: Final = (
    0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0,
)
TOKEN_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.035, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0,
)
REQUEST_BUCKETS: Final = (
    0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0,
)
QUEUE_BUCKETS: Final = (
    0.0001, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
)
STAGE_BUCKETS: Final = (
    0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.25, 1.0, 10.0,
)
# fmt: on

UNKNOWN: Final = "unknown"
"""Model of those that ask for one that there is not."""
NO_ENGINE: Final = "none"
"""Engine of calls for which none was asked."""
BEFORE: Final = "http"
"""Stage of requests that were refused before they were calls."""
RELAY: Final = "relay"
"""Where a call is that has passed all stages."""
QUEUE: Final = "queue"
OBSERVE: Final = "observe"

OUTCOMES: Final = (
    "ok", "broken", "client_left", "client_error", "limited", "filtered", "unavailable", "timeout", "failed",
)  # fmt: skip
_CALM: Final = 60.0
"""Seconds: a longer pause between two chunks is an engine or a client that hung, and says nothing of its pace."""


def outcome_name(outcome: Outcome) -> str:
    """How a call ended, as one of OUTCOMES.

    Broken: the stream had begun. Unavailable, timeout and failed are the gateway's or an engine's doing (503, 504,
    other 5xx); limited, filtered and client_error the client's (429, 400 by a filter, other 4xx).
    """
    if outcome.client_left:
        return "client_left"
    status, error = outcome.status, outcome.error
    if status < 400:
        return "ok" if error is None else "broken"
    if status >= 500:
        return {503: "unavailable", 504: "timeout"}.get(status, "failed")
    if status == 429:
        return "limited"
    return "filtered" if isinstance(error, SolError) and error.code == "content_filter" else "client_error"


class Series:
    """All that is counted of one model, class and engine."""

    __slots__ = (
        "cached_tokens", "completion_tokens", "e2e", "estimated", "first_token", "inter_token", "label", "outcomes",
        "prompt_tokens", "queue",
    )  # fmt: skip

    def __init__(self, label: str, queue: Histogram) -> None:
        self.label = label
        self.queue = queue
        """That of the model and class, whichever engine answers."""
        self.outcomes = dict.fromkeys(OUTCOMES, 0)
        self.first_token = Histogram(FIRST_TOKEN_BUCKETS)
        self.inter_token = Histogram(TOKEN_BUCKETS)
        self.e2e = Histogram(REQUEST_BUCKETS)
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = self.estimated = 0


class Open:
    """Requests of one model that have not ended. Of which class they are, is not known when they begin."""

    __slots__ = ("count", "label")

    def __init__(self, label: str) -> None:
        self.label = label
        self.count = 0


class Pace:
    """Of one call's stream: told of every chunk, with the number of events so far.

    The inter-token latency is that between events, which hold a token, or as many as the engine made in one step.
    Several that come together are what the network or a busy process let pile up: each took its share of the time.
    """

    __slots__ = ("_call", "_events", "_histogram", "_last", "_metrics")

    def __init__(self, metrics: RequestMetrics, call: Call) -> None:
        self._metrics, self._call = metrics, call
        self._histogram: Histogram | None = None
        self._events = 0
        self._last = 0.0

    def __call__(self, now: float, num_events: int) -> None:
        new = num_events - self._events
        if new <= 0:
            return  # a part of an event
        self._events = num_events
        histogram = self._histogram
        if histogram is None:
            # The engine is known now. The first event is the time to first token's.
            self._histogram = self._metrics.series(self._call).inter_token
        elif now - self._last < _CALM:
            histogram.observe((now - self._last) / new, new)
        self._last = now


class RequestMetrics:
    """`canonical`: of each name or alias of a model, its name."""

    def __init__(self, canonical: Mapping[str, str]) -> None:
        self._canonical = canonical
        self._series: dict[tuple[str, str, str | None], Series] = {}
        self._open: dict[str, Open] = {}
        self._queues: dict[tuple[str, str], Histogram] = {}
        self._stages: dict[str, Histogram] = {}
        self._errors: dict[tuple[str, ...], int] = {}
        self._decisions: dict[tuple[str, ...], int] = {}
        self._classes: Capped[str] = Capped()
        self._known_errors: Capped[tuple[str, ...]] = Capped()
        self._known_decisions: Capped[tuple[str, ...]] = Capped()

    def series(self, call: Call) -> Series:
        key = (call.model, call.class_name, call.backend)
        found = self._series.get(key)
        if found is None:
            model, class_name, engine = self._model(call), self._class(call), call.backend
            found = self._series.get((model, class_name, engine))
            if found is None:
                pairs = (("model", model), ("class", class_name), ("engine", engine or NO_ENGINE))
                queue = self._queues.setdefault((model, class_name), Histogram(QUEUE_BUCKETS))
                found = self._series[model, class_name, engine] = Series(labels(pairs), queue)
            if call.model in self._canonical and class_name == call.class_name:
                self._series[key] = found  # also by the alias
        return found

    def begun(self, call: Call) -> Open:
        """Counts it as open; to be given to `ended`."""
        model = self._model(call)
        found = self._open.get(model)
        if found is None:
            found = self._open[model] = Open(labels([("model", model)]))
        found.count += 1
        return found

    def ended(self, call: Call, outcome: Outcome, name: str, opened: Open) -> None:
        """`name`: the outcome's."""
        opened.count -= 1
        series = self.series(call)
        series.outcomes[name] += 1
        if name == "ok":
            series.e2e.observe(outcome.ended_at - call.arrived)
        if outcome.first_byte_at is not None and call.stream:
            series.first_token.observe(outcome.first_byte_at - call.arrived)
        usage = outcome.usage
        if usage is not None:
            series.prompt_tokens += usage.prompt_tokens
            series.cached_tokens += usage.cached_tokens
            series.completion_tokens += usage.completion_tokens
            series.estimated += usage.estimated
        self._passed(call, outcome, series.queue)
        if outcome.error is not None:
            stage = call.trail[-1][0] if call.trail else BEFORE
            self.refused(stage, outcome.status, outcome.error)
        for decision in call.decisions:
            if decision.stage != "filter":  # those are counted where they are made: a call remembers some of them
                self._count(self._decisions, self._known_decisions, (decision.stage, decision.rule, decision.action))

    def refused(self, stage: str, status: int, error: Exception) -> None:
        self._count(self._errors, self._known_errors, (stage, str(status), error_code(error)))

    def pace(self, call: Call) -> Pace | None:
        """For a call that is a stream of OpenAI's chunks."""
        return Pace(self, call) if call.stream and call.path in COMPLETIONS else None

    def render(self) -> Iterator[Iterator[str]]:
        """The lines of each metric."""
        every = list(dict.fromkeys(self._series.values()))

        def of(name: str) -> Iterator[tuple[str, Histogram]]:
            return ((series.label, getattr(series, name)) for series in every)

        def counts(name: str) -> Iterator[tuple[str, float]]:
            return ((series.label, getattr(series, name)) for series in every)

        yield family(
            "sol_gateway_requests_total", "counter", "Requests that ended, by outcome.",
            (
                (f'{series.label},outcome="{name}"', count)
                for series in every
                for name, count in series.outcomes.items()
            ),
        )  # fmt: skip
        yield family(
            "sol_gateway_requests_open", "gauge", "Requests that have not ended.",
            ((each.label, each.count) for each in self._open.values()),
        )  # fmt: skip
        yield family(
            "sol_gateway_errors_total", "counter", "Errors that clients were told, by the stage that raised them.",
            counted(("stage", "status", "code"), self._errors.items()),
        )  # fmt: skip
        yield histograms(
            "sol_gateway_time_to_first_token_seconds", "From a request's arrival to the first byte of its stream.",
            of("first_token"),
        )  # fmt: skip
        yield histograms(
            "sol_gateway_inter_token_latency_seconds", "Between the events of a stream.", of("inter_token")
        )
        yield histograms(
            "sol_gateway_e2e_request_latency_seconds", "From arrival to the last byte, of requests that were answered.",
            of("e2e"),
        )  # fmt: skip
        yield histograms(
            "sol_gateway_queue_time_seconds", "In the gateway's queue, for requests that came to it.",
            (
                (labels(zip(("model", "class"), key, strict=True)), each)
                for key, each in self._queues.items()
                if key[0] != UNKNOWN
            ),
        )  # fmt: skip
        yield histograms(
            "sol_gateway_stage_seconds", "In each stage of the gateway, from being entered to the next.",
            ((f'stage="{name}"', each) for name, each in self._stages.items()),
        )  # fmt: skip
        for name, text in (
            ("prompt_tokens", "Tokens of prompts that engines worked on."),
            ("cached_tokens", "Of these, tokens that the engine had in its prefix cache."),
            ("completion_tokens", "Tokens of answers."),
        ):
            yield family(f"sol_gateway_{name}_total", "counter", text, counts(name))
        yield family(
            "sol_gateway_estimated_usages_total", "counter", "Requests whose tokens are an estimate.",
            counts("estimated"),
        )  # fmt: skip
        yield family(
            "sol_gateway_decisions_total", "counter", "What stages decided about requests; filters' are apart.",
            counted(("stage", "rule", "action"), self._decisions.items()),
        )  # fmt: skip

    def _model(self, call: Call) -> str:
        return self._canonical.get(call.model, UNKNOWN)

    def _class(self, call: Call) -> str:
        return call.class_name if self._classes.admits(call.class_name) else "other"

    def _passed(self, call: Call, outcome: Outcome, queue: Histogram) -> None:
        # Most of what observing a call costs is here: a dozen stages, each of them a histogram.
        stages = self._stages
        ended = outcome.ended_at
        for name, began in reversed(call.trail):
            if name != RELAY:  # the engine's time is not the gateway's
                seconds = ended - began
                histogram = stages.get(name)
                if histogram is None:
                    histogram = stages[name] = Histogram(STAGE_BUCKETS)
                histogram.counts[bisect_left(STAGE_BUCKETS, seconds)] += 1
                histogram.total += seconds
                if name == QUEUE:
                    queue.observe(seconds)
            ended = began

    @staticmethod
    def _count(counts: dict[tuple[str, ...], int], known: Capped[tuple[str, ...]], key: tuple[str, ...]) -> None:
        count = counts.get(key)
        if count is None and not known.admits(key):
            key = (*key[:1], *("other" for _ in key[1:]))
            count = counts.get(key)
        counts[key] = (count or 0) + 1
