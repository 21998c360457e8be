"""The gateway over HTTP, with engines that are well: what clients see is what the engine said."""

from __future__ import annotations

import asyncio
import hashlib
import json
from typing import Any

import httpx
import openai
import pytest
from gateway_harness import CHAT, COMPLETION, events, running, said, until


async def test_the_official_client_gets_what_the_engine_gives_it() -> None:
    async with running() as it, openai.AsyncOpenAI(base_url=f"{it.server.url}/v1", api_key="any") as client:
        direct = openai.AsyncOpenAI(base_url=f"{it.engines[0].url}/v1", api_key="any")
        async with direct:
            assert [model.id for model in (await client.models.list()).data] == ["m", "alias"]
            assert (await client.models.retrieve("alias")).id == "alias"
            arguments: Any = {**CHAT, "seed": 3, "n": 2, "logprobs": True}
            through, straight = [await one.chat.completions.create(**arguments) for one in (client, direct)]
            assert through.choices == straight.choices
            assert through.usage == straight.usage
            stream = await client.chat.completions.create(**{**CHAT, "seed": 3}, stream=True)
            texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
            whole = await direct.chat.completions.create(**{**CHAT, "seed": 3})
            assert "".join(texts) == whole.choices[0].message.content
            renamed = await client.completions.create(**{**COMPLETION, "model": "alias"})
            assert renamed.model == "m"  # what the engine calls it


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}])
async def test_the_usage_of_a_stream_is_known_and_shown_only_to_who_asked(options: dict[str, bool] | None) -> None:
    async with running() as it:
        body = {**CHAT, "stream": True, **({} if options is None else {"stream_options": options})}
        response = await it.http.post("/v1/chat/completions", json=body)
        chunks = events(response.content)
        asked = bool(options and options.get("include_usage"))
        assert chunks[-1] == "[DONE]"
        usages = [chunk["usage"] for chunk in chunks[:-1] if chunk.get("usage")]
        assert len(usages) == asked
        assert all(("usage" in chunk) == asked for chunk in chunks[:-1])
        await it.settled(1)
        usage = it.outcomes[0][1].usage
        assert usage is not None
        assert not usage.estimated
        assert (usage.prompt_tokens, usage.completion_tokens) == (10, 6)
        assert not asked or usages[0]["total_tokens"] == 16


async def test_a_request_id_goes_all_the_way() -> None:
    async with running() as it:
        response = await it.http.post("/v1/completions", json=COMPLETION, headers={"x-request-id": "abc-1"})
        assert response.headers["x-request-id"] == "abc-1"
        assert it.records()[-1]["x_request_id"] == "abc-1"
        unsafe = await it.http.post("/v1/completions", json=COMPLETION, headers={"x-request-id": "a b"})
        assert len(unsafe.headers["x-request-id"]) == 32


async def test_what_is_wrong_with_a_request_is_said_in_openais_form() -> None:
    async with running(server={"port": 0, "max_body_bytes": 2000}) as it:
        cases: list[tuple[str, bytes, int, str | None]] = [
            ("/v1/completions", b"", 400, None),
            ("/v1/completions", b"[1]", 400, None),
            ("/v1/completions", b'{"a":', 400, None),
            ("/v1/completions", b'\xff{"model":"m"}', 400, None),
            ("/v1/completions", b"[" * 1500, 400, None),
            ("/v1/completions", b"{}", 400, "model"),
            ("/v1/completions", b'{"model":3}', 400, "model"),
            ("/v1/completions", b'{"model":"nobody"}', 404, "model"),
            ("/v1/completions", b'{"model":"m","stream":"yes"}', 400, "stream"),
            ("/v1/completions", b'{"model":"m","max_tokens":-1}', 400, "max_tokens"),
            ("/v1/completions", b'{"model":"m","max_tokens":1e3}', 400, "max_tokens"),
            ("/v1/completions", b'{"model":"m","prompt":7}', 400, "prompt"),  # the engine's own words
            ("/v1/completions", b" " * 2001, 413, None),
            ("/v1/nothing", b"{}", 404, None),
            ("/v1/models", b"{}", 405, None),
        ]
        for path, body, status, param in cases:
            response = await it.http.post(path, content=body)
            assert response.status_code == status, (path, body[:40], response.text)
            assert response.headers["content-type"] == "application/json"
            error = response.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["param"] == param, (body, error)
        chunked = await it.http.post("/v1/completions", content=_pieces([b" " * 1500, b" " * 1500]))
        assert chunked.status_code == 413
        assert (await it.http.get("/v1/chat/completions")).status_code == 405


async def _pieces(parts: list[bytes]) -> Any:
    for part in parts:
        yield part


