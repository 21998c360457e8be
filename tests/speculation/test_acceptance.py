"""Python and the library of kernels judge drafts, choose among them and learn from them alike, to the last bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from sol.engine.types import Draft
from sol.ops.cpu.native import NativeError, NativeUnavailableError
from sol.speculation.native import NativeArithmetic
from sol.speculation.plan import StepShape
from sol.speculation.plan.acceptance import Acceptance
from sol.speculation.plan.arithmetic import Arithmetic, Choice, PythonArithmetic
from sol.speculation.plan.costs import CostModel
from sol.speculation.plan.hand import Hand
from sol.speculation.plan.regime import Regime

WIDTH = 20
"""More drafts than have positions of their own"""


def native() -> NativeArithmetic:
    try:
        return NativeArithmetic()
    except NativeUnavailableError as error:
        pytest.skip(str(error))


def shape_of(rows: int) -> StepShape:
    return StepShape(num_tokens=rows, num_requests=rows, num_logits_rows=rows, num_context_tokens=200 * rows)


@dataclass
class Side:
    """What one arithmetic works on."""

    arithmetic: Arithmetic
    costs: CostModel

    def __post_init__(self) -> None:
        self.acceptance = [Acceptance(has_curve=False), Acceptance()]
        self.hand, self.regime = Hand(self.acceptance, WIDTH), Regime(2)
        self.slots: list[int] = []

    def state(self) -> Iterator[float]:
        for one in self.acceptance:
            yield from one.state
        yield from self.regime.table
        yield from self.hand.habits
        for slot in self.slots:
            start, count = slot * WIDTH, self.hand.counts[slot]
            yield from self.hand.predicted[start : start + count]
            yield from self.hand.expected[start : start + count]


def costs() -> CostModel:
    """Stairs of 8 tokens, so that the best number of drafts is not always where the price first exceeds the worth."""
    return CostModel([(shape_of(n), 1e-3 + 2e-4 * ((n + 7) // 8)) for n in (1, 2, 8, 9, 16, 17, 64, 65, 512)])


def draft(rng: random.Random) -> Draft:
    count = rng.randint(1, WIDTH)
    scored = rng.random() < 0.8
    scores = [rng.choice([0.0, 1.0, rng.random() ** 0.1]) for _ in range(count)] if scored else None
    return Draft(drafter="suffix", token_ids=[1] * count, scores=scores)


@pytest.mark.parametrize("requests", [1, 2, 40])
def test_python_and_the_library_agree_to_the_last_bit(requests: int) -> None:
    rng = random.Random(requests)
    sides = [Side(PythonArithmetic(), costs()), Side(native(), costs())]
    for side in sides:
        side.slots = [side.hand.take() for _ in range(requests)]
    some = False
    for _ in range(60):
        drafts = [draft(rng) for _ in range(requests)]
        drafters = [rng.randrange(2) for _ in drafts]
        limits = [rng.randint(1, WIDTH) for _ in drafts]
        choice = Choice(
            shape=shape_of(requests),
            max_tokens=rng.choice([1, 7, 1000]),
            least=rng.choice([0.03, 0.4]),
            margin=0.01,
            nearly=0.99,
            paid=rng.random() * 1e-4,
            deciding=1e-5,
        )
        taught = [rng.random() < 0.7 for _ in drafts]
        right = [rng.randint(0, len(one.token_ids)) for one in drafts]
        late = rng.random() < 0.3  # nobody chose: the drafts are judged when they are learned from
        found = []
        for side in sides:
            lengths = [side.hand.put(slot, one) for slot, one in zip(side.slots, drafts, strict=True)]
            counts = [0] * requests
            chosen = None
            if not late:
                items = [n for record in zip(side.slots, drafters, lengths, limits, strict=True) for n in record]
                chosen = side.arithmetic.choose(side.hand, side.regime, side.costs, choice, items)
                counts, lengths = chosen[0], [-1] * requests
            items = []
            for i, slot in enumerate(side.slots):
                known = min(right[i] + 1, len(drafts[i].token_ids))
                items += [slot, drafters[i], lengths[i], right[i], known, counts[i], int(taught[i])]
            gains = side.arithmetic.learn(side.hand, side.regime, items, least=choice.least, price=0.1)
            found.append((chosen, gains, list(side.state())))
            some = some or any(counts)
        assert found[0] == found[1]
    assert some


def test_few_drafts_are_chosen_from_requests_as_from_their_survivals() -> None:
    """By their survivals, over all requests, and each request's from its first one on."""
    for arithmetic in (PythonArithmetic(), native()):
        side = Side(arithmetic, costs())
        side.acceptance[0].state[-2] = 100.0  # right so often that it is believed
        slots = [side.hand.take() for _ in range(2)]
        good = Draft(drafter="suffix", token_ids=[1] * 4, scores=[0.99] * 4)
        poor = Draft(drafter="suffix", token_ids=[1] * 4, scores=[0.6] * 4)
        items = []
        for slot, one in zip(slots, (poor, good), strict=True):
            items += [slot, 0, side.hand.put(slot, one), 4]
        choice = Choice(shape=shape_of(2), max_tokens=4, least=0.03, margin=0.01, nearly=0.99, paid=0.0, deciding=0.0)
        counts, last, looked_at = side.arithmetic.choose(side.hand, side.regime, side.costs, choice, items)
        assert counts == [0, 4]
        assert last == side.hand.expected[slots[1] * WIDTH + 3]
        assert looked_at == sum(side.hand.counts[slot] for slot in slots)


def test_slots_keep_what_they_hold_when_there_are_more_of_them() -> None:
    side = Side(native(), costs())
    first = side.hand.take()
    side.hand.put(first, Draft(drafter="suffix", token_ids=[1] * 3, scores=[0.5, 0.25, 0.125]))
    others = {side.hand.take() for _ in range(50)}
    assert first not in others
    assert len(others) == 50
    assert list(side.hand.scores[first * WIDTH : first * WIDTH + 3]) == [0.5, 0.25, 0.125]
    gains = side.arithmetic.learn(side.hand, side.regime, [first, 0, 3, 0, 0, 0, 0], least=0.03, price=0.0)
    assert gains == [side.hand.expected[first * WIDTH]]
    side.hand.give_back(first)
    assert side.hand.take() == first


@pytest.mark.parametrize(
    ("items", "said"),
    [
        ([8, 0, 1, 0, 0, 0, 0], "slot 8; there are 8"),
        ([0, 2, 1, 0, 0, 0, 0], "drafter 2; there are 2"),
        ([0, 0, WIDTH + 1, 0, 0, 0, 0], f"{WIDTH + 1} drafts; a slot has room for {WIDTH}"),
        ([0, 0, 1, 0, WIDTH + 1, 0, 1], f"of {WIDTH + 1} drafts right"),
    ],
)
def test_the_library_refuses_what_is_not_there(items: list[int], said: str) -> None:
    side = Side(native(), costs())
    with pytest.raises(NativeError, match=said):
        side.arithmetic.learn(side.hand, side.regime, items, least=0.03, price=0.0)


@pytest.mark.parametrize("score", [float("nan"), 1.5])
def test_the_library_refuses_a_score_that_is_not_a_probability(score: float) -> None:
    side = Side(native(), costs())
    slot = side.hand.take()
    length = side.hand.put(slot, Draft(drafter="suffix", token_ids=[1], scores=[score]))
    with pytest.raises(NativeError, match="it is a probability"):
        side.arithmetic.learn(side.hand, side.regime, [slot, 0, length, 0, 0, 0, 0], least=0.03, price=0.0)
