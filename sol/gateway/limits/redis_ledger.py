"""The ledger that replicas share, in Redis or Valkey: one atomic script, one round trip, to reserve and one to settle.

Its clock is the server's, so replicas need not agree on theirs. All keys begin with `{prefix}`, in braces: in a cluster
they lie in one slot, because a script needs them in one place. Everything expires by itself.

    {prefix}:open      sorted set   reservations that are open, by the end of their lease
    {prefix}:r:ID      hash         one reservation: state, quantum, charged, info, seen
    {prefix}:w:SCOPE   hash         a window's sums, and what was taken in each quantum
    {prefix}:q:SCOPE   list         the quanta of that window, oldest first
    {prefix}:replicas  sorted set   gateways that are alive, by when they were last heard of
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any, Final

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from sol.errors import ConfigError
from sol.gateway.limits.ledger import (
    QUANTUM_SECONDS,
    WINDOW_SECONDS,
    Limit,
    Orphan,
    Reservation,
    Standing,
    beyond,
    over,
)

AWAY: Final = (RedisError, OSError, TimeoutError)
"""What is raised where Redis does not answer, or cannot do as it is asked: it is full, or a replica that only reads."""

_QUANTUM_MS: Final = round(QUANTUM_SECONDS * 1000)
_ORPHANS_AT_ONCE: Final = 200


class RedisLedger:
    """`timeout`: seconds that Redis may take to answer. `clock` (seconds) stands in for the server's where it is given.
    The rest as of `MemoryLedger`. Every method raises one of `AWAY` where there is no answer."""

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "sol",
        timeout: float = 0.25,
        connections: int = 64,
        window: float = WINDOW_SECONDS,
        lease: float = 60.0,
        retention: float = 600.0,
        clock: Callable[[], float] | None = None,
    ) -> None:
        try:
            pool = BlockingConnectionPool.from_url(
                url,
                max_connections=connections,
                timeout=timeout,
                socket_timeout=timeout,
                socket_connect_timeout=timeout,
                # A connection that broke while it lay idle; asking again is safe, since every script is idempotent.
                retry=Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,)),
            )
        except (ValueError, TypeError):  # what they say may be a part of the password
            raise ConfigError(
                "limits.redis.url must be like redis://:password@host:6379/0, with characters like / and @ in the "
                "password written as %2F and %40",
                param="limits.redis.url",
            ) from None
        self._redis: Redis = Redis.from_pool(pool)
        self._p = f"{{{prefix}}}:"
        self._window = round(window / QUANTUM_SECONDS)
        self._lease_ms = round(lease * 1000)
        self._retention_ms = round(retention * 1000)
        self._clock = clock
        shared = (files(__package__) / "window.lua").read_text()
        self._reserve, self._settle, self._renew, self._expire = (
            self._redis.register_script(shared + (files(__package__) / f"{name}.lua").read_text())
            for name in ("reserve", "settle", "renew", "expire")
        )

    async def reserve(self, reservation: Reservation) -> None:
        limits = reservation.limits
        refusal = beyond(limits, reservation.tokens)
        if refusal is not None:
            reservation.standings = tuple([await self.standing(limit) for limit in limits])
            raise refusal
        arguments: list[Any] = [
            self._now(), self._window, _QUANTUM_MS, self._lease_ms, reservation.id, reservation.tokens, reservation.info
        ]  # fmt: skip
        for limit in limits:
            arguments.append(-1 if limit.requests is None else limit.requests)
            arguments.append(-1 if limit.tokens is None else limit.tokens)
        taken, worst, wait_ms, *rest = await self._reserve(keys=self._keys(reservation), args=arguments)
        reservation.standings = tuple(
            Standing(limit, int(rest[3 * i]), int(rest[3 * i + 1]), int(rest[3 * i + 2]) / 1000)
            for i, limit in enumerate(limits)
        )
        if not int(taken):
            raise over(reservation.standings[int(worst) - 1], reservation.tokens, max(int(wait_ms), _QUANTUM_MS) / 1000)

    async def settle(self, reservation: Reservation, tokens: int, requests: int = 1) -> bool:
        arguments: list[Any] = [
            self._now(), self._window, _QUANTUM_MS, self._retention_ms, reservation.id, tokens, requests
        ]  # fmt: skip
        return bool(int(await self._settle(keys=self._keys(reservation), args=arguments)))

    async def renew(self, seen: Sequence[tuple[str, str]]) -> None:
        for start in range(0, len(seen), 100):
            chunk = seen[start : start + 100]
            arguments: list[Any] = [self._now(), self._lease_ms]
            for pair in chunk:
                arguments.extend(pair)
            keys = [f"{self._p}open", *(f"{self._p}r:{key}" for key, _ in chunk)]
            await self._renew(keys=keys, args=arguments)

    async def expire(self) -> list[Orphan]:
        found: list[Orphan] = []
        while True:
            arguments: list[Any] = [self._now(), self._retention_ms, _ORPHANS_AT_ONCE, f"{self._p}r:"]
            answer = [_text(item) for item in await self._expire(keys=[f"{self._p}open"], args=arguments)]
            found += [Orphan(*answer[i : i + 3]) for i in range(0, len(answer), 3)]
            if len(answer) < 3 * _ORPHANS_AT_ONCE:
                return found

    async def tick(self) -> None:
        pass

    async def standing(self, limit: Limit) -> Standing:
        now = await self._server_now()
        taken, quanta = await self._read(limit.scope)
        kept = [quantum for quantum in quanta if quantum > now // _QUANTUM_MS - self._window - 1]
        reset = (kept[-1] + self._window + 1) * _QUANTUM_MS - now if kept else 0
        return Standing(
            limit,
            sum(taken.get(f"r{quantum}", 0) for quantum in kept),
            sum(taken.get(f"t{quantum}", 0) for quantum in kept),
            max(0, reset) / 1000,
        )

    async def heartbeat(self, replica: str, every: float) -> int:
        """This replica is alive, and tells so `every` so many seconds. Returns how many are."""
        now, key = await self._server_now(), f"{self._p}replicas"
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.zadd(key, {replica: now})
        pipeline.zremrangebyscore(key, "-inf", now - 3000 * every)
        pipeline.zcard(key)
        pipeline.pexpire(key, math.ceil(6000 * every))
        return max(1, int((await pipeline.execute())[2]))

    async def leave(self, replica: str) -> None:
        """This replica is about to stop, and the others' shares grow by its own."""
        await self._redis.zrem(f"{self._p}replicas", replica)

    async def check_integrity(self) -> None:
        async for key in self._redis.scan_iter(match=_escaped(f"{self._p}w:") + "*", count=500):
            scope = _text(key).removeprefix(f"{self._p}w:")
            taken, quanta = await self._read(scope)
            for name in "rt":
                cells = [taken.get(f"{name}{quantum}", 0) for quantum in quanta]
                assert taken.get(name, 0) == sum(cells), (scope, name)
                assert all(amount >= 0 for amount in cells), (scope, name)
            assert len(taken) == 2 * len(quanta) + (2 if quanta else 0), scope
            assert quanta == sorted(set(quanta)), scope
        for key in await self._redis.zrange(f"{self._p}open", 0, -1):
            state = await self._redis.hget(f"{self._p}r:{_text(key)}", "state")
            # None and settled: it was settled between the two questions.
            assert state is None or _text(state) in ("open", "settled"), key

    async def ping(self) -> None:
        """Nothing if Redis is there and takes writes."""
        await self._redis.set(f"{self._p}ping", 1, px=1000)

    async def close(self) -> None:
        await self._redis.aclose(close_connection_pool=True)

    async def _read(self, scope: str) -> tuple[dict[str, int], list[int]]:
        """What was taken, by field, and the quanta in order; of one moment."""
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.hgetall(f"{self._p}w:{scope}")
        pipeline.lrange(f"{self._p}q:{scope}", 0, -1)
        fields, quanta = await pipeline.execute()
        return {_text(name): int(value) for name, value in fields.items()}, [int(item) for item in quanta]

    def _keys(self, reservation: Reservation) -> list[str]:
        keys = [f"{self._p}open", f"{self._p}r:{reservation.id}"]
        for limit in reservation.limits:
            keys.append(f"{self._p}w:{limit.scope}")
            keys.append(f"{self._p}q:{limit.scope}")
        return keys

    def _now(self) -> str:
        return "" if self._clock is None else str(math.floor(self._clock() * 1000))

    async def _server_now(self) -> int:
        if self._clock is not None:
            return math.floor(self._clock() * 1000)
        seconds, microseconds = await self._redis.time()
        return int(seconds) * 1000 + int(microseconds) // 1000


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _escaped(text: str) -> str:
    """For a pattern of Redis, in which it stands for itself."""
    return "".join(f"\\{character}" if character in "*?[]^\\" else character for character in text)
