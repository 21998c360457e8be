"""All parts of a gateway, put together from its configuration. This is the only place that knows all of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from sol.errors import ConfigError
from sol.gateway.auth import AuthenticateStage, Authenticator
from sol.gateway.config import GatewayConfig
from sol.gateway.limits.stage import LimitStage
from sol.gateway.pipeline import Pipeline, Stage
from sol.gateway.relay.relay import Relay
from sol.gateway.routing.fleet import Fleet
from sol.gateway.routing.prober import Prober
from sol.gateway.routing.router import Router
from sol.gateway.routing.tasks import RouteStage
from sol.gateway.single_flight import SingleFlight

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
        self.pipeline = Pipeline(self._stages())
        self.relay = Relay(self.fleet, Router(self.fleet, config.routing), self.route, config.relay)
        self.single_flight = SingleFlight()
        self.draining = False
        """No new work is taken; what is open goes on."""
        self._prober = Prober(self.fleet, config)

    def _stages(self) -> Sequence[Stage]:
        """The way of every call: authenticate → limit → filter → classify → queue → route, and then the relay. They are
        left in the reverse order; what limits settle, they settle then."""
        config, canonical = self.config, self.fleet.canonical
        stages: list[Stage] = [
            AuthenticateStage(self.authenticator, canonical),
            LimitStage(config.limits, config.prices, accounts=self._accounts, canonical=canonical),
        ]
        if config.filters:
            # Their libraries are loaded by who configures them.
            from sol.gateway.filters.filters import Filters
            from sol.gateway.filters.stage import FilterStage

            stages.append(FilterStage(Filters(config.filters)))
        stages.append(self.route)
        return stages

    async def start(self) -> None:
        session = self.relay.start()
        try:
            await self.pipeline.start()
        except BaseException:
            await self.relay.close()
            raise
        self._prober.start(session)

    async def close(self) -> None:
        await self._prober.close()
        await self.pipeline.close()
        await self.relay.close()

    def has_capacity(self) -> bool:
        """Whether any engine can be asked."""
        return any(engine.health.is_well for engine in self.fleet)
