"""Which limits a request falls under."""

from __future__ import annotations

from functools import lru_cache

from sol.gateway.call import Principal
from sol.gateway.errors import NoCapacityError
from sol.gateway.limits.config import LimitsConfig, Quota
from sol.gateway.limits.ledger import Limit


class UnknownPolicyError(NoCapacityError):
    """503: a key must not become unlimited because its policy is missing from the configuration."""

    code = "limits_unavailable"


class Limits:
    """From who asks, and for what, to the limits that apply: of the key, of the key and the model, of the tenant, of
    the model. Each has a window of its own, and a request has to fit into all."""

    def __init__(self, config: LimitsConfig) -> None:
        self._config = config
        # A dozen objects for each request otherwise; there are as many answers as keys and models.
        self._of = lru_cache(maxsize=10_000)(self._make)

    def of(self, principal: Principal | None, model: str) -> tuple[Limit, ...]:
        """Without a principal (a gateway without keys), those of the model and of everybody's default."""
        if principal is None:
            return self._of(None, None, None, model)
        return self._of(principal.key_id, principal.tenant, principal.limits, model)

    def _make(self, key: str | None, tenant: str | None, policy: str | None, model: str) -> tuple[Limit, ...]:
        config = self._config
        who = "all clients" if key is None else f"key {key}"
        found: list[tuple[str, Quota | None]] = []
        policy = policy or config.default_policy
        named = None if policy is None else config.policies.get(policy)
        if named is None and policy is not None:  # only a key from a database can name one: the file is checked
            raise UnknownPolicyError(f"this key's limits are those of {policy!r}, which this gateway does not know")
        if named is not None:
            found = [(who, named), (f"{who} on model {model}", named.models.get(model))]
        if tenant is not None:
            found.append((f"tenant {tenant}", config.tenants.get(tenant, config.default_tenant)))
        found.append((f"model {model}", config.models.get(model)))
        return tuple(
            Limit(scope, quota.requests_per_minute, quota.tokens_per_minute)
            for scope, quota in found
            if quota is not None and (quota.requests_per_minute is not None or quota.tokens_per_minute is not None)
        )


def scaled(limits: tuple[Limit, ...], replicas: int) -> tuple[Limit, ...]:
    """What one of `replicas` may give out by itself: its share, and of what is not 0, at least 1."""

    def share(amount: int | None) -> int | None:
        return amount if not amount else max(1, amount // replicas)

    if replicas == 1:
        return limits
    return tuple(Limit(limit.scope, share(limit.requests), share(limit.tokens)) for limit in limits)
