"""The shared ledger, and what happens while it is away.

Redis is taken to be away from the first question that it does not answer. From then on no request waits for it: one
question a second, of this process, finds out whether it is back. Meanwhile requests are refused, let through uncounted,
or counted here, by this replica's share of each limit. Its windows are not empty when that begins: what Redis let
through for this replica is counted here as well. When Redis is back, what is open then is settled there when it ends.
What began and ended while it was away is not counted there, so in the minute after, what fits may exceed a limit by
as much.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Literal

from sol.gateway.errors import NoCapacityError
from sol.gateway.limits.ledger import Limit, Orphan, Reservation, Standing
from sol.gateway.limits.memory import MemoryLedger
from sol.gateway.limits.policy import scaled
from sol.gateway.limits.redis_ledger import AWAY, RedisLedger

logger = logging.getLogger("sol.gateway.limits")

_ASK_EVERY = 1.0
_TOLD_AT_ONCE = 2000
_UNSETTLED = 100_000
"""Ended requests that are told to Redis once it is back. All of them are recorded, whatever becomes of these."""


class LimitsUnavailableError(NoCapacityError):
    """503: whether the client is within its limits cannot be told now, and the configuration says to refuse then."""

    code = "limits_unavailable"
    retry_after = 2


class FailoverLedger:
    """`fail` as in `RedisOptions`."""

    def __init__(
        self,
        shared: RedisLedger,
        fail: Literal["local", "open", "closed"],
        *,
        lease: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shared = shared
        self._fail = fail
        self._local = MemoryLedger(lease=lease, clock=clock)
        self._clock = clock
        self._lease = lease
        self._expire_from = 0.0
        self._replica = uuid.uuid4().hex
        self._away_since: float | None = None
        self._elsewhere: set[str] = set()
        """Open reservations of which Redis may know nothing, because it was away when they were taken."""
        self._unsettled: dict[str, tuple[Reservation, int, int]] = {}
        """Ended ones that Redis knows and has not been told of."""
        self.replicas = 1
        """Gateways that share the limits, when Redis was last there."""

    @property
    def away(self) -> bool:
        return self._away_since is not None

    async def reserve(self, reservation: Reservation) -> None:
        asked = not self.away
        if asked:
            try:
                await self._shared.reserve(reservation)
                self._local.note(reservation)
                return
            except AWAY as error:
                self._is_away(error)
        else:
            self._elsewhere.add(reservation.id)
        if self._fail == "closed":
            raise LimitsUnavailableError("limits cannot be checked at the moment; try again in a few seconds")
        if self._fail == "open":
            self._local.note(reservation)
            reservation.standings = ()
            return
        mine = Reservation(
            reservation.id,
            scaled(reservation.limits, self.replicas),
            reservation.tokens,
            reservation.info,
            settled=reservation.settled,
        )
        mine.tokens = min([mine.tokens, *(limit.tokens for limit in mine.limits if limit.tokens)])
        try:
            self._local.take(mine)
        except BaseException:
            self._elsewhere.discard(reservation.id)
            if asked:  # Redis may have taken it all the same, and not have said so in time
                self._keep_for_later(reservation, 0, 0)
            raise
        finally:
            reservation.standings = mine.standings

    async def settle(self, reservation: Reservation, tokens: int, requests: int = 1) -> bool:
        first = self._local.give_back(reservation, tokens, requests)
        elsewhere = reservation.id in self._elsewhere
        self._elsewhere.discard(reservation.id)
        if first and not (self.away and elsewhere):
            self._keep_for_later(reservation, tokens, requests)
            if not self.away:
                await self._tell(reservation.id)
        return first

    async def renew(self, seen: Sequence[tuple[str, str]]) -> None:
        await self._local.renew(seen)
        if not self.away:
            try:
                await self._shared.renew(seen)
            except AWAY as error:
                self._is_away(error)

    async def expire(self) -> list[Orphan]:
        """Of replicas that died; those of this one are here only if somebody forgot to settle them."""
        found = {orphan.id: orphan for orphan in await self._local.expire()}
        # Leases ran out while nobody could renew them: all who are alive get the time to.
        if not self.away and self._clock() >= self._expire_from:
            try:
                found.update({orphan.id: orphan for orphan in await self._shared.expire()})
            except AWAY as error:
                self._is_away(error)
        return list(found.values())

    async def standing(self, limit: Limit) -> Standing:
        if not self.away:
            try:
                return await self._shared.standing(limit)
            except AWAY as error:
                self._is_away(error)
        return await self._local.standing(limit)

    async def tick(self) -> None:
        """Ask whether Redis is there, say that this replica is, and tell what Redis has not been told."""
        try:
            await self._shared.ping()
            self.replicas = await self._shared.heartbeat(self._replica, 5 * _ASK_EVERY)
        except AWAY as error:
            self._is_away(error)
            return
        if self._away_since is not None:
            logger.warning("Redis is back after %.0f s: limits are shared again", self._clock() - self._away_since)
            self._away_since = None
            self._expire_from = self._clock() + self._lease
        for key in list(itertools.islice(self._unsettled, _TOLD_AT_ONCE)):
            if self.away:
                return
            await self._tell(key)

    async def check_integrity(self) -> None:
        await self._local.check_integrity()
        if not self.away:
            await self._shared.check_integrity()

    async def close(self) -> None:
        if not self.away:
            with contextlib.suppress(*AWAY):
                await self._shared.leave(self._replica)
        with contextlib.suppress(*AWAY):
            await self._shared.close()

    async def _tell(self, key: str) -> None:
        """Settle one in Redis; it is kept, to be told again, unless Redis has answered."""
        entry = self._unsettled.get(key)
        if entry is None:
            return
        try:
            await self._shared.settle(*entry)
        except AWAY as error:
            self._is_away(error)
        else:
            self._unsettled.pop(key, None)

    def _keep_for_later(self, reservation: Reservation, tokens: int, requests: int) -> None:
        self._unsettled[reservation.id] = (reservation, tokens, requests)
        if len(self._unsettled) > _UNSETTLED:
            self._unsettled.pop(next(iter(self._unsettled)))

    def _is_away(self, error: Exception) -> None:
        if self._away_since is None:
            self._away_since = self._clock()
            what = {
                "local": f"this gateway counts for itself, and gives out one of {self.replicas} shares",
                "open": "nothing is limited",
                "closed": "limited requests are refused",
            }[self._fail]
            logger.error("Redis is away (%s: %s): until it is back, %s", type(error).__name__, error, what)
