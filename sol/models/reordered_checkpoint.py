"""Heads that are rotated in part, brought into the order of those that are rotated whole.

Such a model turns element i of a head's first R elements with i + R/2. The ops turn i with i + E/2 over all E elements,
by angles of which some may be 0. Queries and keys meet in a product, so the rows that make them may stand in any order
that is the same for both: here the first halves of all pairs come first, those that are not turned last in each half.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from sol.models.config import ModelConfig
from sol.ops.weights import Dense, GGUFBlocks, Int4Group, Int8Channel, Stored

if TYPE_CHECKING:
    from sol.models.checkpoint import Checkpoint

_FUSED: Final = (".self_attn.qkv_proj.weight", ".self_attn.qkv_proj.bias")


class ReorderedCheckpoint:
    """Implements `sol.models.checkpoint.Checkpoint` for a model with `rotary_dim` and fused projections."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig) -> None:
        assert config.rotary_dim is not None
        assert config.fused_projections
        self._checkpoint = checkpoint
        heads = config.num_attention_heads + config.num_key_value_heads
        head = _order(config.head_dim, config.rotary_dim)
        turned = (torch.arange(heads)[:, None] * config.head_dim + head).flatten()
        rest = torch.arange(config.num_key_value_heads * config.head_dim) + heads * config.head_dim
        self._rows = torch.cat([turned, rest])

    def names(self) -> frozenset[str]:
        return self._checkpoint.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._checkpoint.shape(name)

    def stored_nbytes(self, name: str) -> int:
        return self._checkpoint.stored_nbytes(name)

    @property
    def nbytes(self) -> int:
        return self._checkpoint.nbytes

    def load(self, name: str, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
        tensor = self._checkpoint.load(name, dtype, device)
        return tensor[self._rows.to(tensor.device)] if name.endswith(_FUSED) else tensor

    def stored(self, name: str) -> Stored:
        matrix = self._checkpoint.stored(name)
        return _with_rows(matrix, self._rows) if name.endswith(_FUSED) else matrix


def _order(head_dim: int, rotary_dim: int) -> torch.Tensor:
    """[head_dim]: which element of a head comes where."""
    half, unturned = rotary_dim // 2, (head_dim - rotary_dim) // 2
    elements = torch.arange(head_dim)
    first, second, rest = elements[:half], elements[half:rotary_dim], elements[rotary_dim:]
    return torch.cat([first, rest[:unturned], second, rest[unturned:]])


def _with_rows(matrix: Stored, rows: torch.Tensor) -> Stored:
    match matrix:
        case Dense(weight=weight):
            return Dense(weight[rows])
        case GGUFBlocks(kind=kind, data=data, in_features=in_features):
            return GGUFBlocks(kind, data[rows], in_features)
        case Int8Channel(codes=codes, scales=scales):
            return Int8Channel(codes[rows], scales[rows])
        case Int4Group(codes=codes, scales=scales, zeros=zeros, group_size=group_size, perm=perm):
            return Int4Group(codes[rows], scales[rows], None if zeros is None else zeros[rows], group_size, perm)
