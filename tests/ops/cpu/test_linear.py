"""Packed weights and projections of the C++ backend, on every instruction set that this processor has."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from tiny_cpu import isas, native
from tiny_models import random_blocks

from sol.ops.cpu.native import Format, Isa, NativeError
from sol.ops.cpu.packing import Arena, pack
from sol.ops.dequantize import dequantize
from sol.ops.weights import Dense, GGUFBlocks, Int4Group, Int8Channel, Packed, Stored

pytestmark = pytest.mark.usefixtures("library")

Floats = npt.NDArray[np.float32]

GGML = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
QUANTIZED = (*GGML, "INT8", "INT4", "INT4-zeros", "INT4-perm")
KINDS = (*DENSE, *QUANTIZED)
COLS = 512
EPS = float(np.finfo(np.float32).eps)

each_isa = pytest.mark.parametrize("isa", isas(), ids=lambda isa: isa.name.lower())
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def library() -> None:
    native()


def stored(kind: str, rows: int, cols: int = COLS, *, group_size: int = 64, scale: float | None = 0.01) -> Stored:
    generator = torch.Generator().manual_seed(rows * 1000 + cols)
    if kind in DENSE:
        return Dense((torch.randn(rows, cols, generator=generator) * 0.05).to(DENSE[kind]))
    if kind in GGML:
        return GGUFBlocks(kind, torch.from_numpy(random_blocks(kind, rows, cols, rows, scale=scale)), cols)
    if kind == "INT8":
        codes = torch.randint(-128, 128, (rows, cols), generator=generator, dtype=torch.int8)
        return Int8Channel(codes, torch.randn(rows, generator=generator) * 0.01)
    groups = cols // group_size
    return Int4Group(
        codes=torch.randint(0, 256, (rows, cols // 2), generator=generator, dtype=torch.uint8),
        scales=torch.randn(rows, groups, generator=generator) * 0.01,
        zeros=torch.randint(0, 16, (rows, groups), generator=generator, dtype=torch.uint8) if "-" in kind else None,
        group_size=group_size,
        perm=torch.randperm(cols, generator=generator).to(torch.int32) if kind == "INT4-perm" else None,
    )


def dense(weight: Stored) -> npt.NDArray[np.float64]:
    """The matrix in the order of x's columns."""
    return dequantize(weight, torch.float32).numpy().astype(np.float64)


def packed(isa: Isa, weight: Stored) -> Packed:
    return pack(native(), isa, weight, Arena())


def activations(tokens: int, cols: int = COLS, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal((tokens, cols), dtype=np.float32)


def as_quantized(x: Floats, perm: torch.Tensor | None = None) -> npt.NDArray[np.float64]:
    """What the kernels make of x: int8 codes times a scale for each 32 columns, in the order of packed columns.

    Where the largest value is more than 4.5 times the root of the mean square, what is left over is quantised too.
    """
    order = np.arange(x.shape[1]) if perm is None else perm.numpy()
    blocks = x[:, order].reshape(len(x), -1, 32)
    codes, scales = int8_blocks(blocks)
    made = codes.astype(np.float64) * scales
    rest_codes, rest_scales = int8_blocks(blocks - scales * codes)
    refined = np.square(codes).sum(-1, keepdims=True) * 4.5**2 < 32 * 127**2
    made += np.where(refined, rest_codes.astype(np.float64) * rest_scales, 0)
    out = np.empty(x.shape)
    out[:, order] = made.reshape(len(x), -1)
    return out


def int8_blocks(blocks: Floats) -> tuple[Floats, Floats]:
    scales = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > 0)
    codes = np.rint(blocks * inverse)
    assert np.abs(codes).max() <= 127
    return codes, scales


def linear(isa: Isa, weight: Packed | list[Packed], x: Floats, bias: Floats | None = None) -> Floats:
    segments = weight if isinstance(weight, list) else [weight]
    return native().linear(isa, segments, x, bias)


# ---- Packing


@each_isa
@pytest.mark.parametrize("kind", GGML)
@pytest.mark.parametrize("rows", [1, 7, 19])
def test_ggml_rows_come_back_as_gguf_reads_them(isa: Isa, kind: str, rows: int) -> None:
    weight = stored(kind, rows, scale=None)
    assert isinstance(weight, GGUFBlocks)
    expected = gguf.quants.dequantize(weight.data.numpy(), gguf.GGMLQuantizationType[kind])
    found = native().unpack_rows(isa, packed(isa, weight), range(rows))
    assert np.array_equal(found.view(np.uint32), expected.astype(np.float32).view(np.uint32))


