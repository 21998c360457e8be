"""All parts of a gateway, put together from its configuration. This is the only place that knows all of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sol.errors import ConfigError
from sol.gateway.auth import AuthenticateStage, Authenticator
from sol.gateway.call import Call, Outcome
from sol.gateway.config import GatewayConfig
from sol.gateway.degradation.ladder import Measured
from sol.gateway.degradation.stage import DegradeStage
from sol.gateway.limits.stage import LimitStage
from sol.gateway.observe.page import MetricsPage
from sol.gateway.observe.stage import ObserveStage
from sol.gateway.observe.state import State
from sol.gateway.pipeline import Pipeline, Stage
from sol.gateway.queue.classes import ClassifyStage
from sol.gateway.queue.stage import QueueStage
from sol.gateway.relay.relay import Relay
from sol.gateway.reply import Reply
from sol.gateway.routing.fleet import Fleet
from sol.gateway.routing.prober import Prober
from sol.gateway.routing.router import Router
from sol.gateway.routing.tasks import RouteStage
from sol.gateway.single_flight import SingleFlight
from sol.gateway.sla.autoscaling import model_load
from sol.gateway.sla.monitor import SlaMonitor
from sol.gateway.sla.stage import SlaStage

if TYPE_CHECKING:
    from sol.gateway.filters.filters import Filters

logger = logging.getLogger("sol.gateway")


class Gateway:
    """Between `start` and `close` it answers calls. Raises `ConfigError` for what cannot work."""

    def __init__(self, config: GatewayConfig) -> None:
        for engine in config.engines:
            if engine.url is None:
                raise ConfigError(
                    f"engines[{engine.name}].url is missing: `sol up` starts engines from their spec, `sol gateway` is "
                    "told where they are",
                    param=f"engines[{engine.name}].url",
                )
        self.config = config
        self.fleet = Fleet(config)
        self.route = RouteStage(self.fleet, config.routing)
        self._accounts: Accounts | None = None
        if config.database is not None:
            # SQLAlchemy is loaded by who configures a database.
            from sol.gateway.limits.accounts import Accounts

            self._accounts = Accounts(config.database)
        self.authenticator = Authenticator(config.keys, () if self._accounts is None else (self._accounts.keys,))
        self.monitor = SlaMonitor(config.sla, self.fleet.pools)
        self.queue = QueueStage(self.fleet, config, self.monitor.targets)
        speculating = {
            model for model, pool in self.fleet.pools.items() if any(e.driver.name == "sol" for e in pool.engines)
        }
        self.degrade = DegradeStage(
            config.degradation, self.fleet.canonical, self._measure, speculating, self._has_capacity
        )
        self.observe = ObserveStage(config.observe, self.fleet.canonical)
        self.limits = LimitStage(config.limits, config.prices, accounts=self._accounts, canonical=self.fleet.canonical)
        self.filters: Filters | None = None
        self.pipeline = Pipeline(self._stages())
        self.relay = Relay(self.fleet, Router(self.fleet, config.routing), self.route, config.relay, self.queue.again)
        self.single_flight = SingleFlight()
        self.draining = False
        """No new work is taken; what is open goes on."""
        self._prober = Prober(self.fleet, config)
        metrics = config.observe.metrics
        state = State(self, by_tenant=metrics.shows_tenants)
        self.metrics_page = MetricsPage(self.observe.metrics, state, self.observe, metrics.token)

    def _stages(self) -> Sequence[Stage]:
        """The way of every call: authenticate → classify → sla → degrade → limit → filter → queue → route, and then the
        relay. They are left in the reverse order; what limits settle, they settle then.

        A call's class comes first, since filters ask for it and records name it; what is given up comes before limits,
        so that what is not taken, or shortened, reserves no more than it will use."""
        config, canonical = self.config, self.fleet.canonical
        keep_tier = [
            name for name in canonical if all(e.driver.name == "openai" for e in self.fleet.pool(name).engines)
        ]
        stages: list[Stage] = [
            self.observe,
            AuthenticateStage(self.authenticator, canonical),
            ClassifyStage(config.classes, keep_tier=keep_tier),
            SlaStage(self.monitor, canonical),
            self.degrade,
            self.limits,
        ]
        if config.filters:
            # Their libraries are loaded by who configures them.
            from sol.gateway.filters.filters import Filters
            from sol.gateway.filters.stage import FilterStage

            self.filters = Filters(config.filters)
            stages.append(FilterStage(self.filters))
        stages += [self.queue, self.route]
        if self.observe.tracer is not None:
            from sol.gateway.observe.traces import RelaySpanStage

            stages.append(RelaySpanStage(self.observe.tracer))
        return stages

    async def start(self) -> None:
        upstreams = self.relay.start()
        try:
            await self.pipeline.start()
        except BaseException:
            await self.relay.close()
            raise
        self._prober.start(upstreams)

    async def close(self) -> None:
        await self._prober.close()
        await self.pipeline.close()
        await self.relay.close()

    async def answer(self, call: Call, reply: Reply) -> Outcome:
        """Have a call answered that has passed all stages."""
        return await self.queue.carry(call, reply, lambda: self.relay.answer(call, reply))

    def _measure(self, model: str) -> Measured:
        """How a model is, for its ladder."""
        load = model_load(self, model)
        return Measured(
            burn_rate=load.burn_rate,
            wait_seconds=load.wait_seconds,
            # Where nothing limits engines, nothing is too much for them.
            utilisation=0.0 if load.credits is None else load.utilisation,
            kv_usage=load.kv_usage,
        )

    def _has_capacity(self, model: str) -> bool:
        """Whether nothing speaks against asking one of the model's engines."""
        now = time.monotonic()
        return any(engine.is_well(now) for engine in self.fleet.pools[model].engines)

    def has_capacity(self) -> bool:
        """Whether any engine can be asked."""
        return any(engine.health.is_well for engine in self.fleet)
