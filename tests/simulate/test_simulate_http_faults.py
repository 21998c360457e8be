"""Faults as a client on the wire meets them."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
from raw_client import ask, post, request_bytes, split_head, until

from sol.simulate import EngineLaws, Fault
from sol.simulate.config import SimulateConfig
from sol.simulate.server import SimulatedServer

PATH = "/v1/completions"
WHOLE = {"prompt": "x", "max_tokens": 6, "ignore_eos": True}
STREAM = {**WHOLE, "stream": True}


@asynccontextmanager
async def serving(*faults: Fault, **options: Any) -> AsyncIterator[SimulatedServer]:
    laws = EngineLaws(step_seconds=0.002, sequence_seconds=0.0, prefill_token_seconds=0.0)
    async with SimulatedServer(SimulateConfig(laws=laws, port=0, control_port=0, faults=faults, **options)) as server:
        yield server
        server.service.engine.check_integrity()


async def control(server: SimulatedServer, method: str, path: str = "/simulate/faults", **options: Any) -> Any:
    async with httpx.AsyncClient() as http:
        response = await http.request(method, server.control_url + path, **options)
    return response.json()


async def closing(server: SimulatedServer, body: Any, **headers: str) -> bytes:
    """Everything up to the connection's end."""
    return await ask(server.url, post(PATH, body, connection="close", **headers))


async def test_an_error_has_its_status_body_and_retry_after() -> None:
    limited = Fault(kind="error", status=429, retry_after=0.25, message="too fast", count=1)
    async with serving(
        limited, Fault(kind="error", status=500, message="CUDA out of memory", header="x-oom")
    ) as server:
        answer = await closing(server, WHOLE)
        assert answer.startswith(b"HTTP/1.1 429 Too Many Requests")
        assert b"retry-after: 1\r\nretry-after-ms: 250\r\n" in answer
        error = json.loads(split_head(answer)[1])["error"]
        assert error == {"message": "too fast", "type": "rate_limit_error", "param": None, "code": "simulated"}
        assert (await closing(server, WHOLE)).startswith(b"HTTP/1.1 200")
        assert b"CUDA out of memory" in await closing(server, WHOLE, **{"x-oom": "1"})
        assert [item["hits"] for item in (await control(server, "GET"))["faults"]] == [1, 1]
        # What the engine did not see, it did not compute.
        assert server.service.engine.counters.num_generated_tokens == 6


async def test_the_official_client_retries_past_a_few_errors() -> None:
    async with serving(Fault(kind="error", status=503, retry_after=0.01, count=2)) as server:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=2) as client:
            done = await client.completions.create(model="simulated", prompt="x", max_tokens=2)
        assert done.usage is not None
        assert done.usage.completion_tokens == 2
        assert server.service.num_received == 3


async def test_a_stream_is_reset_after_as_many_events_as_said() -> None:
    for after in (0, 3):
        async with serving(Fault(kind="reset", after_events=after)) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
            writer.write(post(PATH, STREAM))
            with pytest.raises(ConnectionResetError):
                await reader.readuntil(b"[DONE]")
            writer.close()
            assert [(r["ended"], r["faults"]) for r in server.service.records] == [("fault", ["reset"])]
            await until(lambda server=server: server.service.engine.idle)


async def test_a_stream_is_truncated_with_and_without_a_proper_end() -> None:
    async with serving(Fault(kind="truncate", after_events=2), Fault(kind="truncate", after_events=2)) as server:
        answer = await closing(server, STREAM)
        assert answer.count(b"data: ") == 2
        assert not answer.endswith(b"0\r\n\r\n")
        async with httpx.AsyncClient() as http:
            with pytest.raises(httpx.RemoteProtocolError):
                await http.post(server.url + PATH, json=STREAM)
    async with serving(Fault(kind="truncate", after_events=2, clean=True)) as server, httpx.AsyncClient() as http:
        answer = await http.post(server.url + PATH, json=STREAM)
        assert answer.text.count("data: ") == 2
        assert "[DONE]" not in answer.text
        assert "finish_reason" in answer.text
        again = await http.get(server.url + "/health")  # the connection is as good as before
        assert again.status_code == 200


