"""`ModelConfig` from Hugging Face's config.json and generation_config.json.

Defaults are those of transformers' LlamaConfig, so a file that leaves a value out means here what it means there.
"""

from __future__ import annotations

from typing import Any, Final

from safetensors import SafetensorError, safe_open

from sol.errors import CheckpointError, UnsupportedModelError
from sol.models import quantization_config
from sol.models.config import SUPPORTED_ARCHITECTURES, LinearRopeScaling, Llama3RopeScaling, ModelConfig
from sol.models.fields import Fields, read_json_object
from sol.models.source import ModelFiles

_DTYPES: Final = ("float32", "float16", "bfloat16")
_SAFETENSORS_DTYPES: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_ROPE_TYPES: Final = ("default", "linear", "llama3")

_REFUSED: Final = {
    "compression_config": "weights quantised by an early version of compressed-tensors",
    "sliding_window": "sliding-window attention",
    "attention_chunk_size": "chunked attention",
    "num_local_experts": "a mixture of experts",
    "num_experts": "a mixture of experts",
    "adapter_config": "an adapter",
}
"""Keys that, when set, ask for something Sol does not compute."""


def read(files: ModelFiles) -> ModelConfig:
    """Reads `files.config`; see `sol.models.config.load_model_config`."""
    assert files.config is not None
    fields = Fields(read_json_object(files.config), str(files.config))
    _refuse_unsupported(fields)
    num_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    if fields.values.get("head_dim") is None and hidden_size % num_heads:
        raise CheckpointError(
            f"{fields.origin}: hidden_size ({hidden_size}) must be a multiple of num_attention_heads ({num_heads}) "
            "where head_dim is not given",
            param="model",
        )
    vocab_size = fields.integer("vocab_size")
    theta, scaling = _rope(fields)
    quantized = fields.values.get("quantization_config")
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_hidden_layers=fields.integer("num_hidden_layers"),
        num_attention_heads=num_heads,
        num_key_value_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=fields.integer("head_dim", hidden_size // num_heads),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=fields.integer("max_position_embeddings", 2048),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        attention_bias=fields.boolean("attention_bias", False),
        mlp_bias=fields.boolean("mlp_bias", False),
        torch_dtype=_dtype(fields, files),
        bos_token_id=next(iter(fields.token_ids("bos_token_id", vocab_size)), None),
        eos_token_ids=_eos_token_ids(fields, files, vocab_size),
        quantization=quantization_config.read(quantized, fields.origin) if quantized is not None else None,
    )


def _refuse_unsupported(fields: Fields) -> None:
    values = fields.values
    architectures = values.get("architectures")
    if architectures is None and values.get("model_type") == "llama":
        architectures = ["LlamaForCausalLM"]
    known = isinstance(architectures, list) and len(architectures) == 1 and architectures[0] in SUPPORTED_ARCHITECTURES
    if not known:
        named = architectures if architectures is not None else f"none (model_type {values.get('model_type')!r})"
        raise UnsupportedModelError(
            f"{fields.origin}: architectures is {named}; supported is {', '.join(SUPPORTED_ARCHITECTURES)}",
            param="model",
        )
    auto_map = values.get("auto_map")
    if auto_map:
        raise _unsupported(fields, "auto_map", auto_map, "models whose code is built in; none is run from a checkpoint")
    for key, meaning in _REFUSED.items():
        if values.get(key):
            raise UnsupportedModelError(
                f"{fields.origin}: {key} asks for {meaning}, which Sol does not support", param="model"
            )
    activation = fields.string("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise _unsupported(fields, "hidden_act", activation, "silu")


def _unsupported(fields: Fields, key: str, value: Any, supported: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{fields.origin}: {key} is {value!r}; supported is {supported}", param="model")


def _rope(fields: Fields) -> tuple[float, Llama3RopeScaling | LinearRopeScaling | None]:
    """RoPE's base and scaling.

    transformers 5 writes all of it as `rope_parameters`; before, `rope_theta` stood beside `rope_scaling`, whose
    `rope_type` was once called `type`.
    """
    given = {key: fields.values[key] for key in ("rope_parameters", "rope_scaling") if fields.values.get(key)}
    for key, value in given.items():
        if not isinstance(value, dict):
            raise fields.error(key, value, "an object")
    if len(given) == 2 and given["rope_parameters"] != given["rope_scaling"]:
        raise CheckpointError(
            f"{fields.origin}: rope_parameters and rope_scaling contradict each other: keep one", param="model"
        )
    name, values = next(iter(given.items()), ("rope_parameters", {}))
    values = {key: value for key, value in values.items() if value is not None}
    for key in ("rope_theta", "partial_rotary_factor"):
        if fields.values.get(key) is not None:
            values.setdefault(key, fields.values[key])
    rope = Fields(values, f"{fields.origin}: {name}")
    theta = rope.number("rope_theta", 10000.0)
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise _unsupported(rope, "partial_rotary_factor", values["partial_rotary_factor"], "1.0")
    kind = rope.string("rope_type", rope.string("type", "default"))
    read = {"rope_theta", "partial_rotary_factor", "rope_type", "type"}
    scaling: Llama3RopeScaling | LinearRopeScaling | None
    if kind == "default":
        scaling = None
    elif kind == "linear":
        scaling = LinearRopeScaling(factor=rope.number("factor"))
        read |= {"factor"}
    elif kind == "llama3":
        scaling = Llama3RopeScaling(
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_max_position_embeddings=rope.integer("original_max_position_embeddings"),
        )
        read |= {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    else:
        raise _unsupported(rope, "rope_type", kind, ", ".join(_ROPE_TYPES))
    unknown = sorted(values.keys() - read)
    if unknown:
        raise UnsupportedModelError(
            f"{rope.origin}: {', '.join(unknown)} is not supported with rope_type {kind!r}; supported are "
            f"{', '.join(sorted(read))}",
            param="model",
        )
    return theta, scaling


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
