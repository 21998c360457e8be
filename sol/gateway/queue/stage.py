"""The queue as a stage of the pipeline: a call waits in `enter` until an engine has a place for it."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Collection
from typing import TYPE_CHECKING, Final

from sol.gateway.call import Call, Outcome
from sol.gateway.queue.capacity import FleetCapacity
from sol.gateway.queue.config import CLASSES, RANK
from sol.gateway.queue.dispatcher import Dispatcher
from sol.gateway.queue.fair import Waiter
from sol.gateway.queue.service import ServiceLaw
from sol.gateway.reply import Reply
from sol.gateway.routing.engine import Engine
from sol.gateway.routing.fleet import Fleet
from sol.gateway.sla.monitor import NO_TARGETS, Targets

if TYPE_CHECKING:
    from sol.gateway.config import GatewayConfig

logger = logging.getLogger("sol.gateway")

_TICK_SECONDS: Final = 0.05
_BYPASS: Final = frozenset({"/tokenize", "/detokenize"})
"""They take no engine's time worth waiting for."""
_EMBEDDINGS: Final = "/v1/embeddings"
_SHOWN_WAIT: Final = 0.001


class _Slot:
    """A call from `enter` to `leave`."""

    __slots__ = ("call", "given_up", "model", "num_preempted", "reply", "task", "waiter")

    def __init__(self, call: Call, model: str) -> None:
        self.call = call
        self.model = model
        self.waiter: Waiter | None = None
        self.reply: Reply | None = None
        self.task: asyncio.Task[Outcome] | None = None
        """The work on it, where that can be preempted; None: it cannot, or is."""
        self.num_preempted = 0
        self.given_up = False
        """Its work is being given up, and the engine still has it."""