async def test_a_response_ends_at_a_byte_even_within_an_event() -> None:
    async with serving(Fault(kind="truncate", after_bytes=700, clean=True)) as server:
        assert len(split_head(await closing(server, STREAM))[1]) == 700
        head, body = split_head(await closing(server, {**WHOLE, "max_tokens": 4}))
        assert b"content-length: " in head
        assert len(body) < 700  # what is not streamed is shorter, and always cut
        await control(server, "POST", json={"faults": [{"kind": "truncate", "after_bytes": 0}], "replace": True})
        assert split_head(await closing(server, STREAM))[1] == b""
        assert split_head(await closing(server, WHOLE))[1] == b""
        await control(server, "POST", json={"faults": [{"kind": "reset", "after_bytes": 300}], "replace": True})
        with pytest.raises(ConnectionResetError):
            await closing(server, STREAM)


async def test_probes_and_metrics_have_faults_of_their_own() -> None:
    async with serving(
        Fault(kind="error", status=404, path="/v1/models"),
        Fault(kind="reset", path="/health"),
        Fault(kind="hang", path="/ready"),
        Fault(kind="error", count=1, header="x-work"),
    ) as server:
        models = await ask(server.url, request_bytes("GET", "/v1/models", connection="close", **{"x-work": "1"}))
        assert models.startswith(b"HTTP/1.1 404")
        with pytest.raises(ConnectionResetError):
            await ask(server.url, request_bytes("GET", "/health"))
        with pytest.raises(httpx.ReadTimeout):
            async with httpx.AsyncClient(timeout=0.1) as http:
                await http.get(server.url + "/ready")
        assert (await closing(server, WHOLE)).startswith(b"HTTP/1.1 200")

        await control(server, "POST", json={"faults": [{"kind": "stale_metrics"}], "replace": True})
        async with httpx.AsyncClient(base_url=server.url) as http:
            stale = (await http.get("/metrics")).text
            await http.post(PATH, json=WHOLE)
            assert (await http.get("/metrics")).text == stale
            await control(server, "DELETE")
            assert 'vllm:generation_tokens_total{model_name="simulated"} 12.0' in (await http.get("/metrics")).text


async def test_an_error_event_ends_a_stream_and_the_official_client_raises_it() -> None:
    async with serving(Fault(kind="error_event", after_events=2, message="KV cache lost")) as server:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
            stream = await client.completions.create(model="simulated", prompt="x", max_tokens=6, stream=True)
            with pytest.raises(openai.APIError, match="KV cache lost"):
                assert not [chunk async for chunk in stream]
        answer = await closing(server, STREAM)
        assert answer.count(b"data: ") == 3
        assert b"[DONE]" not in answer
        assert answer.endswith(b"0\r\n\r\n")


async def test_a_malformed_chunk_stands_between_good_ones() -> None:
    async with serving(Fault(kind="malformed", after_events=2)) as server:
        events = split_head(await closing(server, STREAM))[1].split(b"\n\n")
        bad = []
        for index, event in enumerate(events[:-2]):
            try:
                json.loads(event.removeprefix(b"data: "))
            except ValueError:
                bad.append(index)
        assert bad == [2]
        assert events[-2] == b"data: [DONE]"


async def test_what_is_not_streamed_is_hit_as_it_is_sent() -> None:
    async with serving(
        Fault(kind="truncate", header="x-fault=cut"),
        Fault(kind="malformed", header="x-fault=bad"),
        Fault(kind="error_event", header="x-fault=error"),
        Fault(kind="reset", header="x-fault=reset"),
    ) as server:
        head, body = split_head(await closing(server, WHOLE, **{"x-fault": "cut"}))
        assert f"content-length: {len(body)}".encode() not in head
        head, body = split_head(await closing(server, WHOLE, **{"x-fault": "bad"}))
        assert f"content-length: {len(body)}".encode() in head
        with pytest.raises(ValueError, match=r"Unterminated|Expecting"):
            json.loads(body)
        assert (await closing(server, WHOLE, **{"x-fault": "error"})).startswith(b"HTTP/1.1 500")
        with pytest.raises(ConnectionResetError):
            await closing(server, WHOLE, **{"x-fault": "reset"})
        assert (await closing(server, WHOLE)).startswith(b"HTTP/1.1 200")


