"""The simulator on a port: the API that clients know, with the engine's model behind it."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from raw_client import ask, post, request_bytes, split_head, until

from sol.simulate import EngineLaws
from sol.simulate.config import SimulateConfig
from sol.simulate.laws import TextLaws
from sol.simulate.server import SimulatedServer

LAWS: dict[str, Any] = {
    "max_model_len": 4096, "num_blocks": 4096, "step_seconds": 0.002, "sequence_seconds": 0.0,
    "prefill_token_seconds": 0.00001, "context_token_seconds": 0.0, "draft_token_seconds": 0.0005,
}  # fmt: skip


@asynccontextmanager
async def serving(text: dict[str, Any] | None = None, **laws: Any) -> AsyncIterator[SimulatedServer]:
    config = SimulateConfig(
        laws=EngineLaws(**{**LAWS, **laws}), text=TextLaws(**(text or {})), port=0, served_model_names=("m", "alias")
    )
    async with SimulatedServer(config) as server:
        yield server
        server.service.engine.check_integrity()


def openai_client(server: SimulatedServer) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


async def metrics(http: httpx.AsyncClient, server: SimulatedServer) -> dict[str, float]:
    text = (await http.get(f"{server.url}/metrics")).text
    return {
        " ".join([sample.name, *(v for k, v in sample.labels.items() if k != "model_name")]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_the_official_client_gets_chats_and_completions() -> None:
    async with serving() as server, openai_client(server) as client:
        assert [model.id for model in (await client.models.list()).data] == ["m", "alias"]
        assert (await client.models.retrieve("alias")).id == "alias"
        messages: Any = [{"role": "user", "content": "Tell me of the river."}]
        chat = await client.chat.completions.create(
            model="alias", messages=messages, n=2, max_completion_tokens=12, logprobs=True, top_logprobs=2, seed=3
        )
        assert chat.model == "alias"
        assert chat.usage is not None
        assert (chat.usage.prompt_tokens, chat.usage.completion_tokens, chat.usage.total_tokens) == (10, 24, 34)
        first, second = chat.choices
        assert (first.index, first.message.role, first.finish_reason) == (0, "assistant", "length")
        assert first.message.content != second.message.content
        assert first.logprobs is not None
        assert first.logprobs.content is not None
        assert "".join(entry.token for entry in first.logprobs.content) == first.message.content
        assert all(len(entry.top_logprobs) == 2 for entry in first.logprobs.content)

        whole = await client.completions.create(
            model="m", prompt=["The water", "A river"], max_tokens=8, echo=True, temperature=0
        )
        assert [choice.index for choice in whole.choices] == [0, 1]
        assert whole.choices[0].text.startswith("The water")
        scored = await client.completions.create(model="m", prompt="The water", max_tokens=8, logprobs=3, temperature=0)
        logprobs = scored.choices[0].logprobs
        assert logprobs is not None
        assert "".join(logprobs.tokens or []) == scored.choices[0].text
        assert (logprobs.text_offset or [])[:2] == [0, len((logprobs.tokens or [""])[0])]
        assert whole.choices[0].text == "The water" + scored.choices[0].text


async def test_a_stream_says_what_the_whole_answer_says() -> None:
    async with serving(num_speculative_tokens=3) as server, openai_client(server) as client:
        messages: Any = [{"role": "user", "content": "Hello"}]
        options: dict[str, Any] = {"model": "m", "messages": messages, "n": 2, "seed": 1, "max_tokens": 30}
        whole = await client.chat.completions.create(**options)
        texts, reasons, usage, num_chunks = {0: "", 1: ""}, {}, None, 0
        async for chunk in await client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        ):
            usage = chunk.usage
            for choice in chunk.choices:
                num_chunks += 1
                texts[choice.index] += choice.delta.content or ""
                if choice.finish_reason:
                    reasons[choice.index] = choice.finish_reason
        assert texts == {choice.index: choice.message.content for choice in whole.choices}
        assert reasons == {0: "length", 1: "length"}
        assert usage is not None
        assert usage.completion_tokens == 60
        assert num_chunks < 60  # several tokens a step

        stop = texts[0].split()[5]
        stopped = ""
        async for chunk in await client.chat.completions.create(**{**options, "n": 1}, stream=True, stop=stop):
            stopped += chunk.choices[0].delta.content or ""
        assert stopped == texts[0][: texts[0].index(stop)]


async def test_streams_tell_who_made_their_tokens() -> None:
    async with serving(num_speculative_tokens=3) as server, httpx.AsyncClient() as http:
        body = {"prompt": "x", "max_tokens": 40, "stream": True, "ignore_eos": True,
                "stream_options": {"include_usage": True, "include_speculation": True}}  # fmt: skip
        response = await http.post(f"{server.url}/v1/completions", json=body)
        events = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
        segments = [item for event in events[:-1] for item in event["choices"][0]["speculation"]["segments"]]
        text = "".join(event["choices"][0]["text"] for event in events[:-1])
        assert "".join(item["text"] for item in segments) == text
        assert sum(item["tokens"] for item in segments) == 40
        usage = events[-1]["usage"]
        drafted = sum(item["tokens"] for item in segments if item["origin"] == "simulated")
        assert drafted == usage["speculation"]["accepted_tokens"]
        assert usage["speculation"]["steps"] == len(events) - 1
        plain = await http.post(
            f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 9, "speculation": {"enabled": False}}
        )
        assert plain.json()["usage"]["speculation"]["draft_tokens"] == 0


async def test_the_same_seed_gives_the_same_bytes() -> None:
    async def run(seed: int) -> list[str]:
        async with serving(seed=seed) as server:
            answers = []
            for stream in (False, True):
                body = {"prompt": "Once", "max_tokens": 20, "stream": stream}
                _, answer = split_head(await ask(server.url, post("/v1/completions", body)))
                text = answer.decode()
                created = json.loads(text.partition("data: ")[2].partition("\n")[0] if stream else text)["created"]
                answers.append(text.replace(f'"created":{created}', ""))
            return answers

    first, again, other = await run(1), await run(1), await run(2)
    assert first == again
    assert first != other


async def test_times_are_those_of_the_law() -> None:
    async with serving() as server, httpx.AsyncClient() as http:
        for prompt in ("one", "the " * 300):
            await http.post(f"{server.url}/v1/completions", json={"prompt": prompt, "max_tokens": 5})
        requests = (await http.get(f"{server.control_url}/simulate/requests")).json()["requests"]
        laws = server.service.config.laws
        for record in requests:
            # What the engine's clock says, however late this process was.
            assert record["ttft_seconds"] == pytest.approx(laws.expected_ttft(record["prompt_tokens"]), abs=1e-6)
            assert record["e2e_seconds"] == pytest.approx(laws.expected_e2e(record["prompt_tokens"], 5), abs=1e-6)
            assert record["queue_seconds"] == 0


async def test_conversations_find_their_beginning_in_the_cache() -> None:
    async with serving() as server, openai_client(server) as client:
        messages: Any = [{"role": "user", "content": "the " * 100}]
        first = await client.chat.completions.create(model="m", messages=messages, max_tokens=40)
        messages += [{"role": "assistant", "content": first.choices[0].message.content},
                     {"role": "user", "content": "more"}]  # fmt: skip
        second = await client.chat.completions.create(model="m", messages=messages, max_tokens=4)
        assert first.usage is not None
        assert second.usage is not None
        assert second.usage.prompt_tokens_details is not None
        cached = second.usage.prompt_tokens_details.cached_tokens
        assert cached == (first.usage.total_tokens - 1) // 16 * 16


async def test_requests_run_together_and_wait_when_there_is_no_place() -> None:
    async with serving(max_num_seqs=2) as server, httpx.AsyncClient() as http:
        body = {"prompt": "x", "max_tokens": 30, "ignore_eos": True}
        tasks = [asyncio.create_task(http.post(f"{server.url}/v1/completions", json=body)) for _ in range(5)]
        await until(lambda: server.service.engine.num_running == 2 and server.service.engine.num_waiting == 3)
        seen = await metrics(http, server)
        assert (seen["vllm:num_requests_running"], seen["vllm:num_requests_waiting"]) == (2, 3)
        assert seen["vllm:kv_cache_usage_perc"] > 0
        await asyncio.gather(*tasks)
        waits = sorted(record["queue_seconds"] for record in server.service.records)
        assert waits[1] < 0.01 < waits[2] < waits[4]


async def test_metrics_are_true_to_the_model() -> None:
    async with serving(num_speculative_tokens=2) as server, httpx.AsyncClient() as http:
        before = await metrics(http, server)
        assert before["vllm:spec_decode_num_drafts_total"] == 0
        for _ in range(3):
            body = {"prompt": "the " * 40, "max_tokens": 20, "ignore_eos": True}
            await http.post(f"{server.url}/v1/completions", json=body)
        await http.post(f"{server.url}/v1/completions", json={"prompt": ""})
        seen = await metrics(http, server)
        records = list(server.service.records)
        assert seen["vllm:prompt_tokens_total"] == sum(r["prompt_tokens"] for r in records) == 123
        assert seen["vllm:generation_tokens_total"] == 60
        assert seen["vllm:request_success_total length"] == 3
        assert seen["vllm:prefix_cache_queries_total"] == 123
        assert seen["vllm:prefix_cache_hits_total"] == sum(r["cached_tokens"] for r in records) == 64
        assert seen["vllm:spec_decode_num_draft_tokens_total"] == sum(r["num_draft_tokens"] for r in records)
        assert seen["vllm:spec_decode_num_accepted_tokens_total"] == sum(r["num_accepted_tokens"] for r in records)
        assert seen["vllm:time_to_first_token_seconds_sum"] == pytest.approx(sum(r["ttft_seconds"] for r in records))
        assert seen["vllm:e2e_request_latency_seconds_sum"] == pytest.approx(sum(r["e2e_seconds"] for r in records))
        assert seen["vllm:request_queue_time_seconds_count"] == 3
        assert seen["sol:request_errors_total invalid_request_error 400"] == 1
        assert seen["sol:simulate_lag_seconds_count"] == server.service.engine.counters.num_steps
        assert (seen["vllm:num_requests_running"], seen["vllm:kv_cache_usage_perc"]) == (0, 0)


async def test_a_client_that_leaves_stops_its_generation() -> None:
    async with serving() as server, httpx.AsyncClient() as http:
        for stream in (True, False):
            body = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": stream}
            reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
            writer.write(post("/v1/completions", body))
            await until(lambda: server.service.engine.num_running == 1)
            if stream:
                await reader.readuntil(b"data: ")
            writer.close()
            await until(lambda: server.service.engine.idle)
        assert server.service.num_open == 0
        assert [record["ended"] for record in server.service.records] == ["abort", "abort"]
        assert (await metrics(http, server))["vllm:request_success_total abort"] == 2


async def test_mistakes_are_errors_of_openais_shape() -> None:
    async with serving() as server, httpx.AsyncClient(base_url=server.url) as http, openai_client(server) as client:
        with pytest.raises(openai.NotFoundError, match="gpt-9"):
            await client.completions.create(model="gpt-9", prompt="x")
        with pytest.raises(openai.BadRequestError, match="context") as caught:
            await client.completions.create(model="m", prompt="x", max_tokens=5000)
        assert caught.value.code == "context_length_exceeded"
        for body, param in [
            ({"prompt": "x", "temprature": 1}, "temprature"),
            ({"prompt": "x", "logit_bias": {"3": 1}}, "logit_bias"),
            ({"prompt": "x", "presence_penalty": 1.0}, "presence_penalty"),
            ({"prompt": [99999999999]}, "prompt"),
            ({"prompt": ["x"] * 100, "n": 100}, "prompt"),
            ({"prompt": "x", "speculation": {"drafter": "simulated"}}, "speculation.drafter"),
            ({"prompt": "x", "min_tokens": 8, "max_tokens": 4}, "min_tokens"),
        ]:
            response = await http.post("/v1/completions", json=body)
            assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        response = await http.post("/v1/chat/completions", json={"messages": []})
        assert response.json()["error"]["param"] == "messages"
        assert (await http.get("/v1/completions")).status_code == 405
        assert (await http.get("/nothing")).json()["error"]["code"] == "unknown_url"
        assert (await http.post("/v1/completions", content=b"[" * 100_000)).status_code == 400
        assert (await http.post("/simulate/faults", content=b"[" * 100_000)).status_code == 400
        assert (await http.get("/v1/models/unknown")).status_code == 404


async def test_an_answer_too_long_to_write_ahead_is_refused() -> None:
    async with serving() as server, httpx.AsyncClient(base_url=server.url) as http:
        body = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "n": 40}
        response = await http.post("/v1/completions", json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "n")
        assert server.service.engine.idle


async def test_tokens_and_text_and_probes() -> None:
    async with serving() as server, httpx.AsyncClient(base_url=server.url) as http:
        counted = (await http.post("/tokenize", json={"prompt": "The water", "return_token_strs": True})).json()
        assert (counted["count"], counted["max_model_len"], counted["token_strs"]) == (2, 4096, ["The", " water"])
        assert (await http.post("/detokenize", json={"tokens": counted["tokens"]})).json() == {"prompt": "The water"}
        chat = (await http.post("/tokenize", json={"messages": [{"role": "user", "content": "Hi"}]})).json()
        used = await http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}]})
        assert chat["count"] == used.json()["usage"]["prompt_tokens"]
        assert (await http.post("/tokenize", json={})).status_code == 400
        assert (await http.post("/detokenize", json={"tokens": [10**6]})).status_code == 400
        for path in ("/health", "/ready", "/live", "/ping", "/version"):
            assert (await http.get(path)).status_code == 200
        assert (await http.head("/health")).content == b""
        sent = await http.get("/health", headers={"x-request-id": "abc-1"})
        assert sent.headers["x-request-id"] == "abc-1"
        state = (await http.get("/simulate/state")).json()
        assert (state["ready"], state["num_received"], state["laws"]["max_model_len"]) == (True, 1, 4096)


async def test_connections_are_kept_pipelined_and_chunked() -> None:
    async with serving() as server:
        body = {"prompt": "x", "max_tokens": 3}
        several = post("/v1/completions", body) + request_bytes("GET", "/health") * 400 + post("/v1/completions", body)
        answers = await ask(server.url, several + request_bytes("GET", "/version", connection="close"))
        assert answers.count(b"HTTP/1.1 200 OK") == 403
        first, last = answers.index(b"text_completion"), answers.rindex(b"text_completion")
        assert first < answers.index(b'{"status": "ok"}') < last < answers.index(b"version")  # in their order

        head, rest = split_head(await ask(server.url, post("/v1/completions", body, version="1.0")))
        assert b"connection: close" in head
        assert json.loads(rest)["usage"]["completion_tokens"] == 3
        old = await ask(server.url, post("/v1/completions", {**body, "stream": True}, version="1.0"))
        assert b"transfer-encoding" not in old
        assert old.endswith(b"data: [DONE]\n\n")
        sent = json.dumps(body).encode()
        chunked = request_bytes("POST", "/v1/completions", **{"transfer-encoding": "chunked", "expect": "100-continue",
                                                              "connection": "close"})  # fmt: skip
        answer = await ask(server.url, chunked + b"%x\r\n%b\r\n0\r\n\r\n" % (len(sent), sent))
        assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK")


async def test_what_is_no_request_is_refused_and_hurts_nobody() -> None:
    async with serving() as server:
        assert (await ask(server.url, b"\x16\x03\x01\x02\x00 not HTTP\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
        large = request_bytes("GET", "/health", padding="x" * 70_000)
        assert (await ask(server.url, large)).startswith(b"HTTP/1.1 431 ")
        long = request_bytes("POST", "/v1/completions", **{"content-length": str(2**26)})
        assert (await ask(server.url, long + b"x" * (2**25 + 1))).startswith(b"HTTP/1.1 413 ")
        # Half a request, and a client that resets.
        _, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
        writer.write(b"POST /v1/completions HTTP/1.1\r\ncontent-le")
        await writer.drain()
        raw = writer.get_extra_info("socket")
        raw.setsockopt(1, 13, struct.pack("ii", 1, 0))  # SOL_SOCKET, SO_LINGER
        writer.transport.abort()
        assert (await ask(server.url, request_bytes("GET", "/health", connection="close"))).startswith(b"HTTP/1.1 200")


async def test_a_stopping_server_lets_open_streams_end_and_takes_no_more() -> None:
    async with serving() as server:
        body = {"prompt": "x", "max_tokens": 60, "ignore_eos": True, "stream": True}
        streaming = asyncio.create_task(ask(server.url, post("/v1/completions", body, connection="close")))
        await until(lambda: server.service.engine.num_running == 1)
        stopping = asyncio.create_task(server.stop(30))
        await asyncio.sleep(0)
        refused = await ask(server.url, post("/v1/completions", body, connection="close"))
        assert refused.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 5" in refused
        assert (await ask(server.url, request_bytes("GET", "/ready", connection="close"))).startswith(b"HTTP/1.1 503")
        assert (await ask(server.url, request_bytes("GET", "/live", connection="close"))).startswith(b"HTTP/1.1 200")
        assert b"data: [DONE]" in await streaming
        await stopping
        with pytest.raises(ConnectionRefusedError):
            await ask(server.url, request_bytes("GET", "/live"))


async def test_a_second_stop_waits_for_nobody_and_streams_end_with_an_error() -> None:
    async with serving() as server:
        body = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True}
        whole = asyncio.create_task(ask(server.url, post("/v1/completions", body)))
        streaming = asyncio.create_task(ask(server.url, post("/v1/completions", {**body, "stream": True})))
        await until(lambda: server.service.engine.counters.num_prompt_tokens == 2)  # both have their first token
        stopping = asyncio.create_task(server.stop(300))
        await asyncio.sleep(0)
        await server.stop(0)
        await stopping
        assert (await whole).startswith(b"HTTP/1.1 503")
        streamed = await streaming
        assert b"data: [DONE]" not in streamed
        assert b'data: {"error": {"message": "the server is shutting down"' in streamed
        assert streamed.endswith(b"0\r\n\r\n")
