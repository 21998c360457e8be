"""The policy `priority`, deadlines, and salts of the prefix cache, in the scheduler and the core."""

from __future__ import annotations

import time

import pytest
from token_runner import VOCAB_SIZE, TokenRunner, expected_output, make_config, make_core, make_request

from sol.engine.core import EngineCore
from sol.engine.deadlines import Deadlines
from sol.engine.request import Request
from sol.engine.request import make_request as accept
from sol.engine.types import EngineRequest, RequestOutput


class Driver:
    """A core by priority; requests arrive in one second unless told otherwise."""

    def __init__(self, **config: object) -> None:
        self.config = make_config(scheduling_policy="priority", **config)
        self.runner = TokenRunner(self.config)
        self.core: EngineCore = make_core(self.config, self.runner)
        self.requests: dict[str, EngineRequest] = {}
        self.tokens: dict[str, list[int]] = {}
        self.last: dict[str, RequestOutput] = {}
        self.order: list[str] = []
        self.num_preemptions = 0

    def add(
        self, name: str, length: int, priority: int = 0, *, start: int = 0, second: float = 0.0, **params: object
    ) -> None:
        prompt = [(start + i) % VOCAB_SIZE for i in range(length)]
        request = make_request(name, prompt, **params)  # type: ignore[arg-type]
        request.priority, request.arrival_time = priority, second
        self.requests[name], self.tokens[name] = request, []
        self.core.add([request])

    def step(self) -> dict[str, int]:
        num_plans = len(self.runner.plans)
        output = self.core.step()
        assert self.core.dead is None
        self.core.check_integrity()
        self.num_preemptions += output.stats.num_preemptions
        for item in output.outputs:
            self.tokens[item.request_id] += item.new_token_ids
            if item.finish_reason is not None:
                self.last[item.request_id] = item
                self.order.append(item.request_id)
        return self.runner.plans[-1].num_scheduled_tokens if len(self.runner.plans) > num_plans else {}

    def finish(self) -> None:
        while self.core.has_work:
            self.step()
        for name, request in self.requests.items():
            assert self.tokens[name] == expected_output(request, self.config.max_model_len)[0]


def test_no_inversion_where_all_places_are_taken() -> None:
    driver = Driver(max_num_seqs=2)
    driver.add("a", 6, 1, max_tokens=20)
    driver.add("b", 6, 2, start=20, max_tokens=20)
    assert driver.step().keys() == {"a", "b"}
    driver.add("urgent", 5, 0, start=40, max_tokens=4)
    assert driver.step().keys() == {"a", "urgent"}
    driver.finish()
    assert driver.order == ["urgent", "a", "b"]
    assert driver.num_preemptions == 1


def test_no_inversion_behind_a_long_prompt() -> None:
    driver = Driver(max_num_batched_tokens=8)
    driver.add("long", 40, 1, max_tokens=2)
    assert driver.step() == {"long": 8}
    driver.add("urgent", 5, 0, start=50, max_tokens=2)
    assert driver.step() == {"urgent": 5, "long": 3}
    driver.finish()
    assert driver.order == ["urgent", "long"]
    assert driver.num_preemptions == 0


def test_no_inversion_where_memory_is_short() -> None:
    driver = Driver(num_blocks=16, max_num_seqs=8)
    driver.add("a", 30, 3, max_tokens=10)
    driver.add("b", 22, 2, start=30, max_tokens=10)
    while not (driver.tokens["a"] and driver.tokens["b"]):
        driver.step()
    driver.add("urgent", 24, 1, start=10, max_tokens=3)
    assert set(driver.step()) == {"urgent", "b"}
    driver.finish()
    assert driver.order[0] == "urgent"


def test_nobody_loses_a_place_that_would_help_nobody() -> None:
    driver = Driver(num_blocks=16, max_num_seqs=8)
    driver.add("most urgent", 40, 0, max_tokens=20)
    driver.add("least urgent", 8, 9, start=30, max_tokens=20)
    while not all(driver.tokens.values()):
        driver.step()
    driver.add("too large", 40, 1, start=10, max_tokens=3)
    for _ in range(3):
        driver.step()
    assert driver.num_preemptions == 0
    driver.finish()