@each_isa
@pytest.mark.parametrize("kind", [*DENSE, "INT8", "INT4", "INT4-zeros"])
def test_other_rows_come_back_as_their_rule_says(isa: Isa, kind: str) -> None:
    weight = stored(kind, 21)
    found = native().unpack_rows(isa, packed(isa, weight), [20, 3, 3, 0])
    assert np.array_equal(found, dense(weight)[[20, 3, 3, 0]].astype(np.float32))


@each_isa
@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_every_16_bit_number_is_read_exactly(isa: Isa, kind: str) -> None:
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).reshape(64, 1024)
    weight = bits.view(DENSE[kind])
    found = torch.from_numpy(native().unpack_rows(isa, packed(isa, Dense(weight)), range(64)))
    torch.testing.assert_close(found, weight.float(), rtol=0, atol=0, equal_nan=True)


@each_isa
def test_packed_sizes_are_those_of_the_format(isa: Isa) -> None:
    lib = native()
    rows = lib.group_rows(isa)
    assert lib.packed_nbytes(isa, Format.Q4_1, rows, 576) == rows * 576 // 32 * 20
    assert lib.packed_nbytes(isa, Format.Q8_0, rows + 1, 32) == 2 * rows * 34
    assert lib.packed_nbytes(isa, Format.Q6_K, rows, 512) == rows * 2 * 210
    assert lib.packed_nbytes(isa, Format.F32, 1, 3) == rows * 12


@pytest.mark.parametrize(
    ("kind", "rows", "cols", "group_size", "message"),
    [
        (Format.Q4_0, 4, 48, 0, "cols is 48; Q4_0 needs a multiple of 32"),
        (Format.Q6_K, 4, 576, 0, "Q6_K needs a multiple of 256"),
        (Format.INT4, 4, 96, 64, "INT4 needs a multiple of 64"),
        (Format.INT4, 4, 96, 48, "group_size is 48"),
        (Format.INT4, 4, 96, 0, "group_size is 0"),
        (Format.Q4_0, 4, 64, 32, "only INT4"),
        (Format.F32, 0, 64, 0, "0 rows"),
        (Format.F32, 4, -1, 0, "-1 columns"),
        (Format.F32, 1 << 40, 64, 0, "below 2^31"),
        (7, 4, 64, 0, "unknown weight format 7"),
    ],
)
def test_impossible_shapes_are_refused(kind: Format, rows: int, cols: int, group_size: int, message: str) -> None:
    with pytest.raises(NativeError) as caught:
        native().packed_nbytes(Isa.PORTABLE, kind, rows, cols, group_size)
    assert message in caught.value.message


@each_isa
@pytest.mark.parametrize("kind", GGML)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_scale_that_is_not_finite_is_refused_with_its_row(isa: Isa, kind: str, value: float) -> None:
    weight = stored(kind, 20)
    assert isinstance(weight, GGUFBlocks)
    at = 208 if kind == "Q6_K" else 0  # where a block's d lies
    weight.data[13, at : at + 2] = torch.from_numpy(np.array([value], dtype=np.float16).view(np.uint8))
    with pytest.raises(NativeError, match="row 13 of 20") as caught:
        packed(isa, weight)
    assert caught.value.code == NativeError.DATA


@each_isa
def test_int_scales_and_zeros_out_of_range_are_refused(isa: Isa) -> None:
    channel = stored("INT8", 9)
    assert isinstance(channel, Int8Channel)
    channel.scales[8] = torch.nan
    group = stored("INT4-zeros", 9)
    assert isinstance(group, Int4Group)
    assert group.zeros is not None
    group.zeros[2, 1] = 16
    for weight, row in ((channel, 8), (group, 2)):
        with pytest.raises(NativeError, match=f"row {row} of 9") as caught:
            packed(isa, weight)
        assert caught.value.code == NativeError.DATA


@each_isa
@each_kind
def test_packed_bytes_are_checked(isa: Isa, kind: str) -> None:
    whole = packed(isa, stored(kind, 20))
    native().check_packed(isa, whole)
    short = Packed(whole.format, whole.rows, whole.in_features, whole.group_size, whole.data[:-4])
    with pytest.raises(NativeError, match="packed_nbytes") as caught:
        native().check_packed(isa, short)
    assert caught.value.code == NativeError.ARGUMENT
    with pytest.raises(NativeError, match="packed_nbytes"):
        linear(isa, short, activations(1))
    if kind not in DENSE:  # every float16 or float32 scale among such bytes is a NaN, every byte beyond its range
        whole.data[:] = 0xFF
        with pytest.raises(NativeError, match="row 0 of 20") as caught:
            native().check_packed(isa, whole)
        assert caught.value.code == NativeError.DATA


