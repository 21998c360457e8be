"""The file of packed weights: used where it fits, made again where it does not, and never believed."""

from __future__ import annotations

import json
import logging
import os
import stat
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_cpu import Paged, cpu_executor, native, random_tokens
from tiny_models import GGUFOptions, gguf_name, make_llama, write_gguf

from sol.errors import CheckpointError, UnsupportedModelError
from sol.models import packed_cache
from sol.models.checkpoint import open_checkpoint
from sol.models.config import load_model_config
from sol.models.packed_cache import CpuPacker, Source
from sol.models.registry import load_program
from sol.models.source import resolve
from sol.ops.program import Program
from sol.ops.weights import Dense, GGUFBlocks, Int4Group, Int8Channel, Packed, Stored

HEADER = struct.Struct("<8sIIQQQ")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SOL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    native()
    folder = tmp_path / "model"
    folder.mkdir()
    llama = make_llama(tie_word_embeddings=True)
    names = [gguf_name(name) for name, p in llama.named_parameters() if p.dim() == 2 and "lm_head" not in name]
    write_gguf(folder / "tiny.gguf", llama, GGUFOptions(quantization=dict.fromkeys(names, "Q8_0")))
    return folder / "tiny.gguf"


def start(
    path: Path, *, smallest: int = 0, version: str = "1", options: tuple[str, ...] = ()
) -> tuple[Program, Path | None]:
    files = resolve(str(path), progress=False)
    config = load_model_config(files)
    library = native()
    source = Source(files, options)
    with CpuPacker(library, library.best_isa(), source, version=version, smallest=smallest) as packer:
        program = load_program(config, open_checkpoint(files), dtype=torch.float32, max_positions=512, packer=packer)
    return program, packer.path


def packed_file(model: Path) -> Path:
    rows = native().group_rows(native().best_isa())
    return model.with_name(f"{model.name}.r{rows}.solpack")


def is_mapped(program: Program) -> bool:
    """From a file, not packed just now."""
    assert isinstance(program.embedding, Packed)
    return not program.embedding.data.flags.writeable


def logits(program: Program) -> torch.Tensor:
    with cpu_executor(program) as executor:
        return Paged(executor).step({0: random_tokens(12, seed=0)})


def table_of(path: Path) -> tuple[dict[str, Any], int]:
    data = path.read_bytes()
    _, _, _, offset, size, _ = HEADER.unpack_from(data)
    return json.loads(data[offset : offset + size]), offset


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """The same file with another table, its header made to fit."""
    table, offset = table_of(path)
    change(table)
    raw = json.dumps(table).encode()
    data = bytearray(path.read_bytes()[:offset]) + raw
    HEADER.pack_into(data, 0, b"SOLPACK\n", 1, 0, offset, len(raw), len(data))
    path.write_bytes(data)


@pytest.mark.parametrize("copied", [0, 1 << 30])
def test_the_second_start_maps_what_the_first_one_packed(
    model: Path, monkeypatch: pytest.MonkeyPatch, copied: int
) -> None:
    monkeypatch.setattr(packed_cache, "_COPIED_NBYTES", copied)
    first, written = start(model)
    assert written == packed_file(model)
    assert stat.S_IMODE(written.stat().st_mode) == 0o644
    second, mapped = start(model)
    assert mapped == written
    assert not is_mapped(first)
    assert is_mapped(second)
    assert torch.equal(logits(first), logits(second))
    assert sorted(p.name for p in model.parent.iterdir()) == [model.name, written.name], "no temporary file is left"


