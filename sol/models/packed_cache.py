"""Weights in the CPU kernels' layout, packed while they are loaded and kept in a file for the next start.

The file lies beside the model (`NAME.LAYOUT.solpack`), or under Sol's cache directory where that cannot be written. It
is a cache: one that is missing, of another model, another layout or another version is made again, one that is damaged
too, with a warning, and where none can be written the weights are simply packed in memory.

A file is read where it is mapped, or copied to huge pages if it is small. One is written beside its place and renamed
when it is complete, so that two servers may do it at once:

    64 bytes        magic, version, where the table is, the file's size
    data            each matrix on a page of its own
    table           JSON: identity of the source, and for each matrix its key, shape, format and place

Nothing in it is believed: every number is compared with the file's size before it is used, shapes with what the
configuration says, and the kernels check the scales.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import mmap
import os
import shutil
import struct
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, Self

import numpy as np
import torch

from sol.errors import CheckpointError, UnsupportedModelError
from sol.models.checkpoint import Checkpoint
from sol.models.source import ModelFiles
from sol.models.wheels import cache_directory
from sol.ops.cpu.native import Format, Isa, Native, NativeError
from sol.ops.cpu.packing import Arena, fingerprint, format_of, pack
from sol.ops.dequantize import dequantize
from sol.ops.weights import Dense, GGUFBlocks, Packed, Stored

logger = logging.getLogger(__name__)

SMALLEST: Final = 8 << 20
"""Of the source's weights, in bytes: smaller models are packed faster than a file is opened."""

_MAGIC: Final = b"SOLPACK\n"
_VERSION: Final = 1
_HEADER: Final = struct.Struct("<8sIIQQQ")  # magic, version, unused, table's offset and size, file's size
_HEADER_NBYTES: Final = 64
_PAGE: Final = 4096
_MAX_TABLE: Final = 1 << 28
_COPIED_NBYTES: Final = 1 << 30
"""Files up to this size are copied to huge pages once they are mapped, which decodes some 10% faster; larger ones are
read where they are mapped, and servers share them."""
_ABANDONED_SECONDS: Final = 3600
"""A temporary file that nobody wrote to for so long belongs to nobody."""


class _DamagedError(Exception):
    pass


@dataclass(frozen=True, slots=True)
class Source:
    """What packed weights were made from, and how."""

    files: ModelFiles
    options: tuple[str, ...] = ()
    """What else the weights depend on, as `float16` or `int4`; part of the file's name"""

    def paths(self) -> tuple[Path, ...]:
        return self.files.safetensors if self.files.gguf is None else (self.files.gguf,)

    def nbytes(self) -> int:
        return sum(path.stat().st_size for path in self.paths())

    def identity(self) -> list[list[Any]]:
        described = [(path.name, path.stat()) for path in self.paths()]
        return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in described]


class CpuPacker:
    """Implements `sol.models.weight_loader.Packer`. A context: left without an exception, a new file takes its place.

    Without `source` nothing is read or written.
    """

    def __init__(
        self, native: Native, isa: Isa, source: Source | None = None, *, version: str = "", smallest: int = SMALLEST
    ) -> None:
        """`version` is of whatever made the stored weights: a file of another one is not used."""
        self._native = native
        self._isa = isa
        self._arena = Arena()
        self._ready: dict[str, tuple[Packed, ...]] = {}
        self._writer: _Writer | None = None
        self._told: set[str] = set()
        self.path: Path | None = None
        """The file that was mapped, or that was written; None if there is none."""
        if source is not None and source.files.load_format != "dummy" and source.nbytes() >= smallest:
            identity = {
                "version": version,
                "layout": fingerprint(native, isa).hex(),
                "source": source.identity(),
                "options": list(source.options),
            }
            self._open(_places(source, native.group_rows(isa)), identity, source.nbytes())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        writer, self._writer = self._writer, None
        if writer is None:
            return
        if kind is not None:
            writer.abandon()
            return
        try:
            writer.finish()
            self.path = writer.path
        except OSError as problem:
            writer.abandon()
            _not_written(writer.path, problem)

    def pack(self, key: str, rows: int, in_features: int, load: Callable[[], Sequence[Stored]]) -> tuple[Packed, ...]:
        """Raises `CheckpointError` for weights that cannot be computed with, `UnsupportedModelError` for shapes that
        the kernels do not take."""
        ready = self._ready.get(key)
        if ready is not None:
            if sum(p.rows for p in ready) == rows and all(p.in_features == in_features for p in ready):
                return ready
            logger.warning("%s: %s has another shape than the model's; packed again", self.path, key)
        packed = tuple(self._pack(key, stored) for stored in load())
        if self._writer is not None:
            try:
                self._writer.add(key, packed)
            except OSError as problem:
                writer, self._writer = self._writer, None
                writer.abandon()
                _not_written(writer.path, problem)
        return packed

    def _pack(self, key: str, stored: Stored) -> Packed:
        if format_of(stored) is None:
            kind = stored.kind if isinstance(stored, GGUFBlocks) else str(getattr(stored, "weight", stored))
            if kind not in self._told:
                self._told.add(kind)
                logger.warning("the CPU kernels have none for %s: those matrices are kept in float16", kind)
            stored = Dense(dequantize(stored, torch.float16))
        try:
            return pack(self._native, self._isa, stored, self._arena)
        except NativeError as error:
            if error.code == NativeError.DATA:
                raise CheckpointError(f"{key}: {error.message}", param="model") from error
            raise UnsupportedModelError(
                f"{key}: the CPU kernels do not take it ({error.message}): use --cpu-kernels torch", param="model"
            ) from error

    def _open(self, places: Sequence[Path], identity: Mapping[str, Any], nbytes: int) -> None:
        for path in places:
            try:
                ready = _read(path, identity, self._native, self._isa, self._arena)
            except (_DamagedError, OSError) as problem:
                logger.warning("%s cannot be used (%s): it is made again", path, problem)
                continue
            if ready is not None:
                self._ready, self.path = ready, path
                return
        problem_at: tuple[Path, OSError] | None = None
        for path in places:
            try:
                self._writer = _Writer(path, identity, nbytes)
                return
            except OSError as problem:
                problem_at = path, problem
        if problem_at is not None:
            _not_written(*problem_at)


