"""config.json into `ModelConfig`: what transformers means by them, or a refusal by name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from tiny_models import TinyLlama, save_llama

from sol.errors import CheckpointError, ModelError, UnsupportedModelError
from sol.models.config import LinearRopeScaling, Llama3RopeScaling, LongRopeScaling, ModelConfig, load_model_config
from sol.models.source import ModelFiles, resolve

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LLAMA3_SCALING = Llama3RopeScaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
SMALLEST = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def read(directory: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return load_model_config(resolve(str(directory), load_format="dummy"))


def test_what_transformers_saves(tiny_llama: Callable[..., TinyLlama]) -> None:
    tiny = tiny_llama(tie_word_embeddings=True, attention_bias=True, rope_theta=5e5, rms_norm_eps=1e-5, head_dim=32)
    assert load_model_config(resolve(str(tiny.directory))) == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        rms_norm_eps=1e-5,
        rope_theta=5e5,
        rope_scaling=None,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=False,
        torch_dtype="float32",
        bos_token_id=1,
        eos_token_ids=(2,),
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_dtype_of_what_transformers_saves(tiny_llama: Callable[..., TinyLlama], dtype: str) -> None:
    tiny = tiny_llama(dtype=getattr(torch, dtype))
    assert load_model_config(resolve(str(tiny.directory))).torch_dtype == dtype


def test_defaults_are_llama_config_s(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    config, theirs = read(tmp_path, SMALLEST), LlamaConfig(**SMALLEST)
    for key in ("rms_norm_eps", "max_position_embeddings", "tie_word_embeddings", "mlp_bias"):
        assert getattr(config, key) == getattr(theirs, key), key
    assert config.qkv_bias == config.output_bias == theirs.attention_bias
    assert config.rope_theta == theirs.rope_parameters["rope_theta"]
    assert (config.num_key_value_heads, config.head_dim) == (theirs.num_key_value_heads, theirs.head_dim)
    assert config.rope_scaling is None
    assert (config.bos_token_id, config.eos_token_ids) == (None, ())


@pytest.mark.parametrize("family", ["Mistral", "Qwen2", "Qwen3", "Gemma2", "Gemma3", "Phi3"])
def test_defaults_of_other_families(tmp_path: Path, family: str) -> None:
    given = {"num_attention_heads": 32, "hidden_size": 256} | {"architectures": [f"{family}ForCausalLM"]}
    config = read(tmp_path, SMALLEST | given)
    theirs = getattr(transformers, "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config")(
        **(SMALLEST | given)
    )
    for key in ("rms_norm_eps", "max_position_embeddings", "tie_word_embeddings", "num_key_value_heads"):
        assert getattr(config, key) == getattr(theirs, key), key
    assert config.head_dim == (getattr(theirs, "head_dim", None) or 256 // 32)
    if family.startswith("Gemma"):
        windows = {"sliding_attention": theirs.sliding_window, "full_attention": None}
        assert config.windows == tuple(windows[kind] for kind in theirs.layer_types)
        assert config.attention_scale == theirs.query_pre_attn_scalar**-0.5
        assert config.attention_softcap == theirs.attn_logit_softcapping
        assert config.logits_softcap == theirs.final_logit_softcapping
        rope = theirs.rope_parameters
        if family == "Gemma3":
            assert config.local_rope_theta == rope["sliding_attention"]["rope_theta"]
            rope = rope["full_attention"]
        assert config.rope_theta == rope["rope_theta"]
    else:
        assert config.windows == (() if family != "Mistral" else (theirs.sliding_window,) * theirs.num_hidden_layers)
    assert config.architecture == f"{family}ForCausalLM"


def test_mixtures_of_experts(tmp_path: Path) -> None:
    mixtral = SMALLEST | {"architectures": ["MixtralForCausalLM"], "num_key_value_heads": 2}
    qwen3 = SMALLEST | {"architectures": ["Qwen3MoeForCausalLM"], "num_key_value_heads": 2}
    config = read(tmp_path, mixtral)
    assert config.experts is not None
    theirs = transformers.MixtralConfig()
    assert config.experts.num_experts == theirs.num_local_experts
    assert config.experts.num_experts_per_tok == theirs.num_experts_per_tok
    assert (config.experts.norm_topk_prob, config.intermediate_size, config.windows) == (True, 96, ())
    config = read(tmp_path, qwen3)
    assert config.experts is not None
    theirs = transformers.Qwen3MoeConfig()
    assert config.experts.num_experts == theirs.num_experts
    assert config.experts.num_experts_per_tok == theirs.num_experts_per_tok
    assert config.experts.norm_topk_prob == theirs.norm_topk_prob
    assert config.intermediate_size == theirs.moe_intermediate_size
    # Its window is of all layers, whatever max_window_layers says.
    used = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
    assert read(tmp_path, qwen3 | used).windows == (7, 7)
    for name in ("num_experts", "num_local_experts"):
        found = read(tmp_path, qwen3 | {name: 16, "norm_topk_prob": True}).experts
        assert found is not None
        assert (found.num_experts, found.norm_topk_prob) == (16, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoder_sparse_step": 2}, "decoder_sparse_step is 2; supported is 1"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers is .0.; supported is none"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok is 5, but there are 4 experts"),
        ({"num_experts": 0}, "num_experts must be a whole number of at least 1"),
        ({"norm_topk_prob": 1}, "norm_topk_prob must be true or false"),
    ],
)
def test_what_a_mixture_may_not_say(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    qwen3 = SMALLEST | {"architectures": ["Qwen3MoeForCausalLM"], "num_key_value_heads": 2}
    with pytest.raises(ModelError, match=message):
        read(tmp_path, qwen3 | changes)


GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
}


def test_gemma3_as_it_was_saved_before_transformers_5(tmp_path: Path) -> None:
    """gemma-3-1b-it's config.json, as far as it says what is computed."""
    given = SMALLEST | GEMMA3 | {
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 5000,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 3,
    }  # fmt: skip
    config = read(tmp_path, given)
    assert config.windows == (512, 512, None)
    assert (config.rope_theta, config.local_rope_theta) == (1e6, 5000.0)
    assert config.rope_scaling == LinearRopeScaling(factor=8.0)
    assert (config.attention_softcap, config.logits_softcap) == (None, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0; supported is null"),
        ({"hidden_activation": "gelu"}, "hidden_activation is 'gelu'; supported is gelu_pytorch_tanh"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention asks for attention to later tokens"),
        ({"sliding_window": None}, "sliding_window must be a whole number of at least 1"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2.0}}}, "full_attention.*'yarn'"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "sliding_attention is scaled; supported is rope_type default",
        ),
        (
            {"rope_parameters": {"full_attention": {}, "chunked_attention": {}}},
            "rope_parameters has chunked_attention; supported are full_attention, sliding_attention",
        ),
        (
            {"rope_parameters": {"full_attention": {}}, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "rope_scaling stands beside rope_parameters",
        ),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "architectures is .'Gemma3ForConditionalGeneration'."),
        ({"architectures": None, "model_type": "gemma3"}, "model_type 'gemma3'"),
    ],
)
def test_what_gemma3_may_not_say(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read(tmp_path, SMALLEST | GEMMA3 | changes)


def test_windows(tmp_path: Path) -> None:
    mistral = SMALLEST | {"architectures": ["MistralForCausalLM"]}
    qwen2 = SMALLEST | {"architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 3, "sliding_window": 8}
    qwen2 |= {"num_key_value_heads": 1}
    mistral |= {"num_key_value_heads": 1}
    assert read(tmp_path, mistral | {"sliding_window": None}).windows == ()
    assert read(tmp_path, qwen2 | {"max_window_layers": 1}).windows == ()
    used = qwen2 | {"use_sliding_window": True}
    assert read(tmp_path, used | {"max_window_layers": 1}).windows == (None, 8, 8)
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert read(tmp_path, used | {"layer_types": types}).windows == (8, None, 8)
    for wrong, message in ((types[:2], "2 layers have a type"), (["chunked"] * 3, "layer_types")):
        with pytest.raises(CheckpointError, match=message):
            read(tmp_path, used | {"layer_types": wrong})


def test_model_type_alone_will_do(tmp_path: Path) -> None:
    config = {key: value for key, value in SMALLEST.items() if key != "architectures"} | {"model_type": "llama"}
    assert read(tmp_path, config).architecture == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("rope", "scaling"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, None),
        ({"rope_theta": 500000}, None),
        ({"rope_theta": 5e5, "rope_scaling": None, "rope_parameters": None}, None),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4}}, LinearRopeScaling(factor=4.0)),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
            LinearRopeScaling(factor=2.0),
        ),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, LLAMA3_SCALING),
        ({"rope_parameters": LLAMA3 | {"rope_theta": 5e5}}, LLAMA3_SCALING),
        ({"rope_parameters": LLAMA3, "rope_scaling": LLAMA3, "rope_theta": 5e5}, LLAMA3_SCALING),
        ({"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 1.0}, "rope_theta": 1e4}, None),
    ],
)
def test_rope(tmp_path: Path, rope: dict[str, Any], scaling: object) -> None:
    config = read(tmp_path, SMALLEST | rope)
    assert config.rope_theta == 5e5
    assert config.rope_scaling == scaling


