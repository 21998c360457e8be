"""Draft-model routing: what kind of work a call is, which engines do it, and who drafts for it in Sol's engines.

A task is named by the client in a header, recognised by a rule, or by a classifier that somebody supplies. Of several
drafters of a task the one whose drafts were worth most is taken; what they are worth comes from the engine's own
`usage.speculation` of each answer.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Mapping
from typing import Any, Final

from sol.errors import ConfigError, RequestError
from sol.gateway.call import Call, Outcome, Usage
from sol.gateway.filters.expressions import compile_expression
from sol.gateway.routing.affinity import prefix_key
from sol.gateway.routing.asking import Asking, Classifier
from sol.gateway.routing.config import RoutingConfig, TaskConfig, TaskRule
from sol.gateway.routing.fleet import Fleet

_ALPHA: Final = 0.1
_MIN_SAMPLES: Final = 5
"""Of each drafter, before they are compared."""
_MAX_TEXT: Final = 8192
"""Characters that a classifier is given, and of each text those that expressions are looked for in."""


class Worth:
    """Of one task's drafters: what each was measured to be worth."""

    def __init__(self, drafters: tuple[str, ...], explore: float) -> None:
        self._drafters = drafters
        self._explore = explore
        self._means: dict[str, float] = {}
        self._counts = dict.fromkeys(drafters, 0)
        self._random = random.Random()  # noqa: S311

    @property
    def measured(self) -> Mapping[str, float]:
        return self._means

    def choose(self) -> str | None:
        if not self._drafters:
            return None
        least = min(self._drafters, key=self._counts.__getitem__)
        if self._counts[least] < _MIN_SAMPLES:
            return least
        if len(self._drafters) > 1 and self._random.random() < self._explore:
            return self._random.choice(self._drafters)
        return max(self._drafters, key=lambda name: self._means.get(name, 0.0))

    def observe(self, drafter: str, value: float) -> None:
        if drafter in self._counts:
            self._counts[drafter] += 1
            old = self._means.get(drafter, value)
            self._means[drafter] = old + _ALPHA * (value - old)

    def idle(self, drafter: str) -> None:
        """It was chosen and drafted nothing, of which there is nothing to measure: that it was tried, counts, or it
        would be tried for ever."""
        if drafter in self._counts:
            self._counts[drafter] += 1

    def refused(self, drafter: str) -> None:
        """The engine does not have it, or it failed: others first, and it last."""
        if drafter in self._counts:
            self._counts[drafter] += 1
            self._means[drafter] = 0.0


class RouteStage:
    """Finds out all that routing needs of a call. The engine itself is chosen by the relay, for each attempt anew."""

    name = "route"

    def __init__(self, fleet: Fleet, config: RoutingConfig, classifier: Classifier | None = None) -> None:
        """Raises `ConfigError` for a classifier that cannot be imported. `classifier` overrides the configured one."""
        self._fleet = fleet
        self._affinity = config.affinity
        self._header = config.task_header.lower()
        self._tasks = {task.name: task for task in config.tasks}
        self._rules = [(task, [_Rule(rule) for rule in task.when]) for task in config.tasks]
        classifier = classifier or (_load(config.classifier) if config.classifier is not None else None)
        self._asking = Asking(classifier, config.classifier_budget) if classifier is not None else None
        self.worth = {task.name: Worth(task.drafters, task.explore) for task in config.tasks}

    async def enter(self, call: Call) -> None:
        self._fleet.pool(call.model)  # an unknown model is refused here
        if self._affinity.enabled:
            call.prefix_key = prefix_key(call, self._affinity.prefix_chars)
        if not self._tasks:
            return
        task, rule = await self._find(call)
        if task is None:
            return
        call.task = task.name
        if task.engines:
            wanted = frozenset(task.engines)
            call.only_engines = wanted if call.only_engines is None else (call.only_engines & wanted or wanted)
        if not _asks_for_drafter(call):
            call.drafter = self.worth[task.name].choose()
        detail = f"{task.name}, drafter {call.drafter}" if call.drafter else task.name
        call.decide(self.name, rule, "task", detail)

    async def leave(self, call: Call, outcome: Outcome) -> None:
        worth = self.worth.get(call.task or "")
        if worth is None or call.drafter is None or outcome.usage is None:
            return
        value = tokens_per_step(outcome.usage, call.drafter)
        if value is not None:
            worth.observe(call.drafter, value)
        else:
            worth.idle(call.drafter)
        call.drafter = None  # a second `leave` counts nothing

    def drafter_refused(self, call: Call) -> None:
        """The engine does not have the drafter that was chosen: the call goes on without one."""
        worth, drafter = self.worth.get(call.task or ""), call.drafter
        if worth is not None and drafter is not None:
            worth.refused(drafter)
            call.decide(self.name, "drafter_refused", "plain", drafter)
        call.drafter = None

    async def _find(self, call: Call) -> tuple[TaskConfig | None, str]:
        model = self._fleet.canonical[call.model]
        named = call.headers.get(self._header)
        if named is not None:
            if named not in self._tasks:
                raise RequestError(
                    f"{self._header} must be one of {', '.join(self._tasks)}, not {named!r:.80}", param=self._header
                )
            return self._tasks[named], "header"
        for task, rules in self._rules:
            for index, rule in enumerate(rules):
                if rule.fits(call, model):
                    return task, f"when[{index}]"
        if self._asking is not None:
            found = await self._asking.ask("\n".join(call.text())[:_MAX_TEXT])
            return (self._tasks.get(found) if isinstance(found, str) else None), "classifier"
        return None, ""


class _Rule:
    def __init__(self, rule: TaskRule) -> None:
        self._rule = rule
        self._pattern = compile_expression(rule.pattern) if rule.pattern is not None else None

    def fits(self, call: Call, model: str) -> bool:
        """`model`: what the call's model is called, whichever name of it the client used."""
        rule = self._rule
        if rule.models and model not in rule.models:
            return False
        if any(call.headers.get(name) != value for name, value in rule.headers.items()):
            return False
        if rule.min_input_tokens is not None and call.input_tokens < rule.min_input_tokens:
            return False
        if rule.max_input_tokens is not None and call.input_tokens > rule.max_input_tokens:
            return False
        if rule.contains and not any(word in text for text in call.text() for word in rule.contains):
            return False
        pattern = self._pattern
        return pattern is None or any(pattern.search(text[:_MAX_TEXT]) for text in call.text())


def tokens_per_step(usage: Usage, drafter: str) -> float | None:
    """What the drafter was worth: the speedup that the engine measured, or tokens a step. None: it was not used."""
    speculation = usage.speculation
    if not isinstance(speculation, Mapping):
        return None
    drafters = speculation.get("drafters")
    if not isinstance(drafters, Mapping) or drafter not in drafters:
        return None
    value: Any = speculation.get("speedup") or speculation.get("tokens_per_step")
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 else None


def _asks_for_drafter(call: Call) -> bool:
    """Whether the client decides itself, or wants no drafts."""
    given = call.json.get("speculation")
    return isinstance(given, dict) and (given.get("drafter") is not None or given.get("enabled") is False)


def _load(path: str) -> Classifier:
    module, _, name = path.partition(":")
    try:
        found: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"routing.classifier: {path!r} cannot be imported ({error}); give module:function",
            param="routing.classifier",
        ) from None
    if not callable(found):
        raise ConfigError(f"routing.classifier: {path!r} is no function", param="routing.classifier")
    classifier: Classifier = found
    return classifier
