"""Round-to-nearest at load: what it costs, that it repeats, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tiny_models import GGUFOptions, TinyLlama, gguf_name, make_llama, write_gguf

from sol.errors import CheckpointError, ConfigError, UnsupportedModelError
from sol.models.checkpoint import open_checkpoint
from sol.models.source import resolve
from sol.ops.dequantize import dequantize
from sol.ops.weights import Int4Group, Int8Channel
from sol.quantization import rounding
from sol.quantization.rounding import int4_group, int8_channel

Factory = Callable[..., TinyLlama]


def normal(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def relative_error(found: torch.Tensor, weight: torch.Tensor) -> float:
    return float((found - weight).square().sum() / weight.square().sum())


def test_int8_is_within_half_a_step_of_every_weight() -> None:
    weight = normal(33, 96) * torch.logspace(-6, 3, 33).unsqueeze(1)
    stored = int8_channel(weight)
    assert stored.codes.dtype == torch.int8
    step = weight.abs().amax(dim=1, keepdim=True) / 127
    assert bool(((dequantize(stored) - weight).abs() <= step * 0.5001).all())
    assert int(stored.codes.abs().amax()) == 127  # no -128: its negative is no code


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_int4_loses_less_than_the_plain_range(group_size: int) -> None:
    """Against the usual way: the range of a group in 15 steps, the zero point rounded."""
    weight = normal(64, 256) + 0.3 * normal(64, 1, seed=1)
    stored = int4_group(weight, group_size)
    assert stored.zeros is not None
    assert int(stored.zeros.max()) <= 15
    groups = weight.view(64, -1, group_size)
    low, high = groups.amin(dim=2, keepdim=True).clamp(max=0), groups.amax(dim=2, keepdim=True).clamp(min=0)
    scale = (high - low) / 15
    zero = (-low / scale).round()
    plain = (((groups / scale).round() + zero).clamp(0, 15) - zero) * scale
    assert relative_error(dequantize(stored), weight) < 0.97 * relative_error(plain.view(64, 256), weight)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_groups_of_one_sign_and_of_zeros(sign: float) -> None:
    weight = sign * normal(4, 64).abs()
    weight[1] = 0
    weight[2, :32] = 0
    for stored in (int4_group(weight, 32), int8_channel(weight)):
        found = dequantize(stored)
        assert bool(torch.isfinite(stored.scales).all())
        assert bool((found[weight == 0] == 0).all())
        assert relative_error(found, weight) < 0.01


def test_exact_codes_come_back() -> None:
    """A matrix that is on a grid already: what was stored is found again, codes and all."""
    codes = torch.arange(16, dtype=torch.float32).repeat(4, 4)
    for stored in (int4_group((codes - 5) * 0.25, 32), int4_group(codes * -2.0, 64)):
        assert torch.equal(dequantize(stored), (codes - 5) * 0.25) or torch.equal(dequantize(stored), codes * -2.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_do_not_depend_on_their_neighbours(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = normal(37, 160).to(dtype)
    whole, bytes_ = int4_group(weight, 32), int8_channel(weight)
    monkeypatch.setattr(rounding, "_CHUNK_ELEMENTS", 700)
    again = int4_group(weight, 32)
    assert torch.equal(whole.codes, again.codes)
    assert torch.equal(whole.scales, again.scales)
    one = int4_group(weight[5:6], 32)
    assert torch.equal(one.codes, whole.codes[5:6])
    assert torch.equal(one.scales, whole.scales[5:6])
    assert torch.equal(int8_channel(weight[9:]).codes, bytes_.codes[9:])


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=32),
    st.sampled_from(["int8", "int4"]),
)
def test_any_finite_row(values: list[float], kind: str) -> None:
    weight = torch.zeros(1, 32)
    weight[0, : len(values)] = torch.tensor(values)
    stored = int8_channel(weight) if kind == "int8" else int4_group(weight, 32)
    assert bool(torch.isfinite(stored.scales).all())
    found = dequantize(stored)
    assert bool(torch.isfinite(found).all())
    largest = float(weight.abs().max())
    if largest > 1e-30:
        assert float((found - weight).abs().max()) <= 0.5 * largest


def test_weights_near_the_largest_float() -> None:
    with pytest.raises(ValueError, match="too large"):
        int4_group(torch.full((1, 32), 3e38) * torch.tensor([1.0, -1.0]).repeat(16), 32)


# --- whole checkpoints


@pytest.mark.parametrize("tie", [False, True])
def test_int4_keeps_embedding_and_head_in_int8(tiny_llama: Factory, tie: bool) -> None:
    tiny = tiny_llama(hidden_size=128, intermediate_size=160, tie_word_embeddings=tie, attention_bias=True)
    checkpoint = open_checkpoint(resolve(str(tiny.directory)), "int4")
    assert checkpoint.names() == tiny.weights.keys()
    for name, weight in tiny.weights.items():
        loaded = checkpoint.load(name, torch.float32)
        if weight.ndim == 1:
            assert torch.equal(loaded, weight)
            continue
        stored = checkpoint.stored(name)
        assert isinstance(stored, Int4Group if "_proj" in name else Int8Channel)
        assert torch.equal(loaded, dequantize(stored))
        assert torch.equal(checkpoint.load(name, torch.bfloat16), loaded.to(torch.bfloat16))
        assert relative_error(loaded, weight) < (0.012 if "_proj" in name else 1e-4)
        parts = (stored.codes, stored.scales) + ((stored.zeros,) if isinstance(stored, Int4Group) else ())
        assert checkpoint.stored_nbytes(name) == sum(part.nbytes for part in parts if part is not None)
    assert checkpoint.nbytes == sum(map(checkpoint.stored_nbytes, checkpoint.names()))


def test_int8_everywhere_and_from_a_gguf_file(tmp_path: Path) -> None:
    model = make_llama()
    matrices = [gguf_name(name) for name, weight in model.state_dict().items() if weight.ndim == 2]
    path = tmp_path / "tiny.gguf"
    expected = write_gguf(path, model, GGUFOptions(quantization=dict.fromkeys(matrices, "F16")))
    checkpoint = open_checkpoint(resolve(str(path)), "int8")
    for name, weight in expected.items():
        if weight.ndim == 2:
            assert isinstance(checkpoint.stored(name), Int8Channel)
            assert relative_error(checkpoint.load(name, torch.float32), weight) < 1e-4


def test_a_quantised_gguf_file_is_not_quantised_again(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, make_llama(), GGUFOptions(quantization={"blk.0.ffn_up.weight": "Q8_0"}))
    files = resolve(str(path))
    with pytest.raises(ConfigError, match=r"quantization is 'int4', .* is quantised already: gguf"):
        open_checkpoint(files, "int4")
    open_checkpoint(files, "gguf")
    with pytest.raises(ConfigError, match=r"quantization is 'awq', but .* is quantised: gguf"):
        open_checkpoint(files, "awq")


def test_a_method_that_a_full_precision_checkpoint_does_not_have(tiny_llama: Factory) -> None:
    with pytest.raises(
        ConfigError, match=r"quantization is 'gptq', but .* is in full precision\. .* one of int8, int4"
    ):
        open_checkpoint(resolve(str(tiny_llama().directory)), "gptq")


def test_dummy_weights_are_quantised_too(tiny_llama: Factory) -> None:
    checkpoint = open_checkpoint(resolve(str(tiny_llama().directory), load_format="dummy"), "int4")
    assert isinstance(checkpoint.stored("model.layers.0.mlp.up_proj.weight"), Int4Group)


def test_columns_that_groups_do_not_divide(tiny_llama: Factory) -> None:
    checkpoint = open_checkpoint(resolve(str(tiny_llama(intermediate_size=80).directory)), "int4")
    with pytest.raises(UnsupportedModelError, match=r"down_proj\.weight has 80 columns, which groups of 32 do not"):
        checkpoint.stored("model.layers.0.mlp.down_proj.weight")


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_finite(tmp_path: Path, quantization: str, value: float) -> None:
    model = make_llama()
    model.save_pretrained(tmp_path)
    state = {name: weight.clone() for name, weight in model.state_dict().items()}
    name = "model.layers.0.mlp.up_proj.weight"
    state[name][3, 5] = value
    save_file(state, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(resolve(str(tmp_path)), "int8" if quantization == "int8" else "int4")
    with pytest.raises(CheckpointError, match=rf"{name} cannot be quantised: it holds values that are not finite"):
        checkpoint.stored(name)
