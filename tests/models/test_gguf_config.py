"""GGUF metadata into `ModelConfig`, or a refusal by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import GGUFOptions, make_llama, write_gguf

from sol.errors import CheckpointError, ModelError, UnsupportedModelError
from sol.models.config import LinearRopeScaling, LongRopeScaling, ModelConfig, RopeFactors, load_model_config
from sol.models.source import ModelFiles, resolve


def read_gguf(path: Path, options: GGUFOptions | None = None, **model: Any) -> ModelConfig:
    write_gguf(path / "tiny.gguf", make_llama(**model), options)
    return load_model_config(resolve(str(path / "tiny.gguf")))


def test_gguf(tmp_path: Path) -> None:
    config = read_gguf(tmp_path, rope_theta=5e5, rms_norm_eps=2.0**-16, head_dim=32, tie_word_embeddings=True)
    assert config == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        rms_norm_eps=2.0**-16,
        rope_theta=5e5,
        rope_scaling=None,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        torch_dtype="float32",
        bos_token_id=1,
        eos_token_ids=(2,),
    )


def test_gguf_biases_and_untied_head(tmp_path: Path) -> None:
    config = read_gguf(tmp_path, attention_bias=True, mlp_bias=True)
    assert config.qkv_bias
    assert config.output_bias
    assert config.mlp_bias
    assert not config.tie_word_embeddings


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
def test_gguf_of_other_families(tmp_path: Path, family: str) -> None:
    config = read_gguf(tmp_path, family=family)
    assert config.architecture == f"{family}ForCausalLM"
    assert (config.qkv_bias, config.output_bias) == (family == "Qwen2", False)
    assert config.head_norms == (family == "Qwen3")


@pytest.mark.parametrize(
    "model",
    [
        {"family": "Gemma2", "num_hidden_layers": 3, "sliding_window": 6, "query_pre_attn_scalar": 16},
        {"family": "Gemma3", "num_hidden_layers": 3, "sliding_window": 6, "query_pre_attn_scalar": 16},
        {
            "family": "Gemma3",
            "layer_types": ["full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 16,
            "final_logit_softcapping": 3.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
        {"family": "Phi3"},
        {"family": "Phi3", "sliding_window": 8},
        {"family": "Phi3", "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}},
        {"family": "Mixtral", "num_local_experts": 4},
        {
            "family": "Qwen3Moe",
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ],
)
def test_a_gguf_file_says_what_the_checkpoint_says_it_is_made_from(tmp_path: Path, model: dict[str, Any]) -> None:
    theirs = make_llama(**model)
    theirs.save_pretrained(tmp_path / "saved")
    expected = load_model_config(resolve(str(tmp_path / "saved")))
    found = read_gguf(tmp_path, **model)
    eps = pytest.approx(expected.rms_norm_eps)  # float32 in GGUF
    assert found.rms_norm_eps == eps
    assert dataclasses.replace(found, rms_norm_eps=expected.rms_norm_eps) == expected


def test_gguf_of_gemma_s_largest_models_scales_scores_by_the_width_of_a_head_s_share(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 46, "hidden_size": 48, "num_attention_heads": 4, "head_dim": 8, "vocab_size": 30}
    config = read_gguf(tmp_path, family="Gemma2", **sizes, intermediate_size=8, num_key_value_heads=1)
    assert config.attention_scale == 12**-0.5
    given = GGUFOptions(metadata={"gemma2.attention.scale": 0.25})
    assert read_gguf(tmp_path, given, family="Gemma2").attention_scale == 0.25


def test_gguf_gemma3_by_a_period(tmp_path: Path) -> None:
    key = "gemma3.attention.sliding_window_pattern"
    by_three = read_gguf(tmp_path, GGUFOptions(metadata={key: 3}), family="Gemma3", num_hidden_layers=4)
    assert [window is None for window in by_three.windows] == [False, False, True, False]
    default = read_gguf(tmp_path, GGUFOptions(metadata={key: None}), family="Gemma3", num_hidden_layers=7)
    assert [window is None for window in default.windows] == [False] * 5 + [True, False]


def test_gguf_least_metadata(tmp_path: Path) -> None:
    """Old converters left out what follows from the rest."""
    absent = ["vocab_size", "attention.head_count_kv", "attention.key_length", "attention.value_length"]
    absent += ["rope.dimension_count", "rope.freq_base"]
    metadata = dict.fromkeys([f"llama.{key}" for key in absent] + ["tokenizer.ggml.tokens"])
    config = read_gguf(tmp_path, GGUFOptions(metadata=metadata), num_key_value_heads=4)
    assert (config.vocab_size, config.num_key_value_heads, config.head_dim) == (320, 4, 16)
    assert config.rope_theta == 10000.0


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "float16"), ("Q4_1", "float16")],
)
def test_gguf_dtype(tmp_path: Path, kind: str, expected: str) -> None:
    options = GGUFOptions(quantization={"blk.0.ffn_up.weight": kind})
    assert read_gguf(tmp_path, options).torch_dtype == expected


def test_gguf_end_tokens(tmp_path: Path) -> None:
    ends = {"tokenizer.ggml.eos_token_id": 9, "tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 9}
    config = read_gguf(tmp_path, GGUFOptions(metadata=ends | {"tokenizer.ggml.bos_token_id": None}))
    assert config.eos_token_ids == (9, 7)
    assert config.bos_token_id is None


@pytest.mark.parametrize(
    ("metadata", "scaling"),
    [
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, LinearRopeScaling(factor=4.0)),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 1.0}, None),
        ({"llama.rope.scale_linear": 2.0}, LinearRopeScaling(factor=2.0)),
        ({"llama.rope.scaling.type": "none"}, None),
    ],
)
def test_gguf_rope_scaling(tmp_path: Path, metadata: dict[str, Any], scaling: object) -> None:
    assert read_gguf(tmp_path, GGUFOptions(metadata=metadata)).rope_scaling == scaling


def test_gguf_rope_factors(tmp_path: Path) -> None:
    factors = np.array([1, 1, 1.5, 2, 4, 8, 8, 8], np.float32)
    config = read_gguf(tmp_path, GGUFOptions(tensors={"rope_freqs.weight": factors}))
    assert config.rope_scaling == RopeFactors(factors=(1.0, 1.0, 1.5, 2.0, 4.0, 8.0, 8.0, 8.0))


def test_gguf_one_value_for_all_layers(tmp_path: Path) -> None:
    per_layer = {"llama.attention.head_count_kv": [2, 2], "llama.feed_forward_length": [96, 96]}
    config = read_gguf(tmp_path, GGUFOptions(metadata=per_layer))
    assert (config.num_key_value_heads, config.intermediate_size) == (2, 96)


NEUTRAL = {
    "llama.attention.causal": True,
    "llama.expert_count": 0,
    "llama.expert_used_count": 0,
    "llama.rope.scaling.finetuned": False,
    "llama.rope.scaling.original_context_length": 64,
    "llama.tensor_data_layout": "Meta AI original pth",
}


def test_gguf_values_that_change_nothing(tmp_path: Path) -> None:
    assert read_gguf(tmp_path, GGUFOptions(metadata=dict(NEUTRAL))).num_hidden_layers == 2


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "gpt2"}, "general.architecture is 'gpt2'; supported is llama"),
        ({"general.type": "adapter"}, "general.type is 'adapter'; supported is model"),
        ({"split.count": 3}, "one of 3 pieces of a model.*llama-gguf-split --merge"),
        ({"llama.expert_weights_norm": False}, "llama.expert_weights_norm = False is not known to Sol"),
        ({"llama.attention.sliding_window": 4096}, "llama.attention.sliding_window is 4096"),
        ({"llama.logit_scale": 2.0}, r"llama\.logit_scale = 2\.0 is not known to Sol"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type is 'yarn'; supported are none, linear"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count is 8; supported is the head's whole width, 16"),
        ({"llama.attention.value_length": 8}, "llama.attention.value_length is 8"),
        ({"llama.attention.head_count": [4, 8]}, "attention.head_count differs between layers"),
        ({"llama.final_logit_softcapping": 30.0}, r"llama\.final_logit_softcapping = 30\.0 is not known to Sol"),
    ],
)
def test_gguf_what_is_not_supported_is_named(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read_gguf(tmp_path, GGUFOptions(metadata=metadata))


LONG_FACTORS = {
    "rope_factors_long.weight": np.linspace(1, 8, 8, dtype=np.float32),
    "rope_factors_short.weight": np.linspace(1, 2, 8, dtype=np.float32),
}


def test_gguf_longrope(tmp_path: Path) -> None:
    """As a converter writes what the checkpoint says."""
    factors = {key: LONG_FACTORS[f"rope_factors_{key.split('_')[0]}.weight"].tolist() for key in _FACTOR_KEYS}
    model: dict[str, Any] = {"family": "Phi3", "original_max_position_embeddings": 64}
    model["rope_parameters"] = {"rope_type": "longrope", **factors}
    make_llama(**model).save_pretrained(tmp_path / "saved")
    expected = load_model_config(resolve(str(tmp_path / "saved"))).rope_scaling
    found = read_gguf(tmp_path, GGUFOptions(tensors=LONG_FACTORS), **model).rope_scaling
    assert isinstance(expected, LongRopeScaling)
    assert isinstance(found, LongRopeScaling)
    assert found.attention_factor == pytest.approx(expected.attention_factor)  # float32 in GGUF
    assert dataclasses.replace(found, attention_factor=expected.attention_factor) == expected


_FACTOR_KEYS = ("short_factor", "long_factor")
HALF_LONG = {"rope_factors_long.weight": LONG_FACTORS["rope_factors_long.weight"]}


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ({"family": "Phi3"}, GGUFOptions(tensors=HALF_LONG), r"lacks the tensor rope_factors_short\.weight"),
        ({}, GGUFOptions(tensors=LONG_FACTORS), "longrope's factors are supported in files of phi3 only, not of llama"),
        (
            {"family": "Phi3"},
            GGUFOptions(metadata={"phi3.rope.scaling.attn_factor": 1.5}),
            "attn_factor is 1.5; supported is 1.0 without",
        ),
        (
            {"family": "Phi3"},
            GGUFOptions(tensors={name: factors[:6] for name, factors in LONG_FACTORS.items()}),
            "longrope has 6 short factors; 16 rotated elements of a head need 8",
        ),
        (
            {"family": "Qwen3Moe", "num_experts": 4, "num_experts_per_tok": 2},
            GGUFOptions(metadata={"qwen3moe.expert_weights_norm": False}),
            "expert_weights_norm is False; supported is True",
        ),
        (
            {"family": "Mixtral", "num_local_experts": 4},
            GGUFOptions(metadata={"llama.expert_used_count": 5}),
            "num_experts_per_tok is 5, but there are 4 experts",
        ),
        (
            {"family": "Mixtral", "num_local_experts": 4},
            GGUFOptions(metadata={"llama.expert_count": 2**31}),
            "2147483648 experts in a layer are more than 8192",
        ),
    ],
)
def test_gguf_longrope_and_mixtures_that_cannot_be(
    tmp_path: Path, model: dict[str, Any], options: GGUFOptions, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        read_gguf(tmp_path, options, **model)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.block_count": None}, "does not say block_count"),
        ({"llama.block_count": 3}, "block_count says 3 layers, the tensors are of 2"),
        ({"llama.context_length": 0}, "context_length must be a whole number of at least 1"),
        ({"llama.vocab_size": 321}, r"llama\.vocab_size says 321 tokens, token_embd\.weight has 320 rows"),
        ({"tokenizer.ggml.tokens": ["a", "b"]}, r"tokenizer\.ggml\.tokens has 2 tokens"),
        ({"tokenizer.ggml.eos_token_id": 320}, r"tokenizer\.ggml\.eos_token_id must be token ids from 0 to 319"),
        ({"llama.attention.key_length": None, "llama.attention.head_count": 5}, "must be a multiple of"),
        ({"llama.attention.head_count_kv": 3}, "must be a multiple of"),
        ({"llama.attention.layer_norm_rms_epsilon": float("inf")}, "layer_norm_rms_epsilon must be a number"),
    ],
)
def test_gguf_what_cannot_be_is_an_error(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_gguf(tmp_path, GGUFOptions(metadata=metadata))


@pytest.mark.parametrize(
    ("factors", "metadata", "message"),
    [
        (np.ones(7, np.float32), {}, "7 factors; a head_dim of 16 needs 8"),
        (np.zeros(8, np.float32), {}, "must hold numbers greater than 0"),
        (np.full(8, np.nan, np.float32), {}, "must hold numbers greater than 0"),
        (np.ones((2, 4), np.float32), {}, r"type F32 and shape \[2, 4\]; supported is F32"),
        (np.ones(8, np.float32), {"llama.rope.scale_linear": 2.0}, "more than one of linear RoPE scaling, rope_freqs"),
    ],
)
def test_gguf_rope_factors_that_cannot_be(tmp_path: Path, factors: Any, metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_gguf(tmp_path, GGUFOptions(tensors={"rope_freqs.weight": factors}, metadata=metadata))


def test_gguf_without_an_embedding(tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    for key in ("embedding_length", "attention.head_count", "block_count"):
        writer.add_uint32(f"llama.{key}", 1)
    writer.add_tensor("blk.0.attn_norm.weight", np.ones(1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"has no tensor token_embd\.weight"):
        load_model_config(resolve(str(tmp_path / "tiny.gguf")))


def test_smollm2(smollm2: ModelFiles) -> None:
    config = load_model_config(smollm2)
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert config.tie_word_embeddings
    assert config.rope_theta == 100000.0
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    assert config.max_position_embeddings == 8192
