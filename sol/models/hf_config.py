"""`ModelConfig` from Hugging Face's config.json and generation_config.json.

Defaults are those of transformers' LlamaConfig, MistralConfig …, so a file that leaves a value out means here what it
means there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from safetensors import SafetensorError, safe_open

from sol.errors import CheckpointError, UnsupportedModelError
from sol.models import quantization_config
from sol.models.config import SUPPORTED_ARCHITECTURES, ExpertsConfig, ModelConfig
from sol.models.fields import Fields, read_json_object
from sol.models.hf_rope import read_ropes
from sol.models.source import ModelFiles

_DTYPES: Final = ("float32", "float16", "bfloat16")
_SAFETENSORS_DTYPES: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_GELU: Final = "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True)
class _Family:
    """What an architecture's configuration class of transformers leaves to its defaults, or to its code."""

    num_key_value_heads: int | None
    """None: as many as attention heads."""
    max_position_embeddings: int
    head_dim: int | None = None
    """None: hidden_size / num_attention_heads."""
    qkv_bias: bool | None = None
    """None: `attention_bias` says it, of q, k, v and o."""
    head_norms: bool = False
    windows: str | None = None
    """"all": `sliding_window` is of all layers; "used": the same, if `use_sliding_window`; "upper": of the layers from
    `max_window_layers` on, if `use_sliding_window`; "alternate": of every second layer, the first among them;
    "pattern": of all but the last of each `sliding_window_pattern` layers. `layer_types` overrules the last three."""
    window: int | None = 4096
    """Where `sliding_window` is left out; None: then there is none."""
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    gemma: bool = False
    """Norms with an offset, post-norms, GELU, scaled embeddings, soft-caps and tied embeddings."""
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    local_rope_theta: float | None = None
    fused_projections: bool = False
    experts: str | None = None
    """What a layer of it calls its mixture of experts."""


_FAMILIES: Final = {
    "LlamaForCausalLM": _Family(None, 2048),
    "MistralForCausalLM": _Family(8, 4096 * 32, qkv_bias=False, windows="all"),
    "Qwen2ForCausalLM": _Family(32, 32768, qkv_bias=True, windows="upper"),
    "Qwen3ForCausalLM": _Family(32, 32768, head_dim=128, head_norms=True, windows="upper"),
    "Gemma2ForCausalLM": _Family(
        4,
        8192,
        head_dim=256,
        windows="alternate",
        gemma=True,
        attention_softcap=50.0,
        logits_softcap=30.0,
    ),
    "Gemma3ForCausalLM": _Family(
        4,
        131072,
        head_dim=256,
        head_norms=True,
        windows="pattern",
        rope_theta=1e6,
        gemma=True,
        local_rope_theta=10000.0,
    ),
    "Phi3ForCausalLM": _Family(
        None, 4096, qkv_bias=False, windows="all", window=None, rms_norm_eps=1e-5, fused_projections=True
    ),
    "Qwen3MoeForCausalLM": _Family(4, 32768, head_norms=True, windows="used", experts="mlp"),
    "MixtralForCausalLM": _Family(
        8,
        4096 * 32,
        qkv_bias=False,
        windows="all",
        window=None,
        rms_norm_eps=1e-5,
        experts="block_sparse_moe",
    ),
}
_BY_MODEL_TYPE: Final = {
    {"Gemma3ForCausalLM": "gemma3_text", "Qwen3MoeForCausalLM": "qwen3_moe"}.get(
        name, name.removesuffix("ForCausalLM").lower()
    ): name
    for name in _FAMILIES
}

_REFUSED: Final = {
    "compression_config": "weights quantised by an early version of compressed-tensors",
    "attention_chunk_size": "chunked attention",
    "num_local_experts": "a mixture of experts",
    "num_experts": "a mixture of experts",
    "adapter_config": "an adapter",
    "use_bidirectional_attention": "attention to later tokens",
}
"""Keys that, when set, ask for something Sol does not compute."""
_NUM_EXPERTS: Final = ("num_local_experts", "num_experts")