async def test_usage_is_wrong_or_missing() -> None:
    async with serving(Fault(kind="wrong_usage", factor=3, count=1)) as server, httpx.AsyncClient() as http:
        first = (await http.post(server.url + PATH, json=WHOLE)).json()["usage"]
        assert (first["prompt_tokens"], first["completion_tokens"], first["total_tokens"]) == (1, 18, 19)
        assert [record["completion_tokens"] for record in server.service.records] == [6]  # the truth is kept
        await control(server, "POST", json={"kind": "wrong_usage", "factor": 0})
        body = {**STREAM, "stream_options": {"include_usage": True}}
        last = (await http.post(server.url + PATH, json=body)).text.split("\n\n")[-3]
        assert json.loads(last.removeprefix("data: "))["usage"] is None


async def test_a_pause_and_a_slow_network_change_the_order_of_no_byte() -> None:
    async with serving() as server:
        await control(server, "POST", json={"kind": "error", "count": 1, "header": "x-none"})
        plain = split_head(await closing(server, {**STREAM, "seed": 1}))[1]
        faults = [
            {"kind": "pause", "after_events": 3, "seconds": 0.1},
            {"kind": "network", "seconds": 0.03, "bytes_per_second": 20000},
        ]
        for fault in faults:
            await control(server, "POST", json={"faults": [fault], "replace": True})
            begin = asyncio.get_running_loop().time()
            slow = split_head(await closing(server, {**STREAM, "seed": 1}))[1]
            taken = asyncio.get_running_loop().time() - begin
            assert [json.loads(e[6:])["choices"] for e in slow.split(b"\n\n")[:-2]] == [
                json.loads(e[6:])["choices"] for e in plain.split(b"\n\n")[:-2]
            ]
            assert taken > fault["seconds"]  # the fault's own time is a lower bound on any machine
        # A connection that was slow for one request is not for the next.
        await control(server, "DELETE")
        assert b"[DONE]" in await closing(server, STREAM)


async def test_a_hang_lasts_until_the_client_leaves() -> None:
    async with serving(Fault(kind="hang", count=1)) as server:
        with pytest.raises(httpx.ReadTimeout):
            async with httpx.AsyncClient(timeout=0.2) as http:
                await http.post(server.url + PATH, json=WHOLE)
        assert (await closing(server, WHOLE)).startswith(b"HTTP/1.1 200")
        assert server.service.engine.counters.num_generated_tokens == 6


async def test_a_client_that_pipelines_behind_a_hang_and_leaves_is_noticed() -> None:
    async with serving(Fault(kind="stall")) as server:
        _, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
        writer.write(post(PATH, STREAM) * 3)
        await until(lambda: server.service.num_open == 1)
        writer.close()
        await until(lambda: server.service.num_open == 0)
        assert server.service.num_received == 1


async def test_a_stalled_engine_is_alive_and_goes_on_when_the_stall_is_taken_away() -> None:
    async with serving() as server:
        added = await control(server, "POST", json=[{"kind": "stall"}])
        asking = asyncio.create_task(closing(server, WHOLE))
        await until(lambda: server.service.engine.num_running == 1)
        alive = await ask(server.url, request_bytes("GET", "/health", connection="close"))
        assert alive.startswith(b"HTTP/1.1 200")
        assert not asking.done()
        assert server.service.engine.counters.num_steps == 0
        await control(server, "DELETE", f"/simulate/faults/{added['faults'][0]['id']}")
        assert (await asking).startswith(b"HTTP/1.1 200")


async def test_a_stall_of_a_second_is_in_the_times_of_who_was_there() -> None:
    async with serving() as server:
        before = await closing(server, WHOLE)
        assert before.startswith(b"HTTP/1.1 200")
        await control(server, "POST", json={"kind": "stall", "seconds": 0.6})
        await closing(server, WHOLE)
        free, stalled = (record["ttft_seconds"] for record in server.service.records)
        assert free == pytest.approx(0.002, abs=1e-6)
        assert 0.002 < stalled <= 0.602 + 1e-6


async def test_health_may_lie_and_flap() -> None:
    async with serving(Fault(kind="unhealthy", period=0.1)) as server, httpx.AsyncClient() as http:
        seen = []
        async with asyncio.timeout(20):
            while len(list(itertools.groupby(seen))) < 4:
                seen.append((await http.get(server.url + "/health")).status_code)
        assert set(seen) == {200, 503}
        assert (await http.post(server.url + PATH, json=WHOLE)).status_code == 200


