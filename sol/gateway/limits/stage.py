"""Limits and accounts as a stage of the pipeline: reserve on the way in, settle and record on the way out."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from sol.gateway.call import Call, Outcome, Usage
from sol.gateway.errors import RateLimitError
from sol.gateway.limits.config import LimitsConfig, Price
from sol.gateway.limits.cost import Totals, cost_nano
from sol.gateway.limits.estimate import Estimates, choices, prompt_size
from sol.gateway.limits.ledger import Ledger, Orphan, RequestBeyondLimitError, Reservation, Standing
from sol.gateway.limits.memory import MemoryLedger
from sol.gateway.limits.policy import Limits
from sol.gateway.limits.records import ORPHAN, UsageRecord

if TYPE_CHECKING:
    from sol.gateway.limits.accounts import Accounts

logger = logging.getLogger("sol.gateway.limits")

_TICK_SECONDS = 1.0
_LAST_BYTE_SECONDS = 0.02
"""From the last byte of an answer to its settlement, at most, on a gateway that keeps up."""
_NO_OUTPUT = ("/embeddings", "/rerank", "/score", "/classify", "/pooling", "/tokenize", "/detokenize")
_NOBODY = "anonymous"
_RATE_HEADERS = tuple(
    tuple(f"x-ratelimit-{what}-{kind}".encode() for what in ("limit", "remaining", "reset"))
    for kind in ("requests", "tokens")
)


class _Open(msgspec.Struct, eq=False):
    """A call between `enter` and `leave`."""

    call: Call
    reservation: Reservation
    model: str
    characters: int | None
    """Of the prompt; None where it holds token ids, of which there is nothing to learn."""
    in_ledger: bool = False
    recorded: bool = False
    tokens: int = 0
    requests: int = 1


class LimitStage:
    """`canonical`: of each name or alias of a model, its name. `accounts` are opened and closed with the stage."""

    name = "limit"

    def __init__(
        self,
        config: LimitsConfig,
        prices: Mapping[str, Price],
        *,
        accounts: Accounts | None = None,
        canonical: Mapping[str, str] | None = None,
    ) -> None:
        self._limits = Limits(config)
        self._estimates = Estimates(config.output_estimate)
        self._prices = prices
        self._accounts = accounts
        self._canonical = canonical or {}
        self.ledger: Ledger = _ledger(config)
        self.totals: dict[tuple[str, str, str], Totals] = {}
        """By tenant, key id and model, since this process began."""
        self.refused = 0
        self._open: dict[int, _Open] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def accounts(self) -> Accounts | None:
        return self._accounts

    @property
    def away(self) -> bool | None:
        """Whether the shared ledger cannot be reached; None where limits are not shared."""
        return getattr(self.ledger, "away", None)

    async def start(self) -> None:
        if self._accounts is not None:
            await self._accounts.start()
        self._task = asyncio.create_task(self._keep(), name="keeper of the ledger")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        await self.ledger.close()
        if self._accounts is not None:
            await self._accounts.close()

    async def enter(self, call: Call) -> None:
        model = self._canonical.get(call.model, call.model)
        limits = self._limits.of(call.principal, model)
        characters, ids = prompt_size(call)
        call.input_tokens = ids or self._estimates.input(model, characters)
        tokens = call.input_tokens + self._output(call, model)
        if call.output_tokens is None:
            # A guess must not make a request impossible that would have fit.
            tokens = min([tokens, *(max(limit.tokens, call.input_tokens) for limit in limits if limit.tokens)])
        reservation = Reservation(os.urandom(16).hex(), limits, tokens)
        opened = _Open(call, reservation, model, None if ids else characters, in_ledger=bool(limits))
        self._open[id(call)] = opened
        if not limits:
            return
        reservation.info = msgspec.json.encode(_facts(call, model)).decode()
        try:
            await self._reserve(reservation)
        except RateLimitError:
            opened.in_ledger = False
            self.refused += 1
            call.response_headers += rate_headers(reservation.standings)
            raise
        call.response_headers += rate_headers(reservation.standings)

    async def _reserve(self, reservation: Reservation) -> None:
        try:
            await self.ledger.reserve(reservation)
        except RequestBeyondLimitError:
            raise
        except RateLimitError:
            if len(self._open) == 1:
                raise
            # A client has the last byte of an answer before it is settled here, and what it sends next must not be
            # refused for what is about to be given back.
            await asyncio.sleep(_LAST_BYTE_SECONDS)
            await self.ledger.reserve(reservation)

    async def leave(self, call: Call, outcome: Outcome) -> None:
        opened = self._open.get(id(call))
        if opened is None:
            return
        if not opened.recorded:
            opened.recorded = True
            try:
                self._account(opened, outcome)
            except Exception:  # what it holds is given back even so
                logger.exception("the call %s could not be accounted for", call.id)
        if opened.in_ledger:
            await self.ledger.settle(opened.reservation, opened.tokens, opened.requests)
        self._open.pop(id(call), None)

    async def check_integrity(self) -> None:
        """Raises AssertionError where the ledger contradicts itself, or a call was forgotten in it."""
        await self.ledger.check_integrity()
        assert all(opened.call is not None and key == id(opened.call) for key, opened in self._open.items())

    def _output(self, call: Call, model: str) -> int:
        if call.path.endswith(_NO_OUTPUT):
            return 0
        if call.output_tokens is not None:
            return call.output_tokens
        return self._estimates.output(_facts(call, model)["key_id"], model) * choices(call)

    def _account(self, opened: _Open, outcome: Outcome) -> None:
        """Decide what the call came to, record it and learn from it. Waits for nothing, so nobody can come between."""
        call, usage = opened.call, outcome.usage
        if usage is None:
            # A request counts if it was let through to an engine or was wrong in itself; where this side could not
            # serve it, or its client left before anything was begun, it gives back what it took.
            ours = outcome.status >= 500 or outcome.status in (409, 429)
            opened.requests = 0 if ours or (outcome.client_left and not call.attempt) else 1
            return
        opened.tokens = usage.prompt_tokens + usage.completion_tokens
        facts = _facts(call, opened.model)
        cost = cost_nano(usage, self._prices.get(opened.model))
        self._total(facts, usage, cost)
        if outcome.client_left:
            ended = "client_left"
        else:
            ended = "failed" if outcome.error is not None or outcome.status >= 400 else "complete"
        self._record(
            UsageRecord(
                id=opened.reservation.id,
                at=time.time(),
                engine=call.backend,
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                completion_tokens=usage.completion_tokens,
                estimated=usage.estimated,
                cost_nano=cost,
                status=outcome.status,
                ended=ended,
                seconds=max(0.0, outcome.ended_at - call.arrived),
                **facts,
            )
        )
        if ended == "complete" and not usage.estimated:
            if opened.characters is not None:
                self._estimates.learn_input(opened.model, opened.characters, usage.prompt_tokens)
            if call.output_tokens is None and not call.path.endswith(_NO_OUTPUT):
                of_each = math.ceil(usage.completion_tokens / choices(call))
                self._estimates.learn_output(facts["key_id"], opened.model, of_each)

    def _total(self, facts: Mapping[str, str], usage: Usage, cost: int) -> None:
        name = (facts["tenant"], facts["key_id"], facts["model"])
        total = self.totals.get(name)
        if total is None:
            total = self.totals[name] = Totals()
        total.add(usage, cost)

    def _record(self, record: UsageRecord) -> None:
        if self._accounts is not None:
            self._accounts.usage.write(record)

    async def _keep(self) -> None:
        """Once a second: that this process is alive, what it has seen of its calls, and who is not alive any more."""
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            try:
                await self.ledger.tick()
                seen = [(item.reservation.id, _seen(item.call)) for item in self._open.values() if item.in_ledger]
                if seen:
                    await self.ledger.renew(seen)
                for orphan in await self.ledger.expire():
                    self._record_orphan(orphan)
            except Exception:
                logger.exception("the ledger could not be kept up to date; it is tried again")

    def _record_orphan(self, orphan: Orphan) -> None:
        """What was known of a request whose gateway died with it."""
        try:
            facts = msgspec.json.decode(orphan.info, type=dict[str, str])
            if not orphan.seen:
                return  # no engine had begun
            engine, prompt, cached, completion = msgspec.json.decode(orphan.seen, type=tuple[str | None, int, int, int])
            usage = Usage(prompt_tokens=prompt, cached_tokens=cached, completion_tokens=completion, estimated=True)
            cost = cost_nano(usage, self._prices.get(facts["model"]))
            record = UsageRecord(
                id=orphan.id,
                at=time.time(),
                engine=engine,
                prompt_tokens=prompt,
                cached_tokens=cached,
                completion_tokens=completion,
                estimated=True,
                cost_nano=cost,
                status=0,
                ended=ORPHAN,
                seconds=None,
                **facts,
            )
        except (msgspec.DecodeError, ValueError, KeyError, TypeError):
            logger.exception("a reservation of another gateway cannot be read: %.300r", orphan)
            return
        logger.warning("a gateway died with the request %s: what was known of it is recorded", facts["request_id"])
        self._total(facts, usage, cost)
        self._record(record)


def rate_headers(standings: tuple[Standing, ...]) -> list[tuple[bytes, bytes]]:
    """OpenAI's `x-ratelimit-*`, of whichever limit has the least left: the one that the client will run into."""
    headers: list[tuple[bytes, bytes]] = []
    for index, (limit_name, remaining_name, reset_name) in enumerate(_RATE_HEADERS):
        left = 0
        least: tuple[int, Standing] | None = None
        for standing in standings:
            limit = standing.limit
            most = limit.tokens if index else limit.requests
            if most is not None:
                here = max(0, most - int(standing.tokens if index else standing.requests))
                if least is None or here < left:
                    left, least = here, (most, standing)
        if least is not None:
            headers += (
                (limit_name, b"%d" % least[0]),
                (remaining_name, b"%d" % left),
                (reset_name, _duration(least[1].reset)),
            )
    return headers


