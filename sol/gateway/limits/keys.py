"""API keys in the database: made, revoked, and found again while the database is away."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import RowMapping, insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from sol.errors import AuthenticationError, ConfigError
from sol.gateway.call import Principal
from sol.gateway.errors import NoCapacityError
from sol.gateway.limits.database import KEYS, Database, DatabaseAwayError, utc

logger = logging.getLogger("sol.gateway.keys")

_ID = re.compile(r"\S{1,200}")
_CACHED = 100_000
_UNKNOWN = 10_000
_AT_ONCE = 4
_CHUNK = 500
_START_SECONDS = 2.0
_RETRY_SECONDS = 1.0
_LOOKED_UP = 1000
"""Keys at a time: somebody may send made-up ones, each of which has to be asked for."""
_ACTIVE_SECONDS = 600.0
"""Keys used within this time are looked up again before they are used; others when they are."""


class KeysUnavailableError(NoCapacityError):
    """503, not 401: whether the key is good cannot be told while the database is away."""

    code = "keys_unavailable"
    retry_after = 2


@dataclass(slots=True)
class _Known:
    principal: Principal
    expires_at: datetime | None
    revoked_at: datetime | None
    checked: float
    used: float


class DatabaseKeys:
    """Finds keys by their hash: those it has seen from memory, whether the database is there or not.

    A key that is revoked or changed is so here within `refresh` seconds, and one that expires does so by the clock.
    Keys that are in the database when the gateway starts are known from then on. One that is not known is looked up
    once, by however many requests ask at a time; if the database is away then, they get 503.
    """

    def __init__(self, database: Database, *, refresh: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._database = database
        self._refresh = refresh
        self._clock = clock
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._unknown: OrderedDict[str, float] = OrderedDict()
        self._looking: dict[str, asyncio.Task[bool]] = {}
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._loaded = False
        self._tried = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read the keys there are. A database that does not answer soon is left to answer later."""
        self._task = asyncio.create_task(self._keep_fresh(), name="refresh of keys")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._tried.wait(), _START_SECONDS)

    async def close(self) -> None:
        tasks = [*self._looking.values(), *([self._task] if self._task is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._task = None

    async def find(self, key_sha256: str) -> Principal | None:
        """Raises `AuthenticationError` for a key that is no longer good, and `KeysUnavailableError`."""
        now = self._clock()
        known = self._known.get(key_sha256)
        if known is None or now - known.checked > 2 * self._refresh:
            missed = self._unknown.get(key_sha256)
            if known is None and missed is not None and now - missed < self._refresh / 2:
                return None
            if not self._database.away:
                try:
                    await self._look_up(key_sha256)
                except DatabaseAwayError:
                    pass
                else:
                    known = self._known.get(key_sha256)
                    if known is None:
                        return None
            if known is None:
                raise KeysUnavailableError(
                    "whether this API key is good cannot be told at the moment; try again in a few seconds"
                )
        known.used = now
        if known.revoked_at is not None:
            raise AuthenticationError("this API key was revoked; use another one")
        if known.expires_at is not None and known.expires_at <= datetime.now(UTC):
            raise AuthenticationError("this API key has expired; use another one")
        return known.principal

    async def _look_up(self, key_sha256: str) -> None:
        task = self._looking.get(key_sha256)
        if task is None:
            if len(self._looking) >= _LOOKED_UP:
                raise KeysUnavailableError("too many API keys that nobody has seen before are being looked up")
            task = asyncio.create_task(self._ask([key_sha256]))
            self._looking[key_sha256] = task
            task.add_done_callback(lambda _: self._looking.pop(key_sha256, None))
        # One client that leaves does not take the others' answer with it.
        await asyncio.shield(task)

    async def _ask(self, digests: Sequence[str]) -> bool:
        async with self._slots:
            rows = await self._database.run(lambda connection: _select(connection, digests))
        self._take_in(rows, digests)
        return True

    def _take_in(self, rows: Iterable[RowMapping], asked: Iterable[str]) -> None:
        now = self._clock()
        missing = set(asked)
        for row in rows:
            digest = row["key_sha256"]
            missing.discard(digest)
            before = self._known.pop(digest, None)
            self._known[digest] = _Known(
                _principal(row), utc(row["expires_at"]), utc(row["revoked_at"]), now, before.used if before else now
            )
            self._unknown.pop(digest, None)
        for digest in missing:
            self._known.pop(digest, None)
            self._unknown[digest] = now
        while len(self._known) > _CACHED:
            self._known.popitem(last=False)
        while len(self._unknown) > _UNKNOWN:
            self._unknown.popitem(last=False)

    async def _keep_fresh(self) -> None:
        while True:
            try:
                await self._refresh_once()
            except Exception:
                logger.exception("refreshing keys failed")
            self._tried.set()
            # While the database is away, nobody else asks whether it is back.
            settled = self._loaded and not self._database.away
            await asyncio.sleep(self._refresh if settled else min(_RETRY_SECONDS, self._refresh))

    async def _refresh_once(self) -> None:
        try:
            if not self._loaded:
                statement = select(KEYS).order_by(KEYS.c.created_at.desc()).limit(_CACHED)

                async def everything(connection: AsyncConnection) -> Sequence[RowMapping]:
                    return (await connection.execute(statement)).mappings().all()

                self._take_in(reversed(await self._database.run(everything)), ())
                self._loaded = True
                return
            since = self._clock() - _ACTIVE_SECONDS
            active = [digest for digest, known in self._known.items() if known.used >= since]
            if not active:
                await self._database.ping()
            for start in range(0, len(active), _CHUNK):
                await self._ask(active[start : start + _CHUNK])
        except DatabaseAwayError:
            pass  # the database has logged it; keys stay as they were


@dataclass(frozen=True, slots=True)
class StoredKey:
    principal: Principal
    key_sha256: str
    created_at: datetime | None
    expires_at: datetime | None
    revoked_at: datetime | None


async def create_key(
    database: Database,
    *,
    id: str,  # noqa: A002
    tenant: str,
    models: Iterable[str] | None = None,
    classes: Iterable[str] = (),
    default_class: str | None = None,
    limits: str | None = None,
    metadata: Mapping[str, str] | None = None,
    expires_at: datetime | None = None,
) -> str:
    """A new key, which is stored as a hash only: this is the one time that it is seen.

    Raises `ConfigError` for an id that is taken, by a revoked key too, or no word, and `DatabaseAwayError`.
    """
    if not _ID.fullmatch(id):
        raise ConfigError(f"id must be one word of at most 200 characters, not {id!r:.80}", param="id")
    if expires_at is not None and expires_at.tzinfo is None:
        raise ConfigError("expires_at must have a time zone, like 2030-01-01T00:00:00+00:00", param="expires_at")
    secret = f"sk-sol-{secrets.token_urlsafe(32)}"
    row = {
        "key_sha256": hashlib.sha256(secret.encode()).hexdigest(),
        "id": id,
        "tenant": tenant,
        "models": None if models is None else sorted(models),
        "classes": list(classes),
        "default_class": default_class,
        "limits": limits,
        "metadata": dict(metadata or {}),
        "created_at": datetime.now(UTC),
        "expires_at": None if expires_at is None else expires_at.astimezone(UTC),
    }

    async def store(connection: AsyncConnection) -> None:
        await connection.execute(insert(KEYS), [row])

    try:
        await database.run(store)
    except IntegrityError:
        raise ConfigError(f"there is a key {id!r} already; choose another id", param="id") from None
    return secret


async def revoke_key(database: Database, id: str) -> bool:  # noqa: A002
    """False if there is no key of this id that is not revoked. Its row stays, for records name it."""

    async def revoke(connection: AsyncConnection) -> int:
        statement = update(KEYS).where(KEYS.c.id == id, KEYS.c.revoked_at.is_(None))
        return (await connection.execute(statement.values(revoked_at=datetime.now(UTC)))).rowcount

    return bool(await database.run(revoke))


async def list_keys(database: Database) -> list[StoredKey]:
    async def read(connection: AsyncConnection) -> Sequence[RowMapping]:
        return (await connection.execute(select(KEYS).order_by(KEYS.c.created_at))).mappings().all()

    return [
        StoredKey(
            _principal(row), row["key_sha256"], utc(row["created_at"]), utc(row["expires_at"]), utc(row["revoked_at"])
        )
        for row in await database.run(read)
    ]


async def _select(connection: AsyncConnection, digests: Sequence[str]) -> Sequence[RowMapping]:
    statement = select(KEYS).where(KEYS.c.key_sha256.in_(digests))
    return (await connection.execute(statement)).mappings().all()


def _principal(row: RowMapping) -> Principal:
    models = row["models"]
    return Principal(
        key_id=row["id"],
        tenant=row["tenant"],
        models=None if models is None else frozenset(models),
        classes=tuple(row["classes"] or ()),
        default_class=row["default_class"],
        limits=row["limits"],
        metadata=row["metadata"] or {},
    )
