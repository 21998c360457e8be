"""`ModelConfig` from the metadata of a GGUF file (keys: docs/gguf.md in ggml)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import numpy as np

from sol.errors import CheckpointError, UnsupportedModelError
from sol.models.config import ExpertsConfig, LinearRopeScaling, LongRopeScaling, ModelConfig, RopeFactors
from sol.models.fields import Fields
from sol.models.gguf import GGUFFile
from sol.models.quantization_config import QuantizationConfig

ARCHITECTURES: Final = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
"""`general.architecture` → Hugging Face's class name. Mistral's files are `llama`, too: they have no window; and so are
Mixtral's: they have experts."""
_LONG_FACTORS: Final = ("rope_factors_long.weight", "rope_factors_short.weight")
_FLOATING: Final = frozenset(("F32", "F16", "BF16"))

_READ: Final = frozenset(
    {
        "vocab_size",
        "context_length",
        "embedding_length",
        "block_count",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scale_linear",
        "rope.scaling.type",
        "rope.scaling.factor",
    }
)
_READ_OF: Final = {
    "gemma2": frozenset(
        {"attention.scale", "attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping"}
    ),
    "gemma3": frozenset(
        {
            "attention.scale",
            "attention.sliding_window",
            "attention.sliding_window_pattern",
            "final_logit_softcapping",
            "rope.freq_base_swa",
        }
    ),
    "llama": frozenset({"expert_count", "expert_used_count"}),
    "phi3": frozenset({"attention.sliding_window", "rope.scaling.attn_factor", "rope.scaling.original_context_length"}),
    "qwen3moe": frozenset({"expert_count", "expert_used_count", "expert_feed_forward_length", "expert_weights_norm"}),
}
"""Keys that are read of one architecture alone."""
_LARGEST_GEMMA: Final = {"gemma2": 46, "gemma3": 62}
"""The layers of the model whose scores are scaled by hidden_size / heads, not by head_dim; its files do not say so, and
ggml tells it by them."""
_UNIFORM: Final = ("feed_forward_length", "attention.head_count", "attention.head_count_kv")
"""May be written as one number or as a list with one a layer."""

