"""Metrics of the queue, of what is promised and kept, of degradation, and of how many engines it would take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from sol.gateway.observe.text import counted, family, labels
from sol.gateway.sla.autoscaling import model_load

if TYPE_CHECKING:
    from sol.gateway.gateway import Gateway
    from sol.gateway.queue.dispatcher import Dispatcher

Lines = Iterator[Iterator[str]]
_EVENTS: Final = ("at_once", "waited", "left", "full", "timeout", "hopeless", "deadline")


def render(gateway: Gateway) -> Lines:
    """The lines of each metric."""
    yield from _queue(gateway)
    yield from _promises(gateway)
    yield from _degradation(gateway)
    yield from _demand(gateway)


def _queue(gateway: Gateway) -> Lines:
    now = time.monotonic()
    queue = gateway.queue
    dispatchers = [(",".join(each.models), each) for each in dict.fromkeys(queue.dispatchers.values())]
    yield family(
        "sol_gateway_queue_waiting", "gauge", "Requests that wait for an engine.",
        (
            (labels([("model", model), ("class", name)]), count)
            for model, dispatcher in queue.dispatchers.items()
            for name, count in dispatcher.num_waiting(model).items()
        ),
    )  # fmt: skip
    yield family(
        "sol_gateway_queue_longest_wait_seconds", "gauge",
        "How long the next to go has waited; models that share engines share a queue.",
        (
            (labels([("models", models), ("class", name)]), dispatcher.longest_wait(now, name))
            for models, dispatcher in dispatchers
            for name in dispatcher.in_flight
        ),
    )  # fmt: skip
    yield family(
        "sol_gateway_queue_events_total", "counter",
        "Requests that went at once or after waiting, or were refused (full, timeout, hopeless, deadline) or left.",
        (
            (f"{labels([('models', models)])},{label}", count)
            for models, dispatcher in dispatchers
            for label, count in counted(("class", "event"), _events(dispatcher).items())
        ),
    )  # fmt: skip
    yield family(
        "sol_gateway_queue_preemptions_total", "counter", "Requests that were given up for more urgent ones.",
        [("", queue.num_preemptions)],
    )  # fmt: skip
    yield family(
        "sol_gateway_engine_credits", "gauge", "Requests that it takes well at once, where anything limits them.",
        (
            (labels([("engine", engine.name)]), engine.credits)
            for engine in gateway.fleet
            if engine.credits is not None
        ),
    )  # fmt: skip


def _events(dispatcher: Dispatcher) -> dict[tuple[str, str], int]:
    """All that can happen, what never did with 0: a counter that begins with its first event has no increase then."""
    return {(name, event): 0 for name in dispatcher.in_flight for event in _EVENTS} | dispatcher.counts


def _degraded(gateway: Gateway) -> dict[tuple[str, str], int]:
    ladders = gateway.degrade.ladders.items()
    return {(model, step.action): 0 for model, ladder in ladders for step in ladder.steps} | gateway.degrade.counts


def _promises(gateway: Gateway) -> Lines:
    kept = [
        (labels([("model", model), ("class", class_name), ("objective", objective.name)]), objective, fast, slow)
        for model, class_name, objective, fast, slow in gateway.monitor.kept()
    ]
    windows = [
        (f'{label},window="{window}"', what)
        for label, _, fast, slow in kept
        for window, what in (("fast", fast), ("slow", slow))
    ]
    yield family(
        "sol_gateway_sla_bound", "gauge", "What is promised: seconds, tokens a second, or a share of errors.",
        ((label, objective.bound) for label, objective, _, _ in kept),
    )  # fmt: skip
    yield family(
        "sol_gateway_sla_budget", "gauge", "Share of requests that may miss it.",
        ((label, objective.budget) for label, objective, _, _ in kept),
    )  # fmt: skip
    yield family(
        "sol_gateway_sla_attainment", "gauge", "Share of the window's requests that kept it.",
        ((label, what.attainment) for label, what in windows),
    )  # fmt: skip
    yield family(
        "sol_gateway_sla_burn_rate", "gauge", "Share that missed it, over the budget: above 1 it is not kept.",
        ((label, what.burn_rate) for label, what in windows),
    )  # fmt: skip
    yield family(
        "sol_gateway_sla_requests", "gauge", "Requests in the window that it says something about.",
        ((label, what.num_requests) for label, what in windows),
    )  # fmt: skip


def _degradation(gateway: Gateway) -> Lines:
    ladders = [
        (labels([("model", model)]), ladder) for model, ladder in gateway.degrade.ladders.items() if ladder.steps
    ]
    yield family(
        "sol_gateway_degradation_level", "gauge", "Steps of its ladder that are taken.",
        ((label, ladder.level) for label, ladder in ladders),
    )  # fmt: skip
    yield family(
        "sol_gateway_degradation_steps", "gauge", "Steps that its ladder has.",
        ((label, len(ladder.steps)) for label, ladder in ladders),
    )  # fmt: skip
    yield family(
        "sol_gateway_degraded_total", "counter", "Requests that were answered with less, or shed, by what was done.",
        counted(("model", "action"), _degraded(gateway).items()),
    )  # fmt: skip


def _demand(gateway: Gateway) -> Lines:
    loads = [(labels([("model", model)]), model_load(gateway, model)) for model in gateway.fleet.pools]
    yield family(
        "sol_gateway_utilisation", "gauge", "Requests in flight and waiting, over what the engines take well.",
        ((label, load.utilisation) for label, load in loads if load.utilisation is not None),
    )  # fmt: skip
    yield family(
        "sol_gateway_desired_engines", "gauge", "Engines that it would take, where that can be told.",
        ((label, load.desired_engines) for label, load in loads if load.desired_engines is not None),
    )  # fmt: skip
