"""A GGUF file as a checkpoint with Hugging Face's names and row order."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from sol.errors import CheckpointError, UnsupportedModelError
from sol.models.config import ExpertsConfig, ModelConfig
from sol.models.gguf import BLOCK_SIZES, GGUFFile
from sol.ops.dequantize import dequantize_blocks
from sol.ops.weights import Dense, GGUFBlocks, Stored

_CHUNK_ELEMENTS: Final = 1 << 18
"""So many elements are dequantised at once: their float32 copies stay in a core's cache."""

_GLOBAL_NAMES: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_NAMES: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OTHER_NAMES: Final = {
    "Gemma2ForCausalLM": _GEMMA_NAMES,
    "Gemma3ForCausalLM": _GEMMA_NAMES,
    "Phi3ForCausalLM": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "MixtralForCausalLM": {"ffn_gate_inp": "block_sparse_moe.gate"},
    "Qwen3MoeForCausalLM": {"ffn_gate_inp": "mlp.gate"},
}
"""Of one architecture, in addition to `_LAYER_NAMES` or instead of what stands there."""
_FLOATING: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_EXPERTS: Final = re.compile(r"blk\.(0|[1-9]\d*)\.ffn_(gate|up|down)_exps\.weight", re.ASCII)
"""One projection of all experts of a layer, [experts, rows, columns]."""
_EXPERT: Final = re.compile(r"blk\.(0|[1-9]\d*)\.ffn_(gate|up|down)\.(0|[1-9]\d*)\.weight", re.ASCII)
"""One of one expert, as the first converters of Mixtral wrote it."""
_LAYER: Final = re.compile(r"blk\.(0|[1-9]\d*)\.(\w+)\.(weight|bias)", re.ASCII)
_GLOBAL: Final = re.compile(r"(\w+)\.(weight|bias)", re.ASCII)
_ROPE_FACTORS: Final = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""No parameters: the configuration holds them, as `RopeFactors` or `LongRopeScaling`."""


def hugging_face_name(name: str, architecture: str) -> str:
    """The Hugging Face name of a tensor in a GGUF file; a name it does not know stays as it is."""
    layer = _LAYER.fullmatch(name)
    layer_names = _LAYER_NAMES | _OTHER_NAMES.get(architecture, {})
    if layer is not None and layer[2] in layer_names:
        return f"model.layers.{layer[1]}.{layer_names[layer[2]]}.{layer[3]}"
    top = _GLOBAL.fullmatch(name)
    if top is not None and top[1] in _GLOBAL_NAMES:
        return f"{_GLOBAL_NAMES[top[1]]}.{top[2]}"
    return name


def _expert_name(experts: ExpertsConfig, layer: str, projection: str, index: int) -> str:
    theirs = experts.projections[("gate", "up", "down").index(projection)]
    return f"model.layers.{layer}.{experts.module}.experts.{index}.{theirs}.weight"


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a parameter is: a tensor of the file, or one expert's part of it."""

    tensor: str
    expert: int | None = None


