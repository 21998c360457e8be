"""The GGUF reader against the `gguf` package, and against files that are damaged or lie."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tiny_models import GGUFOptions, make_llama, write_gguf

from sol.errors import CheckpointError, ModelError, ModelNotFoundError, UnsupportedModelError
from sol.models.checkpoint import open_checkpoint
from sol.models.gguf import BLOCK_SIZES, GGUFFile
from sol.models.source import ModelFiles, resolve


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def value(key: str, kind: int, raw: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + raw


def array(key: str, kind: int, count: int, raw: bytes) -> bytes:
    return value(key, 9, struct.pack("<IQ", kind, count) + raw)


def tensor(name: str = "t", shape: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    """`shape` in GGUF's order, fastest first."""
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def gguf_bytes(
    values: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    data: bytes = bytes(64),
    *,
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    values, tensors = values or [], tensors or []
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(values)) + b"".join(values) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data


def read(tmp_path: Path, content: bytes) -> GGUFFile:
    path = tmp_path / "file.gguf"
    path.write_bytes(content)
    return GGUFFile(path)


SCALARS: dict[str, tuple[int, str, Any]] = {
    "uint8": (0, "B", 255),
    "int8": (1, "b", -128),
    "uint16": (2, "H", 65535),
    "int16": (3, "h", -32768),
    "uint32": (4, "I", 2**32 - 1),
    "int32": (5, "i", -(2**31)),
    "float32": (6, "f", 0.5),
    "bool": (7, "?", True),
    "uint64": (10, "Q", 2**64 - 1),
    "int64": (11, "q", -(2**63)),
    "float64": (12, "d", 1e300),
}


@pytest.mark.parametrize("version", [2, 3])
def test_every_type_of_metadata(tmp_path: Path, version: int) -> None:
    values = [value(name, kind, struct.pack(f"<{code}", what)) for name, (kind, code, what) in SCALARS.items()]
    values.append(value("string", 8, string("naïve ☕")))
    for name, (kind, code, what) in SCALARS.items():
        values.append(array(f"{name}[]", kind, 3, struct.pack(f"<{code}", what) * 3))
    values.append(array("string[]", 8, 3, string("a") + string("") + string("☕")))
    inner = struct.pack("<IQ", 4, 2) + struct.pack("<2I", 1, 2) + struct.pack("<IQ", 8, 1) + string("x")
    values.append(array("nested", 9, 2, inner))
    values.append(array("empty", 6, 0, b""))
    metadata = read(tmp_path, gguf_bytes(values, version=version)).metadata
    for name, (_, _, what) in SCALARS.items():
        assert metadata[name] == what
        assert type(metadata[name]) is type(what)
        assert metadata[f"{name}[]"] == [what] * 3
        assert type(metadata[f"{name}[]"][0]) is type(what)
    assert metadata["string"] == "naïve ☕"
    assert metadata["string[]"] == ["a", "", "☕"]
    assert metadata["nested"] == [[1, 2], ["x"]]
    assert metadata["empty"] == []


def test_tensors_and_their_bytes(tmp_path: Path) -> None:
    values = [value("general.alignment", 4, struct.pack("<I", 64))]
    tensors = [tensor("a", (32, 2), 8, 128), tensor("b", (2, 3, 4, 1), 0, 0)]
    data = bytes(range(128)) + bytes(range(100, 168))
    file = read(tmp_path, gguf_bytes(values, tensors, data, alignment=64))
    a, b = file.tensors["a"], file.tensors["b"]
    assert list(file.tensors) == ["a", "b"]
    assert (a.shape, a.type, a.nbytes) == ((2, 32), "Q8_0", 68)
    assert (b.shape, b.type, b.nbytes) == ((1, 4, 3, 2), "F32", 96)
    assert a.offset == b.offset + 128
    assert b.offset % 64 == 0
    assert file.data("a").tobytes() == data[128:]
    assert file.data("b").tobytes() == data[:96]
    assert not file.data("a").flags.writeable
    with pytest.raises(KeyError):
        file.data("c")


def test_the_data_outlives_the_file_object(tmp_path: Path) -> None:
    data = read(tmp_path, gguf_bytes(None, [tensor()], b"\x07" * 16)).data("t")
    assert data.tobytes() == b"\x07" * 16


