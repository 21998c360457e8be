"""Random weights in the shape of a model (`load_format=dummy`): to measure and to test without a download."""

from __future__ import annotations

import hashlib
import math
from typing import Final

import torch

from sol.models.config import ModelConfig
from sol.ops.weights import Dense, Stored

_STD: Final = 0.02
_POOL: Final = 4_194_301
"""Random numbers drawn; a prime, so that rows of no usual width repeat within it."""


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter that a checkpoint of this configuration has."""
    hidden, head_dim = config.hidden_size, config.head_dim
    q_size, kv_size = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    intermediate = config.intermediate_size
    if config.fused_projections:
        projections = {
            "self_attn.qkv_proj": (q_size + 2 * kv_size, hidden, config.qkv_bias),
            "self_attn.o_proj": (hidden, q_size, config.output_bias),
            "mlp.gate_up_proj": (2 * intermediate, hidden, config.mlp_bias),
            "mlp.down_proj": (hidden, intermediate, config.mlp_bias),
        }
    else:
        projections = {
            "self_attn.q_proj": (q_size, hidden, config.qkv_bias),
            "self_attn.k_proj": (kv_size, hidden, config.qkv_bias),
            "self_attn.v_proj": (kv_size, hidden, config.qkv_bias),
            "self_attn.o_proj": (hidden, q_size, config.output_bias),
            "mlp.gate_proj": (intermediate, hidden, config.mlp_bias),
            "mlp.up_proj": (intermediate, hidden, config.mlp_bias),
            "mlp.down_proj": (hidden, intermediate, config.mlp_bias),
        }
    if config.experts is not None:
        projections = {name: shape for name, shape in projections.items() if not name.startswith("mlp.")}
        module, (gate, up, down) = config.experts.module, config.experts.projections
        projections[f"{module}.gate"] = (config.experts.num_experts, hidden, False)
        for index in range(config.experts.num_experts):
            projections[f"{module}.experts.{index}.{gate}"] = (intermediate, hidden, False)
            projections[f"{module}.experts.{index}.{up}"] = (intermediate, hidden, False)
            projections[f"{module}.experts.{index}.{down}"] = (hidden, intermediate, False)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        if config.post_norms:
            shapes[f"{prefix}.pre_feedforward_layernorm.weight"] = (hidden,)
            shapes[f"{prefix}.post_feedforward_layernorm.weight"] = (hidden,)
        if config.head_norms:
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (head_dim,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (head_dim,)
        for name, (rows, columns, bias) in projections.items():
            shapes[f"{prefix}.{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}.{name}.bias"] = (rows,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


class DummyCheckpoint:
    """Normal weights of standard deviation 0.02, norms that multiply by 1.

    Implements `sol.models.checkpoint.Checkpoint`.

    A parameter is a function of the seed and its name, the same in every process and on every device. Drawing billions
    of numbers would take minutes, so each parameter repeats one pool of four million, from a place of its own on.
    """

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        self._shapes = parameter_shapes(config)
        self._dtype: torch.dtype = getattr(torch, config.torch_dtype)
        self._norm = 1.0 - config.norm_offset
        self._seed = seed
        self._pool = torch.randn(_POOL, generator=torch.Generator().manual_seed(seed)) * _STD
        self._converted: tuple[torch.dtype, torch.device, torch.Tensor] | None = None

    def names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def stored_nbytes(self, name: str) -> int:
        """What it would take in a file of the configuration's dtype."""
        return math.prod(self._shapes[name]) * self._dtype.itemsize

    @property
    def nbytes(self) -> int:
        return sum(map(self.stored_nbytes, self._shapes))

    def load(self, name: str, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
        shape = self._shapes[name]
        if name.endswith("norm.weight"):
            return torch.full(shape, self._norm, dtype=dtype, device=device)
        pool = self._pool_as(dtype, torch.device(device))
        digest = hashlib.blake2b(f"{self._seed}:{name}".encode(), digest_size=8).digest()
        pool = pool.roll(-(int.from_bytes(digest, "little") % _POOL))
        count = math.prod(shape)
        repeats, rest = divmod(count, _POOL)
        result = torch.empty(count, dtype=dtype, device=device)
        result[: repeats * _POOL].view(repeats, _POOL).copy_(pool.expand(repeats, _POOL))
        result[repeats * _POOL :].copy_(pool[:rest])
        return result.view(shape)

    def stored(self, name: str) -> Stored:
        return Dense(self.load(name, self._dtype))

    def _pool_as(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if self._converted is None or self._converted[:2] != (dtype, device):
            self._converted = (dtype, device, self._pool.to(device=device, dtype=dtype))
        return self._converted[2]
