"""A model's shape, read from `config.json` or GGUF metadata. Knows no tensors, so the HTTP process may import it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from sol.errors import CheckpointError
from sol.models.quantization_config import QuantizationConfig

if TYPE_CHECKING:
    from sol.models.source import ModelFiles

SUPPORTED_ARCHITECTURES: Final = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Phi3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "MixtralForCausalLM",
)
"""Hugging Face's class names. GGUF files call them `llama` (Llama, Mistral and Mixtral), `qwen2`, `qwen3`, `gemma2`,
`gemma3`, `phi3` and `qwen3moe`."""


_MAX_EXPERTS: Final = 8192
"""In a layer; real models have hundreds. It only bounds what a damaged file can make us do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3RopeScaling:
    """Frequencies stretched by wavelength, as Llama 3.1 defines it (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearRopeScaling:
    """Positions divided by `factor` (`rope_type: linear`)."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeFactors:
    """Every frequency divided by a factor of its own: what a GGUF file's tensor `rope_freqs.weight` holds.

    It is how converters write Llama 3.1's scaling: rounded to float32, and without the numbers it was made from, so
    the factors are used as they are.
    """

    factors: tuple[float, ...]
    """head_dim / 2 of them, highest frequency first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRopeScaling:
    """Every frequency divided by a factor of its own, and longer contexts by other ones (`rope_type: longrope`,
    arXiv:2402.13753).

    The long factors are used throughout where an engine's `max_model_len` is more than the original length, the short
    ones where it is not, as vLLM and llama.cpp do it: keys that are in the KV cache stay what they are. (transformers
    goes by each prompt's length and computes everything anew when a text grows past the original one.)
    """

    short_factors: tuple[float, ...]
    """rotary_dim / 2 of them, highest frequency first."""
    long_factors: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float
    """What turned elements of queries and keys are multiplied by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts in place of every MLP; each has the model's `intermediate_size`."""

    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    """The scores of a token's experts are made to add up to 1."""
    module: str
    """What a layer calls the mixture in checkpoints; router and experts are `gate` and `experts.0` … in it."""
    projections: tuple[str, str, str]
    """What an expert calls gate, up and down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    architecture: str
    """Hugging Face's class name, e.g. `LlamaForCausalLM`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    """RoPE's base; with `local_rope_theta`, that of layers without a window."""
    rope_scaling: Llama3RopeScaling | LinearRopeScaling | LongRopeScaling | RopeFactors | None
    max_position_embeddings: int
    """The longest sequence, in tokens, as the file says it (linear scaling does not multiply it)."""
    tie_word_embeddings: bool
    qkv_bias: bool
    """Bias on q, k and v."""
    output_bias: bool
    """Bias on o."""
    mlp_bias: bool
    """Bias on gate, up and down."""
    torch_dtype: str
    """Of the checkpoint: `float32`, `float16` or `bfloat16`; of a quantised GGUF file, `float16` like its scales."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """From generation_config.json where there is one (Llama 3 lists several), else from config.json or the GGUF."""
    rotary_dim: int | None = None
    """So many elements of a head, its first ones, are rotated (Phi-4-mini); None: all."""
    head_norms: bool = False
    """Each head of q and k is normed before it is rotated."""
    windows: tuple[int | None, ...] = ()
    """Of each layer: how many tokens, itself among them, a token attends to; None: all. Empty: all in all layers."""
    local_rope_theta: float | None = None
    """RoPE's base in layers with a window, to which `rope_scaling` does not apply (Gemma 3); None: layers are alike."""
    norm_offset: float = 0.0
    """Added to every norm's weight (Gemma: 1)."""
    post_norms: bool = False
    """What attention and MLP add to the residual is normed first (Gemma)."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    embedding_scale: float = 1.0
    """What embeddings are multiplied by (Gemma)."""
    attention_scale: float | None = None
    """What attention scores are multiplied by; None: head_dim ** -0.5."""
    attention_softcap: float | None = None
    """Scores become softcap · tanh(score / softcap) (Gemma 2)."""
    logits_softcap: float | None = None
    fused_projections: bool = False
    """Checkpoints hold q, k and v as one matrix, and gate and up (Phi-3)."""
    experts: ExpertsConfig | None = None
    quantization: QuantizationConfig | None = None
    """How the matrices are stored; None: in full precision."""


def load_model_config(files: ModelFiles) -> ModelConfig:
    """Reads the shape of a model from config.json (and generation_config.json), or from a GGUF file.

    Raises `UnsupportedModelError` for whatever would make the model compute something that Sol does not, and
    `CheckpointError` for values that are missing, ill-typed or contradict each other.
    """
    from sol.models import gguf_config, hf_config  # they build on this module's types

    if files.config is not None:
        config, origin = hf_config.read(files), str(files.config)
    elif files.gguf is not None:
        config, origin = gguf_config.read(files.gguf), str(files.gguf)
    else:
        raise CheckpointError(f"{files.root} has neither a config.json nor a GGUF file", param="model")
    _check(config, origin)
    return config


def _check(config: ModelConfig, origin: str) -> None:
    """That the numbers fit together; each alone is checked where it is read."""
    if config.head_dim % 2:
        raise CheckpointError(
            f"{origin}: head_dim must be even (rotary embeddings turn pairs), not {config.head_dim}", param="model"
        )
    if config.num_attention_heads % config.num_key_value_heads:
        raise CheckpointError(
            f"{origin}: num_attention_heads ({config.num_attention_heads}) must be a multiple of "
            f"num_key_value_heads ({config.num_key_value_heads})",
            param="model",
        )
    if config.windows and len(config.windows) != config.num_hidden_layers:
        raise CheckpointError(
            f"{origin}: {len(config.windows)} layers have a type, the model has {config.num_hidden_layers}",
            param="model",
        )
    if config.experts is not None and config.experts.num_experts > _MAX_EXPERTS:
        raise CheckpointError(
            f"{origin}: {config.experts.num_experts} experts in a layer are more than {_MAX_EXPERTS}, and more than "
            "any model has: the file is damaged",
            param="model",
        )
    if config.experts is not None and config.experts.num_experts_per_tok > config.experts.num_experts:
        raise CheckpointError(
            f"{origin}: num_experts_per_tok is {config.experts.num_experts_per_tok}, but there are "
            f"{config.experts.num_experts} experts",
            param="model",
        )
    if config.rotary_dim is not None and (config.rotary_dim % 2 or config.rotary_dim > config.head_dim):
        raise CheckpointError(
            f"{origin}: {config.rotary_dim} of a head's {config.head_dim} elements are rotated; they must be pairs",
            param="model",
        )
    scaling = config.rope_scaling
    if isinstance(scaling, LongRopeScaling):
        pairs = (config.rotary_dim or config.head_dim) // 2
        for name, factors in (("short", scaling.short_factors), ("long", scaling.long_factors)):
            if len(factors) != pairs:
                raise CheckpointError(
                    f"{origin}: longrope has {len(factors)} {name} factors; {2 * pairs} rotated elements of a head "
                    f"need {pairs}",
                    param="model",
                )
    if isinstance(scaling, RopeFactors) and len(scaling.factors) != config.head_dim // 2:
        raise CheckpointError(
            f"{origin}: rope_freqs.weight has {len(scaling.factors)} factors; a head_dim of {config.head_dim} needs "
            f"{config.head_dim // 2}",
            param="model",
        )
    if isinstance(scaling, Llama3RopeScaling) and scaling.high_freq_factor <= scaling.low_freq_factor:
        raise CheckpointError(
            f"{origin}: high_freq_factor ({scaling.high_freq_factor}) must be greater than low_freq_factor "
            f"({scaling.low_freq_factor})",
            param="model",
        )
