"""Which architectures there are, and how a checkpoint becomes a program of ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from sol.errors import CheckpointError
from sol.models import llama
from sol.models.checkpoint import Checkpoint
from sol.models.config import SUPPORTED_ARCHITECTURES, ModelConfig
from sol.models.weight_loader import Packer, WeightLoader
from sol.ops.program import Program
from sol.progress import Progress

Builder = Callable[[ModelConfig, WeightLoader, int], Program]

ARCHITECTURES: Final[dict[str, Builder]] = dict.fromkeys(SUPPORTED_ARCHITECTURES, llama.build)
"""Hugging Face's class name → what builds its program; `sol.models.config` refuses any other."""


def load_program(
    config: ModelConfig,
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    max_positions: int,
    progress: bool = False,
    packer: Packer | None = None,
    matrix_dtype: torch.dtype | None = None,
) -> Program:
    """Reads a model's weights: dense in `dtype`, or through `packer` (see `WeightLoader`).

    Raises `CheckpointError` naming a tensor that is missing, misshapen or unexpected.
    """
    with Progress(checkpoint.nbytes, "Loading weights", unit="bytes", show=progress) as bar:
        weights = WeightLoader(
            checkpoint, dtype=dtype, device=device, progress=bar, packer=packer, matrix_dtype=matrix_dtype
        )
        program = ARCHITECTURES[config.architecture](config, weights, max_positions)
        left = weights.left_over()
        if left:
            shown = ", ".join(left[:5]) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
            raise CheckpointError(
                f"the checkpoint has tensors that {config.architecture} does not know: {shown}. Its weights and its "
                f"configuration do not belong together. Supported architectures: {', '.join(ARCHITECTURES)}",
                param="model",
            )
    return program
