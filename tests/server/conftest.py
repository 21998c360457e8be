from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import openai
import pytest
from running_server import KEY, OTHER_KEY, Server, start_server

from sol.models.source import ModelFiles


@pytest.fixture(scope="session")
def server(smollm2: ModelFiles) -> Iterator[Server]:
    """The one server that most tests share; leave it idle."""
    with start_server(api_keys=[KEY, OTHER_KEY], max_body_bytes=2**20) as server:
        server.wait_until_ready()
        yield server
        assert server.stop() == 0


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


@pytest.fixture
async def async_client(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with server.async_client() as client:
        yield client
