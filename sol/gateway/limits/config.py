"""The sections `limits`, `prices` and `database` of gateway.yaml."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from sol.gateway.section import Expanded, Section

_Name = Annotated[str, Field(min_length=1, max_length=200)]
_Seconds = Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)]
_Amount = Annotated[int, Field(ge=0, le=10**12)]


class Quota(Section):
    """At most so much a minute; what is not named is not limited."""

    requests_per_minute: _Amount | None = None
    tokens_per_minute: _Amount | None = None
    """Of prompts and answers together."""

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.requests_per_minute is None and self.tokens_per_minute is None and not getattr(self, "models", None):
            raise ValueError("needs requests_per_minute or tokens_per_minute; leave it out where nothing is limited")
        return self


class Policy(Quota):
    """What each key that names this policy may take, for itself."""

    models: dict[_Name, Quota] = Field(default_factory=dict)
    """And what it may take of some models."""


class OutputEstimate(Section):
    """What is reserved for the answer of a request that declares no max_tokens: a quantile of what its key got from its
    model before; until there are enough answers, of what all keys got from the model; until then, `initial`."""

    quantile: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] = 0.95
    initial: Annotated[int, Field(ge=1, le=10**9)] = 512


class RedisOptions(Section):
    """Where replicas of the gateway count together: Redis or Valkey."""

    url: Expanded = Field(repr=False)
    prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,64}$")] = "sol"
    """Begins the name of every key; gateways with the same one share their limits."""
    timeout_seconds: Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)] = 0.25
    """After which an answer is not waited for any longer, and Redis counts as away."""
    fail: Literal["local", "open", "closed"] = "local"
    """While Redis is away: `local`, each replica counts for itself and gives out its share of each limit (the limit
    divided by how many replicas there were); `open`, nothing is limited; `closed`, every limited request gets 503."""

    @field_validator("url")
    @classmethod
    def _of_redis(cls, url: str) -> str:
        if not url.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("must be like redis://host:6379/0, rediss://… for TLS, or unix:///path")
        return url


class LimitsConfig(Section):
    policies: dict[_Name, Policy] = Field(default_factory=dict)
    """By the name that `keys[].limits` gives."""
    default_policy: _Name | None = None
    """Of keys that name none; None: they are not limited."""
    tenants: dict[_Name, Quota] = Field(default_factory=dict)
    """For all keys of a tenant together."""
    default_tenant: Quota | None = None
    """For each tenant that is not in `tenants`."""
    models: dict[_Name, Quota] = Field(default_factory=dict)
    """For all that anybody asks of a model."""
    output_estimate: OutputEstimate = Field(default_factory=OutputEstimate)
    redis: RedisOptions | None = None
    """None: counted in this process, which must be the only one."""
    lease_seconds: Annotated[float, Field(ge=3, le=3600, allow_inf_nan=False)] = 30.0
    """How long a gateway may not be heard of until its open requests are taken to have died with it."""

    @model_validator(mode="after")
    def _names_fit(self) -> Self:
        self.check_policy(self.default_policy, "default_policy")
        return self

    @property
    def model_names(self) -> set[str]:
        """All models that are named here."""
        return {*self.models, *(name for policy in self.policies.values() for name in policy.models)}

    def check_policy(self, name: str | None, where: str) -> None:
        """Raises ValueError if there is no policy of this name."""
        if name is not None and name not in self.policies:
            known = ", ".join(sorted(self.policies)) or "none"
            raise ValueError(f"{where}: there is no policy {name!r} in limits.policies; there are: {known}")


class Price(Section):
    """Of a million tokens, in whatever currency the operator counts in."""

    input: Annotated[Decimal, Field(ge=0, le=10**6, allow_inf_nan=False)]
    output: Annotated[Decimal, Field(ge=0, le=10**6, allow_inf_nan=False)]
    cached_input: Annotated[Decimal, Field(ge=0, le=10**6, allow_inf_nan=False)] | None = None
    """Of prompt tokens that the engine had in its prefix cache; None: `input`."""


_DRIVERS = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg", "postgres": "postgresql+asyncpg"}


class DatabaseOptions(Section):
    """Where keys are looked up and usage is recorded: SQLite or PostgreSQL."""

    url: Expanded = Field(repr=False)
    """sqlite:///path/to/file or postgresql://user:password@host/name."""
    journal: Path = Path("sol-usage")
    """A directory on this machine. A record of usage is written there first and kept until the database has it."""
    journal_max_bytes: Annotated[int, Field(ge=2**20)] = 2**30
    """Of all that waits for the database; past it, usage is counted in metrics and recorded no more."""
    flush_seconds: _Seconds = 1.0
    """How long a record may wait for others to be written with it."""
    key_refresh_seconds: _Seconds = 10.0
    """How soon a key that is revoked or changed in the database is so here."""
    timeout_seconds: Annotated[float, Field(gt=0, le=60, allow_inf_nan=False)] = 5.0
    """After which the database counts as away."""

    @field_validator("url")
    @classmethod
    def _of_a_database(cls, url: str) -> str:
        scheme, separator, rest = url.partition("://")
        name = scheme.partition("+")[0]
        if not separator or name not in _DRIVERS:
            raise ValueError("must be sqlite:///path/to/file or postgresql://user:password@host/name")
        if name == "sqlite" and (not rest.startswith("/") or ":memory:" in rest or rest == "/"):
            raise ValueError("must name a file: sqlite:///path/to/file (four slashes where the path is absolute)")
        return f"{_DRIVERS[name]}://{rest}"
