"""What the metrics page says of calls, and who may read it."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from gateway_harness import CHAT, COMPLETION, Running, running, until
from prometheus_client.parser import text_string_to_metric_families

from sol.errors import ConfigError, RequestError
from sol.gateway.call import Call, Outcome, Usage
from sol.gateway.config import parse_config
from sol.gateway.errors import NoCapacityError, RateLimitError, UpstreamError, UpstreamTimeoutError
from sol.gateway.observe.metrics import RequestMetrics, outcome_name
from sol.gateway.observe.text import MAX_VALUES, Capped, Histogram, family, histograms, labels

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parse(text: str) -> Series:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for each in text_string_to_metric_families(text)
        for sample in each.samples
    }


async def read(gateway: Running, headers: dict[str, str] | None = None) -> Series:
    answer = await gateway.http.get("/metrics", headers=headers)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return parse(answer.text)


def total(series: Series, name: str, **wanted: str) -> float:
    """Of all series of this name that have these labels."""
    return sum(
        value for (found, pairs), value in series.items() if found == name and wanted.items() <= dict(pairs).items()
    )


def a_call(**fields: Any) -> Call:
    given: dict[str, Any] = {
        "id": "x", "path": "/v1/chat/completions", "method": "POST", "headers": {}, "body": b"{}", "json": {},
        "model": "m", "stream": True, "arrived": 0.0, **fields,
    }  # fmt: skip
    return Call(**given)


async def test_calls_are_counted_by_how_they_ended_and_tokens_as_engines_count_them() -> None:
    filters = [{"name": "animals", "kind": "words", "words": ["zebra"]}]
    async with running(1, filters=filters, laws={"step_seconds": 0.03}) as gateway:
        for body in (CHAT, {**CHAT, "stream": True}, {**CHAT, "model": "alias"}):
            assert (await gateway.http.post("/v1/chat/completions", json=body)).status_code == 200
        await gateway.http.post("/v1/completions", json={**COMPLETION, "prompt": "a zebra"})
        await gateway.http.post("/v1/chat/completions", json={**CHAT, "model": "none"})
        await gateway.http.post("/v1/chat/completions", content=b"{")
        await gateway.settled(5)
        series = await read(gateway)
        usages = [outcome.usage for _, outcome in gateway.outcomes if outcome.usage is not None]

    requests = "sol_gateway_requests_total"
    assert total(series, requests) == 5
    assert total(series, requests, model="m", engine="a", outcome="ok") == 3  # an alias is no other model
    assert total(series, requests, model="m", engine="none", outcome="filtered") == 1
    assert total(series, requests, model="unknown", outcome="client_error") == 1
    assert total(series, "sol_gateway_prompt_tokens_total") == sum(usage.prompt_tokens for usage in usages) > 0
    assert total(series, "sol_gateway_completion_tokens_total") == sum(usage.completion_tokens for usage in usages)
    assert total(series, "sol_gateway_time_to_first_token_seconds_count") == 1
    assert total(series, "sol_gateway_e2e_request_latency_seconds_count") == 3
    assert total(series, "sol_gateway_inter_token_latency_seconds_count", engine="a") >= 1
    assert total(series, "sol_gateway_inter_token_latency_seconds_sum", engine="a") >= 0.03
    assert total(series, "sol_gateway_errors_total", stage="filter", code="content_filter") == 1
    assert total(series, "sol_gateway_errors_total", stage="http", status="400") == 1
    assert total(series, "sol_gateway_filter_decisions_total", rule="animals", action="reject") == 1
    assert total(series, "sol_gateway_filter_failures_total", rule="animals") == 0
    assert total(series, "sol_gateway_queue_events_total", event="at_once") == 3
    assert total(series, "sol_gateway_requests_open") == 0
    assert not [name for name, _ in series if "tenant" in name]


async def test_a_stream_that_breaks_is_no_success() -> None:
    fault = {"kind": "reset", "after_events": 3}
    async with running(1, faults=[fault]) as gateway:
        await gateway.http.post("/v1/chat/completions", json={**CHAT, "stream": True})
        await gateway.settled(1)
        series = await read(gateway)
    assert total(series, "sol_gateway_requests_total", outcome="broken") == 1
    assert total(series, "sol_gateway_requests_total", outcome="ok") == 0
    assert total(series, "sol_gateway_errors_total", stage="relay", code="upstream_failed") == 1


async def test_engines_and_how_old_their_signals_are() -> None:
    async with running(2, routing={"health": {"interval": 0.05}, "signal_age": 2}) as gateway:
        await until(lambda: all(engine.signals is not None for engine in gateway.gateway.fleet))
        series = await read(gateway)
        assert total(series, "sol_gateway_engine_healthy") == 2
        assert total(series, "sol_gateway_model_engines_well", model="m") == 2
        assert 0 <= series["sol_gateway_scrape_age_seconds", (("engine", "a"),)] < 2
        assert ("sol_gateway_engine_requests_running", (("engine", "a"),)) in series

        await gateway.engines[0].stop(0)
        engine = gateway.engine("a")
        await until(lambda: not engine.health.is_well and engine.fresh_signals(time.monotonic()) is None)
        series = await read(gateway)
    assert series["sol_gateway_engine_healthy", (("engine", "a"),)] == 0
    assert series["sol_gateway_scrape_age_seconds", (("engine", "a"),)] > 2
    # What it said last is no fact any more.
    assert ("sol_gateway_engine_requests_running", (("engine", "a"),)) not in series
    assert ("sol_gateway_engine_requests_running", (("engine", "b"),)) in series


async def test_the_page_with_tenants_is_read_with_a_token_only() -> None:
    sections: dict[str, Any] = {
        "keys": [{"key": "shop", "tenant": "shop"}],
        "prices": {"m": {"input": 1_000_000, "output": 0}},
        "observe": {"metrics": {"token": "s3cret"}},
    }
    async with running(1, **sections) as gateway:
        answer = await gateway.http.post("/v1/chat/completions", json=CHAT, headers={"authorization": "Bearer shop"})
        prompt = answer.json()["usage"]["prompt_tokens"]
        await gateway.settled(1)
        for headers in ({}, {"authorization": "Bearer shop"}, {"authorization": "Basic s3cret"}):
            assert (await gateway.http.get("/metrics", headers=headers)).status_code == 401
        series = await read(gateway, {"authorization": "Bearer s3cret"})
    assert total(series, "sol_gateway_tenant_tokens_total", tenant="shop", kind="prompt") == prompt
    assert total(series, "sol_gateway_tenant_cost_total", tenant="shop") == prompt
    assert total(series, "sol_gateway_cost_total", model="m") == prompt


async def test_service_levels_and_degradation_are_on_the_page() -> None:
    levels = {"levels": [{"class": "interactive", "ttft": {"p95": 1e-6}, "errors": 0.01}]}
    async with running(1, sla=levels, degradation=[{"action": "shed"}]) as gateway:
        await gateway.http.post("/v1/chat/completions", json={**CHAT, "stream": True})
        await gateway.settled(1)
        series = await read(gateway)
    missed, kept = ({"class": "interactive", "objective": name, "window": "fast"} for name in ("ttft_p95", "errors"))
    assert total(series, "sol_gateway_sla_attainment", **missed) == 0
    assert total(series, "sol_gateway_sla_burn_rate", **missed) == pytest.approx(20)
    assert total(series, "sol_gateway_sla_attainment", **kept) == 1
    assert total(series, "sol_gateway_degradation_steps", model="m") == 1
    assert total(series, "sol_gateway_degraded_total", action="shed") == 0


def test_how_a_call_ended_has_one_name() -> None:
    refused = RequestError("no")
    refused.code = "content_filter"  # type: ignore[misc]
    for name, outcome in {
        "ok": Outcome(status=200),
        "broken": Outcome(status=200, error=UpstreamError("died")),
        "client_left": Outcome(status=200, client_left=True),
        "limited": Outcome(status=429, error=RateLimitError("slower")),
        "filtered": Outcome(status=400, error=refused),
        "client_error": Outcome(status=404, error=RequestError("no")),
        "unavailable": Outcome(status=503, error=NoCapacityError("full")),
        "timeout": Outcome(status=504, error=UpstreamTimeoutError("silent")),
        "failed": Outcome(status=502, error=UpstreamError("died")),
    }.items():
        assert outcome_name(outcome) == name


def test_events_that_come_together_share_the_time() -> None:
    metrics = RequestMetrics({"m": "m"})
    call = a_call(backend="a")
    pace = metrics.pace(call)
    assert pace is not None
    pace(10.0, 1)
    pace(10.01, 1)  # a part of an event
    pace(10.4, 3)
    pace(100.0, 4)  # it hung: that is no pace
    pace(100.1, 5)
    histogram = metrics.series(call).inter_token
    assert sum(histogram.counts) == 3
    assert histogram.total == pytest.approx(0.4 + 0.1)
    assert metrics.pace(a_call(stream=False)) is None


def test_names_from_clients_make_no_series_of_their_own() -> None:
    metrics = RequestMetrics({"m": "m"})
    for number in range(2 * MAX_VALUES):
        call = a_call(model=f"made-up-{number}", class_name=f"class-{number}")
        opened = metrics.begun(call)
        call.decide("route", f"rule-{number}", "engine")
        error = RequestError("no")
        error.code = f"code-{number}"  # type: ignore[misc]
        metrics.ended(call, Outcome(status=400, error=error, usage=Usage(prompt_tokens=1, completion_tokens=1)),
                      "client_error", opened)  # fmt: skip
    text = "".join("".join(lines) for lines in metrics.render())
    assert len(set(re.findall(r"class-\d+", text))) <= MAX_VALUES
    assert len(set(re.findall(r"rule-\d+", text))) <= MAX_VALUES
    assert len(set(re.findall(r"code-\d+", text))) <= MAX_VALUES
    series = parse(text)
    assert total(series, "sol_gateway_requests_total") == 2 * MAX_VALUES
    assert total(series, "sol_gateway_decisions_total", rule="other") == MAX_VALUES
    assert total(series, "sol_gateway_requests_open") == 0


def test_the_text_format_escapes_what_has_to_be() -> None:
    histogram = Histogram((0.1, 1.0))
    for value in (0.1, 0.2, 7.0):
        histogram.observe(value)
    label = labels([("model", 'a"b\\c\nd')])
    text = "".join(
        [*family("sol_x_total", "counter", "X.", [(label, 2)]), *histograms("sol_h", "H.", [(label, histogram)])]
    )
    name = (("model", 'a"b\\c\nd'),)
    found = parse(text)
    assert found["sol_x_total", name] == 2
    assert [found["sol_h_bucket", tuple(sorted((*name, ("le", le))))] for le in ("0.1", "1.0", "+Inf")] == [1, 2, 3]
    assert found["sol_h_sum", name] == pytest.approx(7.3)
    assert "".join(family("sol_y", "gauge", "Y.", [("", float("inf")), ("", float("nan"))])).split()[-4:] == [
        "sol_y", "+Inf", "sol_y", "NaN",
    ]  # fmt: skip
    assert list(family("sol_z", "gauge", "Z.", [])) == []


def test_a_label_that_was_given_stays() -> None:
    capped: Capped[str] = Capped(2)
    assert [capped.admits(name) for name in ("a", "b", "c", "a")] == [True, True, False, True]


def test_wrong_options_are_refused_by_name() -> None:
    base = "models: [{name: m, engines: [a]}]\nengines: [{name: a, url: 'http://127.0.0.1:1'}]\n"
    for options, place in {
        "{log: {sample: 2}}": "observe.log.sample",
        "{traces: {endpoint: 'collector:4318'}}": "observe.traces.endpoint",
        "{metrics: {token: ''}}": "observe.metrics.token",
        "{colour: blue}": "observe",
    }.items():
        with pytest.raises(ConfigError, match=place):
            parse_config(base + f"observe: {options}")


def test_what_changes_while_the_page_is_written_does_no_harm() -> None:
    metrics = RequestMetrics({"m": "m"})

    def count(class_name: str) -> None:
        call = a_call(class_name=class_name, trail=[(f"stage of {class_name}", 0.0)])
        metrics.ended(call, Outcome(status=200, first_byte_at=0.1), "ok", metrics.begun(call))

    count("batch")
    text = ""
    for lines in metrics.render():
        for number, line in enumerate(lines):
            text += line
            if number < 3:
                count(f"class-{number}-{len(text)}")
    found = parse(text)
    assert total(found, "sol_gateway_time_to_first_token_seconds_count") >= 1
    for (name, pairs), value in found.items():
        if name.endswith("_count"):
            last = tuple(sorted((*pairs, ("le", "+Inf"))))
            assert found[name.removesuffix("_count") + "_bucket", last] == value
