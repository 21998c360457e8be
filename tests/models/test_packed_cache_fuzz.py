"""A file of packed weights that something has damaged, or that lies: it is never believed, and never a crash."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_cpu import native

from sol.models.packed_cache import CpuPacker, Source
from sol.models.source import ModelFiles
from sol.ops import Dense
from sol.ops.weights import Int4Group, Int8Channel, Packed, Stored

HEADER = struct.Struct("<8sIIQQQ")
KEYS = ("dense", "channel", "group")
ROWS, COLUMNS = 9, 64


def weights() -> dict[str, Stored]:
    random = torch.Generator().manual_seed(5)
    codes = torch.randint(-128, 128, (ROWS, COLUMNS), generator=random, dtype=torch.int8)
    return {
        "dense": Dense(torch.randn(ROWS, COLUMNS, generator=random)),
        "channel": Int8Channel(codes, torch.rand(ROWS, generator=random)),
        "group": Int4Group(
            torch.randint(0, 256, (ROWS, COLUMNS // 2), generator=random, dtype=torch.uint8),
            torch.rand(ROWS, COLUMNS // 32, generator=random),
            torch.randint(0, 16, (ROWS, COLUMNS // 32), generator=random, dtype=torch.uint8),
            32,
            torch.randperm(COLUMNS, generator=random).to(torch.int32),
        ),
    }


def load(source: Source) -> tuple[dict[str, tuple[Packed, ...]], Path | None, list[str]]:
    """All matrices as a model gets them; the file; and which of them were packed from their source."""
    library, stored, made = native(), weights(), []

    def from_source(key: str) -> Callable[[], Sequence[Stored]]:
        def given() -> Sequence[Stored]:
            made.append(key)
            return [stored[key]]

        return given

    with CpuPacker(library, library.best_isa(), source, smallest=0) as packer:
        packed = {key: packer.pack(key, ROWS, COLUMNS, from_source(key)) for key in KEYS}
    return packed, packer.path, made


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Source, Path, bytes]:
    """A model's source, its packed file, and what is in it."""
    native()
    root = tmp_path_factory.mktemp("model")
    (root / "model.safetensors").write_bytes(b"weights")
    files = ModelFiles(name="model", root=root, load_format="safetensors", safetensors=(root / "model.safetensors",))
    source = Source(files)
    _, path, made = load(source)
    assert path is not None
    assert made == list(KEYS)
    assert load(source)[2] == []  # the file is good
    return source, path, path.read_bytes()


def damaged_bytes(content: bytes) -> st.SearchStrategy[bytes]:
    """Cut off, or some bytes changed: anywhere, in the header, in the table."""
    table = HEADER.unpack_from(content)[3]
    places = st.one_of(st.integers(0, 63), st.integers(0, len(content) - 1), st.integers(table, len(content) - 1))

    def change(changes: list[tuple[int, int]]) -> bytes:
        changed = bytearray(content)
        for place, value in changes:
            changed[place] = value
        return bytes(changed)

    return st.one_of(
        st.integers(0, len(content) - 1).map(lambda n: content[:n]),
        st.lists(st.tuples(places, st.integers(0, 255)), min_size=1, max_size=5).map(change),
        st.binary(min_size=1, max_size=200).map(lambda more: content + more),
    )


def lying_header(content: bytes) -> st.SearchStrategy[bytes]:
    fields = HEADER.unpack_from(content)
    size = st.one_of(st.integers(0, 2**64 - 1), st.integers(0, len(content) + 10), st.sampled_from(fields[3:]))
    return st.tuples(size, size, size).map(lambda told: HEADER.pack(*fields[:3], *told) + content[HEADER.size :])


def lying_table(content: bytes) -> st.SearchStrategy[bytes]:
    """A table that is well-formed and whose header fits, with wrong entries."""
    offset, nbytes = HEADER.unpack_from(content)[3:5]
    table = json.loads(content[offset : offset + nbytes])
    numbers = st.one_of(
        st.integers(-(2**70), 2**70),
        st.integers(0, 200),
        st.integers(0, 20).map(lambda n: n * 4096),
        st.sampled_from([len(content), offset]),
    )
    anything = st.one_of(numbers, st.none(), st.booleans(), st.floats(), st.text(max_size=5), st.just([]), st.just({}))
    names = st.sampled_from(["key", "format", "rows", "in_features", "group_size", "offset", "nbytes", "perm"])

    def write(changes: list[tuple[int, str, Any]]) -> bytes:
        changed = json.loads(json.dumps(table))
        for index, name, value in changes:
            changed["matrices"][index][name] = value
        text = json.dumps(changed).encode()
        return (
            HEADER.pack(*HEADER.unpack_from(content)[:3], offset, len(text), offset + len(text))
            + content[HEADER.size : offset]
            + text
        )

    count = len(table["matrices"])
    swaps = st.tuples(st.integers(0, count - 1), st.integers(0, count - 1), names).map(
        lambda swap: (swap[0], swap[2], table["matrices"][swap[1]][swap[2]])
    )
    change = st.one_of(st.tuples(st.integers(0, count - 1), names, anything), swaps)
    return st.lists(change, min_size=1, max_size=3).map(write)


@pytest.mark.parametrize("lies", [damaged_bytes, lying_header, lying_table])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_made_again_or_can_be_computed_with(
    lies: Callable[[bytes], st.SearchStrategy[bytes]], original: tuple[Source, Path, bytes], data: st.DataObject
) -> None:
    source, path, content = original
    path.write_bytes(data.draw(lies(content)))
    packed, _, made = load(source)
    library = native()
    isa = library.best_isa()
    x = np.ones((1, COLUMNS), dtype=np.float32)
    for key, matrices in packed.items():
        for matrix in matrices:
            library.check_packed(isa, matrix)
        y = library.linear(isa, matrices, x)
        assert y.shape == (1, ROWS), key
        assert np.isfinite(y).all() or key == "dense"
    if set(made) == set(KEYS):  # made again: the next start finds a good file
        packed, _, made = load(source)
        assert made == []


def test_an_order_of_columns_that_a_format_cannot_have(original: tuple[Source, Path, bytes]) -> None:
    source, path, content = original
    offset, nbytes = HEADER.unpack_from(content)[3:5]
    table = json.loads(content[offset : offset + nbytes])
    by_key = {entry["key"]: entry for entry in table["matrices"]}
    by_key["dense"]["perm"] = by_key["group"]["perm"]
    text = json.dumps(table).encode()
    header = HEADER.pack(*HEADER.unpack_from(content)[:3], offset, len(text), offset + len(text))
    path.write_bytes(header + content[HEADER.size : offset] + text)
    packed, _, made = load(source)
    assert made == list(KEYS)
    assert packed["dense"][0].perm is None


def test_a_file_of_random_bytes_is_none(original: tuple[Source, Path, bytes]) -> None:
    source, path, _ = original
    random = np.random.default_rng(3)
    for nbytes in (0, 1, 39, 40, 63, 64, 65, 4096, 20000):
        path.write_bytes(random.bytes(nbytes))
        assert load(source)[2] == list(KEYS)
        assert load(source)[2] == []
