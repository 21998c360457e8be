from __future__ import annotations

from token_runner import make_config, make_request

from sol.config import SchedulerConfig
from sol.engine.policy import FirstComeFirstServed, PriorityWithAging, make_policy, victim
from sol.engine.request import Request
from sol.engine.request import make_request as accept


def requests(count: int) -> list[Request]:
    return [accept(make_request(f"r{i}", [1]), max_model_len=8, sequence=i) for i in range(count)]


def test_first_come_first_served() -> None:
    policy = FirstComeFirstServed()
    a, b, c, d = requests(4)
    for request in (b, c, d):
        policy.add(request)
    assert policy.next() is b
    policy.remove(c)
    policy.put_back(a)
    assert list(policy) == [a, b, d]
    assert len(policy) == 3


def test_the_youngest_gives_way_but_never_an_older_one() -> None:
    a, b, c = requests(3)
    assert victim([a, b, c], wanting=a) is c
    assert victim([a, b], wanting=a) is b
    assert victim([a, b, c], wanting=c) is None


def arriving(name: str, second: float, priority: int, sequence: int) -> Request:
    wanted = make_request(name, [1])
    wanted.arrival_time, wanted.priority = second, priority
    return accept(wanted, max_model_len=8, sequence=sequence)


def test_a_lower_priority_goes_first_unless_the_other_has_aged() -> None:
    policy = PriorityWithAging(aging_seconds=10.0)
    old = arriving("old", 0.0, 2, 0)
    plain = arriving("plain", 5.0, 0, 1)
    late = arriving("late", 19.9, 0, 2)
    too_late = arriving("too late", 20.1, 0, 3)
    for request in (too_late, old, late, plain):
        policy.add(request)
    assert [request.request_id for request in policy] == ["plain", "late", "old", "too late"]
    policy.remove(late)
    assert policy.next() is plain
    policy.remove(plain)
    policy.put_back(plain)
    assert policy.next() is plain
    assert len(policy) == 3


def test_equal_priorities_come_in_order_of_arrival() -> None:
    policy = PriorityWithAging(aging_seconds=10.0)
    first, second = arriving("first", 1.0, 0, 0), arriving("second", 1.0, 0, 1)
    policy.add(second)
    policy.add(first)
    assert list(policy) == [first, second]


def test_the_configuration_names_the_policy() -> None:
    assert isinstance(make_policy(make_config()), FirstComeFirstServed)
    config: SchedulerConfig = make_config(scheduling_policy="priority", priority_aging_seconds=3.0)
    assert isinstance(policy := make_policy(config), PriorityWithAging)
    assert policy.key(arriving("a", 1.0, 2, 7)) == (7.0, 7)
