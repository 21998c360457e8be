from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import openai
import pytest
from running_server import KEY, ORIGIN, OTHER_KEY, Server, start_server, tiny_options

from sol.models.source import ModelFiles


@pytest.fixture(scope="session")
def server(smollm2: ModelFiles) -> Iterator[Server]:
    """The one server that most tests share; leave it idle."""
    with start_server(api_keys=[KEY, OTHER_KEY], max_body_bytes=2**20) as server:
        server.wait_until_ready()
        yield server
        assert server.stop() == 0


@pytest.fixture(scope="session")
def tiny_server(talking_llama: Path) -> Iterator[Server]:
    """One place in the batch, by priority; leave it idle."""
    with start_server(
        **tiny_options(talking_llama, max_num_seqs=1, scheduling_policy="priority"),
        max_queue_len=2, allowed_origins=[ORIGIN], api_keys=[KEY], max_stored_responses=3,
    ) as server:  # fmt: skip
        server.wait_until_ready()
        yield server
        assert server.stop() == 0


@pytest.fixture(scope="session")
def short_server(talking_llama: Path) -> Iterator[Server]:
    """A context of 64 tokens, so that whatever is asked for is soon there; leave it idle."""
    options = tiny_options(talking_llama, max_num_seqs=64, max_model_len=64, scheduling_policy="priority")
    with start_server(**options, api_keys=[KEY], max_body_bytes=2**20) as server:
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
