"""A simulated LLM server whose latencies are known laws: on a virtual clock in process, and over HTTP.

`laws`, `blocks`, `engine` model an engine; `virtual` runs it as fast as it can. `vocabulary` and `language` give it
something to say, `faults` something to go wrong; `http`, `service`, `server` put it on a port.
"""

from sol.simulate.engine import SimulatedRequest
from sol.simulate.faults import Fault
from sol.simulate.laws import PROFILES, EngineLaws, profile
from sol.simulate.virtual import VirtualServer

__all__ = ["PROFILES", "EngineLaws", "Fault", "SimulatedRequest", "VirtualServer", "profile"]
