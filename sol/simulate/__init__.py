"""A simulated LLM server whose latencies are known laws: on a virtual clock in process, and over HTTP.

`laws`, `blocks`, `engine` model an engine; `virtual` runs it as fast as it can. `vocabulary` and `language` give it
something to say, `faults` something to go wrong; `http`, `service`, `server` put it on a port.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sol.simulate.laws import PROFILES, EngineLaws, profile

if TYPE_CHECKING:
    from sol.simulate.engine import SimulatedRequest
    from sol.simulate.faults import Fault
    from sol.simulate.virtual import VirtualServer

__all__ = ["PROFILES", "EngineLaws", "Fault", "SimulatedRequest", "VirtualServer", "profile"]


def __getattr__(name: str) -> Any:
    # Every `sol` command reads the laws for its list of flags, and must not pay for an engine.
    if name in ("Fault", "SimulatedRequest", "VirtualServer"):
        from sol.simulate import virtual

        return getattr(virtual, name)
    raise AttributeError(f"module 'sol.simulate' has no attribute {name!r}")
