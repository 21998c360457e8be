"""What the queue makes of engines that models share, that are left out, or that were told how much they take."""

from __future__ import annotations

import json
import time
from typing import Any

from sol.gateway.call import Call
from sol.gateway.config import GatewayConfig, make_config
from sol.gateway.gateway import Gateway
from sol.gateway.parsing import make_call
from sol.gateway.queue.capacity import FleetCapacity
from sol.gateway.queue.dispatcher import Dispatcher
from sol.gateway.queue.fair import Waiter
from sol.gateway.routing.engine import Engine, Flight
from sol.gateway.routing.fleet import Fleet
from sol.gateway.sla.autoscaling import model_load

TEN = {"max_in_flight": 10}


def make_gateway(models: dict[str, str], engines: str, **entry: Any) -> tuple[GatewayConfig, Fleet, FleetCapacity]:
    """`models`: each with the engines, of one letter, that serve it."""
    config = make_config(
        {
            "models": [{"name": name, "engines": list(names)} for name, names in models.items()],
            "engines": [{"name": name, "url": "http://127.0.0.1:1", **entry} for name in engines],
        }
    )
    fleet = Fleet(config)
    return config, fleet, FleetCapacity(fleet, config)


def make_dispatcher(models: list[str], config: GatewayConfig, capacity: FleetCapacity) -> Dispatcher:
    return Dispatcher(models, config.classes, config.queue, capacity)


def call(model: str, class_name: str) -> Call:
    body = json.dumps({"model": model, "prompt": "x"}).encode()
    made = make_call("/v1/completions", {}, body, call_id="x", arrived=time.monotonic())
    made.class_name = class_name
    return made


def offer(dispatcher: Dispatcher, model: str, class_name: str, *, begun: bool = True) -> Waiter:
    now = time.monotonic()
    waiter = Waiter(
        model=model, class_name=class_name, arrived=now, on_grant=lambda: None, on_refuse=lambda _: None,
        is_begun=lambda: begun,
    )  # fmt: skip
    dispatcher.offer(waiter, now)
    return waiter


def sent(dispatcher: Dispatcher, engine: Engine, model: str, class_name: str) -> Flight:
    """A request that was granted, and that the engine has."""
    assert offer(dispatcher, model, class_name).state == "granted"
    return engine.begin(call(model, class_name))


def test_what_another_models_engines_do_keeps_nobody_from_an_idle_one() -> None:
    config, fleet, capacity = make_gateway({"x": "a", "y": "abcd"}, "abcd", **TEN)
    dispatcher = make_dispatcher(["x", "y"], config, capacity)
    for name in "bcd":
        for _ in range(10):
            sent(dispatcher, fleet.engines[name], "y", "batch")
    # Thirty are in flight, of x's engine's ten places none is taken.
    assert offer(dispatcher, "x", "batch").state == "granted"


def test_the_part_of_the_places_that_is_kept_for_the_urgent_is_each_models_own() -> None:
    config, fleet, capacity = make_gateway({"x": "a", "y": "abcd"}, "abcd", **TEN)
    dispatcher = make_dispatcher(["x", "y"], config, capacity)
    flights = [sent(dispatcher, fleet.engines["a"], "x", "batch") for _ in range(9)]
    late = offer(dispatcher, "x", "batch")
    assert late.state == "waiting"
    assert offer(dispatcher, "y", "batch").state == "granted"
    assert offer(dispatcher, "x", "realtime").state == "granted"
    flights.pop().end("ok")
    dispatcher.pump(time.monotonic())
    assert late.state == "granted"


def test_what_an_engine_that_is_left_out_still_has_keeps_nobody_from_the_others() -> None:
    config, fleet, capacity = make_gateway({"m": "ab"}, "ab", **TEN)
    dispatcher = make_dispatcher(["m"], config, capacity)
    for _ in range(10):
        sent(dispatcher, fleet.engines["a"], "m", "batch")
    fleet.engines["a"].breaker.open(time.monotonic())  # it hangs, with all that it has
    assert offer(dispatcher, "m", "batch").state == "granted"


