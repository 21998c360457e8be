"""Weights by their Hugging Face names, whatever file they are in.

A checkpoint gives tensors; which ones a model expects, and what to do with one nobody expects, is the model's loader's
to decide. Files stay memory-mapped while their checkpoint is alive, so drop it once the weights are loaded.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from safetensors import SafetensorError, safe_open

from sol.errors import CheckpointError, UnsupportedModelError
from sol.models.config import load_model_config
from sol.models.dummy_checkpoint import DummyCheckpoint
from sol.models.gguf_checkpoint import GGUFCheckpoint
from sol.models.source import ModelFiles

_DTYPE_NBYTES: Final = {"F32": 4, "F16": 2, "BF16": 2}
_LFS_POINTER: Final = b"version https://git-lfs"

_RECOMPUTED: Final = ".rotary_emb.inv_freq"
"""RoPE's frequencies, which old versions of transformers saved with every layer. They follow from the configuration,
and transformers ignores them too."""


class Checkpoint(Protocol):
    """A model's weights."""

    def names(self) -> frozenset[str]:
        """Hugging Face's parameter names, as `model.layers.0.self_attn.q_proj.weight`."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """A parameter's shape as torch has it: [out features, in features] for a projection."""
        ...

    def stored_nbytes(self, name: str) -> int:
        """The bytes a parameter takes in its file (for a quantised one, fewer than loaded)."""
        ...

    @property
    def nbytes(self) -> int:
        """The sum of `stored_nbytes` over all names."""
        ...

    def load(self, name: str, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
        """One parameter, dequantised, rows in Hugging Face's order. KeyError for a name not in `names()`.

        The tensor may share memory with the file: do not write to it."""
        ...


def open_checkpoint(files: ModelFiles) -> Checkpoint:
    """Opens the weights that `files` names, in the way that `files.load_format` says."""
    if files.load_format == "dummy":
        return DummyCheckpoint(load_model_config(files))
    if files.load_format == "gguf":
        assert files.gguf is not None
        return GGUFCheckpoint(files.gguf, load_model_config(files))
    return SafetensorsCheckpoint(files)


class SafetensorsCheckpoint:
    """One or several safetensors files, memory-mapped."""

    def __init__(self, files: ModelFiles) -> None:
        self._shards: dict[str, Any] = {}  # safetensors types none of what it returns
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._stored: dict[str, int] = {}
        for path in files.safetensors:
            shard = _open_shard(path)
            for name in shard.keys():  # noqa: SIM118 (a file is not iterable)
                if name.endswith(_RECOMPUTED):
                    continue
                if name in self._shards:
                    raise CheckpointError(
                        f"{files.root} holds the tensor {name} twice, the second time in {path.name}", param="model"
                    )
                view = shard.get_slice(name)
                dtype = view.get_dtype()
                if dtype not in _DTYPE_NBYTES:
                    raise UnsupportedModelError(
                        f"{path}: tensor {name} has the type {dtype}; supported are {', '.join(_DTYPE_NBYTES)}",
                        param="model",
                    )
                self._shards[name] = shard
                self._shapes[name] = tuple(view.get_shape())
                self._stored[name] = math.prod(self._shapes[name]) * _DTYPE_NBYTES[dtype]

    def names(self) -> frozenset[str]:
        return frozenset(self._shards)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def stored_nbytes(self, name: str) -> int:
        return self._stored[name]

    @property
    def nbytes(self) -> int:
        return sum(self._stored.values())

    def load(self, name: str, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
        tensor: torch.Tensor = self._shards[name].get_tensor(name)
        # To the device first: there the conversion is faster, and what travels is no larger than what is stored.
        return tensor.to(device=device).to(dtype=dtype)


def _open_shard(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except FileNotFoundError:
        raise CheckpointError(f"the shard {path} is missing: fetch the model again", param="model") from None
    except (OSError, SafetensorError) as error:
        with path.open("rb") as file:
            if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                raise CheckpointError(
                    f"{path} is a Git LFS pointer, not the weights themselves: run `git lfs pull` in its repository",
                    param="model",
                ) from None
        raise CheckpointError(f"{path} is damaged ({error}): fetch it again", param="model") from error