def test_rope_as_transformers_saves_it(tmp_path: Path) -> None:
    tiny = save_llama(tmp_path, rope_parameters=LLAMA3 | {"rope_theta": 1e5})
    config = load_model_config(resolve(str(tmp_path)))
    assert (config.rope_theta, config.rope_scaling) == (1e5, LLAMA3_SCALING)
    assert tiny.model.config.rope_parameters["rope_type"] == "llama3"


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 2}, None, (2,)),
        ({"eos_token_id": [7, 2, 7]}, None, (7, 2)),
        ({"eos_token_id": 2}, {"eos_token_id": [7, 8, 9]}, (7, 8, 9)),
        ({"eos_token_id": 2}, {"eos_token_id": 3}, (3,)),
        ({"eos_token_id": 2}, {"eos_token_id": None}, (2,)),
        ({"eos_token_id": 2}, {}, (2,)),
        ({"eos_token_id": None}, None, ()),
    ],
)
def test_end_tokens(
    tmp_path: Path, config: dict[str, Any], generation: dict[str, Any] | None, expected: tuple[int, ...]
) -> None:
    assert read(tmp_path, SMALLEST | config, generation).eos_token_ids == expected


@pytest.mark.parametrize(
    ("stored", "given", "expected"),
    [
        (torch.bfloat16, {}, "bfloat16"),
        (torch.float32, {"torch_dtype": "float16"}, "float16"),
        (torch.float32, {"dtype": "torch.bfloat16", "torch_dtype": "float16"}, "bfloat16"),
    ],
)
def test_dtype(tmp_path: Path, stored: torch.dtype, given: dict[str, str], expected: str) -> None:
    save_file({"a": torch.ones(2, dtype=torch.int64), "b": torch.ones(2, dtype=stored)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(SMALLEST | given))
    assert load_model_config(resolve(str(tmp_path))).torch_dtype == expected


def test_dtype_where_no_weight_has_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALLEST))
    save_file({"a": torch.ones(2, dtype=torch.int64)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match="no tensor of the types float32, float16, bfloat16"):
        load_model_config(resolve(str(tmp_path)))
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        load_model_config(resolve(str(tmp_path)))


def test_phi3_as_it_was_published_first(tmp_path: Path) -> None:
    """With the code of its time, which is not run, and longrope by its first name."""
    published = {
        "architectures": ["Phi3ForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_phi3.Phi3Config",
            "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
        },
        "hidden_size": 32,
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "num_attention_heads": 2,
        "rope_scaling": {"type": "su", "short_factor": [1.0, 1.1] * 3, "long_factor": [1.5, 2] * 3},
        "partial_rotary_factor": 0.75,
    }
    (tmp_path / "config.json").write_text(json.dumps(SMALLEST | published))
    config = load_model_config(resolve(str(tmp_path), load_format="dummy"))
    assert config.rotary_dim == 12
    scaling = config.rope_scaling
    assert isinstance(scaling, LongRopeScaling)
    assert scaling.original_max_position_embeddings == 4096
    assert scaling.attention_factor == pytest.approx(1.1902380714)  # sqrt(1 + ln 32 / ln 4096)
    assert (scaling.short_factors, scaling.long_factors) == ((1.0, 1.1) * 3, (1.5, 2.0) * 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"partial_rotary_factor": 0.45}, "turns 7 of a head's 16 elements"),
        ({"partial_rotary_factor": 0.1}, "turns 1 of a head's 16 elements"),
        ({"partial_rotary_factor": 1.5}, "turns 24 of a head's 16 elements; they must be pairs"),
        ({"rope_scaling": {"type": "longrope"}}, "short_factor must be a list of numbers greater than 0, not None"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1] * 8, "long_factor": [0] * 8}}, "long_factor must"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1] * 8, "long_factor": [1] * 7}}, "has 7 long factors"),
    ],
)
def test_phi3_ropes_that_cannot_be(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    given = {"architectures": ["Phi3ForCausalLM"], "hidden_size": 32, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(SMALLEST | given | changes))
    with pytest.raises(CheckpointError, match=message):
        load_model_config(resolve(str(tmp_path), load_format="dummy"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"architectures is \['GPT2LMHeadModel'\]; supported is Llama"),
        ({"architectures": ["LlamaForCausalLM", "Other"]}, "architectures is"),
        ({"architectures": None, "model_type": "gpt2"}, "none .model_type 'gpt2'.; supported is LlamaForCausalLM"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is"),
        ({"auto_map": {"AutoModelForCausalLM": "x.Y"}}, "auto_map is"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}}, "auto_map is"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported is silu"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quant_method is 'bitsandbytes'; supported is awq"),
        ({"compression_config": {"format": "x"}}, "compression_config asks for weights quantised by an early version"),
        ({"sliding_window": 4096}, "sliding_window is 4096; supported is null"),
        ({"num_local_experts": 8}, "num_local_experts asks for a mixture of experts"),
        ({"torch_dtype": "float64"}, "torch_dtype is 'float64'; supported is float32, float16, bfloat16"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling: rope_type is 'yarn'; supported is default"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_parameters: rope_type is 'dynamic'"),
        ({"rope_scaling": {"rope_type": "longrope2"}}, "rope_type is 'longrope2'"),
        ({"rope_scaling": LLAMA3 | {"attention_factor": 2.0}}, "attention_factor is not supported with rope_type"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention is not supported"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0\.5; supported is 1\.0 for"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        read(tmp_path, SMALLEST | changes)
    assert str(tmp_path / "config.json") in caught.value.message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": None}, "does not say vocab_size"),
        ({"hidden_size": 0}, "hidden_size must be a whole number of at least 1, not 0"),
        ({"hidden_size": 64.0}, r"hidden_size must be .* not 64\.0"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be"),
        ({"num_attention_heads": "4"}, "num_attention_heads must be .* not '4'"),
        ({"num_attention_heads": 5}, "hidden_size .64. must be a multiple of num_attention_heads .5."),
        ({"num_key_value_heads": 3}, "num_attention_heads .4. must be a multiple of num_key_value_heads .3."),
        ({"head_dim": 15}, "head_dim must be even .* not 15"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps must be a number greater than 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be"),
        ({"rope_theta": 0}, "rope_parameters: rope_theta must be a number greater than 0"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false, not 1"),
        ({"hidden_act": 3}, "hidden_act must be a string"),
        ({"eos_token_id": 320}, "eos_token_id must be token ids from 0 to 319, not 320"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id must be"),
        ({"bos_token_id": -1}, "bos_token_id must be"),
        ({"rope_scaling": [1]}, "rope_scaling must be an object"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling does not say factor"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor .1.0. must be greater"),
        (
            {"rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "default"}},
            "rope_parameters and rope_scaling contradict",
        ),
    ],
)
def test_what_cannot_be_is_an_error(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, SMALLEST | changes)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not valid JSON"),
        (b"[1]", "JSON object, not list"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 10**5, "not valid JSON"),
    ],
)
def test_config_that_is_no_json_object(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        load_model_config(resolve(str(tmp_path), load_format="dummy"))


def test_files_without_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither a config\.json nor a GGUF file"):
        load_model_config(ModelFiles(name="x", root=tmp_path, load_format="safetensors"))
    files = ModelFiles(name="x", root=tmp_path, load_format="dummy", config=tmp_path / "config.json")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read: No such file"):
        load_model_config(files)


def test_neither_source_nor_config_imports_torch() -> None:
    code = (
        "import sys, sol.models.source, sol.models.config, sol.models.hf_config, sol.models.gguf_config;"
        "assert 'torch' not in sys.modules and 'huggingface_hub' not in sys.modules, 'imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
