"""Databases that the tests of limits use: real ones."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import postgres_servers
import pytest
from postgres_servers import PostgresServer
from redis_servers import MISSING, PROGRAM, RedisServer


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a Redis that nobody stops. Each test takes a prefix of its own."""
    if PROGRAM is None:
        pytest.skip(MISSING)
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server.url
    server.stop()


@pytest.fixture
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One to stop and to start."""
    if PROGRAM is None:
        pytest.skip(MISSING)
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    """Whoever stops it starts it again. What it holds is shared: tests use ids of their own."""
    if postgres_servers.PROGRAMS is None:
        pytest.skip(postgres_servers.MISSING)
    # Under a directory that everybody may enter: the server runs as somebody else.
    with tempfile.TemporaryDirectory(prefix="sol-postgres-", ignore_cleanup_errors=True) as name:
        server = PostgresServer(Path(name))
        server.start()
        yield server
        server.stop()