async def test_a_server_that_starts_slowly_says_so() -> None:
    async with serving(startup_seconds=0.7) as server, httpx.AsyncClient() as http:
        early = await http.post(server.url + PATH, json=WHOLE)
        assert (early.status_code, early.headers["retry-after"]) == (503, "5")
        assert early.json()["error"]["code"] == "engine_not_ready"
        assert (await http.get(server.url + "/live")).status_code == 200

        async def is_ready() -> bool:
            return (await http.get(server.url + "/ready")).status_code == 200

        await until(is_ready)
        assert (await http.post(server.url + PATH, json=WHOLE)).status_code == 200
        await control(server, "POST", json={"kind": "not_ready"})
        assert (await http.get(server.url + "/v1/models")).status_code == 503


async def test_connections_are_refused_and_open_ones_stay() -> None:
    async with serving() as server, httpx.AsyncClient() as kept:
        assert (await kept.get(server.url + "/health")).status_code == 200
        await control(server, "POST", json={"kind": "refuse"})
        with pytest.raises(ConnectionRefusedError):
            await ask(server.url, request_bytes("GET", "/health"))
        assert (await kept.get(server.url + "/health")).status_code == 200
        await control(server, "DELETE")
        assert (await ask(server.url, request_bytes("GET", "/health"))).startswith(b"HTTP/1.1 200")


async def test_a_crash_resets_everyone_and_the_next_process_knows_nothing() -> None:
    async with serving() as server:
        prompt = {"prompt": "the " * 64, "max_tokens": 2}
        await closing(server, prompt)
        asking = [
            asyncio.create_task(ask(server.url, post(PATH, {**STREAM, "max_tokens": 4000}))),
            asyncio.create_task(ask(server.url, post(PATH, {**WHOLE, "max_tokens": 4000}))),
        ]
        await until(lambda: server.service.engine.num_running == 2)
        await control(server, "POST", json={"kind": "crash", "startup_seconds": 0.5})
        for task in asking:
            with pytest.raises(ConnectionResetError):
                await task
        with pytest.raises(ConnectionRefusedError):
            await ask(server.url, request_bytes("GET", "/live"))
        state = await control(server, "GET", "/simulate/state")
        assert (state["num_open"], state["num_running"], state["counters"]["num_steps"]) == (0, 0, 0)
        assert state["num_received"] == 3
        await control(server, "DELETE")  # which starts it again, on the same port
        early = await closing(server, WHOLE)
        assert early.startswith(b"HTTP/1.1 503")

        async def is_ready() -> bool:
            answer = await ask(server.url, request_bytes("GET", "/ready", connection="close"))
            return answer.startswith(b"HTTP/1.1 200")

        await until(is_ready)
        answer = await closing(server, prompt)
        assert json.loads(split_head(answer)[1])["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert [record["ended"] for record in server.service.records] == ["finished", "crash", "crash", "finished"]


async def test_a_crash_on_schedule_ends_by_itself() -> None:
    async with serving(Fault(kind="crash", start=0.2, seconds=0.6)) as server:
        refused = 0
        async with asyncio.timeout(20):
            while not refused:
                try:
                    await ask(server.url, request_bytes("GET", "/live"))
                except (ConnectionRefusedError, ConnectionResetError):
                    refused += 1
                await asyncio.sleep(0.01)
            while True:
                try:
                    answer = await closing(server, WHOLE)
                    break
                except (ConnectionRefusedError, ConnectionResetError):
                    await asyncio.sleep(0.01)
        assert answer.startswith(b"HTTP/1.1 200")


async def test_control_refuses_what_it_does_not_know() -> None:
    async with serving() as server, httpx.AsyncClient(base_url=server.control_url) as http:
        wrong: list[tuple[Any, str]] = [
            ({"kind": "flood"}, "kind"), ({"fault": []}, "fault"), ({"faults": [], "replace": 1}, "replace"),
            ([3], "faults"), (7, "faults"),
        ]  # fmt: skip
        for body, param in wrong:
            response = await http.post("/simulate/faults", json=body)
            assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        assert (await http.delete("/simulate/faults/7")).status_code == 404
        assert (await http.post("/v1/completions", json=WHOLE)).status_code == 404  # clients have the other port
        assert (await http.put("/simulate/faults")).status_code == 405
        assert (await http.get("/simulate/faults")).json() == {"faults": []}
