"""The engine's loop: requests in, one step, outputs out."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol, TypeAlias

from sol.engine.compiling import Compiled, Compiling, Grammars
from sol.engine.scheduler import Scheduler
from sol.engine.types import EngineInfo, EngineOutput, EngineRequest, RequestOutput, SchedulerOutput, StepOutput
from sol.errors import EngineDeadError, RequestError, SolError
from sol.grammar import Grammar

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """Whoever computes plans, in order. It holds the requests of the plans so far until a plan removes them."""

    def submit(self, plan: SchedulerOutput) -> Callable[[], StepOutput]:
        """Start a step; what is returned waits for its result. Results are asked for once each and in order.

        Where an engine works ahead, a plan may come before the result of the one before it has been asked for: the
        input of its decoding rows is then what that step samples, which only the runner can know.
        """
        ...


@dataclass(slots=True)
class _Abort:
    request_id: str


@dataclass(slots=True)
class _Refusal:
    request_id: str
    message: str


@dataclass(slots=True)
class _Step:
    started_at: float
    num_tokens: int
    result: Callable[[], StepOutput]
    """Waits for it."""


_Item: TypeAlias = EngineRequest | Compiled | _Abort | _Refusal | None


class EngineCore:
    """A scheduler and a runner.

    `work_ahead` is how many steps may be planned and started before the oldest one is read: 0 where the host computes
    itself, 1 where a device does, so that it never waits for the host.
    `clock` counts seconds; what a step took is what the engine decides about drafts by.
    `grammars` compiles those of requests; without it a request that has one is refused.
    `add`, `abort`, `refuse` and `wake` may be called from any thread, everything else from one.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        info: EngineInfo,
        *,
        work_ahead: int = 0,
        clock: Callable[[], float] = time.perf_counter,
        grammars: Grammars | None = None,
    ) -> None:
        self.info = info
        self.dead: EngineDeadError | None = None
        """Set once a step has failed; from then on every step raises it."""
        self._scheduler = scheduler
        scheduler.works_ahead = work_ahead > 0
        self._runner = runner
        self._work_ahead = work_ahead
        self._clock = clock
        self._read_at = -math.inf
        """When the latest result was there"""
        self._started: deque[_Step] = deque()
        """Steps that have not been read, oldest first."""
        self._inbox: SimpleQueue[_Item] = SimpleQueue()
        self._awaited: list[_Item] = []
        """What `wait` has taken from the inbox; it comes before the rest."""
        self._compiling = Compiling(grammars, self._inbox.put)

    def add(self, requests: Sequence[EngineRequest]) -> None:
        for request in requests:
            self._inbox.put(request)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Each request that is still there gets a last output with `finish_reason` "abort"; unknown ids are ignored."""
        for request_id in request_ids:
            self._inbox.put(_Abort(request_id))

    def refuse(self, request_id: str, message: str) -> None:
        """Answer a request that could not even be read with an error."""
        self._inbox.put(_Refusal(request_id, message))

    def check_grammar(self, grammar: Grammar) -> None:
        """Raise `SolError` for one that cannot be compiled. From any thread; takes as long as compiling it does."""
        self._compiling.check(grammar)

    def wake(self) -> None:
        """Let `wait` return."""
        self._inbox.put(None)

    @property
    def has_work(self) -> bool:
        return self._busy or bool(self._awaited) or not self._inbox.empty()

    @property
    def awaits_grammars(self) -> bool:
        """Whether there may be work soon of which nobody outside will tell."""
        return len(self._compiling) > 0

    @property
    def _busy(self) -> bool:
        return self._scheduler.has_unfinished or bool(self._started)

    def wait(self) -> None:
        """Block until there is something to do, or `wake` is called."""
        if not (self._busy or self._awaited):
            self._awaited.append(self._inbox.get())

    def step(self) -> EngineOutput:
        """Take in what has arrived, start a step if there is one to start, and read one if it is time.

        If a step fails, every open request gets a last output with `finish_reason` "error", and the next call
        raises `EngineDeadError`. A request that cannot be answered fails alone.
        """
        if self.dead is not None:
            raise self.dead
        outputs = self._take_in()
        outputs += self._scheduler.shed(time.monotonic())
        computed = 0
        started_at = self._clock()
        try:
            plan = self._scheduler.schedule() if self._scheduler.has_unfinished else None
            if plan is not None:
                num_tokens = sum(plan.num_scheduled_tokens.values())
                self._started.append(_Step(started_at, num_tokens, self._runner.submit(plan)))
            if self._started and (plan is None or len(self._started) > self._work_ahead):
                step = self._started.popleft()
                result = step.result()
                # A step that was started behind another one has the device from that one's end on.
                since = max(step.started_at, self._read_at)
                self._read_at = self._clock()
                outputs += self._scheduler.update_from_output(result, self._read_at - since)
                computed = step.num_tokens
        except Exception as error:
            logger.exception("the engine failed in a step")
            self.dead = EngineDeadError(f"the engine failed: {type(error).__name__}: {error}")
            self._started.clear()
            outputs += self._scheduler.finish_all("error", self.dead.message)
            outputs += [_failure(held.request_id, self.dead.message) for held in self._compiling.release_all()]
            computed = 0
        except BaseException:
            # Interrupted in the middle: blocks are published that were perhaps never computed.
            self.dead = EngineDeadError("the engine was interrupted in the middle of a step")
            raise
        stats = self._scheduler.take_stats()
        stats.iteration_tokens = computed
        stats.num_waiting += len(self._compiling)
        return EngineOutput(outputs=outputs, stats=stats)

    def check_integrity(self) -> None:
        """Raise `AssertionError` if the engine's books contradict each other. Between steps only."""
        self._scheduler.check_integrity()

    def _take_in(self) -> list[RequestOutput]:
        items, self._awaited = self._awaited, []
        with contextlib.suppress(Empty):
            while True:
                items.append(self._inbox.get_nowait())
        outputs = []
        for item in items:
            if isinstance(item, EngineRequest):
                output = self._add(item)
            elif isinstance(item, _Abort):
                output = self._abort(item.request_id)
            elif isinstance(item, Compiled):
                output = self._add_compiled(item)
            elif isinstance(item, _Refusal):
                output = _failure(item.request_id, item.message)
            else:
                continue
            if output is not None:
                outputs.append(output)
        return outputs

    def _add(self, request: EngineRequest) -> RequestOutput | None:
        try:
            _check_tokens(request, self.info.vocab_size)
            if self._compiling.release(request.request_id) is not None:
                raise RequestError(f"request_id {request.request_id!r} is in use", param="request_id")
            if not self._compiling.hold(request):
                self._scheduler.add(request)
        except SolError as error:
            # Outputs go by id, so of two requests with one id neither could be answered: the earlier one ends too.
            return self._scheduler.finish(request.request_id, "error", error.message) or _failure(
                request.request_id, error.message
            )
        return None

    def _add_compiled(self, item: Compiled) -> RequestOutput | None:
        request = item.request
        if not self._compiling.is_held(request):
            return None  # it has left meanwhile
        self._compiling.release(request.request_id)
        if item.error is None:
            return self._add(request)
        if not isinstance(item.error, SolError):
            logger.error("a grammar could not be compiled", exc_info=item.error)
        return _failure(request.request_id, f"grammar: {item.error}")

    def _abort(self, request_id: str) -> RequestOutput | None:
        if self._compiling.release(request_id) is not None:
            return RequestOutput(request_id=request_id, new_token_ids=[], finish_reason="abort")
        return self._scheduler.finish(request_id, "abort")


def _check_tokens(request: EngineRequest, vocab_size: int) -> None:
    request.params.check_vocabulary(vocab_size)
    for token_id in request.prompt_token_ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"prompt: token id {token_id} is not in the vocabulary of {vocab_size} tokens", param="prompt"
            )


def _failure(request_id: str, message: str) -> RequestOutput:
    return RequestOutput(request_id=request_id, new_token_ids=[], finish_reason="error", error=message)