_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "attention.causal": (True,),
    "attention.scale": (0.0,),
    "attention.sliding_window": (0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "pooling_type": (0,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.finetuned": (True, False),
    "tensor_data_layout": ("Meta AI original pth",),
    "use_parallel_residual": (False,),
}
"""Keys that change nothing at these values; at any other, they ask for something Sol does not compute."""

_INFORMATION: Final = frozenset({"rope.scaling.original_context_length"})
"""Keys that only describe the model's making."""


def read(path: Path) -> ModelConfig:
    """Reads the file's metadata; see `sol.models.config.load_model_config`."""
    file = GGUFFile(path)
    metadata = file.metadata
    prefix = _prefix(path, metadata)
    _refuse_unsupported(path, metadata, prefix)
    values = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    for key in _UNIFORM:
        values[key] = _one_for_all_layers(f"{path}: {prefix}{key}", values.get(key))
    fields = Fields(values, f"{path}: {prefix}*")
    experts = _experts(fields, prefix.removesuffix("."))
    architecture = ARCHITECTURES[prefix.removesuffix(".")]
    if architecture == "LlamaForCausalLM" and experts is not None:
        architecture = "MixtralForCausalLM"
    num_heads = fields.integer("attention.head_count")
    hidden_size = fields.integer("embedding_length")
    if "attention.key_length" not in values and hidden_size % num_heads:
        raise CheckpointError(
            f"{path}: {prefix}embedding_length ({hidden_size}) must be a multiple of attention.head_count "
            f"({num_heads}) where attention.key_length is not given",
            param="model",
        )
    head_dim = fields.integer("attention.key_length", hidden_size // num_heads)
    rotary_dim = fields.integer("rope.dimension_count", head_dim)
    turns_part = rotary_dim < head_dim and architecture == "Phi3ForCausalLM"
    for key, size in (("attention.value_length", fields.integer("attention.value_length", head_dim)),
                      ("rope.dimension_count", head_dim if turns_part else rotary_dim)):  # fmt: skip
        if size != head_dim:
            raise UnsupportedModelError(
                f"{path}: {prefix}{key} is {values[key]}; supported is the head's whole width, {head_dim}",
                param="model",
            )
    num_layers = fields.integer("block_count")
    layers = {name.split(".")[1] for name in file.tensors if name.startswith("blk.")}
    if num_layers != len(layers):
        raise CheckpointError(
            f"{path}: {prefix}block_count says {num_layers} layers, the tensors are of {len(layers)}", param="model"
        )
    vocab_size = _vocab_size(file, fields, prefix)
    tokens = Fields(metadata, str(path))
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.integer(
            "expert_feed_forward_length" if prefix == "qwen3moe." else "feed_forward_length"
        ),
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=fields.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope_theta=fields.number("rope.freq_base", 1e6 if architecture == "Gemma3ForCausalLM" else 10000.0),
        rope_scaling=_rope_scaling(file, fields, prefix),
        rotary_dim=rotary_dim if turns_part else None,
        max_position_embeddings=fields.integer("context_length"),
        tie_word_embeddings="output.weight" not in file.tensors,
        qkv_bias=_has_bias(file, "attn_(q|k|v)"),
        output_bias=_has_bias(file, "attn_output"),
        mlp_bias=_has_bias(file, "ffn_(gate|up|down)"),
        head_norms=architecture in ("Qwen3ForCausalLM", "Gemma3ForCausalLM", "Qwen3MoeForCausalLM"),
        windows=_windows(fields, architecture, num_layers),
        fused_projections=architecture == "Phi3ForCausalLM",
        experts=experts,
        **_gemma(fields, prefix.removesuffix("."), num_layers, head_dim, hidden_size // num_heads),
        torch_dtype=_dtype(file),
        quantization=QuantizationConfig(method="gguf") if _types(file) - _FLOATING else None,
        bos_token_id=next(iter(tokens.token_ids("tokenizer.ggml.bos_token_id", vocab_size)), None),
        eos_token_ids=_eos_token_ids(tokens, vocab_size),
    )


def _prefix(path: Path, metadata: dict[str, Any]) -> str:
    """What the model's own keys begin with."""
    value = metadata.get("general.architecture")
    if not isinstance(value, str) or value not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{path}: general.architecture is {value!r}; supported is {', '.join(ARCHITECTURES)}", param="model"
        )
    return f"{value}."


def _refuse_unsupported(path: Path, metadata: dict[str, Any], prefix: str) -> None:
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise UnsupportedModelError(f"{path}: general.type is {kind!r}; supported is model", param="model")
    if metadata.get("split.count", 1) not in (0, 1):
        raise UnsupportedModelError(
            f"{path} is one of {metadata['split.count']} pieces of a model; supported is a single file: join them "
            "with `llama-gguf-split --merge`",
            param="model",
        )
    for key, value in metadata.items():
        if not key.startswith(prefix):
            continue
        name = key.removeprefix(prefix)
        if name in _READ_OF.get(prefix.removesuffix("."), ()):
            continue
        if name in _NEUTRAL and value in _NEUTRAL[name]:
            continue
        if name in _NEUTRAL:
            supported = " or ".join(repr(neutral) for neutral in _NEUTRAL[name])
            raise UnsupportedModelError(f"{path}: {key} is {value!r}; supported is {supported}", param="model")
        if name not in _READ and name not in _INFORMATION:
            raise UnsupportedModelError(
                f"{path}: {key} = {value!r} is not known to Sol, so what this model computes is not either; supported "
                f"are {', '.join(sorted(_READ | _NEUTRAL.keys() | _INFORMATION))}",
                param="model",
            )


def _experts(fields: Fields, name: str) -> ExpertsConfig | None:
    """As ggml computes them: softmax over all experts, the chosen scores divided by their sum."""
    if name not in ("llama", "qwen3moe") or (name == "llama" and not fields.values.get("expert_count")):
        return None
    if not fields.boolean("expert_weights_norm", True):
        raise UnsupportedModelError(f"{fields.origin}: expert_weights_norm is False; supported is True", param="model")
    return ExpertsConfig(
        num_experts=fields.integer("expert_count"),
        num_experts_per_tok=fields.integer("expert_used_count"),
        norm_topk_prob=True,
        module="block_sparse_moe" if name == "llama" else "mlp",
        projections=("w1", "w3", "w2") if name == "llama" else ("gate_proj", "up_proj", "down_proj"),
    )


def _windows(fields: Fields, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    key, values = "attention.sliding_window", fields.values
    if architecture == "Phi3ForCausalLM":
        return () if not values.get(key) else (fields.integer(key),) * num_layers
    if architecture == "Gemma2ForCausalLM":
        window = fields.integer(key, 4096)
        return tuple(None if layer % 2 else window for layer in range(num_layers))
    if architecture != "Gemma3ForCausalLM":
        return ()
    window = fields.integer(key)
    pattern = values.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):  # whether each layer has a window
        return tuple(window if has_window else None for has_window in pattern)
    every = fields.integer("attention.sliding_window_pattern", 6)
    return tuple(window if (layer + 1) % every else None for layer in range(num_layers))


def _gemma(fields: Fields, name: str, num_layers: int, head_dim: int, width: int) -> dict[str, Any]:
    """What Gemma's files imply; values that they may leave out are those of ggml. `width`: hidden_size / heads."""
    if name not in _LARGEST_GEMMA:
        return {}
    scale = (width if num_layers == _LARGEST_GEMMA[name] else head_dim) ** -0.5
    second = name == "gemma2"
    final = fields.values.get("final_logit_softcapping")
    return {
        "norm_offset": 1.0,
        "post_norms": True,
        "activation": "gelu_tanh",
        "embedding_scale": fields.integer("embedding_length") ** 0.5,
        "attention_scale": fields.number("attention.scale") if fields.values.get("attention.scale") else scale,
        "attention_softcap": fields.number("attn_logit_softcapping", 50.0) if second else None,
        "logits_softcap": fields.number("final_logit_softcapping", 30.0) if second or final else None,
        "local_rope_theta": None if second else fields.number("rope.freq_base_swa", 10000.0),
    }


def _one_for_all_layers(key: str, value: Any) -> Any:
    if not isinstance(value, list):
        return value
    if len(set(map(repr, value))) != 1:
        raise UnsupportedModelError(
            f"{key} differs between layers ({value}); supported is one value for all", param="model"
        )
    return value[0]


def _vocab_size(file: GGUFFile, fields: Fields, prefix: str) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path} has no tensor token_embd.weight", param="model")
    rows = embedding.shape[0]
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    for what, count in (
        (f"{prefix}vocab_size says", fields.integer("vocab_size", rows)),
        ("tokenizer.ggml.tokens has", len(tokens) if isinstance(tokens, list) else rows),
    ):
        if count != rows:
            raise CheckpointError(
                f"{file.path}: {what} {count} tokens, token_embd.weight has {rows} rows", param="model"
            )
    return rows