def _duration(seconds: float) -> bytes:
    """As OpenAI writes it: 120ms, 8.64s, 1m0.5s."""
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds < 1000:
        return b"%dms" % milliseconds
    minutes, rest = divmod(milliseconds, 60_000)
    text = f"{rest / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    return (f"{minutes}m{text}" if minutes else text).encode()


def _ledger(config: LimitsConfig) -> Ledger:
    if config.redis is None:
        return MemoryLedger(lease=config.lease_seconds)
    # Only who configures Redis waits for its client to be loaded.
    from sol.gateway.limits.failover import FailoverLedger
    from sol.gateway.limits.redis_ledger import RedisLedger

    shared = RedisLedger(
        config.redis.url, prefix=config.redis.prefix, timeout=config.redis.timeout_seconds, lease=config.lease_seconds
    )
    return FailoverLedger(shared, config.redis.fail, lease=config.lease_seconds)


def _facts(call: Call, model: str) -> dict[str, str]:
    """What a record says of a call from the beginning."""
    principal = call.principal
    return {
        "request_id": call.id,
        "tenant": principal.tenant if principal is not None else "default",
        "key_id": principal.key_id if principal is not None else _NOBODY,
        "model": model,
        "class_name": call.class_name,
    }


def _seen(call: Call) -> str:
    """The engine, prompt, cached and completion tokens so far, for whoever finds the call without this process."""
    usage = call.usage
    if usage is None and call.usage_so_far is not None:
        usage = call.usage_so_far()
    if usage is not None:
        return msgspec.json.encode(
            [call.backend, usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens]
        ).decode()
    if not call.attempt:
        return ""
    return msgspec.json.encode([call.backend, call.input_tokens, 0, 0]).decode()
