"""Keys and usage in SQLite and in PostgreSQL, and while neither is there."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from postgres_servers import PostgresServer
from sqlalchemy import text

from sol.errors import AuthenticationError, ConfigError
from sol.gateway.auth import hash_key
from sol.gateway.limits.config import DatabaseOptions
from sol.gateway.limits.database import Database, DatabaseAwayError
from sol.gateway.limits.journal import Journal
from sol.gateway.limits.keys import DatabaseKeys, KeysUnavailableError, create_key, list_keys, revoke_key
from sol.gateway.limits.records import ORPHAN, UsageRecord
from sol.gateway.limits.usage import UsageWriter, usage_by


@dataclass
class Store:
    """A database that can be taken away."""

    options: DatabaseOptions
    take_away: Callable[[], None]
    give_back: Callable[[], None]


@pytest.fixture(params=["sqlite", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    journal = tmp_path / "journal"
    if request.param == "sqlite":
        directory, elsewhere = tmp_path / "database", tmp_path / "elsewhere"
        directory.mkdir()
        options = DatabaseOptions(url=f"sqlite:///{directory}/sol.db", journal=journal, timeout_seconds=1)

        def take_away() -> None:
            directory.rename(elsewhere)
            directory.write_text("not a directory")

        def give_back() -> None:
            directory.unlink()
            elsewhere.rename(directory)

        yield Store(options, take_away, give_back)
    else:
        server: PostgresServer = request.getfixturevalue("postgres")
        options = DatabaseOptions(url=server.url, journal=journal, timeout_seconds=2)
        yield Store(options, server.stop, server.start)


@pytest.fixture
async def database(store: Store) -> AsyncIterator[Database]:
    made = Database(store.options)
    yield made
    await made.close()


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    deadline = time.monotonic() + 20
    while not await condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def name() -> str:
    return uuid.uuid4().hex[:12]


def record(tenant: str, tokens: int = 10, *, key: str | None = None, ended: str = "complete") -> UsageRecord:
    return UsageRecord(
        id=key or uuid.uuid4().hex,
        request_id="a request",
        at=time.time(),
        tenant=tenant,
        key_id="key",
        model="llama",
        engine="one",
        class_name="interactive",
        prompt_tokens=tokens,
        cached_tokens=1,
        completion_tokens=2,
        estimated=False,
        cost_nano=2**40,
        status=200,
        ended=ended,
        seconds=0.5,
    )


async def test_a_key_is_made_found_changed_and_revoked(database: Database) -> None:
    key_id = name()
    secret = await create_key(
        database, id=key_id, tenant="acme", models=["llama"], classes=["batch"], limits="small", metadata={"team": "x"}
    )
    keys = DatabaseKeys(database, refresh=0.05)
    await keys.start()
    found = await keys.find(hash_key(secret))
    assert found is not None
    assert (found.key_id, found.tenant, found.models, found.classes) == (key_id, "acme", {"llama"}, ("batch",))
    assert (found.limits, found.metadata) == ("small", {"team": "x"})
    assert await keys.find(hash_key("sk-nobody's")) is None
    with pytest.raises(ConfigError, match="there is a key"):
        await create_key(database, id=key_id, tenant="other")

    assert await revoke_key(database, key_id)
    assert not await revoke_key(database, key_id)

    async def is_revoked() -> bool:
        try:
            await keys.find(hash_key(secret))
        except AuthenticationError as error:
            return "revoked" in error.message
        return False

    await until(is_revoked)
    stored = next(item for item in await list_keys(database) if item.principal.key_id == key_id)
    assert stored.revoked_at is not None
    assert secret not in repr(stored)
    await keys.close()


async def test_a_key_expires_by_the_clock(database: Database) -> None:
    keys = DatabaseKeys(database, refresh=60)
    moment = datetime.now(UTC) + timedelta(seconds=1)
    secret = await create_key(database, id=name(), tenant="acme", expires_at=moment)
    await keys.start()

    async def has_expired() -> bool:
        try:
            await keys.find(hash_key(secret))
        except AuthenticationError as error:
            return "expired" in error.message and datetime.now(UTC) >= moment
        return False

    await until(has_expired)
    with pytest.raises(ConfigError, match="time zone"):
        await create_key(database, id=name(), tenant="acme", expires_at=datetime(2030, 1, 1))
    await keys.close()


async def test_known_keys_stay_good_while_the_database_is_away(store: Store, database: Database) -> None:
    old = await create_key(database, id=name(), tenant="acme")
    keys = DatabaseKeys(database, refresh=0.05)
    await keys.start()
    store.take_away()
    try:
        await asyncio.sleep(0.3)  # several times past its refresh
        found = await keys.find(hash_key(old))
        assert found is not None
        assert found.tenant == "acme"
        for _ in range(3):
            with pytest.raises(KeysUnavailableError) as caught:
                await keys.find(hash_key("sk-of somebody"))
            assert (caught.value.status, caught.value.retry_after) == (503, 2)
    finally:
        store.give_back()

    async def is_unknown() -> bool:
        try:
            return await keys.find(hash_key("sk-of somebody")) is None
        except KeysUnavailableError:
            return False

    await until(is_unknown)
    await keys.close()


async def test_a_gateway_that_starts_before_its_database_finds_keys_once_it_is_there(
    store: Store, database: Database
) -> None:
    secret = await create_key(database, id=name(), tenant="acme")
    await database.close()
    store.take_away()
    late = Database(store.options)
    keys = DatabaseKeys(late, refresh=0.1)
    try:
        await keys.start()
        with pytest.raises(KeysUnavailableError):
            await keys.find(hash_key(secret))
    finally:
        store.give_back()

    async def is_found() -> bool:
        try:
            return await keys.find(hash_key(secret)) is not None
        except KeysUnavailableError:
            return False

    await until(is_found)
    await keys.close()
    await late.close()


async def test_many_requests_with_one_new_key_are_one_question(database: Database) -> None:
    keys = DatabaseKeys(database, refresh=60)
    await keys.start()
    secret = await create_key(database, id=name(), tenant="acme")
    asked = 0
    run = database.run

    async def counted(work):  # type: ignore[no-untyped-def]
        nonlocal asked
        asked += 1
        return await run(work)

    database.run = counted  # type: ignore[method-assign]
    first = asyncio.create_task(keys.find(hash_key(secret)))
    others = [asyncio.create_task(keys.find(hash_key(secret))) for _ in range(20)]
    await asyncio.sleep(0)
    first.cancel()  # who asked first leaves, and the others get their answer
    assert all(await asyncio.gather(*others))
    assert asked == 1
    await keys.close()


async def test_made_up_keys_cannot_pile_up(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sol.gateway.limits.keys._LOOKED_UP", 3)
    monkeypatch.setattr("sol.gateway.limits.keys._UNKNOWN", 5)
    keys = DatabaseKeys(database, refresh=60)
    await keys.start()
    made_up = [hash_key(f"sk-{number}") for number in range(10)]
    answers = await asyncio.gather(*map(keys.find, made_up), return_exceptions=True)
    assert answers[:3] == [None] * 3
    assert all(isinstance(answer, KeysUnavailableError) for answer in answers[3:])
    for digest in made_up:
        assert await keys.find(digest) is None
    assert len(keys._unknown) == 5
    await keys.close()


@pytest.mark.parametrize("wrong", ["", "two words", "a\nb"])
async def test_an_id_is_one_word(tmp_path: Path, wrong: str) -> None:
    database = Database(DatabaseOptions(url=f"sqlite:///{tmp_path}/sol.db"))
    with pytest.raises(ConfigError, match="one word"):
        await create_key(database, id=wrong, tenant="acme")
    await database.close()


async def test_tables_that_vanish_are_made_again(tmp_path: Path) -> None:
    options = DatabaseOptions(url=f"sqlite:///{tmp_path}/sol.db", journal=tmp_path / "journal")
    database = Database(options)
    writer = UsageWriter(database, Journal(options.journal, 2**20), flush=60)
    writer.write(record("acme", 1))
    await writer.flush()
    (tmp_path / "sol.db").unlink()
    writer.write(record("acme", 2))
    with pytest.raises(DatabaseAwayError):
        await writer.flush()
    await writer.flush()
    assert await sums(database, "acme") == (1, 2)
    await writer.close()
    await database.close()


async def sums(database: Database, tenant: str) -> tuple[int, int]:
    rows = [row for row in await usage_by(database, ["tenant"]) if row["tenant"] == tenant]
    return (rows[0]["requests"], rows[0]["prompt_tokens"]) if rows else (0, 0)


async def test_each_record_is_written_once(store: Store, database: Database) -> None:
    tenant = name()
    writer = UsageWriter(database, Journal(store.options.journal, 2**20), flush=0.02)
    await writer.start()
    for number in range(1200):
        writer.write(record(tenant, number))
    again = record(tenant, 1)
    writer.write(again)
    writer.write(again)
    await writer.flush()
    assert await sums(database, tenant) == (1201, sum(range(1200)) + 1)
    writer.write(again)
    await writer.close()
    assert await sums(database, tenant) == (1201, sum(range(1200)) + 1)
    assert list(store.options.journal.iterdir()) == []
    row = next(row for row in await usage_by(database, ["tenant", "key_id", "model"]) if row["tenant"] == tenant)
    assert row["cost_nano"] == 1201 * 2**40
    later = datetime.now(UTC) + timedelta(hours=1)
    assert all(row["tenant"] != tenant for row in await usage_by(database, ["tenant"], since=later))


async def test_usage_waits_for_a_database_that_is_away_and_survives_the_gateway(
    store: Store, database: Database
) -> None:
    tenant = name()
    journal = store.options.journal
    writer = UsageWriter(database, Journal(journal, 2**20), flush=0.02)
    await writer.start()
    writer.write(record(tenant, 1))
    await writer.flush()
    store.take_away()
    try:
        for _ in range(5):
            writer.write(record(tenant, 10))
            await asyncio.sleep(0.05)
        with pytest.raises(DatabaseAwayError):
            await writer.flush()
        assert len(list(journal.iterdir())) <= 2
        await writer.close()
        assert writer.lost == 0
    finally:
        store.give_back()
    heir = UsageWriter(database, Journal(journal, 2**20), flush=0.02)
    await heir.start()

    async def all_there() -> bool:
        try:
            return await sums(database, tenant) == (6, 51)
        except DatabaseAwayError:
            return False

    await until(all_there)
    await heir.close()
    assert list(journal.iterdir()) == []


async def test_what_was_recorded_for_the_dead_gives_way_to_the_truth_and_not_the_other_way(
    store: Store, database: Database
) -> None:
    tenant = name()
    writer = UsageWriter(database, Journal(store.options.journal, 2**20), flush=60)
    writer.write(record(tenant, 5, key=tenant, ended=ORPHAN))
    await writer.flush()
    writer.write(record(tenant, 7, key=tenant))
    await writer.flush()
    assert await sums(database, tenant) == (1, 7)
    writer.write(record(tenant, 5, key=tenant, ended=ORPHAN))
    await writer.close()
    assert await sums(database, tenant) == (1, 7)


async def test_a_record_the_database_refuses_does_not_hold_up_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = DatabaseOptions(url=f"sqlite:///{tmp_path}/sol.db", journal=tmp_path / "journal")
    database = Database(options)
    trigger = "CREATE TRIGGER refuse BEFORE INSERT ON sol_usage WHEN NEW.prompt_tokens = 13 BEGIN {}; END"
    await database.run(lambda connection: connection.execute(text(trigger.format("SELECT RAISE(ABORT, 'no')"))))
    writer = UsageWriter(database, Journal(options.journal, 2**20), flush=60)
    for tokens in (1, 13, 2):
        writer.write(record("acme", tokens))
    await writer.close()
    assert await sums(database, "acme") == (2, 3)
    assert writer.lost == 1
    assert "refuses a usage record" in caplog.text
    await database.close()


async def test_an_engine_that_reports_nonsense_does_not_stop_the_records(store: Store, database: Database) -> None:
    tenant = name()
    writer = UsageWriter(database, Journal(store.options.journal, 2**20), flush=60)
    for tokens in (1, 2**70, -5):
        writer.write(record(tenant, tokens))
    writer.write(msgspec.structs.replace(record(tenant, 1), engine="a\0b"))
    await writer.close()
    assert await sums(database, tenant) == (4, 10**15 + 2)
    assert writer.lost == 0


CHILD = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from sol.gateway.limits.config import DatabaseOptions
from sol.gateway.limits.database import Database
from sol.gateway.limits.journal import Journal
from sol.gateway.limits.usage import UsageWriter
from test_limits_database import record

async def main():
    options = DatabaseOptions(url="sqlite:////nowhere/at/all.db", journal=Path(sys.argv[1]))
    writer = UsageWriter(Database(options), Journal(options.journal, 2**20), flush=0.01)
    await writer.start()
    for number in range(100):
        writer.write(record("of the dead", number))
        await asyncio.sleep(0.001)
    print("written", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_a_gateway_that_is_killed_loses_no_record(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    child = subprocess.Popen(  # noqa: ASYNC220  (it lives for a moment)
        [sys.executable, "-c", CHILD, str(journal), str(Path(__file__).parent)], stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"written\n"
    mine = Journal(journal, 2**20)
    assert mine.adopt() == 0  # it is alive
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    torn = next(journal.iterdir())
    with torn.open("ab") as file:
        file.write(b'\n{"id": "torn')
    options = DatabaseOptions(url=f"sqlite:///{tmp_path}/sol.db", journal=journal)
    database = Database(options)
    writer = UsageWriter(database, mine, flush=0.01)
    await writer.start()
    await writer.close()
    assert await sums(database, "of the dead") == (100, sum(range(100)))
    assert list(journal.iterdir()) == []
    await database.close()


async def test_a_full_disk_keeps_records_in_memory_and_counts_what_it_loses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sol.gateway.limits.usage._WITHOUT_DISK", 5)
    options = DatabaseOptions(url=f"sqlite:///{tmp_path}/sol.db", journal=tmp_path / "journal")
    database = Database(options)
    writer = UsageWriter(database, Journal(options.journal, 2000), flush=60)
    for _ in range(50):
        writer.write(record("crowded"))
    assert 30 < writer.lost < 45
    await writer.close()
    requests, _ = await sums(database, "crowded")
    assert requests == 50 - writer.lost
    await database.close()


def test_two_journals_in_one_directory_do_not_take_each_others_files(tmp_path: Path) -> None:
    one, two = Journal(tmp_path, 2**20), Journal(tmp_path, 2**20)
    one.append(b"{}")
    assert two.adopt() == 0
    one.close()
    assert two.adopt() == 1
    assert two.adopt() == 0
    assert [line for chunk in two.closed[0].lines(10) for line in chunk] == [b"{}"]
    two.close()


def test_a_journal_that_cannot_be_written_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        Journal(tmp_path / "file", 2**20)
