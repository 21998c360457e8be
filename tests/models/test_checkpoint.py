"""Checkpoints against what transformers and the `gguf` package wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import GGUFOptions, TinyLlama, gguf_name, make_llama, random_blocks, write_gguf

from sol.errors import CheckpointError, UnsupportedModelError
from sol.models import gguf_checkpoint
from sol.models.checkpoint import SafetensorsCheckpoint, open_checkpoint
from sol.models.config import ModelConfig, load_model_config
from sol.models.dummy_checkpoint import DummyCheckpoint, parameter_shapes
from sol.models.gguf import BLOCK_SIZES, TYPE_NAMES, GGUFFile
from sol.models.source import ModelFiles, resolve
from sol.ops.dequantize import GGML_BLOCKS, dequantize
from sol.ops.weights import Dense, GGUFBlocks

Factory = Callable[..., TinyLlama]


def assert_holds(files: ModelFiles, expected: dict[str, torch.Tensor]) -> None:
    checkpoint = open_checkpoint(files)
    assert checkpoint.names() == expected.keys()
    for name, weight in expected.items():
        assert checkpoint.shape(name) == tuple(weight.shape), name
        loaded = checkpoint.load(name, torch.float32)
        assert torch.equal(loaded, weight.float()), name
        if weight.ndim == 2:
            assert torch.equal(dequantize(checkpoint.stored(name)), loaded), name
    assert checkpoint.nbytes == sum(checkpoint.stored_nbytes(name) for name in expected)


# --- safetensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_safetensors_hold_what_transformers_saved(tiny_llama: Factory, dtype: torch.dtype) -> None:
    tiny = tiny_llama(dtype=dtype)
    assert_holds(resolve(str(tiny.directory)), tiny.weights)
    checkpoint = open_checkpoint(resolve(str(tiny.directory)))
    name = "model.layers.1.mlp.up_proj.weight"
    assert checkpoint.load(name, torch.bfloat16).dtype == torch.bfloat16
    assert checkpoint.stored_nbytes(name) == 96 * 64 * dtype.itemsize


def test_sharded_safetensors(tiny_llama: Factory) -> None:
    tiny = tiny_llama(max_shard_size="60KB", tie_word_embeddings=True, attention_bias=True, mlp_bias=True)
    files = resolve(str(tiny.directory))
    assert len(files.safetensors) > 3
    assert_holds(files, tiny.weights)


def files_of(directory: Path) -> ModelFiles:
    return ModelFiles(
        name="x",
        root=directory,
        load_format="safetensors",
        safetensors=tuple(sorted(directory.glob("*.safetensors"))),
    )


def test_saved_rope_frequencies_are_no_parameters(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.ones(2), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert SafetensorsCheckpoint(files_of(tmp_path)).names() == {"a.weight"}


def test_a_tensor_in_two_shards_is_an_error(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({"lm_head.weight": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight twice.*b\.safetensors"):
        SafetensorsCheckpoint(files_of(tmp_path))


def test_unsupported_safetensors_type(tmp_path: Path) -> None:
    save_file({"a.weight": torch.ones(2, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"a\.weight has the type I8; supported are F32, F16, BF16"):
        SafetensorsCheckpoint(files_of(tmp_path))


def test_missing_shard_names_it(tmp_path: Path) -> None:
    path = tmp_path / "model-00002-of-00002.safetensors"
    files = ModelFiles(name="x", root=tmp_path, load_format="safetensors", safetensors=(path,))
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is missing"):
        SafetensorsCheckpoint(files)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git lfs pull"),
        (b"\xff" * 64, "is damaged"),
        (b"", "is damaged"),
    ],
)
def test_damaged_safetensors(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        SafetensorsCheckpoint(files_of(tmp_path))


def test_truncated_safetensors(tiny_llama: Factory, tmp_path: Path) -> None:
    whole = (tiny_llama().directory / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        SafetensorsCheckpoint(files_of(tmp_path))


# --- GGUF


def test_block_sizes_and_type_names_are_ggml_s() -> None:
    assert {int(kind): kind.name for kind in gguf.GGMLQuantizationType} == TYPE_NAMES
    assert GGML_BLOCKS == BLOCK_SIZES
    for kind, size in BLOCK_SIZES.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]] == size


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("num_key_value_heads", [1, 2, 4])
def test_gguf_holds_what_was_written(
    tmp_path: Path, kind: str, num_key_value_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_checkpoint, "_CHUNK_ELEMENTS", 1000)  # several chunks, the last one smaller
    model = make_llama(num_key_value_heads=num_key_value_heads, attention_bias=True, mlp_bias=True)
    matrices = [gguf_name(name) for name, weight in model.state_dict().items() if weight.ndim == 2]
    path = tmp_path / "tiny.gguf"
    expected = write_gguf(path, model, GGUFOptions(quantization=dict.fromkeys(matrices, kind)))
    assert_holds(resolve(str(path)), expected)
    if kind == "F32":
        for name, weight in model.state_dict().items():
            assert torch.equal(expected[name], weight), name


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3", "Gemma2", "Gemma3", "Phi3"])
def test_gguf_of_families_whose_rows_stay(tmp_path: Path, family: str) -> None:
    model = make_llama(family=family)
    path = tmp_path / "tiny.gguf"
    expected = write_gguf(path, model)
    assert_holds(resolve(str(path)), expected)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        # Gemma's norms went through a sum with 1 in float32.
        rounding = 1.2e-7 if "Gemma" in family and name.endswith("norm.weight") else 0.0
        torch.testing.assert_close(expected[name], weight, atol=rounding, rtol=0, msg=name)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("model", [{"family": "Mixtral"}, {"family": "Qwen3Moe", "moe_intermediate_size": 32}])
def test_gguf_of_mixtures(tmp_path: Path, model: dict[str, Any], kind: str) -> None:
    experts = "num_local_experts" if model["family"] == "Mixtral" else "num_experts"
    options: dict[str, Any] = model | {experts: 4}
    theirs = make_llama(**options, num_experts_per_tok=2)
    path = tmp_path / "tiny.gguf"
    stacked = [f"blk.{layer}.ffn_{name}_exps.weight" for layer in (0, 1) for name in ("gate", "up", "down")]
    expected = write_gguf(path, theirs, GGUFOptions(quantization=dict.fromkeys(stacked, kind)))
    files = resolve(str(path))
    assert_holds(files, expected)
    checkpoint = open_checkpoint(files)
    name = next(name for name in expected if ".experts.3." in name)
    assert torch.equal(dequantize(checkpoint.stored(name)).float(), expected[name])
    theirs.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert expected.keys() == saved.keys()
    assert load_model_config(files).torch_dtype == ("float32" if kind == "F32" else "float16")
    if kind == "F32":
        assert all(torch.equal(expected[name], saved[name]) for name in saved)


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_1", "int8", "int4"])
def test_heads_that_are_rotated_in_part_are_reordered_whatever_they_are_stored_as(tmp_path: Path, kind: Any) -> None:
    rope = {"rope_type": "default", "partial_rotary_factor": 0.5}
    model = make_llama(family="Phi3", rope_parameters=rope)
    path = tmp_path / "tiny.gguf"
    quantization = {} if kind.startswith("int") else {"blk.0.attn_qkv.weight": kind}
    written = write_gguf(path, model, GGUFOptions(quantization=quantization))
    checkpoint = open_checkpoint(resolve(str(path)), kind if kind.startswith("int") else None)
    name = "model.layers.0.self_attn.qkv_proj.weight"
    loaded = checkpoint.load(name, torch.float32)
    assert torch.equal(dequantize(checkpoint.stored(name)), loaded)
    # Of each of 4 + 2 heads of 16 elements 8 are rotated: 0 with 4, 1 with 5 …; rows of values stay.
    head = [0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15]
    rows = [16 * index + element for index in range(6) for element in head] + list(range(96, 128))
    tolerance = {"int8": 0.01, "int4": 0.1}.get(kind, 0.0)
    torch.testing.assert_close(loaded, written[name][rows], atol=tolerance, rtol=0)
    other = "model.layers.0.self_attn.o_proj.weight"
    torch.testing.assert_close(checkpoint.load(other, torch.float32), written[other], atol=tolerance, rtol=0)


def test_gguf_with_another_number_of_experts_than_it_says(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    model = make_llama(family="Mixtral", num_local_experts=4)
    write_gguf(path, model, GGUFOptions(metadata={"llama.expert_count": 3}))
    with pytest.raises(CheckpointError, match=r"ffn_\w+_exps\.weight holds 4 experts, the metadata says 3"):
        open_checkpoint(resolve(str(path)))


def test_gguf_of_mixtures_by_their_first_converters(tmp_path: Path) -> None:
    """Each expert in tensors of its own."""
    model = make_llama(family="Mixtral", num_local_experts=2)
    path = tmp_path / "tiny.gguf"
    expected = write_gguf(path, model, GGUFOptions(split_experts=True))
    assert "blk.1.ffn_down.1.weight" in GGUFFile(path).tensors
    assert_holds(resolve(str(path)), expected)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q5_0", "Q5_1"])
def test_gguf_blocks_with_permuted_rows(tmp_path: Path, kind: str) -> None:
    model = make_llama(hidden_size=512, tie_word_embeddings=True)
    raw = {
        "blk.0.attn_q.weight": (random_blocks(kind, 64, 512, 1), kind),
        "blk.1.attn_k.weight": (random_blocks(kind, 32, 512, 2), kind),
        "token_embd.weight": (random_blocks(kind, 320, 512, 3), kind),
    }
    path = tmp_path / "tiny.gguf"
    expected = write_gguf(path, model, GGUFOptions(raw=raw))
    files = resolve(str(path))
    assert_holds(files, expected)
    checkpoint = open_checkpoint(files)
    assert "lm_head.weight" not in checkpoint.names()
    half = checkpoint.load("model.layers.0.mlp.up_proj.weight", torch.bfloat16)
    assert torch.equal(half, expected["model.layers.0.mlp.up_proj.weight"].to(torch.bfloat16))
    stored = checkpoint.stored("model.embed_tokens.weight")
    assert isinstance(stored, GGUFBlocks)
    assert (stored.kind, stored.in_features) == (kind, 512)
    assert np.array_equal(stored.data.numpy(), raw["token_embd.weight"][0])
    dense = checkpoint.stored("model.layers.0.mlp.up_proj.weight")
    assert isinstance(dense, Dense)
    assert dense.weight.dtype == torch.float32
    with pytest.raises(CheckpointError, match=r"output_norm\.weight has 1 dimensions; a matrix has 2"):
        checkpoint.stored("model.norm.weight")


def test_loading_leaves_the_file_s_bytes_alone(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, make_llama())
    before = path.read_bytes()
    checkpoint = open_checkpoint(resolve(str(path)))
    name = "model.embed_tokens.weight"
    loaded = checkpoint.load(name, torch.float32)
    copy = loaded.clone()
    loaded.zero_()
    dequantize(checkpoint.stored(name)).zero_()
    assert torch.equal(checkpoint.load(name, torch.float32), copy)
    assert path.read_bytes() == before


def test_unknown_gguf_tensors_keep_their_names_and_rope_freqs_is_none(tmp_path: Path) -> None:
    extra = {"rope_freqs.weight": np.ones(8, np.float32), "blk.0.attn_sinks.weight": np.ones(16, np.float32)}
    extra["output.scale"] = np.ones(1, np.float32)
    path = tmp_path / "tiny.gguf"
    expected = write_gguf(path, make_llama(), GGUFOptions(tensors=extra))
    names = open_checkpoint(resolve(str(path))).names()
    assert names == expected.keys() | {"blk.0.attn_sinks.weight", "output.scale"}


def test_gguf_rows_that_heads_cannot_share(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, make_llama(), GGUFOptions(metadata={"llama.attention.head_count": 48}))
    checkpoint = open_checkpoint(resolve(str(path)))
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_q\.weight has 64 rows, which 48 heads"):
        checkpoint.load("model.layers.0.self_attn.q_proj.weight", torch.float32)


def test_quantised_vector_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, make_llama(), GGUFOptions(raw={"output_norm.weight": (np.zeros(68, np.uint8), "Q8_0")}))
    checkpoint = open_checkpoint(resolve(str(path)))
    with pytest.raises(UnsupportedModelError, match=r"output_norm\.weight has one dimension and the type Q8_0"):
        checkpoint.load("model.norm.weight", torch.float32)


def test_smollm2_loads_whole(smollm2: ModelFiles) -> None:
    checkpoint = open_checkpoint(smollm2)
    config = load_model_config(smollm2)
    assert {name: checkpoint.shape(name) for name in checkpoint.names()} == parameter_shapes(config)
    weight = checkpoint.load("model.layers.0.self_attn.q_proj.weight", torch.float32)
    assert smollm2.gguf is not None
    stored = GGUFFile(smollm2.gguf).data("blk.0.attn_q.weight")
    rows = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType.Q4_1).reshape(9, 32, 2, 576)
    assert np.array_equal(weight.numpy(), rows.swapaxes(1, 2).reshape(576, 576))


# --- dummy


def tiny_config(directory: Path, **changes: object) -> ModelConfig:
    values = make_llama().config.to_dict() | {"architectures": ["LlamaForCausalLM"]} | changes
    (directory / "config.json").write_text(json.dumps(values))
    return load_model_config(resolve(str(directory), load_format="dummy"))


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_dummy_has_transformers_parameters(tmp_path: Path, tie: bool, bias: bool) -> None:
    options = {"tie_word_embeddings": tie, "attention_bias": bias, "mlp_bias": bias}
    model = make_llama(**options)
    expected = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    if tie:
        del expected["lm_head.weight"]
    tiny_config(tmp_path, **options)
    checkpoint = open_checkpoint(resolve(str(tmp_path), load_format="dummy"))
    assert {name: checkpoint.shape(name) for name in checkpoint.names()} == expected


def test_dummy_weights_are_a_function_of_seed_and_name(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, vocab_size=70_000, torch_dtype="bfloat16")
    first, second = DummyCheckpoint(config), DummyCheckpoint(config)
    name = "model.embed_tokens.weight"  # longer than the pool of random numbers
    weight = first.load(name, torch.float32)
    second.load("lm_head.weight", torch.bfloat16)
    assert torch.equal(weight, second.load(name, torch.float32))
    assert torch.equal(weight.to(torch.bfloat16), second.load(name, torch.bfloat16))
    assert not torch.equal(weight, first.load("lm_head.weight", torch.float32))
    assert not torch.equal(weight, DummyCheckpoint(config, seed=1).load(name, torch.float32))
    assert abs(weight.std().item() - 0.02) < 1e-4
    assert abs(weight.mean().item()) < 1e-4
    assert len(torch.unique(weight[:, 0])) > 60_000  # rows do not repeat
    assert torch.equal(first.load("model.norm.weight", torch.float32), torch.ones(64))
    assert first.stored_nbytes(name) == 70_000 * 64 * 2
    assert first.nbytes == sum(map(first.stored_nbytes, first.names()))