def test_who_waits_for_one_model_does_not_wait_for_another_that_shares_its_engines() -> None:
    gateway = Gateway(
        make_config(
            {
                "models": [{"name": "x", "engines": ["a"]}, {"name": "y", "engines": ["a", "b"]}],
                "engines": [{"name": name, "url": "http://127.0.0.1:1", "max_in_flight": 1} for name in "ab"],
            }
        )
    )
    dispatcher, engine = gateway.queue.dispatchers["x"], gateway.fleet.engines["a"]
    flight = sent(dispatcher, engine, "x", "interactive")
    waits = offer(dispatcher, "x", "interactive")
    waits.arrived -= 5.0
    assert model_load(gateway, "x").wait_seconds >= 5.0
    assert model_load(gateway, "y").wait_seconds == 0.0
    flight.end("ok")


def test_whose_engine_failed_gets_the_next_place_at_another_one() -> None:
    config, fleet, capacity = make_gateway({"m": "ab"}, "ab", max_in_flight=1)
    dispatcher = make_dispatcher(["m"], config, capacity)
    a, b = fleet.engines["a"], fleet.engines["b"]
    failed, busy = sent(dispatcher, a, "m", "batch"), sent(dispatcher, b, "m", "batch")
    now = time.monotonic()
    waiters = [
        Waiter(model="m", class_name="batch", arrived=now, on_grant=lambda: None, on_refuse=lambda _: None,
               is_begun=lambda: False, was_granted=True)
        for _ in range(2)
    ]  # fmt: skip
    failed.end("fault")
    for waiter in waiters:
        dispatcher.offer_again(waiter, ["a"], now)
    assert [each.state for each in waiters] == ["waiting", "waiting"]  # a has a place, which is of no use
    urgent = offer(dispatcher, "m", "realtime")
    assert urgent.state == "granted"  # to a, for all that is known
    flight = a.begin(call("m", "realtime"))
    late = offer(dispatcher, "m", "realtime")
    busy.end("ok")
    dispatcher.pump(time.monotonic())
    assert [waiters[0].state, waiters[1].state, late.state] == ["granted", "waiting", "waiting"]
    dispatcher.leave(waiters[1], now)
    assert not dispatcher.again
    flight.end("ok")
    for waiter in (*waiters, urgent, late):
        dispatcher.leave(waiter, now)


def test_nobody_who_comes_takes_the_place_that_one_waits_for_whose_engine_failed() -> None:
    config, fleet, capacity = make_gateway({"m": "ab"}, "ab", max_in_flight=1)
    dispatcher = make_dispatcher(["m"], config, capacity)
    flights = [sent(dispatcher, fleet.engines[name], "m", "batch") for name in "ab"]
    now = time.monotonic()
    waits = Waiter(
        model="m", class_name="batch", arrived=now, on_grant=lambda: None, on_refuse=lambda _: None,
        is_begun=lambda: False, was_granted=True,
    )  # fmt: skip
    dispatcher.offer_again(waits, ["a"], now)
    flights[1].end("ok")  # its answer is on its way to the client, and the queue has not heard of it yet
    late = offer(dispatcher, "m", "realtime")
    assert (waits.state, late.state) == ("granted", "waiting")


def test_who_waits_for_another_engine_is_let_go_when_there_is_none_any_more() -> None:
    config, fleet, capacity = make_gateway({"m": "ab"}, "ab", max_in_flight=1)
    dispatcher = make_dispatcher(["m"], config, capacity)
    sent(dispatcher, fleet.engines["a"], "m", "batch").end("fault")
    sent(dispatcher, fleet.engines["b"], "m", "batch")
    now = time.monotonic()
    waits = Waiter(
        model="m", class_name="batch", arrived=now, on_grant=lambda: None, on_refuse=lambda _: None, was_granted=True
    )
    dispatcher.offer_again(waits, ["a"], now)
    assert waits.state == "waiting"
    fleet.engines["b"].health.probed("refused")
    dispatcher.tick(time.monotonic())
    assert waits.state == "granted"  # what becomes of it, is the relay's to say


def test_what_is_on_its_way_to_other_engines_takes_no_place_here() -> None:
    config, _, capacity = make_gateway({"x": "a", "y": "b"}, "ab", max_in_flight=2)
    first, second = make_dispatcher(["x"], config, capacity), make_dispatcher(["y"], config, capacity)
    for _ in range(2):
        assert offer(first, "x", "interactive", begun=False).state == "granted"
    assert offer(first, "x", "interactive", begun=False).state == "waiting"
    assert offer(second, "y", "interactive", begun=False).state == "granted"
