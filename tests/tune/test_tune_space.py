"""Spaces, and what crashes exclude from them."""

from __future__ import annotations

import pytest
from simulated_tuning import small_space

from sol.errors import ConfigError
from sol.tune import Parameter, Space
from sol.tune.constraints import Constraints


def test_a_space_lists_every_configuration_once_and_finds_its_place_again() -> None:
    space = small_space(quantization=(None, "int8"))
    configs = list(space)
    assert len(configs) == space.size == 4 * 3 * 2 * 2 * 2
    assert len({space.place(config) for config in configs}) == space.size
    assert all(space.at(space.place(config)) == config for config in configs)
    assert {**configs[0], "max_num_seqs": 3} not in space
    assert {} not in space


def test_neighbours_differ_in_one_parameter_near_ones_first() -> None:
    space = small_space(quantization=(None, "int8", "int4"))
    config = space.at((0, 1, 0, 0, 1))
    near = list(space.neighbours(config))
    assert all(sum(one[name] != config[name] for name in config) == 1 for one in near)
    steps = [one["max_num_seqs"] for one in near if one["max_num_seqs"] != 2]
    assert steps == [8, 32], "one place away, then two"
    assert {one["quantization"] for one in near} == {None, "int8", "int4"}


def test_what_changes_answers_is_told_apart() -> None:
    space = small_space(quantization=(None, "int8"))
    lossless, lossy = space.at((0, 0, 0, 0, 0)), space.at((0, 0, 0, 0, 1))
    assert space.lossy_part(lossless) == {}
    assert space.lossy_part(lossy) == {"quantization": "int8"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"values": ()}, "needs at least one value"),
        ({"values": (1, 1)}, "has a value twice"),
        ({"values": (2, 1)}, "numbers must ascend"),
        ({"values": ("int8",), "lossy": True}, "needs None among its values"),
    ],
)
def test_parameters_that_are_none(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Parameter(name="x", **options)  # type: ignore[arg-type]


def test_a_space_has_a_name_once() -> None:
    with pytest.raises(ConfigError, match="twice"):
        Space([Parameter(name="x", values=(1,)), Parameter(name="x", values=(2,))])


def test_who_asks_for_more_than_the_dead_would_die_too() -> None:
    space = small_space()
    constraints = Constraints(space)
    dead = space.at((2, 1, 0, 0))
    constraints.add_crash(dead, "out of memory")
    assert constraints.excludes(dead) == "it died before: out of memory"
    assert "out of memory" in (constraints.excludes(space.at((3, 1, 1, 0))) or "")
    assert constraints.excludes(space.at((1, 2, 0, 0))) is None, "fewer requests"
    assert constraints.excludes(space.at((3, 2, 0, 1))) is None, "another drafter, of which nothing is known"
    assert constraints.describe() == [
        "max_num_seqs 32 or more, max_num_batched_tokens 512 or more with num_speculative_tokens 0: out of memory"
    ]


def test_a_success_that_asks_for_as_much_takes_the_rule_back() -> None:
    space = small_space()
    constraints = Constraints(space)
    dead = space.at((2, 1, 0, 0))
    constraints.add_crash(dead, "a cosmic ray")
    constraints.add_success(space.at((3, 1, 0, 0)))
    assert constraints.excludes(dead) is not None, "itself is not tried again"
    assert constraints.excludes(space.at((3, 2, 0, 0))) is None
    assert constraints.describe()[0].endswith("alone: a cosmic ray")


def test_a_value_with_which_nothing_ever_ran_is_excluded_unless_nothing_runs_at_all() -> None:
    space = small_space(quantization=(None, "int8", "int4"))
    constraints = Constraints(space)
    constraints.add_crash(space.at((2, 1, 0, 0, 2)), "no kernels")
    constraints.add_crash(space.at((1, 2, 0, 1, 2)), "no kernels")
    smaller = space.at((0, 0, 0, 0, 2))
    assert constraints.excludes(smaller) is None, "it may be anything, as long as nothing else ran"
    constraints.add_success(space.at((2, 1, 0, 0, 0)))
    assert constraints.excludes(smaller) is None, "the second death may have been for want of memory"
    constraints.add_success(space.at((2, 2, 0, 0, 0)))
    assert "all 2 with quantization 'int4' died" in (constraints.excludes(smaller) or "")
    assert constraints.excludes(space.at((0, 0, 0, 0, 1))) is None
    constraints.add_success(smaller)
    assert constraints.excludes(space.at((0, 1, 0, 0, 2))) is None
