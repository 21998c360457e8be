"""What the queue refuses with. Nothing was begun for any of these, so trying again is never the same work twice."""

from __future__ import annotations

from sol.gateway.errors import DeadlineError, NoCapacityError


class QueueFullError(NoCapacityError):
    code = "queue_full"


class QueueTimeoutError(NoCapacityError):
    """It waited as long as its class may."""

    code = "queue_timeout"


class HopelessError(NoCapacityError):
    """Its deadline would pass before its turn came."""

    code = "deadline_unreachable"


class PassedDeadlineError(DeadlineError):
    """Its deadline passed while it waited, or is so near that no engine can meet it."""

    should_retry = None