def test_a_steady_stream_of_urgent_requests_starves_nobody() -> None:
    driver = Driver(max_num_seqs=1, priority_aging_seconds=10.0)
    driver.add("plain", 4, 1, second=0.0, max_tokens=3)
    for i in range(40):  # one a second, each takes longer than that to be answered
        driver.add(f"urgent {i}", 4, 0, start=i, second=float(i), max_tokens=3)
    driver.finish()
    assert driver.order.index("plain") == 10


def test_equal_priorities_preempt_nobody() -> None:
    driver = Driver(max_num_seqs=1)
    for i in range(4):
        driver.add(f"r{i}", 4, start=i, second=float(i), max_tokens=5)
        driver.step()
    driver.finish()
    assert driver.order == ["r0", "r1", "r2", "r3"]
    assert driver.num_preemptions == 0


# ── deadlines ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_waits_past_its_deadline_is_given_up_and_what_runs_is_not() -> None:
    core = make_core(make_config(max_num_seqs=1))
    running, late, patient = (make_request(name, [1, 2, 3], max_tokens=30) for name in ("running", "late", "patient"))
    running.deadline = time.monotonic() + 0.05
    core.add([running])
    core.step()
    late.deadline, patient.deadline = time.monotonic() + 0.05, time.monotonic() + 3600
    core.add([late, patient])
    core.step()
    time.sleep(0.06)
    outputs = {output.request_id: output for output in core.step().outputs}
    core.check_integrity()
    assert outputs["late"].finish_reason == "error"
    assert outputs["late"].deadline_exceeded
    assert "deadline" in (outputs["late"].error or "")
    assert outputs["running"].finish_reason is None
    assert "patient" not in outputs
    while core.has_work:
        outputs |= {output.request_id: output for output in core.step().outputs}
    assert outputs["patient"].finish_reason == "length"
    assert outputs["running"].finish_reason == "length"


def test_what_could_not_be_answered_even_at_full_speed_is_hopeless_at_once() -> None:
    cached: dict[str, int] = {}
    deadlines = Deadlines(lambda request: cached.get(request.request_id, 0))
    deadlines.observe(1, 1e-9)  # too small a step to tell anything
    deadlines.observe(100, 1.0)
    deadlines.observe(100, 2.0)
    requests: dict[str, Request] = {}
    for name, seconds in (("hopeless", 0.2), ("found", 0.2), ("in time", 0.5)):
        wanted = make_request(name, [1] * 30)
        wanted.deadline = 100.0 + seconds
        requests[name] = accept(wanted, max_model_len=64, sequence=len(requests))
        deadlines.add(requests[name])
    cached["found"] = 20
    assert [request.request_id for request in deadlines.take_hopeless(100.0, requests)] == ["hopeless"]
    assert [request.request_id for request in deadlines.take_hopeless(100.15, requests)] == ["found"]
    requests["in time"].block_ids = [0]
    assert deadlines.take_hopeless(200.0, requests) == []


def test_deadlines_of_requests_that_have_left_take_no_memory() -> None:
    deadlines = Deadlines(lambda request: 0)
    for i in range(1000):
        wanted = make_request(f"r{i}", [1])
        wanted.deadline = 1e9
        deadlines.add(accept(wanted, max_model_len=8, sequence=i))
    deadlines.take_hopeless(0.0, {})
    assert deadlines._heap == []


# ── salts ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("first", "second", "shares"),
    [(None, None, True), ("a", "a", True), ("a", "b", False), (None, "a", False), ("", None, False)],
)
def test_a_prefix_is_found_by_requests_of_the_same_salt_only(
    first: str | None, second: str | None, shares: bool
) -> None:
    core = make_core()
    found = []
    for name, salt in (("first", first), ("second", second)):
        request = make_request(name, list(range(1, 20)), max_tokens=2)
        request.cache_salt = salt
        core.add([request])
        while core.has_work:
            found += [output.num_cached_tokens for output in core.step().outputs if output.finish_reason]
            core.check_integrity()
    assert found == [0, 16 if shares else 0]
