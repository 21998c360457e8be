"""What the gateway's parts know at the moment they are asked: engines, limits, filters, the process itself.

Costs nothing until somebody looks at the page.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from sol.gateway.limits.cost import NANO
from sol.gateway.observe import levels
from sol.gateway.observe.text import OTHER, Capped, counted, family, labels
from sol.gateway.routing.engine import Engine
from sol.version import __version__

if TYPE_CHECKING:
    from sol.gateway.filters.filters import Filters
    from sol.gateway.gateway import Gateway
    from sol.gateway.limits.stage import LimitStage

Lines = Iterator[Iterator[str]]
_BREAKER: Final = ("closed", "open", "half_open")
_SIGNALS: Final = (
    ("running", "requests_running", "Requests in its batch, as it says."),
    ("waiting", "requests_waiting", "Requests that wait for a place in its batch, as it says."),
    ("kv_usage", "kv_cache_usage", "Share of its KV cache in use, 0 to 1, as it says."),
    ("prefix_hit_rate", "prefix_cache_hit_rate", "Share of prompt tokens found in its prefix cache, as it says."),
    ("acceptance_rate", "draft_acceptance_rate", "Share of drafted tokens that it accepted, as it says."),
)


class State:
    def __init__(self, gateway: Gateway, *, by_tenant: bool) -> None:
        self._gateway = gateway
        self._by_tenant = by_tenant
        self._tenants: Capped[str] = Capped()
        self._started = time.monotonic()
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)

    def render(self) -> Lines:
        """The lines of each metric."""
        gateway = self._gateway
        yield iter((generate_latest(self._process).decode(),))
        yield family("sol_gateway_info", "gauge", "Its version.", [(labels([("version", __version__)]), 1)])
        yield family("sol_gateway_draining", "gauge", "1 while it takes no new requests.", [("", gateway.draining)])
        yield family(
            "sol_gateway_retries_total", "counter", "Requests sent to another engine after one did not answer.",
            [("", gateway.relay.num_retries)],
        )  # fmt: skip
        yield family(
            "sol_gateway_joined_total", "counter", "Repeated requests that got the answer of the one under way.",
            [("", gateway.single_flight.num_joined)],
        )  # fmt: skip
        yield from self._engines()
        yield from self._models()
        yield from self._limits(gateway.limits)
        if gateway.filters is not None:
            yield from _filters(gateway.filters, [rule.name for rule in gateway.config.filters])
        yield from levels.render(gateway)

    def _engines(self) -> Lines:
        now = time.monotonic()
        engines = [(labels([("engine", engine.name)]), engine) for engine in self._gateway.fleet]
        yield family(
            "sol_gateway_engine_healthy", "gauge", "1 while probes find it well.",
            ((label, engine.health.is_well) for label, engine in engines),
        )  # fmt: skip
        yield family(
            "sol_gateway_engine_breaker_state", "gauge", "1 for the state in which its breaker is.",
            (
                (f'{label},state="{state}"', engine.breaker.state(now) == state)
                for label, engine in engines
                for state in _BREAKER
            ),
        )  # fmt: skip
        yield family(
            "sol_gateway_engine_breaker_opened_total", "counter", "Times that its breaker opened.",
            ((label, engine.breaker.num_opened) for label, engine in engines),
        )  # fmt: skip
        yield family(
            "sol_gateway_engine_requests_in_flight", "gauge", "The gateway's own requests that it has.",
            ((label, engine.in_flight) for label, engine in engines),
        )  # fmt: skip
        yield family(
            "sol_gateway_engine_time_to_first_token_mean_seconds", "gauge",
            "The weighted mean of its times to first token, which routing goes by; recent ones count most.",
            ((label, mean) for label, engine in engines if (mean := engine.latency.typical()) is not None),
        )  # fmt: skip
        yield family(
            "sol_gateway_scrape_age_seconds", "gauge",
            "Since its metrics were last read, or since the gateway began where they never were.",
            ((label, self._age(engine, now)) for label, engine in engines if engine.has_metrics),
        )  # fmt: skip
        for attribute, name, text in _SIGNALS:
            yield family(
                f"sol_gateway_engine_{name}", "gauge", text,
                (
                    (label, value)
                    for label, engine in engines
                    # What is too old for routing is no fact any more: the series ends.
                    if (signals := engine.fresh_signals(now)) is not None
                    and (value := getattr(signals, attribute)) is not None
                ),
            )  # fmt: skip

    def _age(self, engine: Engine, now: float) -> float:
        since = self._started if engine.signals is None else engine.signals.read_at
        return max(0.0, now - since)  # it may have been read again since the page was begun

    def _models(self) -> Lines:
        now = time.monotonic()
        pools = [(labels([("model", name)]), pool) for name, pool in self._gateway.fleet.pools.items()]
        yield family(
            "sol_gateway_model_engines", "gauge", "Engines that it has.",
            ((label, len(pool.engines)) for label, pool in pools),
        )  # fmt: skip
        yield family(
            "sol_gateway_model_engines_well", "gauge", "Engines that nothing speaks against asking.",
            ((label, sum(engine.is_well(now) for engine in pool.engines)) for label, pool in pools),
        )  # fmt: skip
        yield family(
            "sol_gateway_model_panic", "gauge", "1 while so many look ill that all that listen are asked.",
            ((label, pool.askable(now).panic) for label, pool in pools),
        )  # fmt: skip

    def _limits(self, limits: LimitStage) -> Lines:
        yield family(
            "sol_gateway_limited_total", "counter", "Requests refused because a limit was reached.",
            [("", limits.refused)],
        )  # fmt: skip
        away = limits.away
        if away is not None:
            yield family("sol_gateway_redis_up", "gauge", "0 while limits are not shared.", [("", not away)])
        accounts = limits.accounts
        if accounts is not None:
            usage = accounts.usage
            yield family("sol_gateway_database_up", "gauge", "0 while it is away.", [("", not accounts.database.away)])
            yield family("sol_gateway_usage_written_total", "counter", "Usage records that the database has.",
                         [("", usage.written)])  # fmt: skip
            yield family("sol_gateway_usage_lost_total", "counter", "Usage records that nothing could take.",
                         [("", usage.lost)])  # fmt: skip
            yield family("sol_gateway_usage_waiting_bytes", "gauge", "Usage on disk that is not in the database yet.",
                         [("", usage.waiting_bytes)])  # fmt: skip
        costs: Counter[str] = Counter()
        for (_, _, model), total in limits.totals.items():
            costs[model] += total.cost_nano
        yield family(
            "sol_gateway_cost_total", "counter", "What requests cost, in the currency of the prices.",
            ((labels([("model", model)]), nano / NANO) for model, nano in costs.items()),
        )  # fmt: skip
        if self._by_tenant:
            yield from self._by_tenants(limits)

    def _by_tenants(self, limits: LimitStage) -> Lines:
        requests: Counter[tuple[str, ...]] = Counter()
        tokens: Counter[tuple[str, ...]] = Counter()
        costs: Counter[tuple[str, ...]] = Counter()
        for (tenant, _, model), total in limits.totals.items():
            shown = tenant if self._tenants.admits(tenant) else OTHER
            requests[shown, model] += total.requests
            tokens[shown, model, "prompt"] += total.prompt_tokens
            tokens[shown, model, "completion"] += total.completion_tokens
            costs[shown, model] += total.cost_nano
        names = ("tenant", "model")
        yield family("sol_gateway_tenant_requests_total", "counter", "Requests that engines worked on, by tenant.",
                     counted(names, requests.items()))  # fmt: skip
        yield family("sol_gateway_tenant_tokens_total", "counter", "Tokens, by tenant and kind.",
                     counted((*names, "kind"), tokens.items()))  # fmt: skip
        yield family("sol_gateway_tenant_cost_total", "counter", "What requests cost, by tenant.",
                     ((label, nano / NANO) for label, nano in counted(names, costs.items())))  # fmt: skip


def _filters(filters: Filters, names: Sequence[str]) -> Lines:
    counts = filters.counts
    # A counter that begins with its first event has no increase then: what would call for attention begins with 0.
    failures = {(rule, reason): 0 for rule in names for reason in ("error", "timeout")}
    failures.update(counts.failures)
    decisions = {
        (rule, direction, action, "true" if shadow else "false"): count
        for (rule, direction, action, shadow), count in counts.decisions.items()
    }
    yield family("sol_gateway_filter_decisions_total", "counter", "What filters decided.",
                 counted(("rule", "direction", "action", "shadow"), decisions.items()))  # fmt: skip
    yield family("sol_gateway_filter_failures_total", "counter", "Texts that a filter could not look at.",
                 counted(("rule", "reason"), failures.items()))  # fmt: skip
