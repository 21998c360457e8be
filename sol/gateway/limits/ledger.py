"""What is taken from a limit before a request runs, and what it came to: the words that every ledger shares.

A limit is counted in a *sliding window*: the requests that began in any minute, and their tokens. Nothing carries
over from one minute to the next and no minute has a beginning, so there is no edge at which twice the limit fits, and
none at which a client that kept to its limit is refused. A request's tokens are unknown when it begins. It *reserves*
what it may come to, and what it really came to is *settled* when it ends: less goes back at once to where it was taken,
the moment at which the request began; more is added at the moment it is known, because nobody has counted it before.

    sum over the last minute of (settled tokens, or reserved ones while a request is open)  ≤  limit

Reserving and settling are idempotent by the reservation's id: where an answer was lost on its way, ask again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from sol.gateway.errors import RateLimitError

WINDOW_SECONDS: Final = 60.0
QUANTUM_SECONDS: Final = 0.01
"""What is taken within one quantum leaves the window together, when the youngest of it may: up to this much late."""


@dataclass(frozen=True, slots=True)
class Limit:
    """At most `requests` and `tokens` a minute; None: as many as come."""

    scope: str
    """What is limited, in words that tell it from everything else: `tenant acme`. Equal scopes share one window."""
    requests: int | None = None
    tokens: int | None = None


class Standing(msgspec.Struct, frozen=True):
    """How much of a limit is taken, the request at hand included."""

    limit: Limit
    requests: int
    tokens: int
    reset: float
    """Seconds until all of it is free again, if nothing more comes."""


class Reservation(msgspec.Struct, eq=False):
    """One request's share of its limits, from the moment it asks until it is settled."""

    id: str
    limits: tuple[Limit, ...]
    tokens: int
    """What is reserved of each limit's tokens; 1 of its requests."""
    info: str = ""
    """What whoever finds the reservation without its owner needs to know of it; the ledger does not look into it."""
    standings: tuple[Standing, ...] = ()
    settled: bool = False
    """By this process. Kept here, not by the ledger, which would have to remember all that there ever were."""


@dataclass(frozen=True, slots=True)
class Orphan:
    """A reservation whose owner has not been heard of for a lease: its process died, or hung for that long."""

    id: str
    info: str
    seen: str
    """What its owner said of it last; empty: nothing."""


class RequestBeyondLimitError(RateLimitError):
    """429 that no waiting helps: the request alone is more than the limit."""

    code = "request_beyond_limit"
    should_retry = False


class Ledger(Protocol):
    async def reserve(self, reservation: Reservation) -> None:
        """Take the reservation from all its limits, or from none. Fills in `standings`.

        Of an id that is open or settled nothing more is taken: a reservation that was slow on its way takes nothing
        after its request has been settled. Raises `RateLimitError` with the seconds to wait for, and
        `RequestBeyondLimitError` where waiting does not help; `standings` are filled in then, too.
        """
        ...

    async def settle(self, reservation: Reservation, tokens: int, requests: int = 1) -> bool:
        """What the request came to: `tokens`, and 0 `requests` if it never reached an engine and is not to count.

        True the first time; nothing changes after that. One that had been given up as an orphan is put right, and one
        that the ledger does not know is charged as of now.
        """
        ...

    async def renew(self, seen: Sequence[tuple[str, str]]) -> None:
        """The owner of these open reservations is alive; with what it has seen of each (see `Orphan`)."""
        ...

    async def expire(self) -> list[Orphan]:
        """Give up reservations that nobody has renewed for a lease. Each is returned to one caller.

        What they took stays in the window that they took it from: nobody knows how much of it was used.
        """
        ...

    async def tick(self) -> None:
        """To be called about once a second, for what has to be done now and then."""
        ...

    async def standing(self, limit: Limit) -> Standing: ...

    async def check_integrity(self) -> None:
        """Raises AssertionError where the ledger contradicts itself."""
        ...

    async def close(self) -> None: ...


def beyond(limits: Sequence[Limit], tokens: int) -> RequestBeyondLimitError | None:
    """Why a request of so many tokens will never be let through; None if it may be."""
    for limit in limits:
        if limit.tokens is not None and tokens > limit.tokens:
            return RequestBeyondLimitError(
                f"the request may take {tokens} tokens, and the limit of {limit.scope} is {limit.tokens} a minute; "
                "shorten the prompt or lower max_tokens",
                param="max_tokens",
            )
        if limit.requests == 0:
            return RequestBeyondLimitError(f"the limit of {limit.scope} is 0 requests a minute")
    return None


def over(standing: Standing, tokens: int, wait: float) -> RateLimitError:
    """The refusal of a request that does not fit beside what is taken already."""
    limit = standing.limit
    if limit.requests is not None and standing.requests + 1 > limit.requests:
        what = f"{limit.requests} requests a minute are used"
    else:
        left = max(0, (limit.tokens or 0) - standing.tokens)
        what = f"{left} of {limit.tokens} tokens a minute are left, and the request may take {tokens}"
    return RateLimitError(f"over the limit of {limit.scope}: {what}; try again in {wait:.2f} s", wait=wait)
