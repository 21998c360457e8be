"""Draft-model routing: tasks, their engines, and drafters chosen by what they were measured to be worth."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import pytest
from gateway_harness import CHAT, Running, running

from sol.errors import ConfigError, RequestError
from sol.gateway.call import Call, Outcome, Usage
from sol.gateway.config import make_config
from sol.gateway.parsing import make_call
from sol.gateway.routing.fleet import Fleet
from sol.gateway.routing.tasks import RouteStage, Worth

TASKS = [
    {"name": "code", "when": [{"contains": ["def ", "```"]}, {"pattern": r"\bfunction\s*\("}], "drafters": ["ngram"]},
    {"name": "long", "when": [{"min_input_tokens": 100, "headers": {"X-Kind": "summary"}}], "engines": ["b"]},
    {"name": "asked", "engines": ["a"], "drafters": ["suffix", "ngram"]},
]


def make_stage(judge: Any = None, **routing: Any) -> RouteStage:
    config = make_config(
        {
            "models": [{"name": "m", "aliases": ["alias"], "engines": ["a", "b"]}],
            "engines": [{"name": name, "url": "http://127.0.0.1:1", "driver": "sol"} for name in "ab"],
            "routing": {"tasks": TASKS, **routing},
        }
    )
    return RouteStage(Fleet(config), config.routing, judge)


async def classified(stage: RouteStage, prompt: str, headers: dict[str, str] | None = None, **body: Any) -> Call:
    text = json.dumps({"model": "m", "prompt": prompt, **body}).encode()
    call = make_call("/v1/completions", headers or {}, text, call_id="x", arrived=time.monotonic())
    await stage.enter(call)
    return call


async def test_rules_and_headers_name_tasks() -> None:
    stage = make_stage()
    code = await classified(stage, "def f(x):")
    assert (code.task, code.drafter, code.only_engines) == ("code", "ngram", None)
    assert (await classified(stage, "function  (x)")).task == "code"
    long = await classified(stage, "word " * 200, {"x-kind": "summary"})
    assert (long.task, long.only_engines, long.drafter) == ("long", frozenset({"b"}), None)
    assert (await classified(stage, "word " * 200)).task is None
    assert (await classified(stage, "word", {"x-kind": "summary"})).task is None
    named = await classified(stage, "def f(x):", {"x-sol-task": "asked"})
    assert (named.task, named.only_engines) == ("asked", frozenset({"a"}))
    assert [(each.stage, each.rule, each.action) for each in named.decisions] == [("route", "header", "task")]
    with pytest.raises(RequestError, match="x-sol-task must be one of code, long, asked"):
        await classified(stage, "x", {"x-sol-task": "other"})
    # Who decides about drafts is the client, where it does.
    for own in ({"drafter": "suffix"}, {"enabled": False}):
        assert (await classified(stage, "def f(x):", speculation=own)).drafter is None


async def test_a_classifier_is_asked_where_no_rule_fits_and_may_fail() -> None:
    stage = make_stage(lambda text: "asked" if "please" in text else None)
    assert (await classified(stage, "please do")).task == "asked"
    assert (await classified(stage, "do")).task is None
    assert (await classified(stage, "please def ")).task == "code"

    def broken(_text: str) -> str:
        raise RuntimeError("no model")

    assert (await classified(make_stage(broken), "please do")).task is None
    with pytest.raises(ConfigError, match="cannot be imported"):
        make_stage(classifier="nowhere_at_all:f")


async def test_a_classifier_that_hangs_holds_nobody_up_and_nothing_piles_up_behind_it() -> None:
    go_on, asked = threading.Event(), []

    def hangs(text: str) -> str:
        asked.append(text)
        go_on.wait(60)
        return "asked"

    stage = make_stage(hangs, classifier_budget=0.01)
    calls = await asyncio.gather(*(classified(stage, f"do {number}") for number in range(200)))
    assert {call.task for call in calls} == {None}
    assert len(asked) < 10
    go_on.set()  # it is well again, and is asked again
    patient = make_stage(lambda _: "asked")
    assert (await classified(patient, "do")).task == "asked"

    async def asked_again() -> bool:
        return (await classified(stage, "again")).task == "asked"

    for _ in range(1000):
        if await asked_again():
            break
    else:
        pytest.fail("it was never asked again")


@pytest.mark.parametrize("answer", ["nothing", "", 7, ["asked"], {"task": "asked"}])
async def test_a_classifier_that_names_no_task_names_none(answer: Any) -> None:
    assert (await classified(make_stage(lambda _: answer), "do")).task is None


async def test_rules_name_models_by_their_own_names_whatever_a_client_calls_them() -> None:
    tasks = [{"name": "t", "when": [{"models": ["m"]}], "engines": ["a"]}]
    stage = make_stage(tasks=tasks)
    body = json.dumps({"model": "alias", "prompt": "x"}).encode()
    call = make_call("/v1/completions", {}, body, call_id="x", arrived=time.monotonic())
    await stage.enter(call)
    assert call.task == "t"
    with pytest.raises(ConfigError, match="there is no model 'alias'"):
        make_stage(tasks=[{"name": "t", "when": [{"models": ["alias"]}], "engines": ["a"]}])


async def test_a_text_that_was_made_to_be_slow_is_searched_in_linear_time() -> None:
    # A backtracking search takes minutes for this; the test's only clock is everybody's patience.
    stage = make_stage(tasks=[{"name": "t", "when": [{"pattern": "(a+)+$"}], "engines": ["a"]}])
    assert (await classified(stage, "a" * 5000 + "b")).task is None
    assert (await classified(stage, "b" + "a" * 50)).task == "t"
    for pattern in ("(", r"(?<=x)y", r"(a)\1"):
        with pytest.raises(ConfigError, match="pattern"):
            make_stage(tasks=[{"name": "t", "when": [{"pattern": pattern}], "engines": ["a"]}])


def answered(drafter: str, speedup: float | None) -> Outcome:
    speculation = {"steps": 10, "tokens_per_step": 2.0, "speedup": speedup, "drafters": {drafter: {"drafts": 5}}}
    return Outcome(status=200, usage=Usage(prompt_tokens=1, completion_tokens=20, speculation=speculation))


async def test_the_drafter_that_is_worth_most_is_chosen_and_the_others_are_looked_at_again() -> None:
    stage = make_stage()
    chosen = []
    for _ in range(300):
        call = await classified(stage, "x", {"x-sol-task": "asked"})
        assert call.drafter is not None
        chosen.append(call.drafter)
        outcome = answered(call.drafter, 1.1 if call.drafter == "suffix" else 1.9)
        await stage.leave(call, outcome)
        await stage.leave(call, outcome)  # counts once
    assert chosen[:10].count("suffix") == 5
    assert 250 < chosen.count("ngram") < 300
    assert stage.worth["asked"].measured["ngram"] == pytest.approx(1.9)


async def test_a_drafter_that_never_drafts_is_not_chosen_for_ever() -> None:
    stage = make_stage()
    chosen = []
    for _ in range(100):
        call = await classified(stage, "x", {"x-sol-task": "asked"})
        assert call.drafter is not None
        chosen.append(call.drafter)
        # `suffix` found nothing to draft, or the engine's controller did not let it.
        await stage.leave(call, answered("ngram", 1.5) if call.drafter == "ngram" else answered("other", 1.0))
    assert chosen.count("suffix") < 30
    assert stage.worth["asked"].measured == {"ngram": pytest.approx(1.5)}


def test_what_was_refused_is_worth_nothing() -> None:
    worth = Worth(("one", "two"), explore=0.0)
    for _ in range(5):
        worth.observe("two", 1.2)
    for _ in range(5):
        worth.refused("one")
    assert [worth.choose() for _ in range(20)] == ["two"] * 20
    assert Worth((), 0.0).choose() is None


async def chat(it: Running, **headers: str) -> Any:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return await it.http.post("/v1/chat/completions", json=CHAT, headers=names)


async def test_an_engine_is_told_the_drafter_and_its_measure_comes_back() -> None:
    routing = {"tasks": [{"name": "t", "drafters": ["simulated"]}]}
    async with running(laws={"num_speculative_tokens": 3}, routing=routing) as it:
        assert (await chat(it, x_sol_task="t")).status_code == 200
        await it.settled(1)
        assert it.gateway.route.worth["t"].measured["simulated"] >= 1


async def test_a_drafter_that_the_engine_does_not_have_fails_no_request() -> None:
    routing = {"tasks": [{"name": "t", "drafters": ["nobody"]}]}
    async with running(laws={"num_speculative_tokens": 3}, routing=routing) as it:
        response = await chat(it, x_sol_task="t")
        assert response.status_code == 200, response.text
        await it.settled(1)
        assert "drafter_refused" in [each.rule for each in it.outcomes[0][0].decisions]
        own = {**CHAT, "speculation": {"drafter": "nobody"}}
        assert (await it.http.post("/v1/chat/completions", json=own)).status_code == 400