class GGUFCheckpoint:
    """The tensors of one GGUF file. Implements `sol.models.checkpoint.Checkpoint`."""

    def __init__(self, path: Path, config: ModelConfig) -> None:
        self._file = GGUFFile(path)
        self._places: dict[str, _Place] = {}
        for name, tensor in self._file.tensors.items():
            if name in _ROPE_FACTORS:
                continue
            if config.experts is not None and (layer := _EXPERTS.fullmatch(name)) and len(tensor.shape) == 3:
                if tensor.shape[0] != config.experts.num_experts:
                    raise CheckpointError(
                        f"{path}: {name} holds {tensor.shape[0]} experts, the metadata says "
                        f"{config.experts.num_experts}",
                        param="model",
                    )
                for index in range(tensor.shape[0]):
                    self._places[_expert_name(config.experts, layer[1], layer[2], index)] = _Place(name, index)
            elif config.experts is not None and (layer := _EXPERT.fullmatch(name)):
                self._places[_expert_name(config.experts, layer[1], layer[2], int(layer[3]))] = _Place(name)
            else:
                self._places[hugging_face_name(name, config.architecture)] = _Place(name)
        self._norm_offset = config.norm_offset
        self._heads: dict[str, int] = {}
        if config.architecture in (
            "LlamaForCausalLM",
            "MixtralForCausalLM",
        ):  # the others' rows stand as in Hugging Face's checkpoints
            self._heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}

    def names(self) -> frozenset[str]:
        return frozenset(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        place = self._places[name]
        shape = self._file.tensors[place.tensor].shape
        return shape if place.expert is None else shape[1:]

    def stored_nbytes(self, name: str) -> int:
        place = self._places[name]
        tensor = self._file.tensors[place.tensor]
        return tensor.nbytes if place.expert is None else tensor.nbytes // tensor.shape[0]

    @property
    def nbytes(self) -> int:
        return sum(map(self.stored_nbytes, self._places))

    def load(self, name: str, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
        shape, kind = self.shape(name), self._file.tensors[self._places[name].tensor].type
        rows = self._rows(name)
        columns = shape[-1] if len(shape) > 1 else 1
        is_norm = name.endswith("norm.weight")
        step = max(1, _CHUNK_ELEMENTS // columns)
        result = torch.empty((len(rows), columns), dtype=dtype, device=device)
        for begin in range(0, len(rows), step):
            # A copy: the mapping is read-only, and torch knows no read-only tensors.
            chunk = torch.from_numpy(np.array(rows[begin : begin + step], order="C"))
            values = dequantize_blocks(chunk.to(device), kind)
            # The converter has added the norms' offset; taken off before rounding, so that none of the weight is lost.
            result[begin : begin + step] = values.float() - self._norm_offset if is_norm else values
        return result.reshape(shape)

    def stored(self, name: str) -> Stored:
        shape, kind = self.shape(name), self._file.tensors[self._places[name].tensor].type
        if len(shape) != 2:
            raise CheckpointError(
                f"{self._file.path}: {self._places[name].tensor} has {len(shape)} dimensions; a matrix has 2",
                param="model",
            )
        data = torch.from_numpy(np.array(self._rows(name), order="C"))  # a copy, as in `load`
        if kind in _FLOATING:
            return Dense(data.view(_FLOATING[kind]))
        return GGUFBlocks(kind, data, shape[1])

    def _rows(self, name: str) -> npt.NDArray[np.uint8]:
        """[rows, bytes of a row] in Hugging Face's order, read-only. Every row is whole blocks, so rows can be moved
        about and cut between."""
        place, shape = self._places[name], self.shape(name)
        theirs = place.tensor
        tensor = self._file.tensors[theirs]
        block, block_nbytes = BLOCK_SIZES[tensor.type]
        if len(tensor.shape) == 1 and block != 1:
            raise UnsupportedModelError(
                f"{self._file.path}: {theirs} has one dimension and the type {tensor.type}; supported are F32, F16 and "
                "BF16 for norms and biases",
                param="model",
            )
        columns = shape[-1] if len(shape) > 1 else 1
        rows = self._file.data(theirs).reshape(-1, columns // block * block_nbytes)
        if place.expert is not None:
            return rows[place.expert * shape[0] : (place.expert + 1) * shape[0]]
        return self._rows_in_order(theirs, rows)

    def _rows_in_order(self, name: str, rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Undoes the converter's permutation of q and k.

        Hugging Face's RoPE turns element i of a head with i + head_dim/2, ggml's turns 2i with 2i + 1. The converter
        therefore interleaves the two halves of each head's rows; here they are parted again.
        """
        layer = _LAYER.fullmatch(name)
        heads = self._heads.get(layer[2]) if layer is not None else None
        if heads is None:
            return rows
        if len(rows) % (2 * heads):
            raise CheckpointError(
                f"{self._file.path}: {name} has {len(rows)} rows, which {heads} heads of pairs cannot share",
                param="model",
            )
        parted = rows.reshape(heads, len(rows) // heads // 2, 2, -1).swapaxes(1, 2)
        return parted.reshape(rows.shape)