def read(files: ModelFiles) -> ModelConfig:
    """Reads `files.config`; see `sol.models.config.load_model_config`."""
    assert files.config is not None
    fields = Fields(read_json_object(files.config), str(files.config))
    architecture = _architecture(fields)
    family = _FAMILIES[architecture]
    _refuse_unsupported(fields, family)
    num_heads, num_layers = fields.integer("num_attention_heads"), fields.integer("num_hidden_layers")
    hidden_size = fields.integer("hidden_size")
    if fields.values.get("head_dim") is None and family.head_dim is None and hidden_size % num_heads:
        raise CheckpointError(
            f"{fields.origin}: hidden_size ({hidden_size}) must be a multiple of num_attention_heads ({num_heads}) "
            "where head_dim is not given",
            param="model",
        )
    vocab_size = fields.integer("vocab_size")
    head_dim = fields.integer("head_dim", family.head_dim or hidden_size // num_heads)
    max_position_embeddings = fields.integer("max_position_embeddings", family.max_position_embeddings)
    ropes = read_ropes(
        fields,
        theta=family.rope_theta,
        local_theta=family.local_rope_theta,
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        is_phi3=architecture == "Phi3ForCausalLM",
    )
    quantized = fields.values.get("quantization_config")
    attention_bias = fields.boolean("attention_bias", False) if family.qkv_bias is None else False
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=(
            fields.integer("moe_intermediate_size", 768)
            if family.experts == "mlp"
            else fields.integer("intermediate_size")
        ),
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=fields.integer("num_key_value_heads", family.num_key_value_heads or num_heads),
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", family.rms_norm_eps),
        rope_theta=ropes.theta,
        rope_scaling=ropes.scaling,
        rotary_dim=ropes.rotary_dim,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", family.gemma),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=attention_bias,
        mlp_bias=fields.boolean("mlp_bias", False) if architecture == "LlamaForCausalLM" else False,
        head_norms=family.head_norms,
        windows=_windows(fields, family, num_layers),
        local_rope_theta=ropes.local_theta,
        norm_offset=1.0 if family.gemma else 0.0,
        post_norms=family.gemma,
        activation="gelu_tanh" if family.gemma else "silu",
        embedding_scale=hidden_size**0.5 if family.gemma else 1.0,
        attention_scale=fields.number("query_pre_attn_scalar", 256) ** -0.5 if family.gemma else None,
        attention_softcap=(
            _softcap(fields, "attn_logit_softcapping", family.attention_softcap) if family.attention_softcap else None
        ),
        logits_softcap=_softcap(fields, "final_logit_softcapping", family.logits_softcap) if family.gemma else None,
        fused_projections=family.fused_projections,
        experts=_experts(fields, family.experts) if family.experts is not None else None,
        torch_dtype=_dtype(fields, files),
        bos_token_id=next(iter(fields.token_ids("bos_token_id", vocab_size)), None),
        eos_token_ids=_eos_token_ids(fields, files, vocab_size),
        quantization=quantization_config.read(quantized, fields.origin) if quantized is not None else None,
    )


def _architecture(fields: Fields) -> str:
    values = fields.values
    architectures = values.get("architectures")
    model_type = values.get("model_type")
    if architectures is None and isinstance(model_type, str) and model_type in _BY_MODEL_TYPE:
        return _BY_MODEL_TYPE[model_type]
    if not (isinstance(architectures, list) and len(architectures) == 1 and architectures[0] in _FAMILIES):
        named = architectures if architectures is not None else f"none (model_type {values.get('model_type')!r})"
        raise UnsupportedModelError(
            f"{fields.origin}: architectures is {named}; supported is {', '.join(SUPPORTED_ARCHITECTURES)}",
            param="model",
        )
    found: str = architectures[0]
    return found