def test_equals_the_gguf_package_on_a_real_file(smollm2: ModelFiles) -> None:
    assert smollm2.gguf is not None
    ours, theirs = GGUFFile(smollm2.gguf), gguf.GGUFReader(smollm2.gguf)
    keys = [key for key in theirs.fields if not key.startswith("GGUF.")]
    assert list(ours.metadata) == keys
    for key in keys:
        if theirs.fields[key].types[0] != gguf.GGUFValueType.ARRAY or len(theirs.fields[key].data) < 100:
            assert ours.metadata[key] == theirs.fields[key].contents(), key
    tokens = theirs.fields["tokenizer.ggml.tokens"]
    assert len(ours.metadata["tokenizer.ggml.tokens"]) == len(tokens.data) == 49152
    for index in (0, 1, 500, 49151):
        assert ours.metadata["tokenizer.ggml.tokens"][index] == bytes(tokens.parts[tokens.data[index]]).decode()
    assert list(ours.tensors) == [found.name for found in theirs.tensors]
    for found in theirs.tensors:
        mine = ours.tensors[found.name]
        assert (mine.type, mine.offset, mine.nbytes) == (found.tensor_type.name, found.data_offset, found.n_bytes)
        assert mine.shape == tuple(int(size) for size in reversed(found.shape))
        if found.n_bytes < 100_000:
            assert ours.data(found.name).tobytes() == found.data.tobytes()


HUGE = 2**64 - 1
LIES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "another format": (b"\x80\x02}q\x00" + bytes(64), "is not a GGUF file"),
    "git lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git lfs pull"),
    "ends in the version": (b"GGUF\x03", "ends inside its version"),
    "ends in the counts": (b"GGUF" + struct.pack("<I", 3), "ends inside the number of tensors"),
    "more values than bytes": (b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE), "ends inside"),
    "more tensors than bytes": (b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0), "ends inside"),
    "long key": (gguf_bytes([struct.pack("<Q", HUGE)]), "claims to be 18446744073709551615 bytes"),
    "long string": (gguf_bytes([value("k", 8, struct.pack("<Q", 10**6))]), "claims to be 1000000 bytes"),
    "string not UTF-8": (gguf_bytes([value("k", 8, string(b"\xff\xfe"))]), "not UTF-8"),
    "string in an array not UTF-8": (gguf_bytes([array("k", 8, 1, string(b"\xff"))]), "not UTF-8"),
    "long string in an array": (gguf_bytes([array("k", 8, 1, struct.pack("<Q", HUGE))]), "a string in the value of"),
    "strings run out": (
        gguf_bytes([array("k", 8, 2, string("abcd") + bytes(4))], data=b"", alignment=1),
        "ends inside the value of 'k'",
    ),
    "unknown type": (gguf_bytes([value("k", 13, b"")]), "unknown type 13"),
    "unknown element type": (gguf_bytes([array("k", 99, 1, b"")]), "elements of the unknown type 99"),
    "long array": (gguf_bytes([array("k", 4, HUGE, b"")]), "claims 18446744073709551615 elements"),
    "long array of strings": (gguf_bytes([array("k", 8, 10**9, b"")]), "claims 1000000000 elements"),
    "long array of arrays": (gguf_bytes([array("k", 9, 10**9, b"")]), "claims 1000000000 elements"),
    "deep array": (gguf_bytes([array("k", 9, 1, struct.pack("<IQ", 9, 1) * 100)]), "more than 4 deep"),
    "key twice": (gguf_bytes([value("k", 0, b"\x00")] * 2), "'k' occurs twice"),
    "alignment 0": (gguf_bytes([value("general.alignment", 4, bytes(4))]), "power of two, not 0"),
    "alignment 48": (gguf_bytes([value("general.alignment", 4, struct.pack("<I", 48))]), "power of two, not 48"),
    "alignment true": (gguf_bytes([value("general.alignment", 7, b"\x01")]), "power of two, not True"),
    "no dimensions": (gguf_bytes(None, [tensor(shape=())]), "claims 0 dimensions"),
    "many dimensions": (gguf_bytes(None, [tensor(shape=(1,) * 5)]), "claims 5 dimensions"),
    "no elements": (gguf_bytes(None, [tensor(shape=(4, 0))]), r"no elements: its shape is \[0, 4\]"),
    "tensor twice": (gguf_bytes(None, [tensor(), tensor(offset=32)]), "'t' occurs twice"),
    "tensors overlap": (gguf_bytes(None, [tensor("a", (16,)), tensor("b", offset=32)]), "'a' and 'b' overlap"),
    "misaligned": (gguf_bytes(None, [tensor(offset=8)]), "begins at 8"),
    "rows of part of a block": (gguf_bytes(None, [tensor(shape=(16, 2), kind=8)]), "Q8_0 needs multiples of 32"),
    "past the end": (gguf_bytes(None, [tensor(offset=64)]), "'t' ends at byte"),
    "far past the end": (gguf_bytes(None, [tensor(shape=(2**63, 2**63))]), "'t' ends at byte"),
}


