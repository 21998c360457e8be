"""Requests as other people's load generators send them, field for field: the servers take them and answer what those
tools count by. benchmarks/measure_tools.py runs the tools themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from sol.simulate import EngineLaws
from sol.simulate.config import SimulateConfig
from sol.simulate.server import in_thread

GUIDELLM = {
    "model": "simulated", "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True}, "max_completion_tokens": 6,
    "ignore_eos": True, "messages": [{"role": "user", "content": [{"type": "text", "text": "Tell me of the river."}]}],
}  # fmt: skip
"""GuideLLM 0.8.1 on the chat route."""
LM_EVAL_CHAT = {
    "messages": [{"role": "user", "content": "Question: what is 2 + 2? Answer:"}], "model": "simulated",
    "max_tokens": 6, "temperature": 0, "stop": ["\n\n", "Question:"], "seed": 1234,
}  # fmt: skip
"""lm-evaluation-harness 0.4.13, `local-chat-completions`."""
LM_EVAL_SCORE = {
    "model": "simulated", "prompt": "The river is deep", "temperature": 0, "max_tokens": 1, "logprobs": 1,
    "seed": 1234, "echo": True,
}  # fmt: skip
"""The same, `local-completions` scoring a text."""


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    laws = EngineLaws(step_seconds=0.002, num_speculative_tokens=3, acceptance_rate=0.6)
    with in_thread(SimulateConfig(laws=laws, port=0)) as server, httpx.Client(base_url=server.url) as found:
        yield found


def chunks(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    *events, done = [line[6:] for line in answer.text.splitlines() if line]
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


def test_guidellm_counts_tokens_by_the_usage_of_each_chunk(client: httpx.Client) -> None:
    *inner, last = chunks(client, "/v1/chat/completions", GUIDELLM)
    counts = [chunk["usage"]["completion_tokens"] for chunk in inner]
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] == 6
    assert {chunk["usage"]["prompt_tokens"] for chunk in [*inner, last]} == {last["usage"]["prompt_tokens"]}
    # With speculation a chunk is not a token: the counts are what tells.
    texts = [chunk for chunk in inner if chunk["choices"][0]["delta"].get("content")]
    assert len(texts) < 6


def test_vllm_bench_counts_by_the_usage_at_the_end(client: httpx.Client) -> None:
    body = {
        "model": "simulated", "prompt": "Tell me of the river.", "repetition_penalty": 1.0, "max_tokens": 6,
        "logprobs": None, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
        "temperature": 0,
    }  # fmt: skip
    *inner, last = chunks(client, "/v1/completions", body)
    assert all(chunk["usage"] is None for chunk in inner)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 6


def test_counts_in_chunks_of_completions_start_with_what_is_echoed(client: httpx.Client) -> None:
    body = {
        "model": "simulated", "prompt": "The river", "echo": True, "max_tokens": 4, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }  # fmt: skip
    echoed, *_, closing, last = chunks(client, "/v1/completions", body)
    assert (echoed["choices"][0]["text"], echoed["usage"]["completion_tokens"]) == ("The river", 0)
    assert closing["usage"]["completion_tokens"] == last["usage"]["completion_tokens"] == 4


def test_counts_in_chunks_need_the_count_at_the_end(client: httpx.Client) -> None:
    answer = client.post("/v1/chat/completions", json={**GUIDELLM, "stream_options": {"continuous_usage_stats": True}})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "stream_options.continuous_usage_stats"


def test_the_evaluation_harness_gets_texts_and_is_told_that_nothing_here_scores(client: httpx.Client) -> None:
    answer = client.post("/v1/chat/completions", json=LM_EVAL_CHAT).json()
    assert answer["choices"][0]["message"]["content"]
    # `sol serve` has logprobs of prompts; the simulator has no model whose they could be.
    refused = client.post("/v1/completions", json=LM_EVAL_SCORE)
    assert refused.status_code == 400
    assert "logprobs of the prompt" in refused.json()["error"]["message"]
