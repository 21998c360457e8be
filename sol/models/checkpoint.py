"""Weights by their Hugging Face names, whatever file they are in.

A checkpoint gives tensors; which ones a model expects, and what to do with one nobody expects, is the model's loader's
to decide. Files stay memory-mapped while their checkpoint is alive, so drop it once the weights are loaded.
"""

from __future__ import annotations

from typing import Protocol

import torch

from sol.config import Quantization
from sol.models.config import ModelConfig, load_model_config
from sol.models.dummy_checkpoint import DummyCheckpoint
from sol.models.gguf_checkpoint import GGUFCheckpoint
from sol.models.quantization_config import check_request
from sol.models.quantized_checkpoint import QuantizedCheckpoint
from sol.models.reordered_checkpoint import ReorderedCheckpoint
from sol.models.requantized_checkpoint import RequantizedCheckpoint
from sol.models.safetensors_files import SafetensorsFiles
from sol.models.source import ModelFiles
from sol.models.upload import Uploader
from sol.ops.weights import Dense, Stored


class Checkpoint(Protocol):
    """A model's weights."""

    def names(self) -> frozenset[str]:
        """Hugging Face's parameter names, as `model.layers.0.self_attn.q_proj.weight`."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """A parameter's shape as torch has it: [out features, in features] for a projection."""
        ...

    def stored_nbytes(self, name: str) -> int:
        """The bytes a parameter takes as `stored` gives it (for a quantised one, fewer than loaded)."""
        ...

    @property
    def nbytes(self) -> int:
        """The sum of `stored_nbytes` over all names."""
        ...

    def load(self, name: str, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
        """One parameter, dequantised, rows in Hugging Face's order. KeyError for a name not in `names()`.

        The tensor may share memory with the file: do not write to it."""
        ...

    def stored(self, name: str) -> Stored:
        """One matrix in the format that it has in its file, rows in Hugging Face's order, on the CPU: what `load`
        dequantises. It may share memory with the file: do not write to it. KeyError for a name not in `names()`."""
        ...


def open_checkpoint(files: ModelFiles, quantization: Quantization | None = None) -> Checkpoint:
    """Opens the weights that `files` names, in the way that `files.load_format` says.

    `quantization` is `EngineConfig`'s: with int8 and int4, matrices are quantised as they are read. `ConfigError` if it
    does not go with the checkpoint.
    """
    config = load_model_config(files)
    check_request(quantization, config.quantization, files.name)
    checkpoint = _open(files, config)
    if config.rotary_dim is not None:
        checkpoint = ReorderedCheckpoint(checkpoint, config)
    if quantization == "int8" or quantization == "int4":
        return RequantizedCheckpoint(checkpoint, quantization)
    return checkpoint


def _open(files: ModelFiles, config: ModelConfig) -> Checkpoint:
    if files.load_format == "dummy":
        return DummyCheckpoint(config)
    if files.load_format == "gguf":
        assert files.gguf is not None
        return GGUFCheckpoint(files.gguf, config)
    return SafetensorsCheckpoint(files) if config.quantization is None else QuantizedCheckpoint(files, config)


class SafetensorsCheckpoint:
    """One or several safetensors files in full precision, memory-mapped."""

    def __init__(self, files: ModelFiles) -> None:
        self._files = SafetensorsFiles(files)
        self._uploader: Uploader | None = None

    def names(self) -> frozenset[str]:
        return frozenset(self._files.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._files.tensors[name].shape

    def stored_nbytes(self, name: str) -> int:
        return self._files.tensors[name].nbytes

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._files.tensors.values())

    def load(self, name: str, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
        tensor = self._files.read(name)
        if torch.device(device).type == "cpu":
            return tensor.to(dtype)
        # To the device first: there the conversion is faster, and what travels is no larger than what is stored.
        if self._uploader is None:
            self._uploader = Uploader(torch.device(device))
        return self._uploader.upload(tensor).to(dtype)

    def stored(self, name: str) -> Stored:
        return Dense(self._files.read(name))
