"""AWQ, GPTQ and compressed-tensors checkpoints: what they hold, what is refused, and files that lie."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quantized_models import (
    QuantizedLlama,
    Tensors,
    awq,
    compressed,
    gptq,
    int_quantized,
    pack_quantized,
    save_quantized,
)
from safetensors.torch import save_file

from sol.errors import CheckpointError, ConfigError, ModelError, UnsupportedModelError
from sol.models.checkpoint import Checkpoint, open_checkpoint
from sol.models.config import load_model_config
from sol.models.quantization_config import QuantizationConfig, read
from sol.models.source import resolve
from sol.ops.dequantize import dequantize
from sol.ops.weights import Dense, Int4Group, Int8Channel

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False, "desc_act": False}
Q_PROJ = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.1.mlp.down_proj"


def opened(made: QuantizedLlama, quantization: Any = None) -> Checkpoint:
    return open_checkpoint(resolve(str(made.directory)), quantization)


def assert_holds(made: QuantizedLlama) -> Checkpoint:
    checkpoint = opened(made)
    assert checkpoint.names() == made.weights.keys()
    for name, weight in made.weights.items():
        assert checkpoint.shape(name) == tuple(weight.shape)
        assert torch.equal(checkpoint.load(name, torch.float32), weight), name
        if weight.ndim == 2:
            stored = checkpoint.stored(name)
            assert torch.equal(dequantize(stored), weight), name
            assert torch.equal(checkpoint.load(name, torch.bfloat16), weight.to(torch.bfloat16)), name
    assert checkpoint.nbytes == sum(map(checkpoint.stored_nbytes, checkpoint.names()))
    return checkpoint


CASES: dict[str, tuple[Callable[..., Tensors], dict[str, Any], dict[str, Any]]] = {
    "awq": (awq, AWQ, {}),
    "awq g32 old names": (
        awq,
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"},
        {"group_size": 32},
    ),
    "awq rows": (awq, AWQ | {"group_size": -1}, {"group_size": -1}),
    "awq sym": (awq, AWQ, {"symmetric": True}),
    "gptq": (gptq, GPTQ, {}),
    "gptq sym g64": (gptq, GPTQ | {"sym": True, "group_size": 64}, {"symmetric": True, "group_size": 64}),
    "gptq act-order": (gptq, GPTQ | {"desc_act": True}, {"act_order": True}),
    "gptq v2": (gptq, GPTQ | {"checkpoint_format": "gptq_v2"}, {"version": 2}),
    "gptq rows": (gptq, GPTQ | {"group_size": -1}, {"group_size": -1}),
    "gptq 8 bits": (
        gptq,
        GPTQ | {"bits": 8, "group_size": -1, "sym": True},
        {"bits": 8, "group_size": -1, "symmetric": True},
    ),
    "pack-quantized": (
        pack_quantized,
        compressed({"num_bits": 4, "strategy": "group", "group_size": 128, "symmetric": True}),
        {"symmetric": True},
    ),
    "pack-quantized asymmetric g32": (
        pack_quantized,
        compressed({"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}),
        {"group_size": 32},
    ),
    "pack-quantized act-order": (
        pack_quantized,
        compressed({"num_bits": 4, "strategy": "group", "group_size": 64, "symmetric": False, "actorder": "group"}),
        {"group_size": 64, "act_order": True},
    ),
    "pack-quantized rows": (
        pack_quantized,
        compressed({"num_bits": 4, "strategy": "channel", "symmetric": False}),
        {"group_size": -1},
    ),
    "pack-quantized 8 bits": (
        pack_quantized,
        compressed({"num_bits": 8, "strategy": "channel", "symmetric": True}),
        {"bits": 8, "group_size": -1, "symmetric": True},
    ),
    "int-quantized": (
        int_quantized,
        compressed({"num_bits": 8, "strategy": "channel", "symmetric": True}, "int-quantized"),
        {"bits": 8, "group_size": -1, "symmetric": True},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_checkpoints_hold_what_their_codes_stand_for(tmp_path: Path, case: str) -> None:
    pack, config, options = CASES[case]
    checkpoint = assert_holds(save_quantized(tmp_path, pack, config, **options))
    stored = checkpoint.stored(f"{DOWN}.weight")
    if "8 bits" in case or case == "int-quantized":
        assert isinstance(stored, Int8Channel)
        assert stored.scales.dtype == torch.float32
    else:
        assert isinstance(stored, Int4Group)
        # Whole rows are groups of the kernels' largest size with equal scales.
        assert stored.group_size == {"group_size": 128, **options}["group_size"] or stored.group_size == 128
        assert (stored.zeros is None) == bool(options.get("symmetric"))
        assert (stored.perm is not None) == bool(options.get("act_order"))
    assert isinstance(checkpoint.stored("lm_head.weight"), Dense)


def test_a_group_that_the_columns_do_not_fill(tmp_path: Path) -> None:
    """256 and 320 columns in groups of 128: the last group of a row is half a group, so kernels take 64."""
    made = save_quantized(tmp_path, gptq, GPTQ, model={"intermediate_size": 320})
    checkpoint = assert_holds(made)
    stored = checkpoint.stored(f"{DOWN}.weight")
    assert isinstance(stored, Int4Group)
    assert stored.group_size == 64


def test_large_groups_are_repeated(tmp_path: Path) -> None:
    assert_holds(save_quantized(tmp_path, awq, AWQ | {"group_size": 256}, group_size=256, model={"hidden_size": 512}))


def test_modules_left_as_they_are_biases_and_a_tied_head(tmp_path: Path) -> None:
    made = save_quantized(
        tmp_path,
        gptq,
        GPTQ,
        plain=("down_proj", "layers.0.self_attn.k_proj"),
        model={"tie_word_embeddings": True, "attention_bias": True},
    )
    checkpoint = assert_holds(made)
    assert isinstance(checkpoint.stored(f"{DOWN}.weight"), Dense)
    assert isinstance(checkpoint.stored(f"{Q_PROJ}.weight"), Int4Group)


def test_shards(tmp_path: Path) -> None:
    made = save_quantized(tmp_path, awq, AWQ)
    names = sorted(made.tensors)
    (tmp_path / "model.safetensors").unlink()
    for index in range(3):
        path = tmp_path / f"model-{index + 1:05}-of-00003.safetensors"
        save_file({name: made.tensors[name] for name in names[index::3]}, path)
    assert_holds(made)


def test_biases_that_autogptq_adds(tmp_path: Path) -> None:
    made = save_quantized(tmp_path, gptq, GPTQ)
    made.tensors[f"{Q_PROJ}.bias"] = torch.zeros(256, dtype=torch.float16)
    made.save()
    assert_holds(made)
    made.tensors[f"{Q_PROJ}.bias"][3] = 1
    made.save()
    with pytest.raises(CheckpointError, match=rf"{Q_PROJ}\.bias is not zero"):
        opened(made)


def test_compressed_tensors_decides_module_by_module(tmp_path: Path) -> None:
    """Two groups, one by pattern and one by class; what early versions wrote for symmetric schemes."""
    four = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 128, "symmetric": True}
    eight = {"type": "int", "num_bits": 8, "strategy": "channel", "symmetric": True}
    config = compressed({})
    config["config_groups"] = {
        "a": {"targets": ["re:.*down_proj$"], "weights": eight, "format": "int-quantized"},
        "b": {"targets": ["Linear"], "weights": four},
    }
    made = save_quantized(tmp_path, pack_quantized, config, symmetric=True)
    other = save_quantized(tmp_path, int_quantized, config, bits=8, group_size=-1, symmetric=True)
    for name in [name for name in made.tensors if ".down_proj." in name]:
        del made.tensors[name]
    for name in [name for name in other.tensors if ".down_proj." in name]:
        made.tensors[name] = other.tensors[name]
    made.weights |= {name: weight for name, weight in other.weights.items() if ".down_proj." in name}
    made.tensors[f"{Q_PROJ}.weight_zero_point"] = torch.zeros(256, 2, dtype=torch.int8)
    made.save()
    checkpoint = assert_holds(made)
    assert isinstance(checkpoint.stored(f"{DOWN}.weight"), Int8Channel)
    assert isinstance(checkpoint.stored(f"{Q_PROJ}.weight"), Int4Group)
    found = load_model_config(resolve(str(tmp_path))).quantization
    assert found is not None
    assert str(found) == "compressed-tensors (8 bits, one scale a row; 4 bits, groups of 128)"
    assert found.scheme("lm_head") is None


def test_scales_for_a_whole_tensor(tmp_path: Path) -> None:
    config = compressed({"num_bits": 8, "strategy": "tensor", "symmetric": True}, "int-quantized")
    made = save_quantized(tmp_path, int_quantized, config, bits=8, group_size=-1, symmetric=True)
    for name in [name for name in made.tensors if name.endswith("weight_scale")]:
        made.tensors[name] = torch.tensor([0.125], dtype=torch.bfloat16)
        weight = name.removesuffix("_scale")
        made.weights[weight] = made.tensors[weight].float() * 0.125
    made.save()
    assert_holds(made)


# --- what the `quantization` option says


def test_the_option_has_to_match_the_checkpoint(tmp_path: Path) -> None:
    made = save_quantized(tmp_path, awq, AWQ)
    opened(made, "awq")
    with pytest.raises(
        ConfigError, match=r"quantization is 'gptq', but .* is quantised: awq \(4 bits, groups of 128\)"
    ):
        opened(made, "gptq")
    with pytest.raises(ConfigError, match=r"quantization is 'int8', which quantises a full-precision checkpoint"):
        opened(made, "int8")


# --- what is refused


WEIGHTS = {"num_bits": 4, "strategy": "group", "group_size": 128, "symmetric": True}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("awq", "quantization_config must be an object"),
        ({"bits": 4}, "does not say quant_method"),
        ({"quant_method": "fp8"}, "quant_method is 'fp8'; supported is awq, gptq, compressed-tensors"),
        (AWQ | {"version": "gemv"}, "version is 'gemv'; supported is gemm"),
        (AWQ | {"bits": 8}, "bits is 8; supported is 4"),
        (AWQ | {"group_size": 16}, "group_size is 16; supported is multiples of 32"),
        (AWQ | {"group_size": "128"}, "group_size must be -1 or a whole number"),
        (GPTQ | {"bits": 3}, "bits is 3; supported is 4, and 8 with"),
        (GPTQ | {"bits": 8}, "bits is '8 with group_size 128 and sym False'"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format is True"),
        (GPTQ | {"pack_dtype": "int16"}, "pack_dtype is 'int16'"),
        (GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic is '\\+:.*down"),
        (GPTQ | {"dynamic": ["x"]}, "dynamic must be an object"),
        (GPTQ | {"adapter": {"rank": 8}}, "adapter is {'rank': 8}"),
        (GPTQ | {"sym": "yes"}, "sym must be true or false"),
        (compressed(WEIGHTS, "float-quantized"), "format is 'float-quantized'"),
        (compressed(WEIGHTS | {"num_bits": 3}), "num_bits is 3; supported is 4, 8"),
        (compressed(WEIGHTS | {"num_bits": 8}), "strategy is 'group'; supported is tensor, channel"),
        (compressed(WEIGHTS, "int-quantized"), "num_bits is 4; supported is 8"),
        (compressed(WEIGHTS | {"type": "float"}), "type is 'float'; supported is int"),
        (compressed(WEIGHTS | {"dynamic": True}), "dynamic is True"),
        (compressed(WEIGHTS | {"block_structure": [128, 128]}), "block_structure is"),
        (compressed(WEIGHTS | {"strategy": "block"}), "strategy is 'block'"),
        (compressed(WEIGHTS | {"actorder": "random"}), "actorder is 'random'; supported is None, False, True, group"),
        (compressed(WEIGHTS, kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme is {'num_bits': 8}; supported is none"),
        (compressed(WEIGHTS, sparsity_config={"format": "sparse-24"}), "sparsity_config is"),
        (compressed(WEIGHTS, transform_config={"config_groups": {"u": 1}}), "transform_config is"),
        (compressed(WEIGHTS, config_groups={}), "config_groups must be an object with at least one group"),
        (compressed(WEIGHTS, config_groups={"W4A16": ["Linear"]}), "config_groups.W4A16 must be an object"),
        (compressed(WEIGHTS, config_groups={"a": {"targets": ["Linear"]}}), "weights must be an object"),
        (compressed(WEIGHTS, config_groups={"a": {"targets": "Linear", "weights": WEIGHTS}}), "targets must be a list"),
        (compressed(WEIGHTS, ignore=["re:("]), "which is no regular expression"),
        (
            compressed(
                WEIGHTS,
                config_groups={
                    "a": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": {"dynamic": False}}
                },
            ),
            r"input_activations: dynamic is False; supported is True",
        ),
    ],
)
def test_configurations_that_are_refused(config: Any, message: str) -> None:
    with pytest.raises((UnsupportedModelError, CheckpointError), match=message) as error:
        read(config, "config.json")
    assert "config.json" in error.value.message


def test_dynamic_activations_are_accepted() -> None:
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "strategy": "channel", "symmetric": True, "type": "int"},
        "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": False},
    }
    found = read(compressed({}, "int-quantized", config_groups={"a": group}), "x")
    assert isinstance(found, QuantizationConfig)
    assert found.scheme("anything") is not None


def test_columns_that_no_group_divides(tmp_path: Path) -> None:
    made = save_quantized(tmp_path, awq, AWQ | {"group_size": -1}, group_size=-1, model={"intermediate_size": 272})
    with pytest.raises(UnsupportedModelError, match=r"down_proj has 272 columns in groups of 272, which no group"):
        opened(made)


# --- files that lie


def damage(made: QuantizedLlama, name: str, tensor: torch.Tensor | None) -> Checkpoint:
    if tensor is None:
        del made.tensors[name]
    else:
        made.tensors[name] = tensor.contiguous()
    made.save()
    return opened(made)


def int32(*shape: int, value: int = 0) -> torch.Tensor:
    return torch.full(shape, value, dtype=torch.int32)


@pytest.mark.parametrize(
    ("pack", "config", "name", "tensor", "message"),
    [
        (awq, AWQ, "qzeros", None, r"lacks the tensor .*q_proj\.qzeros, which awq needs"),
        (awq, AWQ, "qweight", int32(128, 32), r"q_proj\.qweight has the shape \[128, 32\]; .* make it \[256, 32\]"),
        (awq, AWQ, "scales", torch.ones(2, 128), r"q_proj\.scales has the shape \[2, 128\]"),
        (awq, AWQ, "scales", int32(2, 256), r"q_proj\.scales has the type I32; it has to be F32 or F16 or BF16"),
        (awq, AWQ, "scales", torch.full((2, 256), torch.nan), r"q_proj\.scales has 512 scales that are not finite"),
        (awq, AWQ, "scales", torch.full((2, 256), 3e37), r"512 scales that are not finite, or too large"),
        (awq, AWQ, "g_idx", int32(256), r"has the tensor .*q_proj\.g_idx, which does not belong"),
        (awq, AWQ, "weight", torch.ones(256, 256), r"has the tensor .*q_proj\.weight, which does not belong"),
        (gptq, GPTQ, "g_idx", int32(256, value=2), r"q_proj\.g_idx has groups 2 to 2 in uneven numbers"),
        (gptq, GPTQ, "g_idx", int32(256, value=-7), r"q_proj\.g_idx has groups -7 to -7"),
        (gptq, GPTQ, "g_idx", int32(255), r"q_proj\.g_idx has the shape \[255\]"),
        (gptq, GPTQ, "qzeros", int32(2, 32, value=-1), r"q_proj\.qzeros has the zero point 16"),
        (gptq, GPTQ | {"sym": True}, "qzeros", int32(2, 32), r"q_proj\.qzeros has zero points other than 8"),
        (gptq, GPTQ | {"desc_act": True}, "g_idx", None, r"lacks the tensor .*q_proj\.g_idx"),
    ],
)
def test_damaged_awq_and_gptq(
    tmp_path: Path, pack: Any, config: dict[str, Any], name: str, tensor: torch.Tensor | None, message: str
) -> None:
    made = save_quantized(tmp_path, pack, config)
    with pytest.raises(CheckpointError, match=message):
        damage(made, f"{Q_PROJ}.{name}", tensor).stored(f"{Q_PROJ}.weight")


@pytest.mark.parametrize(
    ("symmetric", "name", "tensor", "message"),
    [
        (True, "weight_shape", torch.tensor([256, 128]), r"weight_shape says \[256, 128\]"),
        (True, "weight_packed", int32(256, 31), r"weight_packed has the shape \[256, 31\]"),
        (True, "weight_scale", torch.ones(256, 1), r"weight_scale has the shape \[256, 1\]"),
        (True, "weight_scale", torch.full((256, 2), torch.inf), r"weight_scale has 512 scales that are not finite"),
        (True, "weight_zero_point", int32(32, 2, value=1), "not zero, but quantization_config says symmetric"),
        (True, "input_scale", torch.ones(1), r"has the tensor .*input_scale, which does not belong"),
        (False, "weight_zero_point", None, r"lacks the tensor .*weight_zero_point"),
        (False, "weight_zero_point", int32(256, 2), r"weight_zero_point has the type I32 and the shape \[256, 2\]"),
    ],
)
def test_damaged_pack_quantized(
    tmp_path: Path, symmetric: bool, name: str, tensor: torch.Tensor | None, message: str
) -> None:
    config = compressed(WEIGHTS | {"symmetric": symmetric})
    made = save_quantized(tmp_path, pack_quantized, config, symmetric=symmetric)
    with pytest.raises(CheckpointError, match=message):
        damage(made, f"{Q_PROJ}.{name}", tensor).stored(f"{Q_PROJ}.weight")


def test_quantised_tensors_where_the_configuration_has_none(tmp_path: Path) -> None:
    config = compressed(WEIGHTS, ignore=["lm_head", "re:.*q_proj"])
    made = save_quantized(tmp_path, pack_quantized, config, symmetric=True)
    with pytest.raises(CheckpointError, match=r"q_proj has quantised tensors, but quantization_config leaves it alone"):
        opened(made)


def test_quantised_tensors_of_no_module(tmp_path: Path) -> None:
    made = save_quantized(tmp_path, awq, AWQ)
    made.tensors["model.layers.7.mlp.up_proj.qweight"] = int32(256, 48)
    made.save()
    with pytest.raises(CheckpointError, match=r"layers\.7\.mlp\.up_proj has quantised .* the model has no such module"):
        opened(made)


def test_integers_where_weights_belong(tmp_path: Path) -> None:
    made = save_quantized(tmp_path, awq, AWQ)
    made.tensors["model.norm.weight"] = torch.ones(256, dtype=torch.int8)
    made.save()
    with pytest.raises(UnsupportedModelError, match=r"model\.norm\.weight has the type I8"):
        opened(made)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[QuantizedLlama]:
    model = {"num_hidden_layers": 1}
    cases = [CASES[name] for name in ("awq", "gptq act-order", "pack-quantized act-order", "int-quantized")]
    return [
        save_quantized(tmp_path_factory.mktemp("whole"), pack, config, model=model, **options)
        for pack, config, options in cases
    ]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_tensor_may_be_any_other(whole: list[QuantizedLlama], tmp_path: Path, data: st.DataObject) -> None:
    """Whatever stands in a tensor's place, there is a weight of the right shape without NaN, or a typed error."""
    source = data.draw(st.sampled_from(whole))
    tensors = dict(source.tensors)
    names = sorted(name for name in tensors if name.startswith(f"{Q_PROJ}."))
    for name in data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True)):
        change = data.draw(st.sampled_from(["drop", "shape", "type", "bytes", "rename"]))
        tensor = tensors.pop(name)
        if change == "shape":
            shape = data.draw(st.lists(st.integers(0, 260), max_size=3))
            tensors[name] = torch.zeros(shape, dtype=tensor.dtype)
        elif change == "type":
            dtypes = [torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32]
            tensors[name] = tensor.to(data.draw(st.sampled_from(dtypes)))
        elif change == "bytes":
            generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
            raw = torch.randint(0, 256, (tensor.nbytes,), dtype=torch.uint8, generator=generator)
            tensors[name] = raw.view(tensor.dtype).view(tensor.shape)
        elif change == "rename":
            suffix = data.draw(st.sampled_from(["qweight", "weight", "weight_scale", "g_idx", "bias", "weight_shape"]))
            tensors[f"{Q_PROJ}.{suffix}"] = tensor
    made = QuantizedLlama(tmp_path, source.weights, tensors, source.config)
    made.save()
    try:
        checkpoint = opened(made)
        if f"{Q_PROJ}.weight" in checkpoint.names() and checkpoint.shape(f"{Q_PROJ}.weight") == (256, 256):
            stored = checkpoint.stored(f"{Q_PROJ}.weight")
            if not isinstance(stored, Dense):
                weight = dequantize(stored)
                assert weight.shape == (256, 256)
                assert bool(torch.isfinite(weight).all())
    except ModelError as error:
        message = error.message
        assert Q_PROJ in message