async def test_keys_open_the_api_and_their_models() -> None:
    keys = [
        {"key": "all-of-it", "tenant": "one"},
        {"key_sha256": hashlib.sha256(b"little").hexdigest(), "models": [], "id": "small"},
    ]
    async with running(keys=keys) as it:

        async def ask(key: str | None) -> httpx.Response:
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            return await it.http.post("/v1/completions", json=COMPLETION, headers=headers)

        for wrong in (None, "other"):
            refused = await ask(wrong)
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"] == "Bearer"
            assert refused.json()["error"]["code"] == "invalid_api_key"
        assert (await ask("all-of-it")).status_code == 200
        forbidden = await ask("little")
        assert forbidden.status_code == 403
        assert forbidden.json()["error"]["param"] == "model"
        assert (await it.http.get("/v1/models")).status_code == 401
        listed = await it.http.get("/v1/models", headers={"authorization": "Bearer little"})
        assert listed.json()["data"] == []
        assert (await it.http.get("/ready")).status_code == 200  # probes have no keys
        assert it.outcomes[-1][0].principal is not None
        assert it.outcomes[-1][0].principal.key_id == "small"


async def test_engines_get_their_own_credentials_and_never_the_clients() -> None:
    options = {"api_key": "for-the-engine", "headers": {"x-team": "blue"}}
    seen: list[dict[str, str]] = []
    async with running(engine=options) as it:
        service = it.engines[0].service
        generate = service.generate

        def spy(exchange: Any) -> None:
            seen.append(dict(exchange.headers))
            generate(exchange)

        it.engines[0]._routes._all["/v1/completions"]["POST"] = spy
        headers = {"authorization": "Bearer mine", "cookie": "a=b", "traceparent": "00-1-2-01"}
        response = await it.http.post("/v1/completions", json=COMPLETION, headers=headers)
        assert response.status_code == 200
    assert seen[0]["authorization"] == "Bearer for-the-engine"
    assert (seen[0]["x-team"], seen[0]["traceparent"]) == ("blue", "00-1-2-01")
    assert "cookie" not in seen[0]


async def test_a_client_that_leaves_ends_the_work_and_is_accounted_for() -> None:
    async with running(laws={"step_seconds": 0.02}) as it:
        body = {**CHAT, "stream": True, "max_tokens": 2000}
        async with it.http.stream("POST", "/v1/chat/completions", json=body) as response:
            received = b""
            async for data in response.aiter_raw():
                received += data
                if received.count(b"data:") > 4:
                    break
        await it.settled(1)
        call, outcome = it.outcomes[0]
        assert outcome.client_left
        assert outcome.usage is not None
        assert outcome.usage.prompt_tokens == 10
        await until(lambda: bool(it.records()))
        record = it.records()[0]
        assert record["ended"] == "abort"
        # What was generated after the last bytes that were received, the engine alone knows.
        assert (
            3 <= outcome.usage.completion_tokens <= record["completion_tokens"] <= outcome.usage.completion_tokens + 5
        )
        assert not outcome.usage.estimated
        assert call.backend == "a"
        # One that waits for a whole answer stops the engine by leaving, too.
        waiting = asyncio.create_task(it.http.post("/v1/completions", json={**COMPLETION, "max_tokens": 2000}))
        await until(lambda: it.engines[0].service.num_open == 1)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await it.settled(2)
        assert it.outcomes[1][1].client_left
        await until(lambda: it.engines[0].service.num_open == 0)


async def test_many_at_once_each_get_their_own_answer() -> None:
    async with running(2) as it, httpx.AsyncClient(base_url=it.server.url, timeout=20, verify=False) as direct:

        async def ask(seed: int) -> tuple[str, str]:
            body = {**CHAT, "seed": seed, "max_tokens": 20}
            streamed = await direct.post("/v1/chat/completions", json={**body, "stream": True})
            whole = await direct.post("/v1/chat/completions", json=body)
            return said(streamed.content), whole.json()["choices"][0]["message"]["content"]

        pairs = await asyncio.gather(*(ask(seed) for seed in range(24)))
        assert all(streamed == whole for streamed, whole in pairs)
        assert len({whole for _, whole in pairs}) > 20
        assert all(len(it.records(index)) > 5 for index in (0, 1))


async def test_embeddings_and_the_like_reach_the_engine_as_they_are() -> None:
    async with running() as it:
        response = await it.http.post("/tokenize", json={"model": "m", "prompt": "The water"})
        assert response.status_code == 200
        assert response.json()["count"] == len(response.json()["tokens"])
        refused = await it.http.post("/v1/embeddings", json={"model": "m", "input": "x"})
        assert refused.status_code == 404  # the simulator has none
        assert "error" in json.loads(refused.content)
        assert it.engine("a").breaker.state(0) == "closed"
