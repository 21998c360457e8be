"""Which of the requests that wait can no longer be answered in time.

What decides is a bound, not a guess: a request is given up once its deadline is nearer than its own prompt would take
at the fastest speed this engine has been seen to compute at. So nothing is given up that an idle engine could still
answer, and what is given up leaves the queue before it costs a step.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping

from sol.engine.request import Request

_FEWEST_TOKENS = 16
"""Steps of fewer tokens say nothing about the speed of prompts."""


class Deadlines:
    """`num_cached` says how many of a request's tokens would be found rather than computed."""

    def __init__(self, num_cached: Callable[[Request], int]) -> None:
        self._num_cached = num_cached
        self._seconds_per_token = 0.0
        """The fewest seen; 0 before any were."""
        self._heap: list[tuple[float, str]] = []
        """When to look at which request: the moments at which they might become hopeless."""

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step computed so many tokens in so many seconds."""
        if num_tokens >= _FEWEST_TOKENS and seconds > 0:
            seen = seconds / num_tokens
            self._seconds_per_token = min(seen, self._seconds_per_token or seen)

    def add(self, request: Request) -> None:
        if request.deadline is not None:
            latest = request.deadline - request.num_tokens * self._seconds_per_token
            heapq.heappush(self._heap, (latest, request.request_id))

    def take_hopeless(self, now: float, requests: Mapping[str, Request]) -> list[Request]:
        """Those of the engine's `requests` that wait for a first token, hopelessly by `now` (a monotonic second)."""
        hopeless = []
        while self._heap and self._heap[0][0] < now:
            _, request_id = heapq.heappop(self._heap)
            request = requests.get(request_id)
            if request is None or request.deadline is None or request.num_output_tokens or request.block_ids:
                continue  # it has left, or has its place
            num_tokens = request.num_tokens - self._num_cached(request)
            latest = request.deadline - num_tokens * self._seconds_per_token
            if latest < now:
                hopeless.append(request)
            else:
                heapq.heappush(self._heap, (latest, request_id))
        if len(self._heap) > 2 * len(requests) + 64:  # mostly of requests that have left
            self._heap = [entry for entry in self._heap if entry[1] in requests]
            heapq.heapify(self._heap)
        return hopeless
