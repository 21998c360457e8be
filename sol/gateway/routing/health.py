"""Whether an engine is well, from probes of its health route, with hysteresis. Its progress is `Engine.is_stalled`."""

from __future__ import annotations

from typing import Literal

from sol.gateway.routing.config import HealthConfig

Probe = Literal["good", "bad", "refused"]
"""What a probe found. Refused: nobody listens, which is certain; bad: an error or silence, perhaps a false alarm."""


class Health:
    """Taken for well until probes say otherwise: a gateway that has just started must not refuse everybody."""

    def __init__(self, config: HealthConfig) -> None:
        self._config = config
        self._well = True
        self._in_a_row = 0
        """Probes that contradict the present state."""
        self.is_listening = True
        self.reason = ""
        """Why it is not well."""

    @property
    def is_well(self) -> bool:
        return self._well

    def probed(self, result: Probe, reason: str = "") -> None:
        self.is_listening = result != "refused"
        good = result == "good"
        if good == self._well:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        if not good:
            self.reason = reason
        needed = self._config.healthy_after if good else self._config.unhealthy_after
        if self._in_a_row >= needed or (not self.is_listening and self._well):
            self._well, self._in_a_row = good, 0
            if good:
                self.reason = ""
