"""Usage records: what each request took and cost, written to the database in batches, beside the hot path."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from sqlalchemy import case, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DataError, IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from sol.gateway.limits.database import USAGE, Database, DatabaseAwayError
from sol.gateway.limits.journal import Journal, Segment
from sol.gateway.limits.records import ORPHAN, UsageRecord

logger = logging.getLogger("sol.gateway.usage")

_BATCH = 500
_ADOPT_SECONDS = 60.0
_SLOWEST_RETRY = 10.0
_WITHOUT_DISK = 10_000
_LARGEST = 10**15

_decoder = msgspec.json.Decoder(UsageRecord)
_encoder = msgspec.json.Encoder()


class UsageWriter:
    """`write` never waits and never raises. What it was given is in the journal, then in the database, each once."""

    def __init__(self, database: Database, journal: Journal, *, flush: float) -> None:
        self._database = database
        self._journal = journal
        self._flush = flush
        self._task: asyncio.Task[None] | None = None
        self._in_memory: deque[UsageRecord] = deque()
        """What the disk did not take."""
        self._lock = asyncio.Lock()
        self.lost = 0
        """Records that neither disk nor database nor memory could take."""
        self.written = 0

    async def start(self) -> None:
        adopted = self._journal.adopt()
        if adopted:
            logger.warning("%d files of usage were left by gateways that are gone: they are recorded now", adopted)
        self._task = asyncio.create_task(self._run(), name="writer of usage records")

    def write(self, record: UsageRecord) -> None:
        try:
            self._journal.append(_encoder.encode(record))
        except OSError as error:
            if not self._in_memory:
                logger.error("usage cannot be written to the journal (%s): it is kept in memory", error)
            if len(self._in_memory) < _WITHOUT_DISK:
                self._in_memory.append(record)
            else:
                self.lost += 1
                if self.lost in (1, 1000, 1_000_000):
                    logger.error("%d usage records are lost: disk and database are both full or away", self.lost)

    @property
    def waiting_bytes(self) -> int:
        return self._journal.size

    async def flush(self) -> None:
        """All that was written is in the database. Raises `DatabaseAwayError`."""
        async with self._lock:
            while self._in_memory:
                batch = [self._in_memory[i] for i in range(min(_BATCH, len(self._in_memory)))]
                await self._store(batch)
                for _ in batch:
                    self._in_memory.popleft()
            # While files wait that the database did not take, no more are begun: one a second, for a day, would be too
            # many to hold open.
            backlog = bool(self._journal.closed)
            if not backlog:
                self._journal.rotate()
            await self._store_closed()
            if backlog:
                self._journal.rotate()
                await self._store_closed()

    async def close(self) -> None:
        """Write what there is; what the database does not take now, the next gateway of this directory records."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        try:
            await self.flush()
        except DatabaseAwayError:
            logger.warning("the database is away: usage stays in the journal and is recorded at the next start")
        finally:
            for record in self._in_memory:
                with contextlib.suppress(OSError):
                    self._journal.append(_encoder.encode(record))
            self._journal.close()

    async def _run(self) -> None:
        delay, adopt_in = self._flush, _ADOPT_SECONDS
        while True:
            await asyncio.sleep(delay)
            adopt_in -= delay
            try:
                if adopt_in <= 0:
                    self._journal.adopt()
                    adopt_in = _ADOPT_SECONDS
                if self._journal.pending or self._in_memory:
                    await self.flush()
                delay = self._flush
            except DatabaseAwayError:
                delay = min(max(2 * delay, 0.5), _SLOWEST_RETRY)
            except Exception:
                logger.exception("usage records could not be written; they are kept")
                delay = _SLOWEST_RETRY

    async def _store_closed(self) -> None:
        while self._journal.closed:
            segment = self._journal.closed[0]
            await self._store_segment(segment)
            self._journal.closed.pop(0)
            segment.remove()

    async def _store_segment(self, segment: Segment) -> None:
        for lines in segment.lines(_BATCH):
            records = []
            for line in lines:
                try:
                    records.append(_decoder.decode(line))
                except msgspec.DecodeError:
                    logger.error("%s has a line that was cut off; it is skipped", segment.path)
            await self._store(records)

    async def _store(self, records: Sequence[UsageRecord]) -> None:
        if not records:
            return
        # Of one id, one row: PostgreSQL refuses to touch a row twice in one statement.
        rows = list({record.id: _row(record) for record in records}.values())
        try:
            await self._database.run(lambda connection: self._insert(connection, rows))
        except (DataError, IntegrityError):
            for row in rows:
                await self._store_one(row)
        self.written += len(rows)

    async def _store_one(self, row: dict[str, Any]) -> None:
        try:
            await self._database.run(lambda connection: self._insert(connection, [row]))
        except (DataError, IntegrityError) as error:
            self.lost += 1
            logger.error("the database refuses a usage record (%.200s): %s", error, row)

    async def _insert(self, connection: AsyncConnection, rows: Sequence[dict[str, Any]]) -> None:
        make = postgresql.insert if self._database.dialect == "postgresql" else sqlite.insert
        statement = make(USAGE)
        changed = {column.name: statement.excluded[column.name] for column in USAGE.columns if column.name != "id"}
        await connection.execute(
            statement.on_conflict_do_update(index_elements=["id"], set_=changed, where=USAGE.c.ended == ORPHAN),
            list(rows),
        )


def _row(record: UsageRecord) -> dict[str, Any]:
    row = {name: _storable(value) for name, value in msgspec.structs.asdict(record).items()}
    row["class"] = row.pop("class_name")
    row["at"] = datetime.fromtimestamp(record.at, UTC)
    return row


def _storable(value: Any) -> Any:
    """Numbers that fit into a column, and whose sums do; texts that PostgreSQL takes. Engines say what they like."""
    if isinstance(value, str):
        return value.replace("\0", "")
    return max(0, min(value, _LARGEST)) if type(value) is int else value


async def usage_by(
    database: Database, columns: Sequence[str], since: datetime | None = None, until: datetime | None = None
) -> list[dict[str, Any]]:
    """Sums of requests, tokens and cost (`cost_nano`) by some of `tenant`, `key_id`, `model`, `engine`, `class`."""
    names = [USAGE.c[name] for name in columns]
    statement = select(
        *names,
        func.count().label("requests"),
        *(func.sum(USAGE.c[name]).label(name) for name in ("prompt_tokens", "cached_tokens", "completion_tokens")),
        func.sum(USAGE.c.cost_nano).label("cost_nano"),
        func.sum(case((USAGE.c.estimated, 1), else_=0)).label("estimated"),
    ).group_by(*names)
    if since is not None:
        statement = statement.where(USAGE.c.at >= since)
    if until is not None:
        statement = statement.where(USAGE.c.at < until)

    async def read(connection: AsyncConnection) -> list[dict[str, Any]]:
        rows = (await connection.execute(statement.order_by(*names))).mappings()
        return [{name: row[name] if name in columns else int(row[name] or 0) for name in row} for row in rows]

    return await database.run(read)
