"""When faults happen, and to whom: without a server."""

from __future__ import annotations

from typing import Any

import pytest

from sol.errors import ConfigError
from sol.simulate.faults import Fault, Faults, parse_fault

PATH = "/v1/completions"


def kinds(faults: Faults, now: float, ordinal: int = 0, path: str = PATH, **headers: str) -> list[str]:
    return [fault.kind for fault in faults.meet(now, ordinal, path, headers)]


def test_a_window_counts_from_when_the_fault_was_set() -> None:
    faults = Faults()
    faults.add([Fault(kind="error", start=1.0, end=2.0)], now=100.0)
    assert [kinds(faults, now) for now in (100.0, 101.0, 101.99, 102.0)] == [[], ["error"], ["error"], []]


def test_a_share_is_drawn_by_seed_and_request() -> None:
    def met(seed: int) -> list[bool]:
        faults = Faults(seed)
        faults.add([Fault(kind="hang", share=0.3)], now=0.0)
        return [bool(kinds(faults, 1.0, ordinal)) for ordinal in range(2000)]

    assert met(1) == met(1) != met(2)
    assert sum(met(1)) / 2000 == pytest.approx(0.3, abs=0.04)


def test_a_count_a_header_and_a_path_select() -> None:
    faults = Faults()
    (counted,) = faults.add([Fault(kind="error", count=2, header="X-Break = yes", path=PATH)], now=0.0)
    assert kinds(faults, 1.0) == []
    assert kinds(faults, 1.0, **{"x-break": "no"}) == []
    assert kinds(faults, 1.0, path="/v1/chat/completions", **{"x-break": "yes"}) == []
    assert [kinds(faults, 1.0, **{"x-break": "yes"}) for _ in range(3)] == [["error"], ["error"], []]
    assert counted.as_dict(1.0) == {
        "id": 1, "kind": "error", "count": 2, "header": "X-Break = yes", "path": PATH, "active": True, "hits": 2,
    }  # fmt: skip
    faults.add([Fault(kind="hang", header="x-any")], now=0.0)
    assert kinds(faults, 1.0, **{"x-any": ""}) == ["hang"]
    assert faults.remove(1)
    assert not faults.remove(1)


def test_health_flaps_with_its_period() -> None:
    faults = Faults()
    faults.add([Fault(kind="unhealthy", start=10.0, period=4.0)], now=0.0)
    seen = [faults.state("unhealthy", now) is not None for now in (9.9, 10.0, 11.9, 12.0, 13.9, 14.0, 16.0)]
    assert seen == [False, True, True, False, False, True, False]


def test_stalls_may_overlap_and_steps_may_span_several() -> None:
    faults = Faults()
    faults.add([Fault(kind="stall", start=0.0, seconds=10.0), Fault(kind="stall", start=5.0, end=15.0),
                Fault(kind="stall", start=16.0, seconds=1.0)], now=0.0)  # fmt: skip
    assert faults.end_of_step(0.0, 1.0) == 16.0
    assert faults.end_of_step(0.0, 2.0) == 18.0
    assert faults.end_of_step(15.5, 0.5) == 16.0
    assert faults.end_of_step(17.0, 0.5) == 17.5
    faults.clear()
    faults.add([Fault(kind="slow", factor=3.0, end=5.0)], now=0.0)
    assert [faults.end_of_step(begin, 1.0) for begin in (1.0, 5.0)] == [4.0, 6.0]


def test_the_next_change_is_that_of_the_port() -> None:
    faults = Faults()
    faults.add([Fault(kind="crash", start=2.0, seconds=3.0), Fault(kind="error", start=1.0)], now=10.0)
    assert [faults.next_change(now) for now in (10.0, 12.0, 15.0)] == [12.0, 15.0, None]


@pytest.mark.parametrize(
    ("data", "param"),
    [
        ([], "faults"),
        ({}, "kind"),
        ({"kind": "flood"}, "kind"),
        ({"kind": ["error"]}, "kind"),
        ({"kind": "error", "statsu": 500}, "faults"),
        ({"kind": "error", "status": 200}, "status"),
        ({"kind": "error", "status": "500"}, "status"),
        ({"kind": "error", "share": 1.5}, "share"),
        ({"kind": "error", "share": None}, "share"),
        ({"kind": "error", "start": -1}, "start"),
        ({"kind": "error", "start": 2, "end": 2}, "end"),
        ({"kind": "error", "count": 0}, "count"),
        ({"kind": "error", "header": ""}, "header"),
        ({"kind": "error", "after_events": 3}, "after_events"),
        ({"kind": "stall", "share": 0.5}, "share"),
        ({"kind": "stall", "seconds": 1, "end": 2}, "seconds"),
        ({"kind": "pause"}, "seconds"),
        ({"kind": "network"}, "seconds"),
        ({"kind": "network", "bytes_per_second": 0}, "bytes_per_second"),
        ({"kind": "slow", "factor": 0}, "factor"),
        ({"kind": "unhealthy", "period": 0}, "period"),
        ({"kind": "truncate", "clean": 1}, "clean"),
        ({"kind": "truncate", "after_bytes": -1}, "after_bytes"),
        ({"kind": "reset", "after_bytes": 5, "after_events": 5}, "after_bytes"),
        ({"kind": "pause", "seconds": 1, "path": "/health"}, "path"),
        ({"kind": "error", "path": 3}, "path"),
        ({"kind": "slow", "factor": float("inf")}, "factor"),
    ],
)
def test_what_means_nothing_is_refused_by_name(data: Any, param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_fault(data)
    assert caught.value.param == param
