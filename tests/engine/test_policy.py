from __future__ import annotations

from token_runner import make_request

from sol.engine.policy import FirstComeFirstServed
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
    policy = FirstComeFirstServed()
    a, b, c = requests(3)
    assert policy.victim([a, b, c], wanting=a) is c
    assert policy.victim([a, b], wanting=a) is b
    assert policy.victim([a, b, c], wanting=c) is None