def _rope_scaling(
    file: GGUFFile, fields: Fields, prefix: str
) -> LinearRopeScaling | LongRopeScaling | RopeFactors | None:
    linear: LinearRopeScaling | None = None
    kind = fields.string("rope.scaling.type", "none")
    is_long = [name in file.tensors for name in _LONG_FACTORS]
    if kind == "linear":
        linear = LinearRopeScaling(factor=fields.number("rope.scaling.factor"))
    elif kind != "none" and not (kind == "longrope" and any(is_long)):
        raise UnsupportedModelError(
            f"{file.path}: {prefix}rope.scaling.type is {kind!r}; supported are none, linear, and factors in the "
            "tensors rope_freqs.weight (Llama 3) or rope_factors_long.weight and rope_factors_short.weight (longrope)",
            param="model",
        )
    elif "rope.scale_linear" in fields.values:  # what rope.scaling.* was before
        linear = LinearRopeScaling(factor=fields.number("rope.scale_linear"))
    if linear is not None and linear.factor == 1.0:
        linear = None
    has_factors = "rope_freqs.weight" in file.tensors
    if (linear is not None) + has_factors + any(is_long) > 1:
        raise UnsupportedModelError(
            f"{file.path} has more than one of linear RoPE scaling, rope_freqs.weight and longrope's factors; "
            "supported is one of them",
            param="model",
        )
    if any(is_long):
        return _longrope(file, fields, prefix)
    if fields.number("rope.scaling.attn_factor", 1.0) != 1.0:
        raise UnsupportedModelError(
            f"{file.path}: {prefix}rope.scaling.attn_factor is {fields.values['rope.scaling.attn_factor']}; supported "
            "is 1.0 without longrope's factors",
            param="model",
        )
    return RopeFactors(factors=_factors(file, "rope_freqs.weight")) if has_factors else linear


def _longrope(file: GGUFFile, fields: Fields, prefix: str) -> LongRopeScaling:
    if prefix != "phi3.":
        raise UnsupportedModelError(
            f"{file.path}: longrope's factors are supported in files of phi3 only, not of {prefix[:-1]}", param="model"
        )
    for name in _LONG_FACTORS:
        if name not in file.tensors:
            raise CheckpointError(f"{file.path} lacks the tensor {name}, but has longrope's other one", param="model")
    long, short = (_factors(file, name) for name in _LONG_FACTORS)
    return LongRopeScaling(
        short_factors=short,
        long_factors=long,
        original_max_position_embeddings=fields.integer("rope.scaling.original_context_length"),
        attention_factor=fields.number("rope.scaling.attn_factor", 1.0),
    )


def _factors(file: GGUFFile, name: str) -> tuple[float, ...]:
    tensor = file.tensors[name]
    if tensor.type != "F32" or len(tensor.shape) != 1:
        raise UnsupportedModelError(
            f"{file.path}: {name} has type {tensor.type} and shape {list(tensor.shape)}; supported is F32 with one "
            "dimension",
            param="model",
        )
    factors = file.data(name).view(np.dtype("<f4"))
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise CheckpointError(f"{file.path}: {name} must hold numbers greater than 0", param="model")
    return tuple(factors.tolist())


def _has_bias(file: GGUFFile, modules: str) -> bool:
    pattern = re.compile(rf"blk\.\d+\.{modules}\.bias")
    return any(pattern.fullmatch(name) for name in file.tensors)


def _types(file: GGUFFile) -> set[str]:
    return {tensor.type for tensor in file.tensors.values() if len(tensor.shape) >= 2}


def _dtype(file: GGUFFile) -> str:
    types = _types(file)
    if "BF16" in types:
        return "bfloat16"
    return "float32" if types == {"F32"} else "float16"


def _eos_token_ids(tokens: Fields, vocab_size: int) -> tuple[int, ...]:
    """End of sequence, of turn and of message: Llama 3 ends a chat turn with the second, a tool call with the third."""
    ids: list[int] = []
    for key in ("eos", "eot", "eom"):
        ids.extend(tokens.token_ids(f"tokenizer.ggml.{key}_token_id", vocab_size))
    return tuple(dict.fromkeys(ids))