def _not_written(path: Path, problem: OSError) -> None:
    logger.warning(
        "packed weights could not be kept in %s (%s): the next start packs them again",
        path,
        problem.strerror or problem,
    )


def _places(source: Source, group_rows: int) -> list[Path]:
    """Where the packed file of a model may lie, the best first."""
    model = source.files.gguf or source.files.root / "model"
    layout = "-".join([f"r{group_rows}", *source.options])
    unique = hashlib.blake2b(str(model.absolute()).encode(), digest_size=8).hexdigest()
    return [
        model.parent / f"{model.name}.{layout}.solpack",
        cache_directory() / "packed" / f"{model.name}-{unique}.{layout}.solpack",
    ]


class _Writer:
    """One file, written matrix by matrix."""

    def __init__(self, path: Path, identity: Mapping[str, Any], nbytes: int) -> None:
        """Raises OSError where it cannot be written, or would leave less room on the disk than it takes."""
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(path.parent).free < 2 * nbytes:
            raise OSError(f"less than {2 * nbytes >> 20} MiB are free there")
        prefix = f".{path.name}."
        for old in path.parent.glob(f"{prefix}*"):
            with contextlib.suppress(OSError):
                if time.time() - old.stat().st_mtime > _ABANDONED_SECONDS:
                    old.unlink()
        descriptor, name = tempfile.mkstemp(prefix=prefix, dir=path.parent)
        self._temporary = Path(name)
        self._file: BinaryIO = os.fdopen(descriptor, "wb", buffering=1 << 20)
        self._table: dict[str, Any] = {"identity": identity, "matrices": []}
        self._file.write(bytes(_HEADER_NBYTES))

    def add(self, key: str, packed: Sequence[Packed]) -> None:
        for matrix in packed:
            entry = {
                "key": key,
                "format": int(matrix.format),
                "rows": matrix.rows,
                "in_features": matrix.in_features,
                "group_size": matrix.group_size,
                "offset": self._write(matrix.data),
                "nbytes": matrix.data.nbytes,
                "perm": None if matrix.perm is None else self._write(matrix.perm),
            }
            self._table["matrices"].append(entry)

    def _write(self, data: Any) -> int:
        offset = -(-self._file.tell() // _PAGE) * _PAGE
        self._file.write(bytes(offset - self._file.tell()))
        self._file.write(data.data)
        return offset

    def finish(self) -> None:
        table = json.dumps(self._table).encode()
        offset = self._file.tell()
        self._file.write(table)
        self._file.seek(0)
        self._file.write(_HEADER.pack(_MAGIC, _VERSION, 0, offset, len(table), offset + len(table)))
        self._file.flush()
        os.fchmod(self._file.fileno(), 0o644)
        # Before it gets its name: after a power cut there is the whole file or none.
        os.fsync(self._file.fileno())
        self._file.close()
        self._temporary.replace(self.path)

    def abandon(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            self._temporary.unlink()


def _read(
    path: Path, identity: Mapping[str, Any], native: Native, isa: Isa, arena: Arena
) -> dict[str, tuple[Packed, ...]] | None:
    """The matrices of a file by key; None if there is no file or it is another model's.

    Raises `_DamagedError` and OSError.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    with file:
        size = os.fstat(file.fileno()).st_size
        if size < _HEADER_NBYTES:
            raise _DamagedError("it ends inside its header")
        magic, version, _, offset, table_nbytes, told = _HEADER.unpack(file.read(_HEADER.size))
        if magic != _MAGIC:
            raise _DamagedError("it is no file of packed weights")
        if version != _VERSION:
            return None
        if told != size or table_nbytes > _MAX_TABLE or offset + table_nbytes != size:
            raise _DamagedError(f"it has {size} bytes; its header says {told}, and a table at {offset}")
        file.seek(offset)
        try:
            table = json.loads(file.read(table_nbytes))
        except (ValueError, RecursionError):
            raise _DamagedError("its table is not JSON") from None
        if not isinstance(table, dict) or not isinstance(table.get("matrices"), list):
            raise _DamagedError("its table is not one")
        if table.get("identity") != identity:
            return None
        mapped = mmap.mmap(file.fileno(), size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    mapped.madvise(mmap.MADV_WILLNEED)
    data = np.frombuffer(mapped, dtype=np.uint8)[:offset]
    if offset <= _COPIED_NBYTES and arena.huge_pages:
        copy = arena.take(offset)
        copy[:] = data
        copy.flags.writeable = False
        data = copy
    found: dict[str, tuple[Packed, ...]] = {}
    for entry in table["matrices"]:
        key, packed = _matrix(entry, data, native, isa)
        found[key] = (*found.get(key, ()), packed)
    return found


def _matrix(entry: Any, data: Any, native: Native, isa: Isa) -> tuple[str, Packed]:
    """One entry of the table, checked. `data` is what lies before the table."""
    numbers = ("format", "rows", "in_features", "group_size", "offset", "nbytes")
    if not isinstance(entry, dict) or not isinstance(entry.get("key"), str):
        raise _DamagedError("an entry of its table is not one")
    key = entry["key"]
    for name in numbers:
        if type(entry.get(name)) is not int or not 0 <= entry[name] < 1 << 62:
            raise _DamagedError(f"{key}: {name} is {entry.get(name)!r}")
    rows, in_features = entry["rows"], entry["in_features"]
    try:
        kind = Format(entry["format"])
        if not 1 <= rows < 1 << 31 or not 1 <= in_features < 1 << 31 or entry["group_size"] >= 1 << 31:
            raise _DamagedError(f"{key}: its shape is [{rows}, {in_features}]")
        needed = native.packed_nbytes(isa, kind, rows, in_features, entry["group_size"])
    except (ValueError, NativeError) as error:
        raise _DamagedError(f"{key}: {error}") from None
    if needed != entry["nbytes"]:
        raise _DamagedError(f"{key}: it has {entry['nbytes']} bytes where {needed} are needed")
    perm = None
    if entry.get("perm") is not None:
        if kind in (Format.F32, Format.F16, Format.BF16):
            raise _DamagedError(f"{key}: {kind.name} has no order of columns")
        perm = _slice(key, data, entry["perm"], 4 * in_features).view(np.int32)
        if not np.array_equal(np.sort(perm), np.arange(in_features, dtype=np.int32)):
            raise _DamagedError(f"{key}: its order of columns is none")
    packed = Packed(
        format=kind,
        rows=rows,
        in_features=in_features,
        group_size=entry["group_size"],
        data=_slice(key, data, entry["offset"], needed),
        perm=perm,
    )
    try:
        native.check_packed(isa, packed)
    except NativeError as error:
        raise _DamagedError(f"{key}: {error.message}") from None
    return key, packed


def _slice(key: str, data: Any, offset: Any, nbytes: int) -> Any:
    if type(offset) is not int or offset < _HEADER_NBYTES or offset % _PAGE or offset + nbytes > len(data):
        raise _DamagedError(f"{key}: its data would lie at {offset} of {len(data)} bytes")
    return data[offset : offset + nbytes]


def packed_nbytes(
    native: Native,
    isa: Isa,
    shapes: Mapping[str, tuple[int, ...]],
    checkpoint: Checkpoint,
    matrix_dtype: torch.dtype | None,
) -> int:
    """What a model's weights will take, to a few percent: matrices as large as they are stored, in whole groups of
    rows (some formats' scales are unpacked)."""
    group = native.group_rows(isa)
    names = checkpoint.names()
    total = 0
    for name, shape in shapes.items():
        if len(shape) != 2:
            total += 4 * math.prod(shape)
        elif name in names:
            whole = -(-shape[0] // group) * group
            if matrix_dtype is None and 8 * checkpoint.stored_nbytes(name) < 4 * math.prod(shape):
                total += whole * shape[1] * 2  # no kernel takes fewer than four bits: Q2_K and Q3_K become float16
            elif matrix_dtype is None:
                total += checkpoint.stored_nbytes(name) * whole // shape[0] * 33 // 32
            else:
                total += whole * shape[1] * matrix_dtype.itemsize
    return total
