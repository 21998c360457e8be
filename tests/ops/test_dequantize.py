"""Stored weight types against the `gguf` package, and against their formulas written out."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from tiny_models import random_blocks

from sol.ops import dequantize as module
from sol.ops.dequantize import GGML_BLOCKS, dequantize, dequantize_blocks, dequantize_rows
from sol.ops.weights import Dense, GGUFBlocks, Int4Group, Int8Channel, Stored


@pytest.mark.parametrize("kind", GGML_BLOCKS)
def test_blocks_equal_gguf_bit_by_bit(kind: str) -> None:
    rows = random_blocks(kind, 96, 512, seed=len(kind))
    expected = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind])
    found = dequantize_blocks(torch.from_numpy(rows), kind)
    assert found.shape == (96, 512)
    assert found.dtype == torch.float32
    assert np.array_equal(found.numpy().view(np.uint32), expected.astype(np.float32).view(np.uint32))


def int4(
    *, rows: int = 5, columns: int = 96, group_size: int = 32, zeros: bool = True, perm: bool = False
) -> Int4Group:
    generator = torch.Generator().manual_seed(rows + columns)
    groups = columns // group_size
    return Int4Group(
        codes=torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=generator),
        scales=torch.randn(rows, groups, generator=generator),
        zeros=torch.randint(0, 16, (rows, groups), dtype=torch.uint8, generator=generator) if zeros else None,
        group_size=group_size,
        perm=torch.randperm(columns, generator=generator).to(torch.int32) if perm else None,
    )


@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize("perm", [True, False])
def test_int4_is_its_formula(zeros: bool, perm: bool) -> None:
    stored = int4(zeros=zeros, perm=perm)
    found = dequantize(stored)
    for row in range(5):
        for column in range(96):
            byte = int(stored.codes[row, column // 2])
            code = byte >> 4 if column % 2 else byte & 15
            zero = 8 if stored.zeros is None else int(stored.zeros[row, column // 32])
            expected = np.float32(code - zero) * stored.scales[row, column // 32].numpy()
            place = column if stored.perm is None else int(stored.perm[column])
            assert found[row, place].numpy() == expected


def test_a_permuted_matrix_multiplies_the_permuted_vector() -> None:
    stored = int4(perm=True)
    assert stored.perm is not None
    x = torch.randn(96, generator=torch.Generator().manual_seed(0))
    sorted_columns = Int4Group(stored.codes, stored.scales, stored.zeros, stored.group_size)
    assert torch.allclose(dequantize(stored) @ x, dequantize(sorted_columns) @ x[stored.perm.long()], atol=1e-4)


def test_int8_is_its_formula() -> None:
    codes = torch.tensor([[-128, 127, 0], [1, -1, 5]], dtype=torch.int8)
    scales = torch.tensor([0.5, -3.0])
    expected = torch.tensor([[-64.0, 63.5, 0.0], [-3.0, 3.0, -15.0]])
    assert torch.equal(dequantize(Int8Channel(codes, scales)), expected)


@pytest.mark.parametrize(
    "stored",
    [
        Dense(torch.randn(7, 96, dtype=torch.float16, generator=torch.Generator().manual_seed(0))),
        GGUFBlocks("Q5_1", torch.from_numpy(random_blocks("Q5_1", 7, 96, 1)), 96),
        Int8Channel(torch.arange(-128, 544, dtype=torch.int16).to(torch.int8).reshape(7, 96), torch.randn(7)),
        int4(rows=7, perm=True),
    ],
    ids=lambda stored: type(stored).__name__,
)
def test_parts_and_types(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = dequantize(stored)
    assert whole.shape == (7, 96)
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 200)  # two rows at a time, one in the last chunk
    assert torch.equal(dequantize(stored), whole)
    for dtype in (torch.float16, torch.bfloat16):
        assert torch.equal(dequantize(stored, dtype), whole.to(dtype))
    ids = torch.tensor([6, 0, 6, 3])
    assert torch.equal(dequantize_rows(stored, ids), whole[ids])
    assert dequantize_rows(stored, ids, torch.bfloat16).dtype == torch.bfloat16