@pytest.mark.parametrize("name", LIES)
def test_lies_are_checkpoint_errors(tmp_path: Path, name: str) -> None:
    content, message = LIES[name]
    with pytest.raises(CheckpointError, match=message) as caught:
        read(tmp_path, content)
    assert str(tmp_path / "file.gguf") in caught.value.message
    assert caught.value.param == "model"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gguf_bytes(version=1), "GGUF version 1; supported is GGUF version 2 or 3, little endian"),
        (gguf_bytes(version=4), "GGUF version 4"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big endian"),
        (b"tjgg" + bytes(60), "from before GGUF"),
        (gguf_bytes(None, [tensor("w", kind=16)]), "'w' has the type IQ2_XXS; supported are F32, F16, BF16, Q4_0"),
        (gguf_bytes(None, [tensor("w", kind=77)]), "'w' has the type number 77"),
    ],
)
def test_what_is_not_supported_says_so(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read(tmp_path, content)


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="there is no file"):
        GGUFFile(tmp_path / "absent.gguf")
    with pytest.raises(CheckpointError, match="cannot be read"):
        GGUFFile(tmp_path)


def use(path: Path) -> str | None:
    """Does all that is ever done with a file. The message if it was refused, None if not."""
    try:
        checkpoint = open_checkpoint(resolve(str(path)))
        for name in checkpoint.names():
            checkpoint.load(name, torch.float32)
    except ModelError as error:
        return error.message
    return None


def test_damaged_headers_never_surprise(tmp_path: Path) -> None:
    whole = tmp_path / "whole.gguf"
    extra = {
        "llama.attention.causal": True,
        "general.name": "tiny",
        "tokenizer.ggml.scores": [0.5, 1.5],
        "tokenizer.ggml.merges": ["a b", "c d"],
        "tokenizer.ggml.tokens": None,
    }
    options = GGUFOptions(
        metadata=extra,
        quantization={"token_embd.weight": "Q8_0", "blk.0.attn_q.weight": "Q4_1"},
        tensors={"rope_freqs.weight": np.ones(8, np.float32)},
    )
    write_gguf(whole, make_llama(vocab_size=32, num_hidden_layers=1), options)
    content = whole.read_bytes()
    header = min(found.offset for found in GGUFFile(whole).tensors.values())
    assert use(whole) is None
    chance = random.Random(0)
    path = tmp_path / "damaged.gguf"
    refused = 0
    for attempt in range(600):
        damaged = bytearray(content)
        if attempt % 4 == 0:
            del damaged[chance.randrange(len(damaged) if attempt % 8 else header) :]
        else:
            for _ in range(chance.choice((1, 1, 2, 8))):
                damaged[chance.randrange(header)] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))
        path.write_bytes(damaged)
        message = use(path)
        if message is not None:
            assert str(path) in message
            refused += 1
    assert refused > 300


def test_every_supported_type_is_read(tmp_path: Path) -> None:
    numbers = {kind.name: int(kind) for kind in gguf.GGMLQuantizationType}
    for kind, (block, nbytes) in BLOCK_SIZES.items():
        file = read(tmp_path, gguf_bytes(None, [tensor("w", (block * 2, 3), numbers[kind])], bytes(nbytes * 6)))
        assert file.tensors["w"].nbytes == len(file.data("w")) == nbytes * 6
