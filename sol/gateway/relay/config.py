"""How long to wait for engines, and how often to ask another."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from sol.gateway.section import Section

Seconds = Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)]


class RelayConfig(Section):
    connect_timeout: Seconds = 5.0
    first_byte_timeout: Seconds = 600.0
    """From sending a request to the first byte of its answer; of an answer that is no stream, all of it."""
    idle_timeout: Seconds = 60.0
    """Between two chunks of a stream: an engine that is silent for longer hangs, and a client that takes nothing
    of what it was sent for as long is gone."""
    max_retries: int = Field(default=2, ge=0, le=10)
    """Engines that are asked after the first. Only where nothing was answered, and no time-out passed."""
    retry_budget: float = Field(default=0.2, ge=0, le=1, allow_inf_nan=False)
    """Retries for each call, in the long run; ten a second always may, and a hundred at once."""
    keep_alive: Seconds = 4.0
    """How long an unused connection to an engine is kept: shorter than engines keep theirs (uvicorn: 5 s)."""
    max_response_bytes: int = Field(default=256 * 2**20, ge=1024)
    """Of an answer that is no stream, which is held in memory."""
