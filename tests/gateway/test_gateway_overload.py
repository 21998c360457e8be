"""benchmarks/gateway_overload.py, for half a minute of its virtual time: what the queue is for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gateway_overload as overload


def p95(requests: list[Any], class_name: str, begin: float, seconds: float) -> float:
    times = [
        (seconds if each.first_token is None else each.first_token) - each.at
        for each in requests
        if each.class_name == class_name and each.at > begin
    ]
    return sorted(times)[int(0.95 * len(times))]


@pytest.mark.parametrize("queue", [True, False])
def test_at_overload_realtime_keeps_its_promise_with_the_queue_only_and_batch_goes_on(queue: bool) -> None:
    begin, seconds = 20.0, 36.0  # what engines take well is learned by then
    arm = overload.Arm(overload.make_requests(50.0, seconds, seed=11), queue=queue)
    arm.run(seconds)
    target = overload.TARGETS["realtime"]
    assert (p95(arm.requests, "realtime", begin, seconds) <= target) is queue
    done = [each for each in arm.requests if each.finish is not None]
    assert sum(each.class_name == "batch" for each in done) > 5 * seconds
    arm.dispatcher.check_integrity()
    for index, (credit, open_) in enumerate(zip(arm.credits, arm.open, strict=True)):
        assert open_ >= 0
        assert credit.limit is None or credit.limit >= 4
        assert arm.prompts[index].tokens == sum(
            each.prompt_tokens for each in arm._unanswered[index] if each.first_token_time is None
        )
