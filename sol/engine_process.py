"""The engine's process: what `sol.engine.process.ProcessClient` starts.

A module of its own, so that the process watches its parent before it spends seconds importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sol.engine.process import run_engine

if TYPE_CHECKING:
    from sol.config import EngineConfig
    from sol.engine.core import EngineCore


def build(config: EngineConfig) -> EngineCore:
    from sol.assemble import build_core

    return build_core(config)


if __name__ == "__main__":
    run_engine(build)
