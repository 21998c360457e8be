"""Hands out a checkpoint's tensors the way ops want them: asked for by name and shape, fused, none left over."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sol.errors import CheckpointError
from sol.models.checkpoint import Checkpoint
from sol.ops.weights import Dense, Linear, Norm
from sol.progress import Progress


class WeightLoader:
    """Hands out a checkpoint's tensors as the ops want them and remembers which were taken."""

    def __init__(
        self, checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device | str, progress: Progress
    ) -> None:
        self.device = device
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._progress = progress
        self._names = checkpoint.names()
        self._taken: set[str] = set()

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """One tensor in memory of its own."""
        self._check(name, shape)
        out = torch.empty(shape, dtype=self._dtype, device=self.device)
        self._fill(name, out)
        return out

    def matrix(self, name: str, rows: int, in_features: int) -> torch.Tensor:
        """One [rows, in_features] in memory of its own, stored the way that products with it are fastest."""
        self._check(name, (rows, in_features))
        out = self._empty_matrix(rows, in_features)
        self._fill(name, out)
        return out

    def norm(self, name: str, size: int, eps: float) -> Norm:
        return Norm(weight=self.tensor(f"{name}.weight", (size,)), eps=eps)

    def linear(self, parts: Sequence[tuple[str, int]], in_features: int, *, bias: bool = False) -> Linear:
        """Projections (name, rows), one below the other, as one [all rows, in_features]."""
        for name, count in parts:
            self._check(f"{name}.weight", (count, in_features))
            if bias:
                self._check(f"{name}.bias", (count,))
        rows = sum(count for _, count in parts)
        weight = self._empty_matrix(rows, in_features)
        bias_out = torch.empty(rows, dtype=self._dtype, device=self.device) if bias else None
        start = 0
        for name, count in parts:
            self._fill(f"{name}.weight", weight[start : start + count])
            if bias_out is not None:
                self._fill(f"{name}.bias", bias_out[start : start + count])
            start += count
        return Linear(segments=(Dense(weight),), bias=bias_out)

    def tied(self, name: str, embedding: torch.Tensor) -> Linear:
        """A head that is the embedding. Files may store it a second time; a copy that differs is an error."""
        if name in self._names:
            copy = self.tensor(name, tuple(embedding.shape))
            if not torch.equal(copy, embedding):
                raise CheckpointError(
                    f"{name} differs from model.embed_tokens.weight, but the configuration ties the two: "
                    "set tie_word_embeddings to false in config.json if the file is right",
                    param="model",
                )
        return Linear(segments=(Dense(embedding),))

    def left_over(self) -> list[str]:
        """Names of the tensors that nobody took, sorted."""
        return sorted(self._names - self._taken)

    def _empty_matrix(self, rows: int, in_features: int) -> torch.Tensor:
        # On a CPU torch's product with one vector uses a single thread along rows, all of them along columns:
        # a matrix with more rows than columns is streamed almost twice as fast if its columns are contiguous.
        if torch.device(self.device).type == "cpu" and rows > in_features:
            return torch.empty((in_features, rows), dtype=self._dtype).t()
        return torch.empty((rows, in_features), dtype=self._dtype, device=self.device)

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        # Before anything is allocated: a configuration that lies may ask for any size.
        if name not in self._names:
            raise CheckpointError(f"the checkpoint lacks the tensor {name}", param="model")
        found = self._checkpoint.shape(name)
        if found != shape:
            raise CheckpointError(
                f"the tensor {name} has the shape {list(found)}; the configuration makes it {list(shape)}",
                param="model",
            )

    def _fill(self, name: str, out: torch.Tensor) -> None:
        out.copy_(self._checkpoint.load(name, self._dtype, self.device))
        self._taken.add(name)
        self._progress.advance(self._checkpoint.stored_nbytes(name))