def _refuse_unsupported(fields: Fields, family: _Family) -> None:
    values = fields.values
    auto_map = values.get("auto_map")
    if auto_map and not _is_built_in(auto_map, values.get("architectures")):
        raise _unsupported(fields, "auto_map", auto_map, "models whose code is built in; none is run from a checkpoint")
    for key, meaning in _REFUSED.items():
        if values.get(key) and not (family.experts is not None and key in _NUM_EXPERTS):
            raise UnsupportedModelError(
                f"{fields.origin}: {key} asks for {meaning}, which Sol does not support", param="model"
            )
    if family.windows is None and values.get("sliding_window"):
        raise _unsupported(fields, "sliding_window", values["sliding_window"], "null for this architecture")
    if family.gemma:
        activation = fields.string("hidden_activation", _GELU)
        if activation != _GELU:
            raise _unsupported(fields, "hidden_activation", activation, _GELU)
        if family.attention_softcap is None and values.get("attn_logit_softcapping"):
            raise _unsupported(fields, "attn_logit_softcapping", values["attn_logit_softcapping"], "null")
        return
    activation = fields.string("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise _unsupported(fields, "hidden_act", activation, "silu")


def _is_built_in(auto_map: Any, architectures: Any) -> bool:
    """Whether a checkpoint's code is only the early form of a class that transformers has by now (Phi-3's files): the
    class that its weights are of has the name of the architecture."""
    named = auto_map.get("AutoModelForCausalLM") if isinstance(auto_map, dict) else None
    return isinstance(named, str) and architectures == ["Phi3ForCausalLM"] == [named.rpartition(".")[2]]


def _experts(fields: Fields, module: str) -> ExpertsConfig:
    if module == "block_sparse_moe":
        return ExpertsConfig(
            num_experts=fields.integer("num_local_experts", 8),
            num_experts_per_tok=fields.integer("num_experts_per_tok", 2),
            norm_topk_prob=True,
            module=module,
            projections=("w1", "w3", "w2"),
        )
    if fields.integer("decoder_sparse_step", 1) != 1:
        raise _unsupported(fields, "decoder_sparse_step", fields.values["decoder_sparse_step"], "1")
    if fields.values.get("mlp_only_layers"):
        raise _unsupported(fields, "mlp_only_layers", fields.values["mlp_only_layers"], "none")
    # transformers 5 writes it by its other name.
    key = "num_experts" if fields.values.get("num_experts") is not None else "num_local_experts"
    return ExpertsConfig(
        num_experts=fields.integer(key, 128),
        num_experts_per_tok=fields.integer("num_experts_per_tok", 8),
        norm_topk_prob=fields.boolean("norm_topk_prob", False),
        module=module,
        projections=("gate_proj", "up_proj", "down_proj"),
    )


def _softcap(fields: Fields, key: str, default: float | None) -> float | None:
    """null is none, absent the family's default."""
    if fields.values.get(key) is None:
        return None if key in fields.values else default
    return fields.number(key)


def _windows(fields: Fields, family: _Family, num_layers: int) -> tuple[int | None, ...]:
    values = fields.values
    if family.windows is None:
        return ()
    if family.windows in ("used", "upper") and not fields.boolean("use_sliding_window", False):
        return ()
    if values.get("sliding_window") is None and ("sliding_window" in values or family.window is None):
        if family.gemma:
            raise fields.error("sliding_window", None, "a whole number of at least 1")
        return ()
    window = fields.integer("sliding_window", family.window or 1)
    if family.windows in ("all", "used"):
        return (window,) * num_layers
    types = values.get("layer_types")
    if types is None and family.windows != "upper":
        pattern = 2 if family.windows == "alternate" else fields.integer("sliding_window_pattern", 6)
        return tuple(window if (layer + 1) % pattern else None for layer in range(num_layers))
    if types is None:
        first = fields.integer("max_window_layers", 28)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if not isinstance(types, list) or not all(kind in ("full_attention", "sliding_attention") for kind in types):
        raise fields.error("layer_types", types, "a list of full_attention and sliding_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _unsupported(fields: Fields, key: str, value: Any, supported: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{fields.origin}: {key} is {value!r}; supported is {supported}", param="model")


def _dtype(fields: Fields, files: ModelFiles) -> str:
    """`dtype` (transformers 5) or `torch_dtype`; where neither is given, the type of the first weight."""
    key = "dtype" if fields.values.get("dtype") is not None else "torch_dtype"
    if fields.values.get(key) is None:
        return _first_weight_dtype(files) if files.safetensors else "float32"
    dtype = fields.string(key).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise _unsupported(fields, key, dtype, ", ".join(_DTYPES))
    return dtype


def _first_weight_dtype(files: ModelFiles) -> str:
    path = files.safetensors[0]
    try:
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 (a file is not iterable)
                dtype = file.get_slice(name).get_dtype()
                if dtype in _SAFETENSORS_DTYPES:
                    return _SAFETENSORS_DTYPES[dtype]
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}", param="model") from error
    raise UnsupportedModelError(f"{path} holds no tensor of the types {', '.join(_DTYPES)}", param="model")


def _eos_token_ids(fields: Fields, files: ModelFiles, vocab_size: int) -> tuple[int, ...]:
    if files.generation_config is not None:
        generation = Fields(read_json_object(files.generation_config), str(files.generation_config))
        ids = generation.token_ids("eos_token_id", vocab_size)
        if ids:
            return ids
    return fields.token_ids("eos_token_id", vocab_size)
