"""Which class a call is of: the header, `service_tier`, `priority`, or what its key says, in this order."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from sol.errors import RequestError
from sol.gateway.auth import ANONYMOUS
from sol.gateway.call import Call, Outcome
from sol.gateway.errors import AccessDeniedError
from sol.gateway.queue.config import CLASSES, RANK, ClassesConfig

HEADER: Final = "x-sol-class"
_TIERS: Final[Mapping[str, str | None]] = {
    "auto": None, "default": None, "scale": None, "priority": "realtime", "fast": "realtime", "flex": "batch",
}  # fmt: skip
"""OpenAI's values, all of them."""
_ORDINARY: Final = ("auto", "default")
"""What engines understand as well."""
_PATIENT: Final = 10
"""`priority` from which on a request is best_effort."""


class ClassifyStage:
    """Sets `call.class_name`. Raises `RequestError` for a class, tier or priority that is none, and `AccessDeniedError`
    for one that the key may not have.

    A key has its default class, those that are less urgent, and what its `classes` name. Where there are no keys,
    everybody has all.
    """

    name = "classify"

    def __init__(self, config: ClassesConfig, *, keep_tier: Collection[str] = ()) -> None:
        """`keep_tier`: models whose engines know `service_tier`, by all their names; of other requests the field is
        taken out once it has been understood."""
        self._default = config.default
        self._keep_tier = frozenset(keep_tier)

    async def enter(self, call: Call) -> None:
        principal = call.principal
        own = (principal.default_class if principal is not None else None) or self._default
        if own not in RANK:  # a key of a database may name a class that there was once
            own = self._default
        asked, param = self._asked(call)
        call.class_name = own if asked is None else asked
        if asked is None or principal is None or principal is ANONYMOUS:
            return
        if asked not in principal.classes and RANK[asked] < RANK[own]:
            raise AccessDeniedError(
                f"this key may not ask for the class {asked} ({param}); leave it out for {own}, or have "
                f"{asked} added to the key's classes",
                param=param,
            )
        call.decide(self.name, param, "class", asked)

    async def leave(self, call: Call, outcome: Outcome) -> None:
        pass

    def _asked(self, call: Call) -> tuple[str | None, str]:
        """What the call asks for, and where. Fields that engines would refuse are taken out."""
        data, dropped = call.json, []
        header = call.headers.get(HEADER)
        tier, priority = data.get("service_tier"), data.get("priority")
        if header is not None and header not in RANK:
            raise RequestError(f"{HEADER} must be one of {', '.join(CLASSES)}, not {header!r:.80}", param=HEADER)
        if tier is not None:
            if not isinstance(tier, str) or tier not in _TIERS:
                raise RequestError(f"service_tier must be one of {', '.join(_TIERS)}, not {tier!r:.80}",
                                   param="service_tier")  # fmt: skip
            if tier not in _ORDINARY and call.model not in self._keep_tier:
                dropped.append("service_tier")
        if priority is not None:
            if not isinstance(priority, int) or isinstance(priority, bool):
                raise RequestError(
                    f"priority must be a whole number (lower is more urgent), not {priority!r:.80}", param="priority"
                )
            if priority:
                dropped.append("priority")  # the gateway's queue has obeyed it
        if dropped:
            call.rewrite({name: value for name, value in data.items() if name not in dropped})
        if header is not None:
            return header, HEADER
        if tier is not None and _TIERS[tier] is not None:
            return _TIERS[tier], "service_tier"
        if priority:
            return class_of_priority(priority), "priority"
        return None, ""


def class_of_priority(priority: int) -> str:
    """vLLM's polarity: lower is more urgent, and 0 is what is not said."""
    if priority < 0:
        return "realtime"
    return "best_effort" if priority >= _PATIENT else "batch"
