"""Tensors in one or several safetensors files, memory-mapped, by the names they have there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from sol.errors import CheckpointError, UnsupportedModelError
from sol.models.source import ModelFiles

DTYPES: Final[dict[str, torch.dtype]] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}
FLOATING: Final = ("F32", "F16", "BF16")

_LFS_POINTER: Final = b"version https://git-lfs"
_RECOMPUTED: Final = ".rotary_emb.inv_freq"
"""RoPE's frequencies, which old versions of transformers saved with every layer. They follow from the configuration,
and transformers ignores them too."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What a file says about one tensor."""

    path: Path
    dtype: str
    """safetensors' name: F16, I32 …"""
    shape: tuple[int, ...]
    nbytes: int


class SafetensorsFiles:
    """`tensors` says what there is, `read` gets it.

    Raises `CheckpointError` for a file that is missing or damaged or repeats a name, and `UnsupportedModelError` for
    a tensor whose type is not one of `dtypes`.
    """

    def __init__(self, files: ModelFiles, dtypes: tuple[str, ...] = FLOATING) -> None:
        self._shards: dict[str, Any] = {}  # safetensors types none of what it returns
        tensors: dict[str, StoredTensor] = {}
        for path in files.safetensors:
            shard = _open(path)
            for name in shard.keys():  # noqa: SIM118 (a file is not iterable)
                if name.endswith(_RECOMPUTED):
                    continue
                if name in tensors:
                    raise CheckpointError(
                        f"{files.root} holds the tensor {name} twice, the second time in {path.name}", param="model"
                    )
                view = shard.get_slice(name)
                dtype = view.get_dtype()
                if dtype not in dtypes:
                    raise UnsupportedModelError(
                        f"{path}: tensor {name} has the type {dtype}; supported are {', '.join(dtypes)}", param="model"
                    )
                shape = tuple(view.get_shape())
                tensors[name] = StoredTensor(path, dtype, shape, math.prod(shape) * DTYPES[dtype].itemsize)
                self._shards[name] = shard
        self.tensors: Mapping[str, StoredTensor] = tensors

    def read(self, name: str) -> torch.Tensor:
        """One tensor as it is stored. It may share memory with the file: do not write to it. KeyError if unknown."""
        tensor: torch.Tensor = self._shards[name].get_tensor(name)
        return tensor


def _open(path: Path) -> Any:
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