@each_isa
def test_rows_that_are_not_there_are_refused(isa: Isa) -> None:
    weight = packed(isa, stored("Q8_0", 9))
    for row in (-1, 9):
        with pytest.raises(NativeError, match=f"is {row}; there are 9 rows"):
            native().unpack_rows(isa, weight, [0, row])


# ---- Projections


@each_isa
@each_kind
@pytest.mark.parametrize("rows", [1, 8, 37])
def test_a_projection_is_the_product_to_rounding(isa: Isa, kind: str, rows: int) -> None:
    weight, x = stored(kind, rows), activations(7)
    matrix = dense(weight)
    perm = weight.perm if isinstance(weight, Int4Group) else None
    inputs = x.astype(np.float64) if kind in DENSE else as_quantized(x, perm)
    found = linear(isa, packed(isa, weight), x)
    # What a chain of float32 additions may lose of each term. With a minimum the terms are w - min and min.
    terms = np.abs(inputs) @ (np.abs(matrix) + 2 * _minima(weight)).T
    steps = COLS if kind in DENSE else 2 * COLS // 32
    assert (np.abs(found - inputs @ matrix.T) <= (steps + 4) * EPS * terms).all()
    assert found.shape == (7, rows)


def _minima(weight: Stored) -> npt.NDArray[np.float64]:
    """[rows, COLS] or less: bounds of the minima of formats that have them."""
    sizes = {"Q4_1": 20, "Q5_1": 24, "Q4_K": 144, "Q5_K": 176}
    if not isinstance(weight, GGUFBlocks) or weight.kind not in sizes:
        return np.zeros((1, 1))
    blocks = weight.data.numpy().reshape(len(weight.data), -1, sizes[weight.kind])
    minima = np.abs(np.ascontiguousarray(blocks[..., 2:4]).view(np.float16)[..., 0].astype(np.float64))
    if weight.kind.endswith("K"):  # times six bits
        minima *= 63
    return minima.repeat(COLS // minima.shape[1], axis=1)


@each_isa
@pytest.mark.parametrize("kind", QUANTIZED)
def test_the_error_of_a_projection_is_that_of_its_activations(isa: Isa, kind: str) -> None:
    weight, x = stored(kind, 24), activations(5, seed=1)
    matrix = dense(weight)
    perm = weight.perm.numpy() if isinstance(weight, Int4Group) and weight.perm is not None else np.arange(COLS)
    step = np.abs(x[:, perm]).reshape(5, -1, 32).max(-1).repeat(32, axis=-1) / 127  # of a code
    bound = (step / 2) @ np.abs(matrix[:, perm]).T
    found = linear(isa, packed(isa, weight), x)
    assert (np.abs(found - x.astype(np.float64) @ matrix.T) <= bound * 1.01 + 1e-5).all()


def with_outliers(x: Floats) -> Floats:
    """Every third block has one value far above the others."""
    x = x.copy()
    x[:, 5::96] *= 50
    return x


@each_isa
@pytest.mark.parametrize("kind", QUANTIZED)
def test_an_outlier_costs_its_neighbours_no_precision(isa: Isa, kind: str) -> None:
    weight, x = stored(kind, 24), with_outliers(activations(5, seed=1))
    inputs = as_quantized(x, weight.perm if isinstance(weight, Int4Group) else None)
    found = linear(isa, packed(isa, weight), x)
    exact = inputs @ dense(weight).T
    np.testing.assert_allclose(found, exact, rtol=1e-4, atol=1e-4 * np.abs(exact).max())
    lost, once = np.abs(inputs - x), np.abs(x).reshape(5, -1, 32).max(-1).repeat(32, axis=-1) / 254
    assert lost.max() < once.max() / 20


@each_isa
@each_kind
def test_a_row_has_the_same_bits_among_any_number_of_tokens(isa: Isa, kind: str) -> None:
    weight, x = packed(isa, stored(kind, 37)), with_outliers(activations(40))
    whole = linear(isa, weight, x)
    for tokens in range(1, 40):
        assert np.array_equal(linear(isa, weight, x[40 - tokens :]), whole[40 - tokens :]), tokens


@each_isa
@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "F16"])
def test_long_inputs_are_cut_without_a_trace(isa: Isa, kind: str) -> None:
    weight, x = packed(isa, stored(kind, 9, 4096)), activations(150, 4096)
    whole = linear(isa, weight, x)
    for token in (0, 47, 48, 95, 149):
        assert np.array_equal(linear(isa, weight, x[token : token + 1])[0], whole[token])


