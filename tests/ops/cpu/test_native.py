"""The binding: what it says where there is no library or another one, and that struct layouts agree with the header."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_cpu import native

from sol.ops.cpu import native as abi
from sol.ops.cpu.native import (
    Activation,
    DraftLayout,
    Format,
    Isa,
    KVDType,
    Native,
    NativeError,
    NativeUnavailableError,
    OpKind,
)
from sol.ops.cpu.packing import Arena, fingerprint, format_of, pack
from sol.ops.weights import Dense, GGUFBlocks, Int4Group, Int8Channel

ROOT = Path(__file__).parents[3]
HEADER = (ROOT / "sol" / "ops" / "cpu" / "csrc" / "sol_cpu.h").read_text()
STRUCTS = ("SolSegment", "SolLinear", "SolNorm", "SolOp", "SolModelDesc", "SolBatch", "SolDrafts", "SolStepCosts")


def compile_and_run(folder: Path, source: str, *, shared: bool = False) -> str:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("there is no C compiler")
    (folder / "source.c").write_text(source)
    target = folder / ("library.so" if shared else "program")
    flags = ["-shared", "-fPIC"] if shared else []
    include = ROOT / "sol" / "ops" / "cpu" / "csrc"
    subprocess.run([compiler, *flags, f"-I{include}", str(folder / "source.c"), "-o", str(target)], check=True)
    return "" if shared else subprocess.run([str(target)], capture_output=True, text=True, check=True).stdout


def test_structs_are_those_of_the_header(tmp_path: Path) -> None:
    lines = []
    expected = []
    for name in STRUCTS:
        struct = getattr(abi, name)
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        expected.append(f"{name} {ctypes.sizeof(struct)}")
        for field, *_ in struct._fields_:
            lines.append(f'printf("{name}.{field} %zu\\n", offsetof({name}, {field}));')
            expected.append(f"{name}.{field} {getattr(struct, field).offset}")
    source = "#include <stddef.h>\n#include <stdio.h>\n#include <sol_cpu.h>\nint main(void) {" + "".join(lines) + "}"
    assert compile_and_run(tmp_path, source).splitlines() == expected


def test_numbers_are_those_of_the_header() -> None:
    found = {name: int(value) for name, value in re.findall(r"\b(SOL_\w+) = (-?\d+)", HEADER)}
    assert int(re.findall(r"SOL_ABI_VERSION (\d+)", HEADER)[0]) == abi.ABI_VERSION
    expected = {"SOL_OK": 0}
    expected |= {f"SOL_ISA_{isa.name}": isa.value for isa in Isa}
    expected |= {f"SOL_{kind.name}": kind.value for kind in Format}
    expected |= {f"SOL_OP_{kind.name}": kind.value for kind in OpKind}
    expected |= {f"SOL_ACT_{kind.name}": kind.value for kind in Activation}
    expected |= {f"SOL_{name}": number.value for name, number in DraftLayout.__members__.items()}
    names = {KVDType.FLOAT32: "F32", KVDType.FLOAT16: "F16", KVDType.INT8: "INT8"}
    expected |= {f"SOL_KV_{names[kind]}": kind.value for kind in KVDType}
    expected |= {f"SOL_E_{name}": getattr(NativeError, name) for name in ("ARGUMENT", "MEMORY", "UNSUPPORTED", "DATA")}
    assert found == expected


def test_functions_are_those_of_the_header() -> None:
    declared = re.findall(r"SOL_API [^;(]*?\b(sol_\w+)\(([^;]*)\);", HEADER)
    found = {name: 0 if text.strip() == "void" else text.count(",") + 1 for name, text in declared}
    assert found == {name: len(arguments) for name, (_, arguments) in abi._SIGNATURES.items()}


def test_a_library_that_is_missing_damaged_or_another_is_said(tmp_path: Path) -> None:
    with pytest.raises(NativeUnavailableError, match=r"not built: install a C\+\+17 compiler"):
        Native(tmp_path / "none.so")
    (tmp_path / "damaged.so").write_bytes(b"\x7fELF")
    with pytest.raises(NativeUnavailableError, match=r"cannot be loaded .*: install Sol again"):
        Native(tmp_path / "damaged.so")
    names = [name for name in abi._SIGNATURES if name != "sol_abi_version"]
    body = "".join(f"int {name}(void) {{ return 0; }}\n" for name in names)
    compile_and_run(tmp_path, f"int sol_abi_version(void) {{ return 999; }}\n{body}", shared=True)
    with pytest.raises(NativeUnavailableError, match=r"another version of Sol \(ABI 999, not \d+\)"):
        Native(tmp_path / "library.so")


def test_the_best_set_is_the_last_that_there_is() -> None:
    library = native()
    supported = library.isas()
    assert Isa.PORTABLE in supported
    assert library.best_isa() == max(supported), "the header has them in order of preference"
    assert all(library.group_rows(isa) in (8, 16) for isa in supported)


def test_the_library_needs_nothing_of_python_or_torch() -> None:
    if shutil.which("readelf") is None:
        pytest.skip("there is no readelf")
    shown = subprocess.run(
        ["readelf", "--dynamic", str(native().path)], capture_output=True, text=True, check=True
    ).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", shown)
    allowed = {"libstdc++", "libm", "libgcc_s", "libc", "ld", "libasan", "libubsan", "libtsan"}
    assert {re.split(r"\.so|-", name)[0] for name in needed} <= allowed


@pytest.mark.parametrize("rows", [1, 7, 8, 33])
def test_every_stored_type_is_packed_and_read_back(rows: int) -> None:
    library = native()
    isa = library.best_isa()
    generator = torch.Generator().manual_seed(rows)
    dense = torch.randn(rows, 64, generator=generator)
    codes = torch.randint(-127, 128, (rows, 64), generator=generator, dtype=torch.int8)
    scales = torch.rand(rows, generator=generator)
    nibbles = torch.randint(0, 256, (rows, 32), generator=generator, dtype=torch.uint8)
    groups = torch.rand(rows, 2, generator=generator)
    zeros = torch.randint(0, 16, (rows, 2), generator=generator, dtype=torch.uint8)
    unpacked = torch.stack([nibbles & 15, nibbles >> 4], dim=-1).view(rows, 64).float()
    cases = [
        (Dense(dense), Format.F32, dense),
        (Dense(dense.half()), Format.F16, dense.half().float()),
        (Dense(dense.bfloat16()), Format.BF16, dense.bfloat16().float()),
        (Dense(dense.t().contiguous().t()), Format.F32, dense),
        (Int8Channel(codes, scales), Format.INT8, codes.float() * scales[:, None]),
        (
            Int4Group(nibbles, groups, zeros, 32),
            Format.INT4,
            (unpacked - zeros.float().repeat_interleave(32, 1)) * groups.repeat_interleave(32, 1),
        ),
        (Int4Group(nibbles, groups, None, 32), Format.INT4, (unpacked - 8) * groups.repeat_interleave(32, 1)),
    ]
    arena = Arena()
    for stored, kind, expected in cases:
        known = format_of(stored)
        assert known is not None
        assert known[0] == kind
        packed = pack(library, isa, stored, arena)
        assert packed.data.ctypes.data % abi.ALIGNMENT == 0
        library.check_packed(isa, packed)
        found = library.unpack_rows(isa, packed, range(rows))
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-6, atol=1e-7)
        x = torch.randn(3, 64, generator=generator)
        bias = torch.randn(2 * rows, generator=generator)
        y = library.linear(isa, [packed, packed], x.numpy(), bias.numpy())
        exact = x @ torch.cat([expected, expected]).t() + bias
        np.testing.assert_allclose(y, exact.numpy(), atol=float(0.02 * exact.abs().max()))
    assert format_of(GGUFBlocks("Q2_K", torch.zeros(1, 84, dtype=torch.uint8), 256)) is None
    assert format_of(Dense(dense.double())) is None


def test_errors_carry_the_librarys_words() -> None:
    library = native()
    isa = library.best_isa()
    with pytest.raises(NativeError) as caught:
        library.packed_nbytes(isa, Format.Q4_0, 8, 33)
    assert caught.value.code == NativeError.ARGUMENT
    assert "33" in caught.value.message
    packed = pack(library, isa, Dense(torch.eye(8)), Arena())
    with pytest.raises(NativeError, match="8"):
        library.unpack_rows(isa, packed, [8])


def test_the_fingerprint_tells_layouts_apart() -> None:
    library = native()
    assert fingerprint(library, Isa.PORTABLE) == fingerprint(library, Isa.PORTABLE)
    for isa in library.isas():
        same = library.group_rows(isa) == library.group_rows(Isa.PORTABLE)
        assert (fingerprint(library, isa) == fingerprint(library, Isa.PORTABLE)) == same


def test_an_arena_gives_aligned_pieces_and_keeps_them_apart() -> None:
    arena = Arena()
    pieces = [arena.take(nbytes) for nbytes in (1, 100, 64 << 20, 65, (64 << 20) + 1, 3)]
    for index, piece in enumerate(pieces):
        assert piece.ctypes.data % abi.ALIGNMENT == 0
        piece[:1] = index + 1
        piece[-1:] = index + 1
    assert [int(piece[0]) for piece in pieces] == [1, 2, 3, 4, 5, 6]


def test_another_library_may_be_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from sol.ops.cpu import native; native.load()"],
        env={"SOL_CPU_LIBRARY": str(tmp_path / "missing.so"), "PATH": "/usr/bin"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "the CPU kernels were not built" in done.stderr
