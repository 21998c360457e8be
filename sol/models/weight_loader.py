"""Hands out a checkpoint's tensors the way ops want them: asked for by name and shape, fused, none left over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from sol.errors import CheckpointError
from sol.models.checkpoint import Checkpoint
from sol.ops.weights import Dense, GGUFBlocks, Int4Group, Int8Channel, Linear, Norm, Packed, Stored, Weight
from sol.progress import Progress


class Packer(Protocol):
    """Brings matrices into a backend's own layout, or has them there already."""

    def pack(self, key: str, rows: int, in_features: int, load: Callable[[], Sequence[Stored]]) -> tuple[Packed, ...]:
        """The matrices that `load` gives, one below the other: together [rows, in_features].

        `key` is the name of the first of them, by which a packer that has them already may know them: then `load` is
        not called.
        """
        ...


class WeightLoader:
    """Hands out a checkpoint's tensors as the ops want them and remembers which were taken.

    Without a packer matrices are dense, in `dtype`. With one they are packed: as they are stored, or first converted
    to `matrix_dtype`. Norms and biases have `dtype` in either case.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        progress: Progress,
        packer: Packer | None = None,
        matrix_dtype: torch.dtype | None = None,
    ) -> None:
        self.device = device
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._progress = progress
        self._packer = packer
        self._matrix_dtype = matrix_dtype
        self._names = checkpoint.names()
        self._taken: set[str] = set()

    def embedding(self, name: str, rows: int, in_features: int, *, is_head: bool) -> Weight:
        """[rows, in_features] whose rows are looked up and, where the head is tied to it, multiplied with."""
        self._check(name, (rows, in_features))
        if self._packer is not None:
            return self._packed(self._packer, [name], rows, in_features)[0]
        # A lookup wants its rows side by side; a product may want the columns so.
        out = self._empty_matrix(rows, in_features) if is_head else self._empty(rows, in_features)
        self._fill(name, out)
        return Dense(out)

    def norm(self, name: str, size: int, eps: float, offset: float = 0.0) -> Norm:
        self._check(f"{name}.weight", (size,))
        weight = self._empty(size)
        self._fill(f"{name}.weight", weight)
        return Norm(weight=weight, eps=eps, offset=offset)

    def linear(self, parts: Sequence[tuple[str, int]], in_features: int, *, bias: bool = False) -> Linear:
        """Projections (name, rows), one below the other, as one [all rows, in_features]."""
        for name, count in parts:
            self._check(f"{name}.weight", (count, in_features))
            if bias:
                self._check(f"{name}.bias", (count,))
        rows = sum(count for _, count in parts)
        bias_out = self._empty(rows) if bias else None
        segments: tuple[Weight, ...]
        if self._packer is not None:
            segments = self._packed(self._packer, [f"{name}.weight" for name, _ in parts], rows, in_features)
        else:
            weight = self._empty_matrix(rows, in_features)
            start = 0
            for name, count in parts:
                self._fill(f"{name}.weight", weight[start : start + count])
                start += count
            segments = (Dense(weight),)
        if bias_out is not None:
            start = 0
            for name, count in parts:
                self._fill(f"{name}.bias", bias_out[start : start + count])
                start += count
        return Linear(segments=segments, bias=bias_out)

    def experts(self, parts_of: Sequence[Sequence[tuple[str, int]]], in_features: int) -> tuple[Linear, ...]:
        """As many projections of equal shape, each as `linear` gives it; dense ones on a GPU one after another in one
        tensor, for kernels that find an expert by its number."""
        if self._packer is not None or torch.device(self.device).type == "cpu":
            return tuple(self.linear(parts, in_features) for parts in parts_of)
        for parts in parts_of:
            for name, count in parts:
                self._check(f"{name}.weight", (count, in_features))
        whole = self._empty(len(parts_of), sum(count for _, count in parts_of[0]), in_features)
        for parts, weight in zip(parts_of, whole, strict=True):
            start = 0
            for name, count in parts:
                self._fill(f"{name}.weight", weight[start : start + count])
                start += count
        return tuple(Linear(segments=(Dense(weight),)) for weight in whole)

    def tied(self, name: str, embedding_name: str, embedding: Weight) -> Linear:
        """A head that is the embedding. Files may store it a second time; a copy that differs is an error."""
        if name in self._names:
            self._check(name, self._checkpoint.shape(embedding_name))
            kept = self._checkpoint.load(embedding_name, self._dtype, self.device)
            copy = self._checkpoint.load(name, self._dtype, self.device)
            self._took(name)
            if not torch.equal(copy, kept):
                raise CheckpointError(
                    f"{name} differs from {embedding_name}, but the configuration ties the two: "
                    "set tie_word_embeddings to false in config.json if the file is right",
                    param="model",
                )
        return Linear(segments=(embedding,))

    def left_over(self) -> list[str]:
        """Names of the tensors that nobody took, sorted."""
        return sorted(self._names - self._taken)

    def _packed(self, packer: Packer, names: Sequence[str], rows: int, in_features: int) -> tuple[Packed, ...]:
        packed = packer.pack(names[0], rows, in_features, lambda: joined([self._stored(name) for name in names]))
        for name in names:
            self._took(name)
        return packed

    def _stored(self, name: str) -> Stored:
        if self._matrix_dtype is None:
            return self._checkpoint.stored(name)
        return Dense(self._checkpoint.load(name, self._matrix_dtype, self.device))

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self.device)

    def _empty_matrix(self, rows: int, in_features: int) -> torch.Tensor:
        # On a CPU torch's product with one vector uses a single thread along rows, all of them along columns:
        # a matrix with more rows than columns is streamed almost twice as fast if its columns are contiguous.
        if torch.device(self.device).type == "cpu" and rows > in_features:
            return torch.empty((in_features, rows), dtype=self._dtype).t()
        return self._empty(rows, in_features)

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
        self._took(name)

    def _took(self, name: str) -> None:
        self._taken.add(name)
        self._progress.advance(self._checkpoint.stored_nbytes(name))


def joined(parts: Sequence[Stored]) -> list[Stored]:
    """The same matrices, neighbours of one format as one: what they cost a kernel is counted in segments."""
    out: list[Stored] = []
    for part in parts:
        both = _join(out[-1], part) if out else None
        if both is None:
            out.append(part)
        else:
            out[-1] = both
    return out


def _join(above: Stored, below: Stored) -> Stored | None:
    """One matrix of two, or None if their formats differ."""
    match above, below:
        case Dense(a), Dense(b) if a.dtype == b.dtype:
            return Dense(torch.cat([a, b]))
        case GGUFBlocks(), GGUFBlocks() if above.kind == below.kind:
            return GGUFBlocks(above.kind, torch.cat([above.data, below.data]), above.in_features)
        case Int8Channel(), Int8Channel():
            return Int8Channel(torch.cat([above.codes, below.codes]), torch.cat([above.scales, below.scales]))
        case Int4Group(), Int4Group() if (
            above.group_size == below.group_size
            and (above.zeros is None) == (below.zeros is None)
            and _same(above.perm, below.perm)
        ):
            zeros = None
            if above.zeros is not None and below.zeros is not None:
                zeros = torch.cat([above.zeros, below.zeros])
            return Int4Group(
                torch.cat([above.codes, below.codes]),
                torch.cat([above.scales, below.scales]),
                zeros,
                above.group_size,
                above.perm,
            )
    return None


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a, b)
