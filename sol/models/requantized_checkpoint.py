"""A full-precision checkpoint whose matrices are quantised as they are read: `--quantization int8` and `int4`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import torch

from sol.errors import CheckpointError, UnsupportedModelError
from sol.models.packing import int4_nbytes
from sol.ops.dequantize import dequantize
from sol.ops.weights import Dense, Stored
from sol.quantization.rounding import GROUP_SIZE, int4_group, int8_channel

if TYPE_CHECKING:
    from sol.models.checkpoint import Checkpoint

_INT8_ALWAYS: Final = ("model.embed_tokens.weight", "lm_head.weight", ".gate.weight")
"""Ends of names; the last one is a router's: who computes hangs on it, and it is small."""
"""Embedding and head lose most by four bits, and every token pays for it."""


class RequantizedCheckpoint:
    """Implements `sol.models.checkpoint.Checkpoint`, one matrix at a time: `load` gives what the codes stand for.

    int8: one scale a row, everywhere. int4: a scale and a zero point for each 32 columns, embedding,
    head and routers int8. Norms and biases stay as they are.
    """

    def __init__(self, checkpoint: Checkpoint, quantization: Literal["int8", "int4"]) -> None:
        self._checkpoint = checkpoint
        self._quantization = quantization

    def names(self) -> frozenset[str]:
        return self._checkpoint.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._checkpoint.shape(name)

    def stored_nbytes(self, name: str) -> int:
        """What it takes when it is quantised."""
        shape = self.shape(name)
        if len(shape) != 2:
            return self._checkpoint.stored_nbytes(name)
        rows, columns = shape
        if self._quantization == "int8" or name.endswith(_INT8_ALWAYS):
            return rows * (columns + 4)
        return int4_nbytes(rows, columns, GROUP_SIZE)

    @property
    def nbytes(self) -> int:
        return sum(map(self.stored_nbytes, self.names()))

    def load(self, name: str, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
        if len(self.shape(name)) != 2:
            return self._checkpoint.load(name, dtype, device)
        return dequantize(self.stored(name), dtype).to(device)

    def stored(self, name: str) -> Stored:
        matrix = self._checkpoint.stored(name)
        assert isinstance(matrix, Dense)  # a checkpoint that is quantised already was refused
        try:
            if self._quantization == "int8" or name.endswith(_INT8_ALWAYS):
                return int8_channel(matrix.weight)
            columns = matrix.weight.shape[1]
            if columns % GROUP_SIZE == 0:
                return int4_group(matrix.weight, GROUP_SIZE)
        except ValueError as error:
            raise CheckpointError(f"the tensor {name} cannot be quantised: {error}", param="model") from None
        raise UnsupportedModelError(
            f"{name} has {columns} columns, which groups of {GROUP_SIZE} do not divide: quantization int4 does not "
            "go with this model, int8 does",
            param="quantization",
        )
