"""What an abandoned request came to can be asked for, once, with the API key and by whoever named it."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from running_server import KEY, Server

from sol.server.usages import MAX_USAGES, Usages

PROMPT = [5] * 40


async def ask(client: httpx.AsyncClient, key: str) -> dict[str, int] | None:
    """None: there is nothing, after some time."""
    for _ in range(100):
        answer = await client.get(f"/v1/usage/{key}")
        if answer.status_code == 200:
            found: dict[str, int] = answer.json()["usage"]
            return found
        assert answer.status_code == 404
        assert answer.json()["error"]["type"] == "not_found_error"
        await asyncio.sleep(0.01)
    return None


@pytest.mark.parametrize("stream", [False, True])
async def test_what_an_abandoned_request_came_to(server: Server, stream: bool) -> None:
    before = await asyncio.to_thread(server.wait_until_idle)
    key = f"abandoned-{stream}"
    body = {"model": "smollm2", "prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": stream}
    async with httpx.AsyncClient(base_url=server.url, headers={"authorization": f"Bearer {KEY}"}, timeout=60) as client:
        working = asyncio.create_task(client.post("/v1/completions", json=body, headers={"x-sol-usage-key": key}))
        await asyncio.to_thread(server.wait_until, lambda m: m["vllm:num_requests_running"] == 1)
        assert (await client.get(f"/v1/usage/{key}")).status_code == 404
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        usage = await ask(client, key)
        after = await asyncio.to_thread(server.wait_until_idle)
        assert usage is not None
        assert usage["prompt_tokens"] == len(PROMPT)
        generated = "vllm:generation_tokens_total"
        # The engine's process may have made some more until it was told, which its server never saw.
        assert 0 <= usage["completion_tokens"] <= after[generated] - before[generated] < 400
        assert (await client.get(f"/v1/usage/{key}")).status_code == 404
        assert (await client.get(f"/v1/usage/{key}", headers={"authorization": "Bearer no"})).status_code == 401


def test_as_many_are_kept_as_may_be() -> None:
    usages = Usages()
    for number in range(MAX_USAGES + 5):
        usages.keep(str(number), {"prompt_tokens": number})
    usages.keep("x" * 1000, {})
    assert len(usages) == MAX_USAGES
    assert usages.take("4") is None
    assert usages.take("5") == {"prompt_tokens": 5}
    assert usages.take("5") is None