class QueueStage:
    """`targets` says what requests for a model and of a class are promised."""

    name = "queue"

    def __init__(
        self, fleet: Fleet, config: GatewayConfig, targets: Callable[[str, str], Targets] = lambda *_: NO_TARGETS
    ) -> None:
        self._fleet = fleet
        self._options = config.queue
        self._classes = {name: config.classes.of(name) for name in CLASSES}
        self._targets = targets
        self.capacity = FleetCapacity(fleet, config)
        self.dispatchers: dict[str, Dispatcher] = {}
        """By model; models that share engines share one."""
        for models in _groups(fleet):
            dispatcher = Dispatcher(models, config.classes, config.queue, self.capacity)
            self.dispatchers.update(dict.fromkeys(models, dispatcher))
        self._dispatchers_of = {
            engine.name: [self.dispatchers[model] for model, pool in fleet.pools.items() if engine in pool.engines]
            for engine in fleet
        }
        self.laws = {model: ServiceLaw() for model in fleet.pools}
        self.num_preemptions = 0
        """Ever."""
        self._slots: dict[int, _Slot] = {}
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        if self._options.enabled:
            for engine in self._fleet:
                engine.on_begun = functools.partial(self._begun, engine)
            self._task = asyncio.create_task(self._tick(), name="queue")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def enter(self, call: Call) -> None:
        """Raises `UnknownModelError`, and the errors of `sol.gateway.queue.errors`."""
        model = self._fleet.pool(call.model).model
        if not self._options.enabled or call.path in _BYPASS:
            return
        slot = self._slots[id(call)] = _Slot(call, model)
        await self._wait(slot)
        waiter = slot.waiter
        assert waiter is not None
        assert waiter.granted_at is not None
        waited = waiter.granted_at - waiter.arrived
        if waited > _SHOWN_WAIT:
            call.decide(self.name, call.class_name, "waited", f"{waited:.3f} s")

    async def leave(self, call: Call, outcome: Outcome) -> None:
        slot = self._slots.pop(id(call), None)
        if slot is None or slot.waiter is None:
            return
        granted_at = slot.waiter.granted_at
        try:
            if granted_at is not None:
                self._learn(slot, granted_at, outcome)
        finally:
            self.dispatchers[slot.model].leave(slot.waiter, time.monotonic())

    async def carry(self, call: Call, reply: Reply, work: Callable[[], Awaitable[Outcome]]) -> Outcome:
        """Do the `work` on a call that has passed all stages. Where its class can be preempted and its answer is no
        stream, the work may be given up for somebody more urgent and done again later."""
        slot = self._slots.get(id(call))
        if slot is None or call.stream or self._classes[call.class_name].preempt == "never":
            return await work()
        slot.reply = reply
        while True:
            outcome = await self._preemptible(slot, work)
            if outcome is not None:
                return outcome
            assert slot.waiter is not None
            call.decide(self.name, "preempt", "retry", f"given up by {call.backend}")
            call.usage = call.first_byte_at = None  # of work that its client has nothing of
            self.dispatchers[slot.model].leave(slot.waiter, time.monotonic(), successor="realtime")
            await self._wait(slot)

    async def again(self, call: Call, besides: Collection[str]) -> bool:
        """Wait until an engine `besides` these, which have failed it, has a place for a call. False: calls like this
        one do not wait. Raises `QueueTimeoutError`, `PassedDeadlineError` and `HopelessError`."""
        slot = self._slots.get(id(call))
        if slot is None or slot.waiter is None:
            return False
        self.dispatchers[slot.model].leave(slot.waiter, time.monotonic())
        await self._wait(slot, besides)
        return True

    async def _preemptible(self, slot: _Slot, work: Callable[[], Awaitable[Outcome]]) -> Outcome | None:
        """None: it was preempted, and nothing of it is left."""

        async def run() -> Outcome:
            return await work()

        task = slot.task = asyncio.create_task(run())
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise
        finally:
            slot.task = None
            slot.given_up = False
        return None if task.cancelled() else task.result()

    async def _wait(self, slot: _Slot, besides: Collection[str] | None = None) -> None:
        """`besides`: engines that it had a place at, and that failed it."""
        call, model = slot.call, slot.model
        now = time.monotonic()
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def grant() -> None:
            if not granted.done():
                granted.set_result(None)

        def refuse(error: Exception) -> None:
            if not granted.done():
                granted.set_exception(error)

        law = self.laws[model]
        tenant = call.principal.tenant if call.principal is not None else ""
        output = 0.0 if call.path == _EMBEDDINGS else law.output_tokens(call.class_name, tenant, call.output_tokens)
        attempts = call.attempt
        slot.waiter = waiter = Waiter(
            model=model,
            class_name=call.class_name,
            tenant=tenant,
            cost=max(1.0, call.input_tokens + output),
            expected_seconds=law.seconds(call.input_tokens, output),
            first_seconds=law.prompt.expect(call.input_tokens),
            arrived=call.arrived,
            deadline=self._deadline(call, model),
            size=len(call.body),
            was_granted=slot.num_preempted > 0 or besides is not None,
            on_grant=grant,
            on_refuse=refuse,
            is_begun=lambda: call.attempt > attempts,
        )
        if besides is None:
            self.dispatchers[model].offer(waiter, now)
        else:
            self.dispatchers[model].offer_again(waiter, besides, now)
        await granted

    def _deadline(self, call: Call, model: str) -> float | None:
        promised = self._targets(model, call.class_name).deadline
        latest = None if promised is None else call.arrived + promised
        if call.deadline is None or latest is None:
            return latest if call.deadline is None else call.deadline
        return min(latest, call.deadline)

    def _learn(self, slot: _Slot, granted_at: float, outcome: Outcome) -> None:
        call, usage, first = slot.call, outcome.usage, outcome.first_byte_at
        credit = self.capacity.credits.get(call.backend or "")
        if usage is None or first is None:
            return
        law = self.laws[slot.model]
        tokens = usage.completion_tokens
        if outcome.error is None and not outcome.client_left and tokens and not usage.estimated:
            tenant = call.principal.tenant if call.principal is not None else ""
            law.observe_output(call.class_name, tenant, tokens)
        if not call.stream or slot.num_preempted:
            return
        # By the estimate that the next request will be judged by, too.
        law.observe_stream(call.input_tokens, first - granted_at, tokens, outcome.ended_at - first)
        if credit is not None:
            targets = self._targets(slot.model, call.class_name)
            late = targets.ttft is not None and first - granted_at > targets.ttft
            slow = targets.itl is not None and tokens > 1 and outcome.ended_at - first > targets.itl * (tokens - 1)
            credit.answered(slow=late or slow)

    def _begun(self, engine: Engine) -> None:
        """The engine has computed a prompt."""
        for dispatcher in dict.fromkeys(self._dispatchers_of[engine.name]):
            if len(dispatcher.queue):
                now = time.monotonic()
                self.capacity.look_for_room(engine, now)
                dispatcher.pump(now)

    def look(self, now: float) -> None:
        """What nobody's coming or going tells of: what engines say, deadlines, and who has waited for too long."""
        self.capacity.look(now)
        for dispatcher in dict.fromkeys(self.dispatchers.values()):
            dispatcher.tick(now)
            self._preempt(dispatcher, now)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            try:
                self.look(time.monotonic())
            except Exception:
                logger.exception("the queue could not be looked at; it is tried again")

    def _preempt(self, dispatcher: Dispatcher, now: float) -> None:
        """Give up one request for each model whose next `realtime` request has waited for too long, and no more than
        so many of them wait: an engine that is told to stop may take its time."""
        for model in dispatcher.models:
            waiter = dispatcher.queue.next_of("realtime", model)
            if waiter is None or now - waiter.arrived < self._options.preempt_after:
                continue
            # A place at any other engine would be of no use to it.
            engines = {engine.name for engine in self._fleet.pools[model].askable(now).engines}
            slots = [slot for slot in self._slots.values() if slot.task is not None and slot.call.backend in engines]
            if sum(slot.given_up for slot in slots) >= dispatcher.queue.num_waiting("realtime", model):
                continue
            victims = [
                slot for slot in slots
                if not slot.given_up and slot.reply is not None and not slot.reply.started
                and slot.waiter is not None and slot.waiter.state == "granted"
                and slot.num_preempted < self._options.max_preemptions
            ]  # fmt: skip
            if not victims:
                continue
            victim = max(victims, key=_has_least_to_lose)
            assert victim.task is not None
            victim.num_preempted += 1
            victim.given_up = True
            self.num_preemptions += 1
            victim.task.cancel()


def _has_least_to_lose(slot: _Slot) -> tuple[int, float]:
    """The least urgent, and of these the last one to have begun."""
    return RANK[slot.call.class_name], (slot.waiter and slot.waiter.granted_at) or 0.0


def _groups(fleet: Fleet) -> list[list[str]]:
    """Models, together with those that share engines with them."""
    groups: list[tuple[set[str], list[str]]] = []
    for model, pool in fleet.pools.items():
        engines, models = {engine.name for engine in pool.engines}, [model]
        for group in [group for group in groups if group[0] & engines]:
            groups.remove(group)
            engines |= group[0]
            models = group[1] + models
        groups.append((engines, models))
    return [models for _, models in groups]
