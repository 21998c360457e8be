"""What a request may ask of speculation, checked before the engine sees it."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Final

from sol.engine.types import SpeculationParams
from sol.errors import RequestError

MAX_TENANT_CHARACTERS: Final = 256


def check_speculation(wanted: SpeculationParams, drafters: Sequence[str]) -> None:
    """Raise `RequestError` for values of a wrong type, and for a drafter that is not one of `drafters`."""
    for name in ("enabled", "include_origins"):
        if not isinstance(getattr(wanted, name), bool):
            raise _wrong(name, f"true or false, not {getattr(wanted, name)!r}")
    tenant: object = wanted.tenant
    if tenant is not None and not (isinstance(tenant, str) and 0 < len(tenant) <= MAX_TENANT_CHARACTERS):
        raise _wrong("tenant", f"a string of 1 to {MAX_TENANT_CHARACTERS} characters, not {reprlib.repr(tenant)}")
    if wanted.drafter is None or wanted.drafter in drafters:
        return
    if drafters:
        raise _wrong(
            "drafter", f"one of those that this engine has ({', '.join(drafters)}), not {wanted.drafter!r:.80}"
        )
    raise _wrong("drafter", f"left out, because this engine does not speculate; it is {wanted.drafter!r:.80}")


def _wrong(name: str, allowed: str) -> RequestError:
    return RequestError(f"speculation.{name} must be {allowed}", param=f"speculation.{name}")
