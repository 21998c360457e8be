"""A model of the machine that says which configurations cannot fit, cannot reach the SLO, or cannot beat the best.

Roofline (Williams et al. 2009): a step reads every weight once and cannot be shorter than that takes at the memory's
bandwidth; all tokens of a second cannot cost more than the processor's operations. Both are bounds on what an engine
could do at best, so what they exclude would have been in vain; where a number is not known, nothing is excluded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from sol.bench.slo import Slo
from sol.errors import ConfigError
from sol.models.config import ModelConfig
from sol.tune.space import Config

_WEIGHT_BYTES: Final[Mapping[str, float]] = {"int8": 1.0, "fp8": 1.0, "int4": 0.5}
"""A parameter, without scales."""
_STORED_BYTES: Final[Mapping[str, float]] = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0}
_QUANTIZED_BYTES: Final = 0.25
"""A parameter of a checkpoint that is quantised somehow: two bits are the fewest that anybody serves."""
_CACHE_BYTES: Final[Mapping[str, float]] = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "int8": 1.0, "fp8": 1.0}

_SPEEDS: Final[Mapping[str, int]] = {"int8": 2, "fp8": 2}
"""Operations in that precision for one in 16 bits, on processors that have it at all."""
_FASTEST: Final = 4
"""Of four bits: of INT4 before Hopper, of FP4 since Blackwell."""

_SLACK: Final = 1.5
"""For a mean number of output tokens that few requests told."""

_GPUS: Final[tuple[tuple[str, float, float], ...]] = (
    ("B200", 8.0e12, 2.25e15), ("H200", 4.8e12, 0.99e15), ("H100 NVL", 3.94e12, 0.99e15),
    ("H100 PCIe", 2.04e12, 0.76e15), ("H100", 3.36e12, 0.99e15), ("H20", 4.0e12, 0.148e15),
    ("A100", 2.04e12, 0.312e15), ("L40S", 0.864e12, 0.363e15), ("L40", 0.864e12, 0.182e15), ("L4", 0.301e12, 0.122e15),
    ("A40", 0.697e12, 0.15e15), ("A10G", 0.601e12, 0.125e15), ("A10", 0.601e12, 0.125e15), ("T4", 0.321e12, 0.0652e15),
    ("V100S", 1.14e12, 0.131e15), ("V100", 0.901e12, 0.126e15), ("RTX 5090", 1.8e12, 0.42e15),
    ("RTX 4090", 1.01e12, 0.331e15), ("RTX 3090 Ti", 1.01e12, 0.16e15), ("RTX 3090", 0.937e12, 0.143e15),
)  # fmt: skip
"""Words of the name, bytes a second, dense 16-bit operations a second (with 16-bit sums where those are faster).

Of all boards of a name the fastest, rounded up: a bound must not lie below what one of them does. They were checked
against tables of NVIDIA's figures that others publish, but for four: the V100S has its figures from memory; the H100
NVL has the operations of the H100, which it does not reach; the A10's follow from the A40's by cores and clock, and the
A10G has the A10's, which it does not reach. Those of RTX 3090 and 3090 Ti are half of what is advertised with sparsity.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One device; a configuration may take several. None: unknown, so nothing follows. Raises `ConfigError`."""

    memory_bytes: float | None = None
    """That an engine may use."""
    bandwidth: float | None = None
    """Of that memory, bytes a second."""
    operations: float | None = None
    """16-bit, a second."""

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "bandwidth", "operations"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} must be a number above 0, not {value}", param=name)

    @classmethod
    def of_gpu(cls, name: str, memory_bytes: float) -> Machine:
        """Of a name that is not known, the memory alone."""
        for words, bandwidth, operations in _GPUS:
            if re.search(rf"\b{words}\b", name):  # whole words: an L40 is no L4, and a GB200 is faster than a B200
                return cls(memory_bytes=memory_bytes, bandwidth=bandwidth, operations=operations)
        return cls(memory_bytes=memory_bytes)


