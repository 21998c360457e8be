"""Verdicts on the virtual clock, where it is known who is slower, and on blocks made by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sol.bench import Stop
from sol.compare import Answer, Block, Comparison, Pair, Plan, Progress, Round, compare, judge
from sol.compare.likelihoods import Likelihoods
from sol.compare.session import Outcome
from sol.compare.texts import Equivalence
from sol.compare.virtual import VirtualSampler, slower
from sol.errors import ConfigError
from sol.simulate import profile

LAWS = profile("h100-8b", noise="lognormal")


async def of_virtual(factor: float, seed: int, plan: Plan) -> Comparison:
    sampler = VirtualSampler(LAWS, slower(LAWS, factor), prompts=4, concurrency=2, seed=seed)
    return await compare(sampler, plan)


async def test_a_server_against_itself_and_against_a_slower_one() -> None:
    """The bars are those of the whole benchmark (9 and 72 of 100), here with a fifth of the runs."""
    false = found = 0
    for seed in range(20):
        false += (await of_virtual(1.0, seed, Plan())).verdict != "cannot tell"
        slow = await of_virtual(1.05, 100 + seed, Plan(effect=0.05))
        assert slow.verdict != "better"
        assert slow.announced is not None
        assert len(slow.blocks) == min(200, max(10, slow.announced))
        found += slow.verdict == "worse"
    assert false <= 3
    assert found >= 14


async def test_twice_as_fast_is_better_and_by_how_much() -> None:
    comparison = await of_virtual(0.5, 1, Plan(blocks=6))
    effect = comparison.primary
    assert comparison.verdict == "better"
    assert effect.low is not None
    assert effect.high is not None
    assert effect.low < 0.5 < effect.high
    rates = comparison.effects["throughput"]
    assert rates.ratio == pytest.approx(2, rel=0.15)
    assert rates.verdict == "better"  # although its ratio is above 1
    assert comparison.effects["ttft"].ratio == pytest.approx(0.5, rel=0.15)


async def test_what_drifts_through_a_pair_falls_out_of_a_block() -> None:
    """Whoever comes second finds the machine 10% slower: BA undoes what AB suffers."""

    def one(seconds: float, first: int) -> Round:
        return Round(answers=[answer(first + i, seconds) for i in range(3)], seconds=3 * seconds)

    blocks = [
        Block(number=n, pairs=[
            Pair(a=one(1.0, 6 * n), b=one(1.1, 6 * n), a_first=True),
            Pair(a=one(1.1, 6 * n + 3), b=one(1.0, 6 * n + 3), a_first=False),
        ])
        for n in range(8)
    ]  # fmt: skip
    comparison = judge(blocks, Plan(blocks=8))
    assert comparison.primary.ratio == pytest.approx(1.0)
    assert comparison.verdict == "cannot tell"
    assert comparison.primary.within(0.01)


def answer(place: int, e2e: float, *, error: str | None = None) -> Answer:
    failed = error is not None
    return Answer(key=str(place), place=place, e2e=None if failed else e2e, output_tokens=10, error=error)


def made(number: int, of_b: Callable[[int], Answer], of_a: Callable[[int], Answer] | None = None) -> list[Block]:
    """Blocks of two pairs of four requests; A takes a second for each."""
    of_a = of_a or (lambda place: answer(place, 1.0))

    def pair(begin: int, a_first: bool) -> Pair:
        places = range(begin, begin + 4)
        sides = [Round(answers=[side(place) for place in places], seconds=4.0) for side in (of_a, of_b)]
        return Pair(a=sides[0], b=sides[1], a_first=a_first)

    return [Block(number=n, pairs=[pair(8 * n, True), pair(8 * n + 4, False)]) for n in range(number)]


def test_one_block_that_met_a_stall_decides_nothing() -> None:
    blocks = made(10, lambda place: answer(place, 50.0 if place < 8 else 1.0 + 0.001 * (-1) ** (place // 8)))
    assert judge(blocks, Plan()).verdict == "cannot tell"


def test_five_blocks_have_no_verdict() -> None:
    assert judge(made(5, lambda place: answer(place, 3.0)), Plan()).verdict == "cannot tell"
    assert judge(made(6, lambda place: answer(place, 3.0)), Plan()).verdict == "worse"


def test_who_fails_more_often_is_worse_however_fast() -> None:
    blocks = made(6, lambda place: answer(place, 0.5, error="http_500" if place % 4 == 0 else None))
    comparison = judge(blocks, Plan())
    assert comparison.failures.only_b == 12
    assert comparison.failures.kinds_b == {"http_500": 12}
    assert comparison.primary.ratio == pytest.approx(0.5)
    assert comparison.primary.num_blocks == 6
    assert comparison.verdict == "worse"
    # As many on both sides, for instance of prompts that are too long, are no reason.
    both = made(
        6, blocks_b := (lambda place: answer(place, 0.5, error="http_400" if place % 4 == 0 else None)), blocks_b
    )
    assert not judge(both, Plan()).failures.worse
    assert judge(both, Plan()).failures.both == 12


def test_a_side_without_answers_has_no_ratio() -> None:
    comparison = judge(made(6, lambda place: answer(place, 1.0, error="timeout")), Plan())
    assert comparison.primary.ratio is None
    assert comparison.effects == {}
    assert comparison.verdict == "worse"
    # If A is gone, B is not worse, and yet nothing was compared.
    turned = judge(made(6, lambda place: answer(place, 1.0), lambda place: answer(place, 1.0, error="connect")), Plan())
    assert turned.verdict == "cannot tell"
    nothing = Likelihoods(offered=False)
    assert Outcome(comparison=turned, texts=Equivalence(num_compared=0), likelihoods=nothing).exit_code == 2


async def test_stopping_keeps_the_blocks_so_far() -> None:
    stop, seen = Stop(), list[Progress]()

    def note(progress: Progress) -> None:
        seen.append(progress)
        if len(seen) == 7:
            stop.set()

    sampler = VirtualSampler(LAWS, slower(LAWS, 2.0), prompts=2, concurrency=1, seed=3)
    comparison = await compare(sampler, Plan(blocks=10), stop=stop, on_progress=note)
    assert comparison.interrupted
    assert len(comparison.blocks) == 7
    assert comparison.verdict == "worse"
    assert [progress.total for progress in seen] == [10] * 7


async def test_a_wanted_effect_is_bounded_by_the_most_blocks() -> None:
    comparison = await of_virtual(1.0, 5, Plan(blocks=6, effect=0.001, max_blocks=7))
    assert comparison.announced is not None
    assert comparison.announced > 100
    assert len(comparison.blocks) == 7


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"blocks": 5}, "blocks must be at least 6"),
        ({"effect": 0.0}, "effect must be"),
        ({"max_blocks": 9}, "max_blocks is 9"),
        ({"metric": "speed"}, "metric must be one of"),
    ],
)
def test_a_plan_that_cannot_tell_anything_is_refused(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Plan(**wrong)  # type: ignore[arg-type]
