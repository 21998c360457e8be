"""Loads as they run: against a simulated server with known laws, and against one that is told what to send."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench_server import FINISH, STREAM, ScriptedServer, answer, chunked, text_event, usage, whole

from sol.bench import (
    ClosedLoop,
    Conversation,
    Data,
    Endpoint,
    Lengths,
    Limits,
    Listed,
    Stage,
    Stop,
    Summary,
    Synthetic,
    Tally,
    Trim,
    Turn,
    at_rate,
    calibrate,
    measure,
    parse_slo,
    prepare,
    summarise,
)
from sol.bench.endpoint import probe
from sol.bench.scrape import Scraper
from sol.bench.tokens import token_times
from sol.errors import ConfigError, EndpointError
from sol.simulate import Fault, profile
from sol.simulate.config import SimulateConfig
from sol.simulate.server import SimulatedServer

EVERYTHING = Trim(warmup=0, cooldown=0)


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def short(max_tokens: int = 4, prompt: str = "a b c") -> Listed:
    return Listed([Conversation(key="one", turns=[Turn(prompt=prompt, max_tokens=max_tokens)])])


def simulated(*faults: Fault, **laws: Any) -> SimulatedServer:
    return SimulatedServer(SimulateConfig(laws=profile("fast", **laws), port=0, faults=faults))


async def run(server: SimulatedServer, load: Any, data: Data | None = None, **options: Any) -> tuple[Stage, Summary]:
    endpoint = await prepare(Endpoint(url=server.url))
    stage = await measure(endpoint, load, data or short(), **options)
    return stage, summarise(stage, trim=EVERYTHING)


async def test_requests_are_due_when_the_schedule_says_and_at_no_other_time() -> None:
    load = at_rate(100, seconds=0.5, seed=3)
    async with simulated() as server:
        stage, summary = await run(server, load)
    assert [record.intended for record in stage.records] == load.arrivals.tolist()
    assert all(r.intended <= r.started <= r.connected <= r.sent <= r.times[0] <= r.end for r in stage.records)
    assert summary.num_ok == summary.num_requests == len(load.arrivals)
    assert summary.output_tokens.mean.value == 4.0
    assert summary.latencies["ttft"].smallest >= 0.001  # the server's laws allow no less: a step takes 1 ms


async def test_a_stall_of_the_server_is_in_the_tail_of_everything_that_was_due_meanwhile() -> None:
    async with simulated() as server:
        endpoint = await prepare(Endpoint(url=server.url))
        tally = Tally()

        async def stall() -> None:
            # In the middle of the load, whenever that is; it outlasts the rest.
            await until(lambda: tally.num_started >= 10)
            server.service.faults.add([Fault(kind="stall", seconds=2.0)], time.monotonic())

        stalling = asyncio.create_task(stall())
        stage = await measure(endpoint, at_rate(100, arrivals="constant", seconds=0.7), short(), tally=tally)
        await stalling
    waited = [record.times[0] - record.intended for record in stage.records]
    # A closed loop would have waited once. Here every request that became due meanwhile did, each for the rest of it.
    assert max(waited) > 0.3
    assert sum(one > 0.1 for one in waited) >= 25
    assert summarise(stage, trim=EVERYTHING).num_ok == 70


async def test_a_client_that_stands_still_says_so() -> None:
    async def block(_pool: object, _origin: float) -> None:
        await asyncio.sleep(0.2)
        time.sleep(0.25)  # noqa: ASYNC251 - what is tested: the event loop stands still

    async with simulated() as server:
        endpoint = await prepare(Endpoint(url=server.url))
        stage = await measure(endpoint, at_rate(50, arrivals="constant", seconds=0.8), short(), companion=block)
    client = summarise(stage, trim=EVERYTHING).client
    assert client.limited
    assert client.longest_stall > 0.15
    assert any("stood still" in reason for reason in client.reasons)
    assert any("late" in reason for reason in client.reasons)
    # Requests that became due meanwhile count from then, not from when the client got round to them.
    assert max(record.started - record.intended for record in stage.records) > 0.15


async def test_a_closed_loop_never_has_more_in_flight_than_asked_for() -> None:
    async def reply(_body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.005)
        writer.write(answer(text_event("a"), FINISH, usage(1, 1)))

    async with ScriptedServer(reply) as server:
        endpoint = await prepare(Endpoint(url=server.url))
        server.most_open = server.num_connections = 0
        stage = await measure(endpoint, ClosedLoop(concurrency=5, num_conversations=60), short())
    assert server.most_open == server.num_connections == 5  # and connections are used again
    assert len(stage.records) == 60
    ends = sorted(record.end for record in stage.records)
    begun = sorted(record.intended for record in stage.records)
    assert begun[:5] == [0.0] * 5
    assert begun[5:] == ends[:55]  # each is due when a slot becomes free


async def test_speculations_chunks_hold_several_tokens_and_none_is_lost() -> None:
    async with simulated(num_speculative_tokens=4, acceptance_rate=0.8) as server:
        stage, summary = await run(server, ClosedLoop(concurrency=4, num_conversations=20), short(40))
    assert stage.counting == "segments"
    assert summary.tokens_per_chunk > 1.5
    for record in stage.records:
        assert token_times(record, "segments").num_tokens == record.completion_tokens == 40
    gaps, chunks = summary.latencies["itl"], summary.latencies["chunk"]
    assert gaps.n > chunks.n
    assert gaps.mean.value < chunks.mean.value
    assert summary.speculation["tokens_per_step"] > 1.5


async def test_errors_are_counted_by_kind_and_are_in_no_latency() -> None:
    faults = (Fault(kind="error", status=503, message="busy", share=0.4),)
    async with simulated() as server:
        endpoint = await prepare(Endpoint(url=server.url))
        server.service.faults.add(faults, time.monotonic())
        stage = await measure(endpoint, ClosedLoop(concurrency=2, num_conversations=60), short())
    summary = summarise(stage, trim=EVERYTHING, slo=parse_slo("ttft_p50<60s"))
    failed = summary.errors["http_503"]
    assert 0 < failed < 60
    assert summary.error_examples["http_503"] == "busy"
    assert summary.num_ok == summary.latencies["e2e"].n == 60 - failed
    assert summary.slo is not None
    assert summary.slo.attainment.value == pytest.approx((60 - failed) / 60)
    assert summary.slo.verdict == "met"


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Fault(kind="reset", after_events=2), "disconnected"),
        (Fault(kind="truncate", after_events=2), "disconnected"),
        (Fault(kind="truncate", after_events=2, clean=True), "truncated"),
        (Fault(kind="error_event", after_events=2), "stream_error"),
        (Fault(kind="malformed", after_events=2), "malformed"),
    ],
)
async def test_streams_that_break_off(fault: Fault, kind: str) -> None:
    async with simulated() as server:
        endpoint = await prepare(Endpoint(url=server.url))
        server.service.faults.add([fault], time.monotonic())
        stage = await measure(endpoint, ClosedLoop(concurrency=1, num_conversations=2), short(20))
    assert [record.error for record in stage.records] == [kind, kind]
    assert summarise(stage, trim=EVERYTHING).num_ok == 0


async def test_a_request_that_hangs_ends_with_its_time() -> None:
    async with simulated() as server:
        endpoint = await prepare(Endpoint(url=server.url))
        server.service.faults.add([Fault(kind="hang", count=1)], time.monotonic())
        load = ClosedLoop(concurrency=1, num_conversations=2)
        stage = await measure(endpoint, load, short(), limits=Limits(request_seconds=0.1))
    assert [record.error for record in stage.records] == ["timeout", None]


async def test_a_stopped_run_keeps_what_it_has() -> None:
    stop = Stop()
    async with simulated(step_seconds=0.02) as server:
        endpoint = await prepare(Endpoint(url=server.url))
        tally = Tally()

        async def end() -> None:
            await until(lambda: tally.num_finished > 0)
            stop.set()

        ending = asyncio.create_task(end())
        load = ClosedLoop(concurrency=4, seconds=600)
        stage = await measure(endpoint, load, short(5), stop=stop, tally=tally)
        await ending
    assert stage.interrupted
    assert any(record.ok for record in stage.records)
    assert {record.error for record in stage.records} <= {None, "cancelled"}
    summary = summarise(stage, trim=EVERYTHING, slo=parse_slo("ttft<60s"))
    assert summary.errors == {}  # what the client broke off is no miss
    assert summary.slo is not None
    assert summary.slo.attainment.value == 1.0


async def test_what_does_not_end_in_time_is_cancelled_and_counted() -> None:
    async with simulated(step_seconds=0.05) as server:
        endpoint = await prepare(Endpoint(url=server.url))
        load = ClosedLoop(concurrency=3, seconds=0.1)
        stage = await measure(endpoint, load, short(1000), limits=Limits(drain_seconds=0.1))
    assert not stage.interrupted
    assert summarise(stage, trim=EVERYTHING).num_cancelled == 3


async def test_turns_go_on_from_the_endpoints_own_answers() -> None:
    async def reply(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        said = f"answer {len(body['messages'])}"
        writer.write(answer(text_event(said), FINISH, usage(1, 2)))

    turns = [Turn(prompt="one", max_tokens=3), Turn(prompt="two", max_tokens=4, delay=0.05)]
    async with ScriptedServer(reply) as server:
        endpoint = await prepare(Endpoint(url=server.url))
        server.bodies.clear()
        data = Listed([Conversation(key="talk", turns=turns)])
        stage = await measure(endpoint, ClosedLoop(concurrency=1, num_conversations=1), data)
    assert [body["messages"] for body in server.bodies] == [
        [{"role": "user", "content": "one"}],
        [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "answer 1"},
            {"role": "user", "content": "two"},
        ],
    ]
    assert [body["max_tokens"] for body in server.bodies] == [3, 4]
    first, second = stage.records
    assert second.intended == first.end + 0.05


async def test_every_way_of_counting_tokens_is_found_out() -> None:
    def script(knows: str | None, refuses: bool) -> Any:
        async def reply(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
            options = body.get("stream_options", {})
            if refuses and (
                (knows not in options and options.keys() - {"include_usage"}) or "return_token_ids" in body
            ):
                writer.write(whole(400, {"error": {"message": "unknown option"}}))
            elif knows == "continuous_usage_stats" and knows in options:
                writer.write(STREAM)
                for total in (2, 3):
                    one = text_event("ab")[:-3] + b',"usage":{"prompt_tokens":1,"completion_tokens":%d}}\n\n' % total
                    writer.write(chunked(one))
                writer.write(chunked(FINISH + usage(1, 3) + b"data: [DONE]\n\n") + b"0\r\n\r\n")
            elif knows == "return_token_ids" and knows in body:
                writer.write(answer(text_event("ab", token_ids=[1, 2]), FINISH, usage(1, 2)))
            else:
                final = [usage(1, 2)] if knows is not None and options else []
                writer.write(answer(text_event("ab"), FINISH, *final))

        return reply

    for knows, refuses, counting in (
        ("continuous_usage_stats", True, "usage"),
        ("continuous_usage_stats", False, "usage"),
        ("return_token_ids", False, "token_ids"),
        ("include_usage", True, "estimated"),
        ("include_usage", False, "estimated"),
        (None, True, "chunks"),
        (None, False, "chunks"),
    ):
        async with ScriptedServer(script(knows, refuses)) as server:
            assert (await prepare(Endpoint(url=server.url))).counting == counting, (knows, refuses)
            if knows is None:
                with pytest.raises(EndpointError if refuses else ConfigError, match=r"segments|unknown option"):
                    await prepare(Endpoint(url=server.url, counting="segments"))


async def test_endpoints_that_are_away_or_refuse() -> None:
    async with simulated() as server:
        url = server.url
        with pytest.raises(EndpointError, match=r"does not complete a short request .* http_404"):
            await prepare(Endpoint(url=url, model="another"))
        bad = Endpoint(url=url, body={"temperature": "hot"})
        with pytest.raises(EndpointError, match=r"http_400: .*temperature"):
            await prepare(bad)
    with pytest.raises(EndpointError, match="cannot be reached"):
        await prepare(Endpoint(url=url))
    stage = await measure(
        Endpoint(url=url, model="m", counting="chunks"), ClosedLoop(concurrency=2, num_conversations=4), short()
    )
    assert [record.error for record in stage.records] == ["connect"] * 4


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"url": "localhost:8000"}, "url must be like"),
        ({"url": "http://h:99999"}, "url must be like"),
        ({"url": "http://u:p@h"}, "no user name"),
        ({"url": "http://h", "headers": {"a": "b\r\nc: d"}}, "the header 'a'"),
        ({"url": "http://h", "headers": {"a b": "c"}}, "the header 'a b'"),
        ({"url": "http://h", "route": "embeddings"}, "route must be chat or completions"),
    ],
)
def test_what_is_no_endpoint_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Endpoint(**options)


def test_an_endpoint_may_be_given_by_its_root_or_its_v1_and_tells_no_secrets() -> None:
    for url, path in (("http://h", "/v1"), ("http://h/v1/", "/v1"), ("https://h/api", "/api/v1")):
        assert Endpoint(url=url).base_path == path
    secret = Endpoint(url="http://h", api_key="s3cret", headers={"x-key": "s3cret"})
    assert "s3cret" not in f"{secret!r} {secret.describe()}"
    assert b"Authorization: Bearer s3cret" in secret.post({})


async def test_words_are_as_long_as_the_endpoint_says() -> None:
    async with simulated() as server:
        endpoint = await prepare(Endpoint(url=server.url, body={"ignore_eos": True}))
        data = Synthetic(
            await calibrate(endpoint), input_tokens=Lengths.parse("150", "x"), output_tokens=Lengths.parse("3", "x")
        )
        stage = await measure(endpoint, ClosedLoop(concurrency=4, num_conversations=12), data)
    counted = [record.prompt_tokens for record in stage.records]
    assert all(count is not None and abs(count - 150) <= 25 for count in counted), counted
    assert abs(sum(filter(None, counted)) / len(counted) - 150) <= 10
    assert {record.completion_tokens for record in stage.records} == {3}


async def test_without_streaming_only_whole_requests_have_a_time() -> None:
    async with simulated() as server:
        endpoint = await prepare(Endpoint(url=server.url, stream=False, route="completions"))
        stage = await measure(endpoint, ClosedLoop(concurrency=2, num_conversations=6), short())
    summary = summarise(stage, trim=EVERYTHING, slo=parse_slo("e2e<60s,ttft<60s"))
    assert set(summary.latencies) == {"e2e"}
    assert summary.output_tokens.mean.value == 4.0
    assert summary.slo is not None
    assert summary.slo.attainment.value == 0.0  # a time to first token that nobody saw is not met
    with pytest.raises(ConfigError, match="without streaming there are no chunks to count"):
        await prepare(Endpoint(url=server.url, model="simulated", stream=False, counting="usage"))


async def test_littles_law_holds_and_the_server_tells_its_side() -> None:
    async with simulated(step_seconds=0.005) as server:
        endpoint = await prepare(Endpoint(url=server.url))
        scraper = Scraper(endpoint, gpus=False, interval=0.05)
        load = ClosedLoop(concurrency=6, seconds=1.0)
        stage = scraper.attach(await measure(endpoint, load, short(10), companion=scraper))
    summary = summarise(stage)
    assert summary.little["in_flight"] == pytest.approx(6, rel=0.1)
    assert summary.little["expected"] == pytest.approx(6, rel=0.25)
    assert summary.server["running"] > 3
    assert summary.server["generation_tokens_per_second"] > 0


async def test_warm_up_and_cool_down_are_left_out() -> None:
    async with simulated() as server:
        stage, _ = await run(server, at_rate(100, arrivals="constant", seconds=1))
    summary = summarise(stage, trim=Trim(warmup=0.295, cooldown=0.2))
    begin, end = summary.window
    assert begin == 0.295
    assert summary.num_requests == sum(begin <= record.intended <= end for record in stage.records) < 60
    default = summarise(stage)
    assert default.window[0] == pytest.approx(0.1 * stage.load_seconds)


async def test_connections_that_the_server_closes_are_opened_again() -> None:
    async def reply(_body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        # The end of a response without a length is the end of its connection.
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        writer.write(text_event("a") + FINISH + usage(1, 1) + b"data: [DONE]\n\n")
        await writer.drain()
        writer.close()

    async with ScriptedServer(reply) as server:
        endpoint = await prepare(Endpoint(url=server.url))
        stage = await measure(endpoint, ClosedLoop(concurrency=1, num_conversations=5), short())
    assert [record.error for record in stage.records] == [None] * 5


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        (b"", "disconnected"),
        (b"SSH-2.0-OpenSSH\r\n", "malformed"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n{", "disconnected"),
        (b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 4\r\n\r\noops", "http_502"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + whole(429, {"error": {"message": "m"}}), "http_429"),
    ],
)
async def test_what_is_no_answer(sent: bytes, kind: str) -> None:
    async def reply(_body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        await writer.drain()
        writer.close()

    async with ScriptedServer(reply) as server:
        endpoint = Endpoint(url=server.url, model="m", counting="chunks")
        record = await probe(endpoint, endpoint.pool())
    assert record.error == kind


async def test_a_companion_that_fails_does_not_cost_the_measurement(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(_pool: object, _origin: float) -> None:
        raise ValueError("companion")

    async with simulated() as server:
        stage, summary = await run(server, ClosedLoop(concurrency=1, num_conversations=3), companion=fail)
    assert summary.num_ok == len(stage.records) == 3
    assert "what runs beside the load has failed" in caplog.text


async def test_data_that_fails_ends_the_run_with_its_error() -> None:
    class Broken:
        def conversation(self, index: int) -> Conversation:
            if index >= 3:
                raise ConfigError("no more", param="dataset")
            return short().conversation(index)

        def describe(self) -> dict[str, Any]:
            return {}

    async with simulated() as server:
        for load in (ClosedLoop(concurrency=2, num_conversations=9), at_rate(200, num_conversations=9)):
            with pytest.raises(ConfigError, match="no more"):
                await run(server, load, Broken())


async def test_gpus_of_this_machine_are_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nwhile :; do echo '50, 1000, 200.5'; echo '100, 3000, 100'; sleep 0.1; done\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    async with simulated() as server:
        endpoint = await prepare(Endpoint(url=server.url))
        scraper = Scraper(endpoint, path=None, gpus=True, interval=0.1)
        load = at_rate(50, arrivals="constant", seconds=0.6)
        stage = scraper.attach(await measure(endpoint, load, short(), companion=scraper))
    assert stage.server.keys() == {"gpu_utilization", "gpu_memory_mib", "gpu_power_watts"}
    assert {value for _, value in stage.server["gpu_utilization"]} == {0.75}
    assert {value for _, value in stage.server["gpu_memory_mib"]} == {4000.0}