def test_a_file_of_another_model_version_or_option_is_made_again(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    start(model)
    assert not is_mapped(start(model, version="2")[0])
    assert is_mapped(start(model, version="2")[0])
    other, path = start(model, version="2", options=("float16",))
    assert not is_mapped(other)
    assert path != packed_file(model)
    os.utime(model, ns=(1, 1))
    assert not is_mapped(start(model, version="2")[0])
    assert caplog.records == []


def test_small_models_are_not_kept(model: Path) -> None:
    assert start(model, smallest=packed_cache.SMALLEST)[1] is None
    assert not packed_file(model).exists()


def test_a_directory_that_cannot_be_written(
    model: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = packed_cache.tempfile.mkstemp

    def mkstemp(prefix: str, dir: Path) -> Any:  # noqa: A002
        if dir == model.parent:
            raise PermissionError(13, "Permission denied")
        return made(prefix=prefix, dir=dir)

    monkeypatch.setattr(packed_cache.tempfile, "mkstemp", mkstemp)
    _, path = start(model)
    assert path is not None
    assert path.parent == own_cache / "packed"
    assert is_mapped(start(model)[0])
    assert caplog.records == []


def test_nowhere_to_write(model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def mkstemp(**_: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(packed_cache.tempfile, "mkstemp", mkstemp)
    program, path = start(model)
    assert path is None
    assert logits(program).isfinite().all()
    assert "could not be kept" in caplog.text
    assert "Permission denied" in caplog.text


def test_a_disk_that_is_full_or_becomes_full(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = logits(start(model, smallest=1 << 40)[0])

    def write(self: Any, data: Any) -> int:
        if data.nbytes > 10_000:
            raise OSError(28, "No space left on device")
        return 64

    with monkeypatch.context() as patch:
        patch.setattr(packed_cache._Writer, "_write", write)
        program, path = start(model)
    assert path is None
    assert torch.equal(logits(program), expected)
    assert "No space left on device" in caplog.text
    assert [p.name for p in model.parent.iterdir()] == [model.name]
    caplog.clear()
    with monkeypatch.context() as patch:
        usage = packed_cache.shutil.disk_usage(model.parent)
        patch.setattr(packed_cache.shutil, "disk_usage", lambda path: usage._replace(free=1000))
        assert start(model)[1] is None
    assert "MiB are free there" in caplog.text


def test_a_start_that_fails_leaves_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise CheckpointError("damaged")

    monkeypatch.setattr("sol.models.weight_loader.WeightLoader.norm", fail)
    with pytest.raises(CheckpointError, match="damaged"):
        start(model)
    assert [p.name for p in model.parent.iterdir()] == [model.name]


def test_abandoned_temporary_files_are_removed(model: Path) -> None:
    path = packed_file(model)
    old, new = path.with_name(f".{path.name}.old"), path.with_name(f".{path.name}.new")
    for file in (old, new):
        file.write_bytes(b"half")
    os.utime(old, (1, 1))
    start(model)
    assert not old.exists()
    assert new.exists(), "another server may be writing it"


def test_two_at_once_both_start(model: Path) -> None:
    results: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: results.append(logits(start(model)[0]))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2
    assert torch.equal(*results)
    assert is_mapped(start(model)[0])
    assert len(list(model.parent.iterdir())) == 2


def first_matrix(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda table: table["matrices"][0].update(values)


LIES: dict[str, Callable[[dict[str, Any]], None]] = {
    "an offset past the end": first_matrix(offset=1 << 40),
    "an offset into the header": first_matrix(offset=0),
    "an offset that is not aligned": first_matrix(offset=4097),
    "an offset that is no number": first_matrix(offset="4096"),
    "a negative offset": first_matrix(offset=-4096),
    "more rows": first_matrix(rows=321),
    "very many rows": first_matrix(rows=1 << 40, in_features=1 << 40),
    "no rows": first_matrix(rows=0),
    "odd columns": first_matrix(in_features=63),
    "another format": first_matrix(format=0),
    "an unknown format": first_matrix(format=99),
    "a number of bytes": first_matrix(nbytes=5),
    "a true number": first_matrix(rows=True),
    "a perm past the end": first_matrix(perm=1 << 40),
    "a perm that is none": first_matrix(perm=4096),
    "no key": first_matrix(key=None),
    "an entry that is none": lambda table: table["matrices"].__setitem__(0, 7),
    "no list": lambda table: table.update(matrices=None),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_table_that_lies_is_found_out(model: Path, lie: str, caplog: pytest.LogCaptureFixture) -> None:
    first, _ = start(model)
    expected = logits(first)
    rewrite(packed_file(model), LIES[lie])
    with caplog.at_level(logging.WARNING):
        program, _ = start(model)
    assert not is_mapped(program)
    assert "it is made again" in caplog.text
    assert torch.equal(logits(program), expected)
    assert is_mapped(start(model)[0]), "the next start finds a good one"


def test_a_shape_that_fits_the_file_but_not_the_model(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, _ = start(model)

    def swap(table: dict[str, Any]) -> None:
        names = [entry["key"] for entry in table["matrices"]]
        table["matrices"][0]["key"], table["matrices"][1]["key"] = names[1], names[0]

    rewrite(packed_file(model), swap)
    program, _ = start(model)
    assert "has another shape than the model's" in caplog.text
    assert torch.equal(logits(program), logits(first))


def test_scales_that_are_not_finite_are_found_out(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    start(model)
    path = packed_file(model)
    table, _ = table_of(path)
    entry = table["matrices"][0]
    data = bytearray(path.read_bytes())
    data[entry["offset"] : entry["offset"] + entry["nbytes"]] = b"\xff" * entry["nbytes"]
    path.write_bytes(data)
    assert not is_mapped(start(model)[0])
    assert "it is made again" in caplog.text


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_damaged_files_never_crash(model: Path, data: st.DataObject) -> None:
    path = packed_file(model)
    start(model)
    good = path.read_bytes()
    _, offset = table_of(path)
    how = data.draw(st.sampled_from(["cut", "header", "table"]))
    if how == "cut":
        bad = good[: data.draw(st.integers(0, len(good) - 1))]
    else:
        begin, end = (0, 40) if how == "header" else (offset, len(good))
        at = data.draw(st.integers(begin, end - 1))
        bad = good[:at] + data.draw(st.binary(min_size=1, max_size=8)) + good[at + 1 :]
    path.write_bytes(bad[: len(good)])
    program, _ = start(model)
    assert logits(program).isfinite().all()


def test_what_the_kernels_refuse_is_said(tmp_path: Path) -> None:
    library = native()
    with CpuPacker(library, library.best_isa()) as packer:

        def pack(stored: Stored, rows: int, columns: int) -> Any:
            return packer.pack("lm_head.weight", rows, columns, lambda: [stored])

        bad = torch.tensor([1.0, float("nan")])
        with pytest.raises(CheckpointError, match=r"lm_head\.weight: .*1"):
            pack(Int8Channel(torch.zeros(2, 32, dtype=torch.int8), bad), 2, 32)
        blocks = torch.from_numpy(np.full((1, 34), 0x7C, dtype=np.uint8))  # an infinite scale
        with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
            pack(GGUFBlocks("Q8_0", blocks * 0 + torch.tensor([0, 0x7C] + [0] * 32, dtype=torch.uint8), 32), 1, 32)
        with pytest.raises(UnsupportedModelError, match=r"lm_head\.weight: .*--cpu-kernels torch"):
            pack(Int8Channel(torch.zeros(2, 33, dtype=torch.int8), torch.ones(2)), 2, 33)
        with pytest.raises(UnsupportedModelError, match=r"lm_head\.weight"):
            pack(Int4Group(torch.zeros(2, 20, dtype=torch.uint8), torch.ones(2, 1), None, 40), 2, 40)
        kept = pack(Dense(torch.eye(3)), 3, 3)
        assert library.unpack_rows(library.best_isa(), kept[0], [2])[0].tolist() == [0, 0, 1]