# --- against the compressed-tensors package


@pytest.mark.parametrize(
    ("stored_format", "options"),
    [
        ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 64, "symmetric": True}),
        ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 128, "symmetric": False}),
        ("pack-quantized", {"num_bits": 4, "strategy": "channel", "symmetric": False}),
        ("pack-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": True}),
        ("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_what_the_compressed_tensors_package_writes(
    tmp_path: Path, stored_format: str, options: dict[str, Any]
) -> None:
    from compressed_tensors import quantization
    from compressed_tensors.compressors import BaseCompressor

    scheme = quantization.QuantizationScheme(
        targets=["Linear"], weights=quantization.QuantizationArgs(type="int", **options)
    )
    config = quantization.QuantizationConfig(
        config_groups={"group_0": scheme},
        format=stored_format,
        ignore=["lm_head"],
        quantization_status="compressed",
    )
    compressor = BaseCompressor.get_value_from_registry(stored_format)
    # All projections plain; then each is replaced by what the package makes of it.
    made = save_quantized(tmp_path, awq, config.model_dump(mode="json"), plain=("_proj",))
    for name, weight in list(made.weights.items()):
        if "_proj" not in name:
            continue
        groups = 1 if options["strategy"] == "channel" else weight.shape[1] // options["group_size"]
        middle = 1 << (options["num_bits"] - 1)
        parts = weight.view(weight.shape[0], groups, -1)
        state = {"weight": weight, "weight_scale": (parts.abs().amax(dim=2) / middle).to(torch.float16).float()}
        if options["symmetric"]:
            state["weight_zero_point"] = torch.zeros_like(state["weight_scale"], dtype=torch.int8)
        else:
            state["weight_zero_point"] = (parts.mean(dim=2) / state["weight_scale"] * 4).round().to(torch.int8)
        packed = compressor.compress(state, scheme)
        made.weights[name] = compressor.decompress(packed, scheme)["weight"]
        del made.tensors[name]
        module = name.removesuffix(".weight")
        made.tensors |= {f"{module}.{suffix}": tensor for suffix, tensor in packed.items()}
    made.save()
    assert_holds(made)
