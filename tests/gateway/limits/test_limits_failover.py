"""Redis goes away and comes back; requests go on as the configuration says."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from redis_servers import RedisServer

from sol.gateway.errors import RateLimitError
from sol.gateway.limits.failover import FailoverLedger, LimitsUnavailableError
from sol.gateway.limits.ledger import Limit, Reservation
from sol.gateway.limits.redis_ledger import RedisLedger

LIMIT = Limit("key a", requests=100, tokens=1000)


@asynccontextmanager
async def failover(server: RedisServer, fail: Any = "local", **options: Any) -> AsyncIterator[FailoverLedger]:
    ledger = FailoverLedger(RedisLedger(server.url, prefix="test", **options), fail, lease=30)
    yield ledger
    await ledger.check_integrity()
    await ledger.close()


def reservation(tokens: int, limit: Limit = LIMIT) -> Reservation:
    return Reservation(uuid.uuid4().hex, (limit,), tokens)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    deadline = time.monotonic() + 20
    while not await condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def back(ledger: FailoverLedger) -> None:
    async def tried() -> bool:
        await ledger.tick()
        return not ledger.away

    await until(tried)


async def test_two_replicas_share_a_limit_and_each_counts_its_half_while_redis_is_away(
    redis_server: RedisServer,
) -> None:
    async with failover(redis_server) as one, failover(redis_server) as two:
        for ledger in (one, two, one):
            await ledger.tick()
        assert one.replicas == two.replicas == 2
        mine, theirs = reservation(300), reservation(300)
        await one.reserve(mine)
        await two.reserve(theirs)
        with pytest.raises(RateLimitError, match="400 of 1000"):
            await one.reserve(reservation(401))
        redis_server.stop()
        with pytest.raises(RateLimitError, match="200 of 500"):
            await one.reserve(reservation(201))
        assert one.away
        during = reservation(200)
        await one.reserve(during)
        await two.reserve(reservation(200))
        assert await one.settle(mine, 100)
        assert not await one.settle(mine, 100)
        redis_server.start()
        await back(one)
        await back(two)
        # Redis has forgotten everything; what was settled while it was away, and what is open, it is told.
        assert (await one.standing(LIMIT)).tokens == 100
        assert await one.settle(during, 150)
        assert (await two.standing(LIMIT)).tokens == 250


async def test_open_lets_through_and_closed_refuses_until_it_is_back(redis_server: RedisServer) -> None:
    async with failover(redis_server, "open") as opened, failover(redis_server, "closed") as closed:
        redis_server.stop()
        for _ in range(3):
            await opened.reserve(reservation(900))
            with pytest.raises(LimitsUnavailableError) as caught:
                await closed.reserve(reservation(900))
            assert caught.value.status == 503
        redis_server.start()
        await back(opened)
        await back(closed)
        await closed.reserve(reservation(900))
        with pytest.raises(RateLimitError):
            await opened.reserve(reservation(900))


async def test_a_redis_that_hangs_delays_one_time_out_and_no_request_after_it(redis_server: RedisServer) -> None:
    async with failover(redis_server, timeout=0.2) as ledger:
        waited_for = reservation(10)
        await ledger.reserve(waited_for)
        redis_server.freeze()
        try:
            hung = reservation(10)
            await ledger.reserve(hung)
            assert ledger.away
            others = [reservation(1) for _ in range(50)]
            async with asyncio.timeout(9):  # 50 time-outs would be ten seconds
                for other in others:
                    await ledger.reserve(other)
                    await ledger.settle(other, 1)
                await ledger.settle(waited_for, 5)
        finally:
            redis_server.thaw()
        await back(ledger)
        assert await ledger.settle(hung, 7)
        # What the frozen server had been asked when it froze was done when it thawed, and is settled all the same.
        assert (await ledger.standing(LIMIT)).tokens == 5 + 7


async def test_a_client_that_leaves_while_it_is_reserved_for_leaves_nothing_behind(redis_server: RedisServer) -> None:
    async with failover(redis_server, timeout=5) as ledger:
        leaving = [reservation(10) for _ in range(20)]
        for number, item in enumerate(leaving):
            task = asyncio.create_task(ledger.reserve(item))
            for _ in range(number):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await ledger.settle(item, 0, requests=0)

        async def nothing_left() -> bool:
            standing = await ledger.standing(LIMIT)
            return (standing.requests, standing.tokens) == (0, 0)

        await until(nothing_left)
        await ledger.reserve(reservation(1000))
        assert not ledger.away


async def test_two_hundred_clients_of_three_replicas_take_the_limit_and_no_more(redis_server: RedisServer) -> None:
    """Reserve more than is used, settle, and come again until refused: in the end the limit is used, to the token."""
    limit = Limit("tenant t", tokens=20_000)
    async with (
        failover(redis_server, timeout=60) as one,
        failover(redis_server, timeout=60) as two,
        failover(redis_server, timeout=60) as three,
    ):
        used = 0
        refused_wrongly = []

        async def client(number: int) -> None:
            nonlocal used
            ledger = (one, two, three)[number % 3]
            while True:
                item = reservation(50, limit)
                try:
                    await ledger.reserve(item)
                except RateLimitError as error:
                    if item.standings[0].tokens + 50 <= 20_000:
                        refused_wrongly.append(error)
                    return
                await ledger.settle(item, 23)
                used += 23

        await asyncio.gather(*map(client, range(200)))
        assert refused_wrongly == []
        assert used <= 20_000
        standing = await one.standing(limit)
        assert standing.tokens == used
        while True:  # those that were refused beside open reservations have room again
            last = reservation(50, limit)
            try:
                await one.reserve(last)
            except RateLimitError:
                break
            await one.settle(last, 23)
            used += 23
        assert 20_000 - 50 < used <= 20_000
