"""The ladder: when steps are taken and taken back, and what they do to calls."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from sol.errors import ConfigError
from sol.gateway.call import Call
from sol.gateway.config import make_config
from sol.gateway.degradation.config import Step
from sol.gateway.degradation.ladder import Ladder, Measured
from sol.gateway.degradation.stage import DegradeStage, LoadShedError
from sol.gateway.gateway import Gateway
from sol.gateway.parsing import make_call

STEPS = tuple(
    Step.model_validate({"when": {"burn_rate": 2}, "after": 10, "recover_after": 30, **each})
    for each in (
        {"action": "drafts_off"},
        {"action": "max_tokens", "max_tokens": 50},
        {"action": "model", "models": ["large"], "to": "small", "classes": ["batch", "best_effort"]},
        {"action": "shed"},
        {"action": "shed", "classes": ["interactive", "batch", "best_effort"]},
    )
)


def call(class_name: str = "best_effort", path: str = "/v1/chat/completions", **body: Any) -> Call:
    data = json.dumps({"model": "large", **body}).encode()
    made = make_call(path, {}, data, call_id="x", arrived=time.monotonic())
    made.class_name = class_name
    return made


def stage(level: int) -> DegradeStage:
    made = DegradeStage(STEPS, {"large": "large", "alias": "large", "small": "small"}, lambda _: Measured(), {"large"})
    made.ladders["large"].level = level
    return made


def test_a_step_is_taken_when_its_reason_lasts_and_each_waits_for_itself() -> None:
    ladder = Ladder(STEPS)
    bad, good = Measured(burn_rate=5.0), Measured(burn_rate=0.1)
    assert not ladder.update(bad, 0.0)
    assert not ladder.update(good, 5.0)  # it did not last
    changes = [now for now in range(6, 60) if ladder.update(bad, float(now))]
    assert changes == [16, 27, 38, 49]
    assert ladder.level == 4
    assert ladder.reason == "burn_rate 5 (bound 2)"


def test_a_step_is_taken_back_late_and_only_when_all_is_well_below() -> None:
    ladder = Ladder(STEPS[:1])
    for now in range(12):
        ladder.update(Measured(burn_rate=3.0), float(now))
    assert ladder.level == 1
    assert not any(ladder.update(Measured(burn_rate=1.8), float(now)) for now in range(12, 200))  # in between
    assert not any(ladder.update(Measured(burn_rate=0.0), float(now)) for now in range(200, 230))
    assert ladder.update(Measured(burn_rate=0.0), 230.0)
    assert (ladder.level, ladder.reason) == (0, "recovered")


def test_signals_that_swing_do_not_make_it_swing() -> None:
    ladder = Ladder(STEPS)
    changes = sum(ladder.update(Measured(burn_rate=4.0 if now % 8 < 4 else 0.0), float(now)) for now in range(600))
    assert changes == 0


def test_what_nobody_knows_is_no_reason() -> None:
    ladder = Ladder([Step(action="drafts_off", after=0, when={"utilisation": 1.5, "kv_usage": 0.9})])  # type: ignore[arg-type]
    assert not ladder.update(Measured(burn_rate=100.0), 0.0)
    assert ladder.update(Measured(kv_usage=0.95), 1.0)


def test_what_nobody_knows_any_more_is_no_reason_to_take_a_step_back() -> None:
    ladder = Ladder([Step(action="shed", after=0, recover_after=30, when={"burn_rate": 2, "kv_usage": 0.9})])  # type: ignore[arg-type]
    assert ladder.update(Measured(burn_rate=0.0, kv_usage=0.95), 0.0)
    for now in range(1, 100):  # engines that are too busy to say how they are
        assert not ladder.update(Measured(burn_rate=0.0), float(now))
    assert not ladder.update(Measured(burn_rate=0.0, kv_usage=0.1), 100.0)
    assert not ladder.update(Measured(burn_rate=0.0), 120.0)
    assert not ladder.update(Measured(burn_rate=0.0, kv_usage=0.1), 140.0)
    assert ladder.update(Measured(burn_rate=0.0, kv_usage=0.1), 170.0)
    # What was no reason to take it need not be known.
    assert ladder.update(Measured(burn_rate=3.0, kv_usage=0.1), 171.0)
    assert not ladder.update(Measured(burn_rate=0.0), 172.0)
    assert ladder.update(Measured(burn_rate=0.0), 202.0)


def test_engines_that_nothing_limits_are_not_too_busy() -> None:
    gateway = Gateway(
        make_config(
            {
                "models": [{"name": "m", "engines": ["a"]}],
                "engines": [{"name": "a", "url": "http://x:1", "max_in_flight": 1}],
                "degradation": [{"action": "shed", "when": {"utilisation": 2}, "after": 0, "recover_after": 30}],
            }
        )
    )
    engine, ladder = gateway.fleet.engines["a"], gateway.degrade.ladders["m"]
    flights = [engine.begin(call()) for _ in range(2)]
    gateway.degrade.update(0.0)
    assert (ladder.level, ladder.reason) == (1, "utilisation 2 (bound 2)")
    engine.max_in_flight = None
    gateway.degrade.update(1.0)
    gateway.degrade.update(31.0)
    assert ladder.level == 0
    for flight in flights:
        flight.end("ok")


async def test_steps_do_what_they_say_to_those_they_name() -> None:
    plain = call(max_tokens=500, n=2)
    await stage(0).enter(plain)
    assert not plain.decisions
    assert not plain.response_headers

    degraded = call(max_tokens=500, n=2)
    await (third := stage(3)).enter(degraded)
    assert degraded.no_drafts
    assert (degraded.json["max_tokens"], degraded.output_tokens) == (50, 100)
    assert json.loads(degraded.body) == degraded.json
    assert degraded.model == "small"
    assert degraded.response_headers == [(b"x-sol-degraded", b"drafts_off, max_tokens, model")]
    assert [each.rule for each in degraded.decisions] == ["drafts_off", "max_tokens", "model"]
    assert third.counts == {("large", "drafts_off"): 1, ("large", "max_tokens"): 1, ("large", "model"): 1}

    urgent = call("realtime", max_tokens=500)
    await third.enter(urgent)
    assert (urgent.json["max_tokens"], urgent.model, urgent.no_drafts) == (500, "large", True)


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/v1/chat/completions", {}, {"max_completion_tokens": 50}),
        ("/v1/completions", {"n": 3}, {"max_tokens": 50, "n": 3}),
        ("/v1/responses", {}, {"max_output_tokens": 50}),
        ("/v1/completions", {"max_tokens": 20}, {"max_tokens": 20}),
        ("/v1/completions", {"max_tokens": 90, "min_tokens": 80}, {"max_tokens": 50, "min_tokens": 50}),
        ("/v1/embeddings", {}, {}),
    ],
)
async def test_answers_are_shortened_by_the_field_that_the_engine_reads(
    path: str, body: dict[str, Any], expected: dict[str, Any]
) -> None:
    shortened = call(path=path, **body)
    await stage(2).enter(shortened)
    assert shortened.json == {"model": "large", **expected}


async def test_a_model_that_cannot_answer_replaces_none() -> None:
    well = {"small": True}
    made = DegradeStage(STEPS, {"large": "large", "small": "small"}, lambda _: Measured(), {"large"}, well.__getitem__)
    made.ladders["large"].level = 3
    await made.enter(first := call("batch"))
    well["small"] = False
    await made.enter(second := call("batch"))
    assert (first.model, second.model) == ("small", "large")
    assert second.response_headers == [(b"x-sol-degraded", b"drafts_off")]
    assert made.counts["large", "model"] == 1


def test_a_gateway_knows_whether_a_models_engines_can_be_asked() -> None:
    gateway = Gateway(
        make_config(
            {
                "models": [{"name": "large", "engines": ["a"]}, {"name": "small", "engines": ["b"]}],
                "engines": [{"name": name, "url": "http://x:1"} for name in "ab"],
                "degradation": [{"action": "model", "models": ["large"], "to": "small"}],
            }
        )
    )
    assert gateway.degrade.can_answer("small")
    gateway.fleet.engines["b"].health.probed("refused")
    assert not gateway.degrade.can_answer("small")
    assert gateway.degrade.can_answer("large")


async def test_classes_are_shed_one_after_another() -> None:
    with pytest.raises(LoadShedError) as refused:
        await stage(4).enter(call())
    assert (refused.value.status, refused.value.code, refused.value.wait) == (503, "load_shed", 10.0)
    await stage(4).enter(call("interactive"))
    last = stage(5)
    with pytest.raises(LoadShedError):
        await last.enter(call("interactive"))
    with pytest.raises(LoadShedError):
        await last.enter(shed := call(max_tokens=500))
    assert last.counts == {("large", "shed"): 2}  # who is refused gets no less than somebody else
    assert [each.rule for each in shed.decisions] == ["shed"]
    await stage(5).enter(call("realtime"))


def test_each_model_has_a_ladder_of_the_steps_that_concern_it() -> None:
    ladders = stage(0).ladders
    assert [step.action for step in ladders["large"].steps] == ["drafts_off", "max_tokens", "model", "shed", "shed"]
    assert [step.action for step in ladders["small"].steps] == ["max_tokens", "shed", "shed"]
    measured = {"large": Measured(burn_rate=9.0), "small": Measured()}
    both = DegradeStage(STEPS, {"large": "large", "small": "small"}, lambda model: measured[model])
    for now in range(30):
        both.update(float(now))
    assert (both.ladders["large"].level, both.ladders["small"].level) == (2, 0)


@pytest.mark.parametrize(
    ("step", "says"),
    [
        ({"action": "max_tokens"}, "max_tokens belongs to"),
        ({"action": "shed", "max_tokens": 5}, "max_tokens belongs to"),
        ({"action": "model", "to": "m"}, "models, those that are replaced"),
        ({"action": "model", "models": ["m"], "to": "m"}, "replaced by itself"),
        ({"action": "model", "models": ["m"], "to": "none"}, "there is no model 'none'"),
        ({"action": "drafts_off"}, "no engine with the driver sol"),
        ({"action": "shed", "when": {}}, "needs burn_rate"),
    ],
)
def test_steps_that_cannot_work_are_refused(step: dict[str, Any], says: str) -> None:
    data = {"models": [{"name": "m", "engines": ["a"]}], "engines": [{"name": "a", "url": "http://x:1"}]}
    with pytest.raises(ConfigError, match=says):
        make_config({**data, "degradation": [step]})
