"""What steps and drafters cost: fitted, corrected while running, and hard to fool."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from sol.speculation.plan import StepShape, shapes_to_measure
from sol.speculation.plan.costs import CostModel, DraftingCost


def shape(tokens: int, requests: int = 1, context: int = 128) -> StepShape:
    return StepShape(
        num_tokens=tokens, num_requests=requests, num_logits_rows=tokens, num_context_tokens=requests * context
    )


def seconds_of(step: StepShape) -> float:
    """Flat, then linear, with a share for requests and context."""
    return 4e-3 + 2e-5 * max(0, step.num_tokens - 32) + 1e-5 * step.num_requests + 1e-8 * step.num_context_tokens


def fitted(streams: int = 64) -> CostModel:
    shapes = shapes_to_measure(
        max_num_seqs=streams, max_num_batched_tokens=4096, max_model_len=2048, num_speculative_tokens=16
    )
    return CostModel([(step, seconds_of(step)) for step in shapes])


def test_shapes_to_measure_respect_the_engines_limits_and_begin_with_a_plain_step() -> None:
    for limits in (
        (1, 16, 32, 4),
        (8, 64, 64, 16),
        (256, 512, 2048, 16),
        (3, 7, 6, 1),
        (4, 64, 130, 16),
        (4, 64, 17, 16),
    ):
        seqs, batched, length, drafts = limits
        shapes = shapes_to_measure(
            max_num_seqs=seqs, max_num_batched_tokens=batched, max_model_len=length, num_speculative_tokens=drafts
        )
        assert (shapes[0].num_tokens, shapes[0].num_requests) == (1, 1)
        for step in shapes:
            assert step.num_requests <= seqs
            assert step.num_tokens <= batched
            assert step.num_tokens // step.num_requests <= drafts + 1
            each = step.num_tokens // step.num_requests
            context = step.num_context_tokens // step.num_requests
            assert context >= each
            assert context + 2 * each + 1 <= length  # it runs three times, all of its drafts may be accepted


@pytest.mark.parametrize(("requests", "tokens"), [(1, 1), (1, 10), (2, 3), (16, 2), (20, 5), (64, 1), (50, 8)])
def test_steps_that_were_not_measured_are_foretold(requests: int, tokens: int) -> None:
    step = shape(requests * tokens, requests, 300)
    assert fitted().seconds(step) == pytest.approx(seconds_of(step), rel=0.06)


def test_a_curve_begins_at_the_step_itself_and_never_falls() -> None:
    model = fitted()
    rng = random.Random(0)
    for _ in range(200):
        step = shape(rng.randint(1, 300), rng.randint(1, 8))
        model.observe(step, seconds_of(step) * rng.lognormvariate(0, 0.2))
    step = shape(12, 12)
    curve = model.curve(step, 100)
    assert len(curve) == 101
    assert curve[0] == pytest.approx(model.seconds(step))
    assert all(a <= b for a, b in itertools.pairwise(curve))
    assert model.curve(step, 100, 30) == curve[::30]
    assert len(model.curve(shape(16_380), 40)) == 41


def test_a_machine_that_becomes_slower_is_followed_at_all_sizes() -> None:
    model = fitted()
    for _ in range(60):
        model.observe(shape(4, 4), 1.5 * seconds_of(shape(4, 4)))
    for step in (shape(4, 4), shape(40, 8)):
        assert model.seconds(step) == pytest.approx(1.5 * seconds_of(step), rel=0.1)


def test_pauses_change_little() -> None:
    model = fitted()
    for number in range(200):
        model.observe(shape(4, 4), seconds_of(shape(4, 4)) * (50.0 if number % 40 == 39 else 1.0))
    assert model.seconds(shape(4, 4)) == pytest.approx(seconds_of(shape(4, 4)), rel=0.05)


def test_what_the_fit_got_wrong_about_a_size_is_mended() -> None:
    model = fitted()
    for _ in range(300):
        model.observe(shape(8, 8), seconds_of(shape(8, 8)))
        model.observe(shape(24, 8), 1.1 * seconds_of(shape(24, 8)))
    ratio = model.seconds(shape(24, 8)) / model.seconds(shape(8, 8))
    assert ratio == pytest.approx(1.1 * seconds_of(shape(24, 8)) / seconds_of(shape(8, 8)), rel=0.03)


def test_prompts_have_a_price_of_their_own_and_do_not_change_that_of_decoding() -> None:
    model = fitted()
    before = model.seconds(shape(8, 8))
    mixed = StepShape(num_tokens=1008, num_requests=9, num_logits_rows=8, num_context_tokens=2024)
    for _ in range(60):
        model.observe(mixed, before + 1000 * 5e-6)
    assert model.seconds(mixed) == pytest.approx(before + 5e-3, rel=0.1)
    assert model.seconds(shape(8, 8)) == pytest.approx(before, rel=0.01)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_clocks_that_went_wrong_are_ignored(seconds: float) -> None:
    model = fitted()
    before = model.seconds(shape(4, 4))
    model.observe(shape(4, 4), seconds)
    assert model.seconds(shape(4, 4)) == before
    price = DraftingCost(1e-5, 1e-5, 1e-7, 3e-6)
    price.observe(1, 4, 2, math.nan)
    assert price.per_request == 1e-5


def test_without_measurements_the_first_step_sets_the_scale() -> None:
    model = CostModel()
    model.observe(shape(1), 0.02)
    assert model.seconds(shape(1)) == pytest.approx(0.02, rel=0.05)
    assert 0.02 < model.seconds(shape(64)) < 0.2


def test_what_a_drafter_costs_is_learned_part_by_part() -> None:
    rng = random.Random(0)
    price = DraftingCost(1e-3, 1e-3, 1e-3, 1e-3)
    for _ in range(2000):
        requests = rng.randint(1, 32)
        tokens, unread = requests * rng.randint(1, 8), requests * rng.randint(1, 40)
        seconds = 2e-3 + 1e-4 * requests + 3e-4 * tokens + 1e-5 * unread
        price.observe(requests, tokens, unread, seconds * rng.lognormvariate(0, 0.05))
    assert price.per_token == pytest.approx(3e-4, rel=0.2)
    expected = price.base + 8 * price.per_request + 32 * price.per_token + 80 * price.per_unread
    assert expected == pytest.approx(2e-3 + 8e-4 + 96e-4 + 8e-4, rel=0.1)
