"""Any endpoint that speaks OpenAI's protocol: it is not started by us and tells nothing of its load."""

from __future__ import annotations

from pathlib import Path

from sol.engines.commands import ServerCommand
from sol.engines.driver import Driver
from sol.engines.spec import EngineSpec
from sol.errors import ConfigError


class OpenAI(Driver):
    """Started only by a whole `command`, for a server that nobody here knows."""

    name = "openai"
    title = "an OpenAI-compatible endpoint"
    health_path = "/v1/models"
    ready_path = "/v1/models"
    metrics_path = None

    def command(
        self, spec: EngineSpec, *, host: str = "127.0.0.1", port: int | None = None, directory: Path | None = None
    ) -> ServerCommand:
        if spec.command is None:
            raise ConfigError(
                "driver openai is any endpoint, and no program that can be started: name its url instead of a spec, or "
                "the engine's driver, or a whole command in the spec",
                param="driver",
            )
        return super().command(spec, host=host, port=port, directory=directory)
