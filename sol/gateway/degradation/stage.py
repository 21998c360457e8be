"""Degradation as a stage: what the ladders have come to is done to each call, and said in `x-sol-degraded`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from sol.gateway.call import Call, Outcome
from sol.gateway.degradation.config import Step
from sol.gateway.degradation.ladder import Ladder, Measured
from sol.gateway.errors import NoCapacityError
from sol.gateway.limits.estimate import choices

logger = logging.getLogger("sol.gateway")

HEADER: Final = b"x-sol-degraded"
_TICK_SECONDS: Final = 1.0
_RETRY_AFTER: Final = 10.0
_LENGTHS: Final = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_LENGTH_OF: Final[Mapping[str, str]] = {
    "/v1/chat/completions": "max_completion_tokens",
    "/v1/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
}
"""What a request without a length is given; other paths generate nothing."""


class LoadShedError(NoCapacityError):
    code = "load_shed"


class DegradeStage:
    """`measure` says how a model is. `canonical`: of each name or alias of a model, its name. `speculating`: models
    with engines that can be told not to draft. `can_answer`: whether a model, by its own name, has an engine that may
    be asked."""

    name = "degrade"

    def __init__(
        self,
        steps: Sequence[Step],
        canonical: Mapping[str, str],
        measure: Callable[[str], Measured],
        speculating: Collection[str] = (),
        can_answer: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self.can_answer = can_answer
        self.ladders = {
            model: Ladder(_steps_of(steps, model, model in speculating)) for model in dict.fromkeys(canonical.values())
        }
        self.counts: dict[tuple[str, str], int] = {}
        """Calls since the beginning, by model and what was done to them."""
        self._canonical = canonical
        self._measure = measure
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        if any(ladder.steps for ladder in self.ladders.values()):
            self._task = asyncio.create_task(self._watch(), name="degradation")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def enter(self, call: Call) -> None:
        model = self._canonical.get(call.model)
        ladder = self.ladders.get(model or "")
        if ladder is None or model is None or not ladder.level or call.path not in _LENGTH_OF:
            return
        done: list[str] = []
        # The last of a kind counts: further down, answers are shorter, and models smaller.
        steps = {step.action: step for step in ladder.taken if step.applies(model, call.class_name)}
        if "shed" in steps:
            self._count(model, "shed")
            call.decide(self.name, "shed", "refuse", ladder.reason)
            raise LoadShedError(
                f"requests of the class {call.class_name} are not taken for the moment: the model {model} has more "
                "to do than its engines can; try again later",
                wait=_RETRY_AFTER,
            )
        for action, step in steps.items():
            if self._do(step, call):
                done.append(action)
                self._count(model, action)
                call.decide(self.name, action, "degrade", ladder.reason)
        if done:
            call.response_headers.append((HEADER, ", ".join(done).encode()))

    async def leave(self, call: Call, outcome: Outcome) -> None:
        pass

    def update(self, now: float) -> None:
        """Look how every model is."""
        for model, ladder in self.ladders.items():
            if ladder.steps and ladder.update(self._measure(model), now):
                taken = ", ".join(step.action for step in ladder.taken) or "nothing"
                logger.warning("degradation of %s: %s is given up now (%s)", model, taken, ladder.reason)

    def _do(self, step: Step, call: Call) -> bool:
        """Whether it changed anything for this call."""
        if step.action == "drafts_off":
            call.no_drafts = True
            return True
        if step.action == "model":
            assert step.to is not None
            if not self.can_answer(step.to):
                return False  # a long wait for what was asked for is better than none
            call.model = step.to
            return True
        assert step.max_tokens is not None
        return _shorten(call, step.max_tokens)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            try:
                self.update(time.monotonic())
            except Exception:
                logger.exception("the state of the engines could not be judged; it is tried again")

    def _count(self, model: str, what: str) -> None:
        self.counts[model, what] = self.counts.get((model, what), 0) + 1


def _shorten(call: Call, most: int) -> bool:
    changed: dict[str, Any] = {}
    declared = [name for name in _LENGTHS if call.json.get(name) is not None]
    for name in declared:
        if call.json[name] > most:
            changed[name] = most
    if not declared:
        changed[_LENGTH_OF[call.path]] = most
    least = call.json.get("min_tokens")
    if changed and isinstance(least, int) and least > most:
        changed["min_tokens"] = most  # else the engine would refuse what the client did not ask for
    if not changed:
        return False
    call.rewrite({**call.json, **changed})
    call.output_tokens = min(call.json[name] for name in declared or changed if name in _LENGTHS) * choices(call)
    return True


def _steps_of(steps: Sequence[Step], model: str, speculates: bool) -> list[Step]:
    """Steps that can change something for the model."""
    return [
        step
        for step in steps
        if (not step.models or model in step.models) and (step.action != "drafts_off" or speculates)
    ]
