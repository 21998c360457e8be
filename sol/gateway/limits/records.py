"""What is recorded of a request that an engine worked on."""

from __future__ import annotations

import msgspec

ORPHAN = "orphan"
"""`ended` of a request whose gateway died: what was known of it last. Gives way to the real record if that comes."""


class UsageRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    id: str
    """Of the reservation: one of its kind, whatever clients send as their request ids."""
    request_id: str
    at: float
    """Seconds since 1970 when it ended."""
    tenant: str
    key_id: str
    model: str
    engine: str | None
    class_name: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    estimated: bool
    """The engine did not tell: a stream that ended early."""
    cost_nano: int
    """Billionths of the currency that prices are in."""
    status: int
    ended: str
    """complete, client_left, failed or orphan."""
    seconds: float | None
    """From the request's arrival to the answer's last byte; None: not known."""
