"""What engines are allowed at once, and what requests take, as learned."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from sol.gateway.queue.credits import Credits
from sol.gateway.queue.service import DrainRate, PromptLaw, ServiceLaw
from sol.gateway.routing.prompts import Prompts
from sol.simulate.engine import SimulatedRequest
from sol.simulate.laws import profile
from sol.simulate.virtual import VirtualServer


def test_nothing_is_limited_without_a_reason() -> None:
    credits_ = Credits(floor=4)
    for now in range(100):
        credits_.taken(500)
        credits_.in_demand = True
        credits_.look(float(now), in_flight=400, running=400, waiting=0)
    assert credits_.limit is None


def test_what_waits_in_the_engine_is_taken_off_and_not_more_than_half() -> None:
    credits_ = Credits(floor=4)
    credits_.look(0.0, in_flight=80, running=64, waiting=16)
    assert credits_.limit == 64
    credits_.look(2.0, in_flight=64, running=1, waiting=63)
    assert credits_.limit == 40  # of the 80 that it had since the look before
    for now in range(4, 30, 2):
        credits_.look(float(now), in_flight=5, running=0, waiting=5)
    assert credits_.limit == 4


def test_it_grows_only_while_somebody_waits_and_slowly_near_what_was_too_much() -> None:
    credits_ = Credits(floor=1)
    credits_.look(0.0, in_flight=100, running=50, waiting=50)
    assert credits_.limit == 50
    credits_.look(2.0, in_flight=50, running=50, waiting=0)
    assert credits_.limit == 50
    grown = []
    for step in range(20):
        credits_.in_demand = True
        credits_.look(4.0 + 2 * step, in_flight=credits_.limit, running=50, waiting=0)
        assert credits_.limit is not None
        grown.append(credits_.limit)
    fast = [value for value in grown if value < 90]
    assert fast[1] - fast[0] >= 6
    slow = [value for value in grown if value >= 85][:5]
    assert [after - before for before, after in itertools.pairwise(slow)] == [1, 1, 1, 2]
    credits_.in_demand = True
    credits_.look(100.0, in_flight=grown[-1], running=50, waiting=0, kv_usage=0.99)
    assert credits_.limit == grown[-1]


def test_what_is_not_used_does_not_grow() -> None:
    # Somebody waits for another reason: prompts that the engine has to compute first, or a part kept for the urgent.
    credits_ = Credits(floor=4)
    credits_.look(0.0, in_flight=40, running=20, waiting=20)
    credits_.look(2.0, in_flight=10, running=10, waiting=0)
    assert credits_.limit == 20
    for step in range(60):
        credits_.in_demand = True
        credits_.look(4.0 + 2 * step, in_flight=10, running=10, waiting=0)
    assert credits_.limit == 20


def test_what_an_engine_was_told_to_take_is_never_passed_and_may_be_less_than_the_least() -> None:
    credits_ = Credits(floor=4, initial=2)
    credits_.look(0.0, in_flight=2, running=1, waiting=1)
    assert credits_.limit == 2
    for step in range(10):
        credits_.in_demand = True
        credits_.look(2.0 + 2 * step, in_flight=2, running=2, waiting=0)
    assert credits_.limit == 2


def test_refusals_and_slow_answers_shrink_it_without_any_signals() -> None:
    credits_ = Credits(floor=4)
    credits_.taken(40)
    credits_.refused()
    credits_.look(0.0, in_flight=10)
    assert credits_.limit == 36
    credits_.taken(36)
    for number in range(20):
        credits_.answered(slow=number % 10 == 0)
    credits_.look(2.0, in_flight=30)
    assert credits_.limit == 32
    for _ in range(20):
        credits_.answered(slow=False)
    credits_.look(4.0, in_flight=30)
    assert credits_.limit == 32


def test_it_finds_the_places_of_a_simulated_engine() -> None:
    server = VirtualServer(profile("h100-8b", max_num_seqs=24))
    credits_, open_, now = Credits(floor=4), 0, 0.0
    while now < 120:
        now += 0.02
        open_ -= len(server.run(now))
        while open_ < (credits_.limit or 200):
            server.submit(max(now, server.now), prompt_tokens=50, output_tokens=100)
            open_ += 1
        credits_.taken(open_)
        credits_.in_demand = True
        if round(now / 0.02) % 100 == 0:
            credits_.look(now, in_flight=open_, running=server.engine.num_running, waiting=server.engine.num_waiting)
    assert credits_.limit is not None
    assert 22 <= credits_.limit <= 28


def test_prompts_have_room_for_what_the_engine_computes_and_a_little_more() -> None:
    laws = profile("h100-8b", max_num_batched_tokens=2048)
    server, prompts, now = VirtualServer(laws), Prompts(), 0.0
    assert prompts.room(now, 0.1) == math.inf
    unanswered: list[SimulatedRequest] = []
    loads: dict[SimulatedRequest, int] = {}
    waits = []
    while now < 30:
        now += 0.005
        server.run(now)
        for one in [one for one in unanswered if one.first_token_time is not None]:
            unanswered.remove(one)
            prompts.begun(one.prompt_tokens, loads.pop(one), one.ttft, now)
            if now > 5:
                waits.append(one.ttft)
        while prompts.tokens <= min(prompts.room(now, 0.05), 50_000):
            unanswered.append(server.submit(max(now, server.now), prompt_tokens=1000, output_tokens=2))
            loads[unanswered[-1]] = prompts.sent(1000)
    assert prompts.tokens == sum(one.prompt_tokens for one in unanswered)
    rate = len(waits) * 1000 / 25
    assert rate > 0.8 / laws.prefill_token_seconds * 0.8  # the engine is as good as busy
    assert sorted(waits)[len(waits) // 2] < 0.25
    prompts.gone(prompts.tokens)
    assert prompts.tokens == 0
    assert prompts.room(now + 60, 0.05) == math.inf  # long ago


def test_the_law_of_prompts_is_a_line_with_a_beginning() -> None:
    law, random_ = PromptLaw(), random.Random(1)
    for _ in range(200):
        tokens = random_.randint(10, 5000)
        law.observe(tokens, 0.03 + tokens * 2e-4 + random_.uniform(-0.005, 0.005))
    for tokens in (10, 1000, 5000):
        assert law.expect(tokens) == pytest.approx(0.03 + tokens * 2e-4, abs=0.01)
    same = PromptLaw()
    for _ in range(10):
        same.observe(100, 0.5)
    assert same.expect(200) == pytest.approx(1.0)


def test_answers_are_expected_to_be_like_those_before_and_no_longer_than_declared() -> None:
    law = ServiceLaw()
    assert law.output_tokens("batch", "acme", 10) == 10
    for _ in range(200):
        law.observe_output("batch", "acme", 600)
    assert law.output_tokens("batch", "acme", None) == pytest.approx(600)
    assert law.output_tokens("batch", "acme", 4096) == pytest.approx(600)
    law.observe_stream(100, 0.1, 101, 1.0)
    assert law.seconds(100, 50) == pytest.approx(0.1 + 0.5)


def test_the_rate_is_of_the_time_in_which_somebody_waits() -> None:
    rate = DrainRate()
    assert rate.per_second() is None
    rate.left(1000)  # nobody waited
    now = 0.0
    for _ in range(100):
        rate.backlog(now, True)
        rate.left(50)
        now += 0.1
    rate.backlog(now, False)
    assert rate.per_second() == pytest.approx(500, rel=0.1)
    rate.backlog(now + 1000, False)
    assert rate.per_second() == pytest.approx(500, rel=0.1)