@each_isa
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("cols", [1, 3, 33])
def test_float_weights_take_any_number_of_columns(isa: Isa, kind: str, cols: int) -> None:
    weight, x = stored(kind, 11, cols), activations(3, cols)
    np.testing.assert_allclose(linear(isa, packed(isa, weight), x), x @ dense(weight).T, rtol=1e-5, atol=1e-6)


@each_isa
@pytest.mark.parametrize("group_size", [32, 128, 512])
def test_groups_of_any_size(isa: Isa, group_size: int) -> None:
    weight, x = stored("INT4-zeros", 19, group_size=group_size), activations(5)
    expected = as_quantized(x) @ dense(weight).T
    np.testing.assert_allclose(linear(isa, packed(isa, weight), x), expected, rtol=1e-4, atol=1e-4)


@each_isa
def test_segments_of_several_formats_and_a_bias(isa: Isa) -> None:
    weights = [stored("Q4_K", 19), stored("Q6_K", 5), stored("F16", 8), stored("INT4-perm", 3)]
    x, bias = activations(6), activations(1, 35)[0]
    parts = [linear(isa, packed(isa, weight), x) for weight in weights]
    found = linear(isa, [packed(isa, weight) for weight in weights], x, bias)
    assert np.array_equal(found, np.concatenate(parts, axis=1) + bias)


@each_isa
@each_kind
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_token(isa: Isa, kind: str, value: float) -> None:
    weight, x = packed(isa, stored(kind, 9)), activations(6)
    clean = linear(isa, weight, x)
    x[3, 77] = value
    found = linear(isa, weight, x)
    assert not np.isfinite(found[3]).any()
    if kind not in DENSE:
        assert np.isnan(found[3]).all()
    assert np.array_equal(np.delete(found, 3, axis=0), np.delete(clean, 3, axis=0))


@each_isa
@pytest.mark.parametrize("kind", QUANTIZED)
def test_activations_of_any_size(isa: Isa, kind: str) -> None:
    weight = stored(kind, 9)
    sizes = np.array([[1e-30], [1e-20], [1e20], [1.0]])
    x = (activations(4, seed=2) * sizes).astype(np.float32)
    x[3] = 0.0
    x[1, :64] = 0.0  # whole blocks
    x[0, 64:96] = 1e-42  # subnormal: a block of zeros
    found = linear(isa, packed(isa, weight), x)
    assert np.isfinite(found).all()
    assert not found[3].any()
    perm = weight.perm if isinstance(weight, Int4Group) else None
    expected = as_quantized(np.where(np.abs(x) < 1e-35, np.float32(0), x), perm) @ dense(weight).T
    np.testing.assert_allclose(found / sizes, expected / sizes, rtol=1e-3, atol=2e-3)


@each_isa
def test_extreme_codes_do_not_overflow(isa: Isa) -> None:
    """The largest codes of every width, times activations that are all at the end of their range."""
    x = np.ones((5, COLS), dtype=np.float32)
    x[1] = -1
    x[2, ::2] = -1
    for kind in GGML:
        weight = stored(kind, 8)
        assert isinstance(weight, GGUFBlocks)
        blocks = weight.data.numpy()
        scales = blocks.copy()
        blocks[:] = 0xFF if kind != "Q8_0" else 0x80
        size = blocks.shape[1] // (COLS // (256 if kind.endswith("K") else 32))
        at = slice(208, 210) if kind == "Q6_K" else slice(0, 4 if kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else 2)
        blocks.reshape(8, -1, size)[..., at] = scales.reshape(8, -1, size)[..., at]
        expected = as_quantized(x) @ dense(weight).T
        np.testing.assert_allclose(linear(isa, packed(isa, weight), x), expected, rtol=1e-4, atol=1e-3)


@each_isa
def test_what_cannot_be_multiplied_is_refused(isa: Isa) -> None:
    first, second = packed(isa, stored("Q8_0", 8)), packed(isa, stored("Q8_0", 8, 256))
    with pytest.raises(NativeError, match="segment 1 has 256 columns, the first 512"):
        linear(isa, [first, second], activations(1))
    perm = np.arange(COLS, dtype=np.int32)
    floats = packed(isa, stored("F32", 8))
    with pytest.raises(NativeError, match="perm is for quantised formats"):
        linear(isa, Packed(floats.format, 8, COLS, 0, floats.data, perm), activations(1))
    perm[5] = 6
    for bad in (6, -1, COLS):
        perm[5] = bad
        with pytest.raises(NativeError, match=r"perm\[[56]\] is "):
            linear(isa, Packed(first.format, 8, COLS, 0, first.data, perm), activations(1))