@dataclass(slots=True, kw_only=True)
class Roofline:
    """Of a model on a machine."""

    model: ModelConfig
    machine: Machine
    slo: Slo
    price_per_hour: float | None = None
    most_drafts: int = 16
    """Of a step, where a configuration leaves it to the engine."""
    output_tokens: float | None = None
    """Mean of a request; None until it is known."""

    def refuses(self, config: Config) -> str | None:
        """Why it cannot fit or cannot reach the SLO."""
        need, memory = self.least_bytes(config), self.machine.memory_bytes
        if memory is not None and need > memory * _devices(config):
            return (
                f"it needs at least {_size(need)} for weights and one step, and there are "
                f"{_size(memory * _devices(config))}"
            )
        step = self.least_step_seconds(config)
        per_token = step / (1 + self._drafts(config))
        for clause in self.slo.clauses:
            slowest = clause.bound if clause.metric in ("tpot", "itl") else math.inf
            if clause.metric == "tps":
                slowest = 1 / clause.bound
            if per_token >= slowest:
                return (
                    f"reading its weights takes {1000 * step:.3g} ms a step, so a token at least "
                    f"{1000 * per_token:.3g} ms: {clause.text} cannot be"
                )
        return None

    def most(self, config: Config) -> float:
        """An upper bound of its score: good requests a second, or good tokens for a unit of money."""
        tokens = math.inf
        step = self.least_step_seconds(config)
        if step > 0 and config.get("max_num_seqs") is not None:
            tokens = config["max_num_seqs"] * (1 + self._drafts(config)) / step
        if self.machine.operations is not None:
            speed = self.machine.operations * _devices(config) * self._speed(config)
            tokens = min(tokens, speed / (2 * self.parameters(reading=True)))
        if self.price_per_hour is not None:
            return tokens * 3600 / self.price_per_hour
        return _SLACK * tokens / self.output_tokens if self.output_tokens else math.inf

    def parameters(self, *, reading: bool = False) -> int:
        """Of the matrices; `reading`: of those that a step reads, which is all but rows of the embedding."""
        m = self.model
        attention = m.hidden_size * m.head_dim * (2 * m.num_attention_heads + 2 * m.num_key_value_heads)
        layer = attention + 3 * m.hidden_size * m.intermediate_size
        table = m.vocab_size * m.hidden_size
        return m.num_hidden_layers * layer + table * (1 if m.tie_word_embeddings or reading else 2)

    def weight_bytes(self, config: Config, *, reading: bool = False) -> float:
        count = self.parameters(reading=reading)
        if self.model.quantization is not None:
            return count * _QUANTIZED_BYTES
        chosen = config.get("quantization")
        if chosen is not None:
            # Embedding and head often stay as they are; a bound from below counts them as small.
            return count * _WEIGHT_BYTES.get(chosen, _QUANTIZED_BYTES)
        # Left to themselves, engines may load what is stored in 32 bits as 16 (vLLM does).
        return count * _STORED_BYTES.get(config.get("dtype", "auto"), 2.0)

    def least_bytes(self, config: Config) -> float:
        """Weights, the activations of a layer and the logits of the largest step, and the cache of its tokens."""
        m = self.model
        tokens, seqs = config.get("max_num_batched_tokens") or 1, config.get("max_num_seqs") or 1
        activations = 2.0 * tokens * (2 * m.hidden_size + 2 * m.intermediate_size)
        width = _CACHE_BYTES.get(config.get("kv_cache_dtype", ""), 1.0)
        cache = 2.0 * m.num_hidden_layers * m.num_key_value_heads * m.head_dim * width * max(tokens, seqs)
        return self.weight_bytes(config) + activations + 4.0 * seqs * m.vocab_size + cache

    def least_step_seconds(self, config: Config) -> float:
        if self.machine.bandwidth is None:
            return 0.0
        return self.weight_bytes(config, reading=True) / (self.machine.bandwidth * _devices(config))

    def _speed(self, config: Config) -> int:
        """Operations for one in 16 bits, at best."""
        chosen = config.get("quantization")
        if self.model.quantization is not None:
            return _FASTEST
        return 1 if chosen is None else _SPEEDS.get(chosen, _FASTEST)

    def _drafts(self, config: Config) -> int:
        speculation: Any = config.get("speculation", "auto")
        if speculation in ("off", False):
            return 0
        if isinstance(speculation, Mapping):
            return int(speculation.get("num_speculative_tokens") or self.most_drafts)
        return self.most_drafts


def _devices(config: Config) -> int:
    """Among how many the model is split."""
    return int(config.get("tensor_parallel_size") or 1) * int(config.get("pipeline_parallel_size") or 1)


def _size(number: float) -> str:
    return f"{number / 2**30:.3g} GiB"
