"""Reader for GGUF files, versions 2 and 3, little endian (the format of llama.cpp; its specification is docs/gguf.md
in ggml). Knows numpy and no torch, so the HTTP process may read a tokenizer from a GGUF file.

The whole header is parsed and checked when the file is opened: every count, length, offset and name is compared with
the file's size before anything is read or allocated, so a truncated or lying file is a `CheckpointError` and never a
crash. Tensor data stays on disk, memory-mapped.
"""

from __future__ import annotations

import itertools
import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt

from sol.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError

BLOCK_SIZES: Final[dict[str, tuple[int, int]]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
"""Of every supported tensor type: elements in a block, bytes in a block."""

TYPE_NAMES: Final[dict[int, str]] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
"""ggml's tensor types by number, so that an error can name a type Sol does not read."""

_MAGIC: Final = b"GGUF"
_OLDER_MAGICS: Final = (b"lmgg", b"fmgg", b"tjgg", b"algg")  # GGML, GGMF, GGJT and GGLA as little-endian words
_LFS_POINTER: Final = b"version https://git-lfs"
_DEFAULT_ALIGNMENT: Final = 32
_MAX_DIMENSIONS: Final = 4

# The largest real files stay far below these; they only bound what a damaged one can make us allocate.
_MAX_STRING_BYTES: Final = 1 << 27
_MAX_ARRAY_VALUES: Final = 1 << 24
_MAX_NESTING: Final = 4

_STRING: Final = 8
_ARRAY: Final = 9
_BOOL: Final = 7
_SCALARS: Final[dict[int, struct.Struct]] = {
    0: struct.Struct("<B"), 1: struct.Struct("<b"), 2: struct.Struct("<H"), 3: struct.Struct("<h"),
    4: struct.Struct("<I"), 5: struct.Struct("<i"), 6: struct.Struct("<f"), 7: struct.Struct("<B"),
    10: struct.Struct("<Q"), 11: struct.Struct("<q"), 12: struct.Struct("<d"),
}  # fmt: skip
_U32: Final = _SCALARS[4]
_U64: Final = _SCALARS[10]


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where one tensor lies."""

    name: str
    shape: tuple[int, ...]
    """In torch's order: rows first (GGUF itself writes the fastest dimension first)."""
    type: str
    """ggml's name of the format: a key of `BLOCK_SIZES`."""
    offset: int
    """Bytes from the beginning of the file."""
    nbytes: int


class GGUFFile:
    """An open GGUF file.

    `metadata` maps keys to plain Python values: int, float, bool, str, or a list of these. `tensors` maps names to
    `GGUFTensor`, in the file's order.

    Raises `ModelNotFoundError` when there is no such file, `UnsupportedModelError` for a version, byte order or tensor
    type Sol does not read, and `CheckpointError` for a file that is damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._buffer = _map(self.path)
        header = _HeaderReader(self.path, self._buffer)
        self.metadata: dict[str, Any] = header.metadata
        self.tensors: dict[str, GGUFTensor] = header.tensors

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        """The raw bytes of a tensor: shape [nbytes], read-only, backed by the file. KeyError for an unknown name."""
        tensor = self.tensors[name]
        return np.frombuffer(self._buffer, dtype=np.uint8, count=tensor.nbytes, offset=tensor.offset)


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelNotFoundError(f"there is no file {path}", param="model") from None
    except ValueError:
        raise CheckpointError(f"{path} is empty: fetch it again", param="model") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}", param="model") from error


class _HeaderReader:
    """One pass over everything before the tensor data."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self._path = path
        self._buffer = buffer
        self._size = len(buffer)
        self._position = 0
        self._values_left = _MAX_ARRAY_VALUES
        num_tensors, num_values = self._preamble()
        self.metadata = self._metadata(num_values)
        self.tensors = self._tensors(num_tensors)

    def _fail(self, what: str) -> NoReturn:
        raise CheckpointError(f"{self._path} is damaged: {what}; fetch it again", param="model")

    def _scalar(self, layout: struct.Struct, what: str) -> Any:
        if self._position + layout.size > self._size:
            self._fail(f"it ends inside {what}")
        (value,) = layout.unpack_from(self._buffer, self._position)
        self._position += layout.size
        return value

    def _string(self, what: str) -> str:
        length = self._scalar(_U64, what)
        end = self._position + length
        if length > _MAX_STRING_BYTES or end > self._size:
            self._fail(f"{what} claims to be {length} bytes long")
        raw = self._buffer[self._position : end]
        self._position = end
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            self._fail(f"{what} is not UTF-8")

    def _preamble(self) -> tuple[int, int]:
        start = self._buffer[:24]
        if start.startswith(_LFS_POINTER):
            raise CheckpointError(
                f"{self._path} is a Git LFS pointer, not the model itself: run `git lfs pull` in its repository",
                param="model",
            )
        if start[:4] in _OLDER_MAGICS:
            self._unsupported("it is a GGML file from before GGUF")
        if start[:4] != _MAGIC:
            raise CheckpointError(
                f"{self._path} is not a GGUF file: it begins with {start[:4]!r} instead of {_MAGIC!r}", param="model"
            )
        self._position = 4
        version = self._scalar(_U32, "its version")
        if version not in (2, 3):
            # Versions are small, so a big-endian file shows its low half empty.
            odd = "it is big endian" if version and version & 0xFFFF == 0 else f"it is GGUF version {version}"
            self._unsupported(odd)
        return self._scalar(_U64, "the number of tensors"), self._scalar(_U64, "the number of metadata values")

    def _unsupported(self, what: str) -> NoReturn:
        raise UnsupportedModelError(
            f"{self._path} cannot be read: {what}; supported is GGUF version 2 or 3, little endian: "
            "convert the model again with a current converter",
            param="model",
        )

    def _metadata(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for index in range(count):
            key = self._string(f"the key of metadata value {index} of {count}")
            if key in metadata:
                self._fail(f"metadata key {key!r} occurs twice")
            metadata[key] = self._value(self._scalar(_U32, f"the type of {key!r}"), f"the value of {key!r}", 0)
        return metadata

    def _value(self, kind: int, what: str, nesting: int) -> Any:
        if kind == _STRING:
            return self._string(what)
        if kind == _ARRAY:
            return self._array(what, nesting + 1)
        if kind not in _SCALARS:
            self._fail(f"{what} has the unknown type {kind}")
        value = self._scalar(_SCALARS[kind], what)
        return bool(value) if kind == _BOOL else value

    def _array(self, what: str, nesting: int) -> list[Any]:
        if nesting > _MAX_NESTING:
            self._fail(f"{what} nests arrays more than {_MAX_NESTING} deep")
        kind = self._scalar(_U32, what)
        count = self._scalar(_U64, what)
        if kind in (_STRING, _ARRAY):
            smallest = 8 if kind == _STRING else 12
        elif kind in _SCALARS:
            smallest = _SCALARS[kind].size
        else:
            self._fail(f"{what} has elements of the unknown type {kind}")
        if count > self._values_left or count * smallest > self._size - self._position:
            self._fail(f"{what} claims {count} elements")
        self._values_left -= count
        if kind == _STRING:
            return self._strings(count, what)
        if kind == _ARRAY:
            return [self._array(what, nesting + 1) for _ in range(count)]
        values = struct.unpack_from(f"<{count}{_SCALARS[kind].format[1:]}", self._buffer, self._position)
        self._position += count * smallest
        return [bool(value) for value in values] if kind == _BOOL else list(values)

    def _strings(self, count: int, what: str) -> list[str]:
        # Vocabularies have 10^5 of these and most of the header's time goes here: no call to _string for each.
        strings: list[str] = []
        append: Callable[[str], None] = strings.append
        buffer, size, position = self._buffer, self._size, self._position
        unpack = _U64.unpack_from
        try:
            for _ in range(count):
                begin = position + 8
                position = begin + unpack(buffer, position)[0]
                if position > size:
                    self._fail(f"a string in {what} claims to be {position - begin} bytes long")
                append(buffer[begin:position].decode("utf-8"))
        except struct.error:
            self._fail(f"it ends inside {what}")
        except UnicodeDecodeError:
            self._fail(f"a string in {what} is not UTF-8")
        self._position = position
        return strings

    def _tensors(self, count: int) -> dict[str, GGUFTensor]:
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            self._fail(f"general.alignment must be a power of two, not {alignment!r}")
        described = [self._describe(f"the description of tensor {index} of {count}") for index in range(count)]
        base = -(-self._position // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, kind, offset in described:
            if name in tensors:
                self._fail(f"tensor {name!r} occurs twice")
            if offset % alignment:
                self._fail(f"tensor {name!r} begins at {offset}, which is no multiple of {alignment}")
            block, nbytes = BLOCK_SIZES[kind]
            if shape[-1] % block:
                self._fail(f"tensor {name!r} has rows of {shape[-1]} elements; {kind} needs multiples of {block}")
            tensor = GGUFTensor(name, shape, kind, base + offset, math.prod(shape) // block * nbytes)
            if tensor.offset + tensor.nbytes > self._size:
                self._fail(
                    f"tensor {name!r} ends at byte {tensor.offset + tensor.nbytes}, the file at byte {self._size}"
                )
            tensors[name] = tensor
        ordered = sorted(tensors.values(), key=lambda tensor: tensor.offset)
        for before, after in itertools.pairwise(ordered):
            if before.offset + before.nbytes > after.offset:
                self._fail(f"tensors {before.name!r} and {after.name!r} overlap")
        return tensors

    def _describe(self, what: str) -> tuple[str, tuple[int, ...], str, int]:
        name = self._string(what)
        dimensions = self._scalar(_U32, what)
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            self._fail(f"tensor {name!r} claims {dimensions} dimensions")
        shape = tuple(self._scalar(_U64, what) for _ in range(dimensions))[::-1]
        if 0 in shape:
            self._fail(f"tensor {name!r} has no elements: its shape is {list(shape)}")
        number = self._scalar(_U32, what)
        kind = TYPE_NAMES.get(number, f"number {number}")
        if kind not in BLOCK_SIZES:
            raise UnsupportedModelError(
                f"{self._path}: tensor {name!r} has the type {kind}; supported are {', '.join(BLOCK_SIZES)}: "
                "choose a file quantised to one of these",
                param="model",
            )
        return name, shape, kind, self._scalar(_U64, what)
