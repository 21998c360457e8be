"""/metrics."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import TYPE_CHECKING, Final

from sol.errors import AuthenticationError
from sol.gateway.observe.text import CONTENT_TYPE

if TYPE_CHECKING:
    from sol.gateway.observe.metrics import RequestMetrics
    from sol.gateway.observe.stage import ObserveStage
    from sol.gateway.observe.state import State


_LINES_AT_ONCE: Final = 500
"""Some 300 microseconds."""


class MetricsPage:
    """A page of `sol.gateway.app`. `token`: what readers must send; None: nothing."""

    def __init__(self, requests: RequestMetrics, state: State, stage: ObserveStage, token: str | None) -> None:
        self._requests = requests
        self._state = state
        self._stage = stage
        self._token = token.encode() if token is not None else None

    async def __call__(self, headers: Mapping[str, str]) -> tuple[int, bytes, bytes]:
        """Raises `AuthenticationError` without the token."""
        if self._token is not None:
            scheme, _, sent = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(sent.strip().encode(), self._token):
                raise AuthenticationError("metrics are read with the header 'Authorization: Bearer TOKEN'")
        parts = []
        for lines in self._render():
            while piece := "".join(islice(lines, _LINES_AT_ONCE)):
                parts.append(piece.encode())
                await asyncio.sleep(0)  # streams go on meanwhile
        return 200, CONTENT_TYPE, b"".join(parts)

    def _render(self) -> Iterator[Iterator[str]]:
        return chain(self._requests.render(), self._state.render(), self._stage.render())
