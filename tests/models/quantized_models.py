"""Checkpoints as AWQ, GPTQ and compressed-tensors write them: a tiny Llama with random codes, scales and zero points.

The packers here follow the formats' descriptions nibble by nibble, in another way than the readers, and give what the
codes stand for from the same formula: (code - zero point) · scale.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tiny_models import make_llama

HIDDEN, INTERMEDIATE = 256, 384
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

Tensors = dict[str, torch.Tensor]


def pack_rows(codes: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """[rows, columns] → int32 [rows, ⌈columns · bits / 32⌉]: nibble i of a word holds its column `order`[i]."""
    per_word = 32 // bits
    rows, columns = codes.shape
    words = np.zeros((rows, -(-columns // per_word)), dtype=np.uint32)
    for position, column in enumerate(order or range(per_word)):
        held = codes[:, column::per_word].astype(np.uint32)
        words[:, : held.shape[1]] |= held << np.uint32(bits * position)
    return torch.from_numpy(words.view(np.int32))


@dataclass
class Codes:
    """A quantised matrix [rows, columns]."""

    codes: np.ndarray
    scales: np.ndarray
    """float16 [rows, groups]"""
    zeros: np.ndarray
    """[rows, groups]"""
    groups: np.ndarray
    """[columns]: of each column"""

    @property
    def weight(self) -> torch.Tensor:
        steps = self.codes.astype(np.int32) - self.zeros[:, self.groups]
        return torch.from_numpy(steps.astype(np.float32) * self.scales.astype(np.float32)[:, self.groups])


def random_codes(
    rows: int, columns: int, *, bits: int, group_size: int, symmetric: bool, act_order: bool, seed: int
) -> Codes:
    generator = np.random.default_rng(seed)
    size = columns if group_size == -1 else group_size
    count = -(-columns // size)
    groups = np.arange(columns) // size
    if act_order:
        generator.shuffle(groups)
    middle = 1 << (bits - 1)
    zeros = np.full((rows, count), middle)
    if not symmetric:
        zeros = generator.integers(1, 1 << bits, size=(rows, count))
    return Codes(
        codes=generator.integers(0, 1 << bits, size=(rows, columns)),
        scales=generator.uniform(0.5, 1.5, size=(rows, count)).astype(np.float16) * np.float16(0.4 / middle),
        zeros=zeros,
        groups=groups,
    )


def awq(made: Codes, bits: int, **_: Any) -> Tensors:
    return {
        "qweight": pack_rows(made.codes.T, bits, AWQ_ORDER),
        "qzeros": pack_rows(made.zeros.T, bits, AWQ_ORDER),
        "scales": torch.from_numpy(made.scales.T.copy()),
    }


def gptq(made: Codes, bits: int, *, version: int = 1, **_: Any) -> Tensors:
    stored = made.zeros - 1 if version == 1 else made.zeros
    return {
        "qweight": pack_rows(made.codes, bits).t().contiguous(),
        "qzeros": pack_rows(stored.T, bits),
        "scales": torch.from_numpy(made.scales.T.copy()),
        "g_idx": torch.from_numpy(made.groups.astype(np.int32)),
    }


def pack_quantized(made: Codes, bits: int, *, symmetric: bool, act_order: bool = False, **_: Any) -> Tensors:
    tensors = {
        "weight_packed": pack_rows(made.codes, bits),
        "weight_scale": torch.from_numpy(made.scales),
        "weight_shape": torch.tensor(made.codes.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = pack_rows(made.zeros.T, bits).t().contiguous()
    if act_order:
        tensors["weight_g_idx"] = torch.from_numpy(made.groups.astype(np.int32))
    return tensors


def int_quantized(made: Codes, bits: int, **_: Any) -> Tensors:
    assert bits == 8
    return {
        "weight": torch.from_numpy((made.codes - 128).astype(np.int8)),
        "weight_scale": torch.from_numpy(made.scales).to(torch.bfloat16),
    }


@dataclass
class QuantizedLlama:
    directory: Path
    weights: Tensors
    """What the checkpoint holds, float32 by the names of the plain weights"""
    tensors: Tensors = field(repr=False)
    """What its file holds"""
    config: dict[str, Any]

    def save(self) -> Path:
        """Writes `tensors` and `config` as they are now."""
        (self.directory / "config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, self.directory / "model.safetensors")
        return self.directory


def save_quantized(
    directory: Path,
    pack: Callable[..., Tensors],
    quantization_config: dict[str, Any],
    *,
    bits: int = 4,
    group_size: int = 128,
    symmetric: bool = False,
    act_order: bool = False,
    plain: tuple[str, ...] = (),
    model: dict[str, Any] | None = None,
    **options: Any,
) -> QuantizedLlama:
    """A tiny Llama whose projections, except those whose names contain one of `plain`, are quantised; its embedding,
    head, norms and biases are float16."""
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "head_dim": 32, "num_attention_heads": 8}
    llama = make_llama(dtype=torch.float16, initializer_range=0.05, **(sizes | (model or {})))
    tensors: Tensors = {}
    weights: Tensors = {}
    for index, (name, parameter) in enumerate(llama.state_dict().items()):
        if name == "lm_head.weight" and llama.config.tie_word_embeddings:
            continue
        module = name.removesuffix(".weight")
        if not module.endswith("_proj") or any(part in name for part in plain):
            tensors[name] = parameter.clone()
            weights[name] = parameter.float()
            continue
        made = random_codes(
            *parameter.shape, bits=bits, group_size=group_size, symmetric=symmetric, act_order=act_order, seed=index
        )
        packed = pack(made, bits, symmetric=symmetric, act_order=act_order, **options)
        tensors |= {f"{module}.{suffix}": tensor for suffix, tensor in packed.items()}
        if packed.get("weight_scale", torch.empty(0)).dtype == torch.bfloat16:
            made.scales = packed["weight_scale"].float().numpy()
        weights[name] = made.weight
    config = llama.config.to_dict() | {
        "architectures": [type(llama).__name__],
        "quantization_config": quantization_config,
    }
    made_model = QuantizedLlama(directory, weights, tensors, config)
    made_model.save()
    return made_model


def compressed(weights: dict[str, Any], stored_format: str = "pack-quantized", **changes: Any) -> dict[str, Any]:
    """A compressed-tensors `quantization_config`."""
    group = {"targets": ["Linear"], "weights": {"type": "int", **weights}, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": stored_format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "sparsity_config": {},
        **changes,
    }
