"""The tables of keys and of usage, in SQLite or PostgreSQL, and a database that may be away at any time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Float,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    event,
    select,
)
from sqlalchemy.exc import DataError, IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from sol.errors import ConfigError
from sol.gateway.errors import NoCapacityError
from sol.gateway.limits.config import DatabaseOptions

logger = logging.getLogger("sol.gateway.database")

metadata = MetaData()

KEYS: Final = Table(
    "sol_keys",
    metadata,
    Column("key_sha256", Text, primary_key=True),
    Column("id", Text, nullable=False, unique=True),
    Column("tenant", Text, nullable=False),
    Column("models", JSON),
    Column("classes", JSON, nullable=False, default=list),
    Column("default_class", Text),
    Column("limits", Text),
    Column("metadata", JSON, nullable=False, default=dict),
    Column("created_at", DateTime(timezone=True), nullable=False),
    Column("expires_at", DateTime(timezone=True)),
    Column("revoked_at", DateTime(timezone=True)),
)

USAGE: Final = Table(
    "sol_usage",
    metadata,
    Column("id", Text, primary_key=True),
    Column("request_id", Text, nullable=False),
    Column("at", DateTime(timezone=True), nullable=False, index=True),
    Column("tenant", Text, nullable=False),
    Column("key_id", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("engine", Text),
    Column("class", Text, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
    Column("estimated", Boolean, nullable=False),
    Column("cost_nano", BigInteger, nullable=False),
    Column("status", Integer, nullable=False),
    Column("ended", Text, nullable=False),
    Column("seconds", Float),
    Index("sol_usage_by_tenant", "tenant", "at"),
)

_Result = TypeVar("_Result")


class DatabaseAwayError(NoCapacityError):
    """503: the database does not answer, or not as it should; it is asked again."""

    code = "database_unavailable"
    retry_after = 2


class Database:
    """Raises `ConfigError` for a URL that cannot be one. Nothing is opened until something is asked."""

    def __init__(self, options: DatabaseOptions) -> None:
        self._timeout = options.timeout_seconds
        sqlite = options.url.startswith("sqlite")
        arguments: dict[str, Any] = {"timeout": self._timeout}
        if not sqlite:
            arguments["command_timeout"] = self._timeout
        # A file is opened anew each time: one that is kept open may be gone from where others look for it.
        pool: dict[str, Any] = {"poolclass": NullPool}
        if not sqlite:
            pool = {"pool_size": 4, "max_overflow": 4, "pool_timeout": self._timeout, "pool_pre_ping": True}
        try:
            self._engine: AsyncEngine = create_async_engine(
                options.url, connect_args=arguments, hide_parameters=True, **pool
            )
        except (SQLAlchemyError, ImportError, ValueError) as error:
            raise ConfigError(f"database.url cannot be used: {error}", param="database.url") from None
        if sqlite:
            event.listen(self._engine.sync_engine, "connect", _prepare_sqlite)
        self.dialect = self._engine.dialect.name
        self._has_tables = False
        self._away = False

    @property
    def away(self) -> bool:
        """It failed to answer last: who can do without it should, until somebody who can wait has had an answer."""
        return self._away

    async def run(self, work: Callable[[AsyncConnection], Awaitable[_Result]]) -> _Result:
        """`work` in a transaction. Raises `DatabaseAwayError`; what is wrong with the values themselves is raised as
        SQLAlchemy's DataError or IntegrityError."""
        making_tables = not self._has_tables
        try:
            # Drivers have time-outs of their own, and not for everything: a host that takes packets and says nothing.
            async with asyncio.timeout(2 * self._timeout), self._engine.begin() as connection:
                if making_tables:
                    await connection.run_sync(metadata.create_all)
                    making_tables = False
                result = await work(connection)
        except (DataError, IntegrityError) as error:
            if making_tables:  # so was another gateway, at the same time
                raise self._is_away(error) from None
            raise
        except (SQLAlchemyError, OSError, TimeoutError) as error:
            raise self._is_away(error) from None
        if self._away:
            logger.warning("the database is back")
        self._away = False
        self._has_tables = True
        return result

    async def ping(self) -> None:
        """Raises `DatabaseAwayError`."""
        await self.run(lambda connection: connection.execute(select(1)))

    async def close(self) -> None:
        await self._engine.dispose()

    def _is_away(self, error: Exception) -> DatabaseAwayError:
        if not self._away:
            logger.error("the database is away: %s: %.300s", type(error).__name__, error)
        self._away = True
        self._has_tables = False  # it may come back empty
        return DatabaseAwayError("the database does not answer at the moment; try again in a few seconds")


def utc(moment: datetime | None) -> datetime | None:
    """As it comes from a database: SQLite gives times back without their zone."""
    return moment.replace(tzinfo=UTC) if moment is not None and moment.tzinfo is None else moment


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    """Readers do not wait for a writer, and a commit does not wait for the disk: a crash of the machine may lose the
    last ones, never the file."""
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.close()
