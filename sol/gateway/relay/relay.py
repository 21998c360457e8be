"""What is done with a call that has passed all stages: an engine is asked, and another where that one did not answer.

Another engine is asked only while the client has been told nothing, and only after failures that cannot have cost it an
answer: nobody took the connection, it was closed without a word, or the engine said 502 or 503. A time-out is none of
these: the work may be running, and would run twice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Final

from sol.errors import SolError
from sol.gateway.call import Call, Outcome
from sol.gateway.errors import CLIENT_CLOSED_REQUEST, DeadlineError, GatewayError, UpstreamError
from sol.gateway.queue.errors import QueueTimeoutError
from sol.gateway.relay.attempt import Answer, Attempt, ClientStalled, StreamFailed, Unanswered, fail_stream
from sol.gateway.relay.budget import RetryBudget
from sol.gateway.relay.config import RelayConfig
from sol.gateway.relay.request import Door
from sol.gateway.reply import Reply
from sol.gateway.routing.engine import Engine
from sol.gateway.routing.fleet import Fleet
from sol.gateway.routing.router import Choice, EnginesFullError, Router
from sol.gateway.routing.tasks import RouteStage
from sol.gateway.upstream.pool import Upstreams

logger = logging.getLogger("sol.gateway")

_RETRIED: Final = frozenset({502, 503})

Again = Callable[[Call, Collection[str]], Awaitable[bool]]


async def _for_nothing(_call: Call, _asked: Collection[str]) -> bool:
    return False


class Relay:
    def __init__(
        self, fleet: Fleet, router: Router, route: RouteStage, config: RelayConfig, again: Again = _for_nothing
    ) -> None:
        """`again` waits until an engine that was not asked yet has a place."""
        self._again = again
        self._fleet = fleet
        self._router = router
        self._route = route
        self._config = config
        self._upstreams: Upstreams | None = None
        self._doors: dict[str, Door] = {}
        self._budget = RetryBudget(config.retry_budget, time.monotonic())
        self.num_open = 0
        self.num_retries = 0
        """Ever."""

    def start(self) -> Upstreams:
        """The connections to engines, which are for the gateway's other requests to them, too."""
        config = self._config
        self._upstreams = Upstreams(connect_timeout=config.connect_timeout, keep_alive=config.keep_alive)
        self._doors = {engine.name: Door(engine, self._upstreams.origin(engine.base_url)) for engine in self._fleet}
        return self._upstreams

    async def close(self) -> None:
        if self._upstreams is not None:
            await self._upstreams.close()
            self._upstreams = None

    async def answer(self, call: Call, reply: Reply) -> Outcome:
        """Have the call answered. Raises a SolError where the client was told nothing, which is then to be told to it;
        what fails later is told by an event, and stands in the outcome."""
        self.num_open += 1
        self._budget.called(self.num_open)
        try:
            return await self._answer(call, reply)
        finally:
            self.num_open -= 1

    async def _answer(self, call: Call, reply: Reply) -> Outcome:
        try:
            answer = await self._ask(call, reply)
        except ClientStalled:
            return self._outcome(call, CLIENT_CLOSED_REQUEST, client_left=True)
        except StreamFailed as error:
            return self._outcome(call, 200, error)
        except Exception as error:
            if not reply.started:
                raise
            if not isinstance(error, SolError):
                logger.exception("unexpected error in the stream of call %s", call.id)
            await fail_stream(reply, error)
            return self._outcome(call, 200, error)
        if answer is None:
            return self._outcome(call, 200)
        await reply.send(answer.status, [*answer.headers, *call.response_headers], answer.body)
        if answer.status < 400:
            return self._outcome(call, answer.status)
        said = UpstreamError(f"the engine {call.backend} answered with status {answer.status}")
        return self._outcome(call, answer.status, said)

    async def _ask(self, call: Call, reply: Reply) -> Answer | None:
        """Engines, until one answers or a failure is final. Raises what the last one failed with."""
        asked: list[Engine] = []
        failed: Answer | GatewayError | None = None
        again: Engine | None = None
        repeated = False
        for _ in range(self._config.max_retries + 1):
            if failed is not None:
                if not self._budget.take(time.monotonic()):
                    break
                self.num_retries += 1
            try:
                choice = await self._choose(call, asked, wait=again is None)
            except (QueueTimeoutError, DeadlineError):
                raise  # it waited for the others
            except SolError:
                if failed is None:
                    raise
                if again is None:
                    break
                # Nobody else is left, and it may have been the connection that was old, not the engine that is ill.
                asked.remove(again)
                again, repeated = None, True
                choice = await self._choose(call, asked, wait=True)
            engine = choice.engine
            rule = f"{choice.rule}, panic" if choice.panic else choice.rule
            call.decide("route", rule, "engine", engine.name)
            try:
                answer = await self._attempt(call, engine, reply)
                if answer is None or answer.status not in _RETRIED:
                    return answer
                failed = answer
            except Unanswered as unanswered:
                failed = unanswered.error
                if unanswered.closed and not repeated:
                    again = engine
            asked.append(engine)
        assert failed is not None
        if isinstance(failed, Answer):
            return failed
        raise failed

    async def _choose(self, call: Call, asked: list[Engine], *, wait: bool) -> Choice:
        """An engine that was not asked. That those are busy which are well is no reason to fail: if `wait`, the call
        waits for one, before those in the queue, where it has been."""
        while True:
            try:
                return self._router.choose(call, asked)
            except EnginesFullError:
                if not wait or not await self._again(call, [engine.name for engine in asked]):
                    raise

    async def _attempt(self, call: Call, engine: Engine, reply: Reply) -> Answer | None:
        door = self._doors[engine.name]
        model = engine.served_name or self._fleet.pool(call.model).model
        call.attempt += 1
        call.backend = engine.name
        answer = await Attempt(call, engine, model, self._config, reply, door).run()
        if call.drafter is not None and answer is not None and answer.status == 400 and b"speculation" in answer.body:
            # The gateway's own choice is no reason to refuse a client: it gets its answer, drafted otherwise or not.
            self._route.drafter_refused(call)
            call.attempt += 1
            answer = await Attempt(call, engine, model, self._config, reply, door).run()
        return answer

    @staticmethod
    def _outcome(call: Call, status: int, error: Exception | None = None, *, client_left: bool = False) -> Outcome:
        return Outcome(
            status=status, error=error, usage=call.usage, first_byte_at=call.first_byte_at, client_left=client_left
        )
