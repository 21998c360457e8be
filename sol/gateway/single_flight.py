"""Requests that a client sends again while the first is still being answered: the work is done once.

Such a request has the `idempotency-key` of another, or says that it is a retry, as OpenAI's clients do
(`x-stainless-retry-count`), and is in all that it asks like one that is open. If the answer is no stream, both get the
same one, and it is worked on as long as one of them waits. A stream cannot be joined in its middle: the second gets
409, and may come again when the first has ended.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final

from sol.gateway.errors import DuplicateRequestError
from sol.gateway.reply import KeptReply, Reply

_RETRY_AFTER: Final = 1.0
_RETRY_COUNT: Final = "x-stainless-retry-count"

Work = Callable[[Reply], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Identity:
    """What a request could be a repetition of. The credentials are part of `key`: nobody gets another's answer."""

    key: bytes
    body_hash: bytes
    is_retry: bool
    """It must not be worked on while another of its key is; one that is none is registered for its retries to find."""


def identify(path: str, headers: Mapping[str, str], body: bytes) -> Identity | None:
    """None: nothing in the request says that it ever could be a repetition."""
    named, count = headers.get("idempotency-key"), headers.get(_RETRY_COUNT)
    if named is None and count is None:
        return None
    body_hash = hashlib.blake2b(body, digest_size=16).digest()
    digest = hashlib.blake2b(digest_size=16)
    for part in (path, headers.get("authorization", ""), named or headers.get("x-request-id", "")):
        digest.update(part.encode("utf-8", "surrogateescape") + b"\0")
    if named is None:
        digest.update(body_hash)
    return Identity(digest.digest(), body_hash, named is not None or count not in (None, "0"))


class _Flight:
    def __init__(self, identity: Identity, stream: bool) -> None:
        self.identity = identity
        self.stream = stream
        self.num_waiting = 1
        self.task: asyncio.Task[KeptReply] | None = None


class SingleFlight:
    def __init__(self) -> None:
        self._flights: dict[bytes, _Flight] = {}
        self.num_joined = 0

    def __len__(self) -> int:
        return len(self._flights)

    async def run(self, identity: Identity | None, reply: Reply, work: Work, *, stream: bool) -> None:
        """Do `work`, which writes to the reply it is given, or wait for the same work that is under way.

        Raises `DuplicateRequestError` for a repetition that cannot join, and what `work` raises.
        """
        flight = None if identity is None else self._flights.get(identity.key)
        if identity is None or (flight is not None and not identity.is_retry):
            # Who sends the same twice and does not call it a retry wants two answers.
            await work(reply)
        elif flight is None:
            await self._lead(_Flight(identity, stream), reply, work)
        elif flight.identity.body_hash != identity.body_hash:
            raise DuplicateRequestError(
                "another request with this idempotency-key is being answered; give each its own", wait=_RETRY_AFTER
            )
        elif flight.task is None or stream:
            raise DuplicateRequestError(
                "this request is already being answered; end that one, or wait for its end", wait=_RETRY_AFTER
            )
        else:
            flight.num_waiting += 1
            self.num_joined += 1
            await self._wait(flight, reply)

    async def _lead(self, flight: _Flight, reply: Reply, work: Work) -> None:
        self._flights[flight.identity.key] = flight
        try:
            if flight.stream:
                await work(reply)
                return
            flight.task = asyncio.create_task(_keep(work))
            flight.task.add_done_callback(lambda _: self._forget(flight))
            await self._wait(flight, reply)
        finally:
            if flight.task is None:
                self._forget(flight)

    async def _wait(self, flight: _Flight, reply: Reply) -> None:
        assert flight.task is not None
        try:
            kept = await asyncio.shield(flight.task)
        except asyncio.CancelledError:
            flight.num_waiting -= 1
            if not flight.num_waiting:
                self._forget(flight)  # nobody joins what is being given up
                flight.task.cancel()
                await asyncio.gather(flight.task, return_exceptions=True)
            raise
        await reply.send(kept.status, kept.headers, kept.body)

    def _forget(self, flight: _Flight) -> None:
        if self._flights.get(flight.identity.key) is flight:
            del self._flights[flight.identity.key]


async def _keep(work: Work) -> KeptReply:
    kept = KeptReply()
    await work(kept)
    return kept
