"""The engines that are known, by their names in gateway.yaml."""

from __future__ import annotations

from sol.engines.driver import Driver
from sol.engines.drivers.llama_cpp import LlamaCpp
from sol.engines.drivers.openai import OpenAI
from sol.engines.drivers.sglang import Sglang
from sol.engines.drivers.sol import Sol
from sol.engines.drivers.tensorrt_llm import TensorrtLlm
from sol.engines.drivers.tgi import Tgi
from sol.engines.drivers.vllm import Vllm
from sol.errors import ConfigError

DRIVERS: dict[str, Driver] = {
    each.name: each for each in (Sol(), Vllm(), Sglang(), Tgi(), TensorrtLlm(), LlamaCpp(), OpenAI())
}


def driver_named(name: str) -> Driver:
    """Raises `ConfigError` for a name that nobody has."""
    try:
        return DRIVERS[name]
    except KeyError:
        raise ConfigError(f"driver must be one of {', '.join(DRIVERS)}, not {name!r}", param="driver") from None
