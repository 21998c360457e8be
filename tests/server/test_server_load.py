"""Many clients at once, clients that leave, and what the metrics say about it."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import httpx
import openai
import pytest
from running_server import KEY, Server

LONG: dict[str, Any] = {
    "model": "smollm2",
    "messages": [{"role": "user", "content": "Tell me a very long story."}],
    "max_tokens": 400,
    "extra_body": {"ignore_eos": True},
}
ABORTED = "vllm:request_success_total abort"


async def test_64_streams_at_once(server: Server, async_client: openai.AsyncOpenAI) -> None:
    before = server.wait_until_idle()

    async def stream(i: int) -> tuple[str, int, str | None]:
        text, tokens, reason = "", 0, None
        async with await async_client.completions.create(
            model="smollm2",
            prompt=f"The number {i} is",
            temperature=0,
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        ) as chunks:
            async for chunk in chunks:
                if chunk.usage is not None:
                    tokens = chunk.usage.completion_tokens
                for choice in chunk.choices:
                    text += choice.text
                    reason = choice.finish_reason or reason
        return text, tokens, reason

    results = await asyncio.gather(*[stream(i) for i in range(64)])
    assert all(text for text, _, _ in results)
    assert [(tokens, reason) for _, tokens, reason in results] == [(8, "length")] * 64
    after = await asyncio.to_thread(server.wait_until_idle)
    assert after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"] == 64 * 8
    name = "vllm:request_success_total length"
    assert after[name] - before[name] == 64


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_that_is_left(server: Server, client: openai.OpenAI, n: int) -> None:
    before = server.wait_until_idle()
    with client.chat.completions.create(**LONG, n=n, stream=True) as stream:
        for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        during = server.wait_until(lambda m: m["vllm:num_requests_running"] == n)
        assert during["vllm:kv_cache_usage_perc"] > 0
    after = server.wait_until_idle()
    assert after[ABORTED] - before[ABORTED] == n
    assert after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"] < 400


@pytest.mark.parametrize("n", [1, 3])
async def test_an_answer_that_nobody_waits_for(server: Server, async_client: openai.AsyncOpenAI, n: int) -> None:
    before = server.wait_until_idle()
    asking = asyncio.create_task(async_client.chat.completions.create(**LONG, n=n))
    await asyncio.to_thread(server.wait_until, lambda m: m["vllm:num_requests_running"] == n)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    after = await asyncio.to_thread(server.wait_until_idle)
    assert after[ABORTED] - before[ABORTED] == n


def test_a_client_that_leaves_before_it_was_sent_anything(server: Server) -> None:
    before = server.wait_until_idle()
    body = json.dumps({"prompt": [5] * 300, "max_tokens": 200, "ignore_eos": True, "stream": True})
    url = httpx.URL(server.url)
    with socket.create_connection((url.host, url.port)) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: sol\r\nauthorization: Bearer {KEY}\r\n"
        head += "content-type: application/json\r\n"
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
        server.wait_until(lambda m: m["vllm:num_requests_running"] == 1)
    after = server.wait_until_idle()
    assert after[ABORTED] - before[ABORTED] == 1


def test_the_metrics_of_a_request(server: Server, client: openai.OpenAI) -> None:
    before = server.wait_until_idle()
    answer = client.completions.create(
        model="smollm2", prompt="Once upon a time there was", max_tokens=5, extra_body={"ignore_eos": True}
    )
    after = server.wait_until_idle()
    assert answer.usage is not None
    grown = {key: after[key] - before.get(key, 0) for key in after}
    assert grown["vllm:prompt_tokens_total"] == answer.usage.prompt_tokens
    assert grown["vllm:generation_tokens_total"] == 5
    assert grown["vllm:prefix_cache_queries_total"] == answer.usage.prompt_tokens
    assert grown["vllm:request_success_total length"] == 1
    for name in (
        "time_to_first_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_time_per_output_token_seconds",
    ):
        assert grown[f"vllm:{name}_count"] == 1, name
        assert 0 <= grown[f"vllm:{name}_sum"] < 60, name
    assert grown["vllm:inter_token_latency_seconds_count"] == 4
    assert grown["vllm:iteration_tokens_total_count"] >= 5
    parts = ("request_queue_time", "request_prefill_time", "request_decode_time")
    assert sum(grown[f"vllm:{part}_seconds_sum"] for part in parts) == pytest.approx(
        grown["vllm:e2e_request_latency_seconds_sum"], abs=0.2
    )
    assert after["sol:engine_alive"] == 1
    assert {"vllm:num_requests_waiting", "vllm:num_preemptions_total", "vllm:prefix_cache_hits_total"} <= set(after)


def test_health(server: Server) -> None:
    for path in ("/live", "/ready", "/health", "/ping", "/version"):
        response = httpx.get(server.url + path)
        assert response.status_code == 200
        assert response.headers["x-request-id"]
