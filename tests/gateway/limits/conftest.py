"""Databases that the tests of limits use: real ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
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
