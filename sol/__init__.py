"""Sol: large language models, faster and cheaper on the hardware you have.

For instance:

    from sol import LLM, SamplingParams
    print(LLM().generate("The capital of France is", SamplingParams(max_tokens=8))[0].outputs[0].text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sol import openmp
from sol.engine.types import SpeculationParams
from sol.sampling_params import SamplingParams
from sol.version import __version__

if TYPE_CHECKING:
    from sol.llm import LLM

__all__ = ["LLM", "SamplingParams", "SpeculationParams", "__version__"]


def __getattr__(name: str) -> Any:
    # The HTTP process imports `sol` and must not pay for torch; `sol.LLM` does.
    if name == "LLM":
        openmp.settle()
        from sol.llm import LLM

        return LLM
    raise AttributeError(f"module 'sol' has no attribute {name!r}")
