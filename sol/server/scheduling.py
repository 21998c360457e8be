"""What a request says about when it has to be answered: its priority, its deadline, and whose cache it may share."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from starlette.requests import Request

from sol.errors import RequestError
from sol.server.parsing import shorten
from sol.server.protocol import GenerationBody
from sol.server.state import ServerState

DEADLINE_HEADER = "x-request-deadline-ms"
"""Milliseconds from the request's arrival."""
READ_TIMEOUT_HEADER = "x-stainless-read-timeout"
"""How many seconds OpenAI's clients wait for the next bytes of an answer."""

MOST_URGENT, LEAST_URGENT = -(2**31), 2**31 - 1

TIERS = {"priority": -1, "default": 0, "auto": 0, "flex": 1}
"""OpenAI's service tiers as priorities."""
MAX_SALT_CHARACTERS = 256


@dataclass(frozen=True, slots=True)
class Scheduling:
    """Fields of `EngineRequest`."""

    priority: int = 0
    deadline: float | None = None
    """Monotonic second, of the first token of a stream and of a whole answer."""
    cache_salt: str | None = None


def scheduling_of(request: Request, body: GenerationBody, state: ServerState) -> Scheduling:
    """Raises `RequestError`, or `QueueFullError` if there is no room for one more."""
    state.check_queue()
    salt = body.cache_salt
    if salt is not None and not 0 < len(salt) <= MAX_SALT_CHARACTERS:
        raise RequestError(
            f"cache_salt must have 1 to {MAX_SALT_CHARACTERS} characters, not {len(salt)}", param="cache_salt"
        )
    by_priority = state.config.engine.scheduling_policy == "priority"
    return Scheduling(_priority(body, by_priority=by_priority), _deadline(request), salt)


def _priority(body: GenerationBody, *, by_priority: bool) -> int:
    if body.service_tier is not None and body.service_tier not in TIERS:
        raise RequestError(
            f"service_tier must be one of {', '.join(TIERS)}, not {shorten(body.service_tier)}", param="service_tier"
        )
    tier = TIERS[body.service_tier or "default"]
    name, priority = ("service_tier", tier) if body.priority is None else ("priority", body.priority)
    if priority and not by_priority:
        raise RequestError(
            f"{name} is not supported here, because the server answers who comes first (it was started without "
            "--scheduling-policy priority); remove it",
            param=name,
        )
    if not MOST_URGENT <= priority <= LEAST_URGENT:
        raise RequestError(f"priority must be a 32-bit integer, lower first, not {priority}", param="priority")
    return priority


def _deadline(request: Request) -> float | None:
    wanted = request.headers.get(DEADLINE_HEADER)
    if wanted is not None:
        milliseconds = _number(wanted)
        if milliseconds is None:
            raise RequestError(
                f"the header {DEADLINE_HEADER} must be a number of milliseconds above 0, not {shorten(wanted)}",
                param=DEADLINE_HEADER,
            )
        return time.monotonic() + milliseconds / 1000
    # A hint that the client's library sends on its own: one that says nothing is none.
    seconds = _number(request.headers.get(READ_TIMEOUT_HEADER, ""))
    return None if seconds is None else time.monotonic() + seconds


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) and number > 0 else None
