"""Who goes first, and who has to give way."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from sol.engine.request import Request


class FirstComeFirstServed:
    """The requests that wait, oldest first; of those that run, the youngest gives way.

    Strict: a request that does not fit yet blocks those behind it, so that a long prompt is never overtaken for ever
    by short ones.
    """

    def __init__(self) -> None:
        # An OrderedDict because an abort takes requests from the middle.
        self._waiting: OrderedDict[str, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting.values())

    def add(self, request: Request) -> None:
        self._waiting[request.request_id] = request

    def put_back(self, request: Request) -> None:
        """A preempted request: it is older than all that wait, because it had been taken before them."""
        self._waiting[request.request_id] = request
        self._waiting.move_to_end(request.request_id, last=False)

    def next(self) -> Request:
        """The request whose turn it is; it stays in the queue."""
        return next(iter(self._waiting.values()))

    def remove(self, request: Request) -> None:
        del self._waiting[request.request_id]

    def victim(self, running: Sequence[Request], wanting: Request) -> Request | None:
        """Whom to preempt so that `wanting` gets blocks: the youngest, and never an older one (then None)."""
        youngest = running[-1]
        return youngest if youngest is not wanting else None
