"""A model's shape, read from `config.json` or GGUF metadata. Knows no tensors, so the HTTP process may import it."""

from __future__ import annotations

from dataclasses import dataclass


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
    rope_scaling: Llama3RopeScaling | LinearRopeScaling | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    """Bias on q, k, v and o."""
    mlp_bias: bool
    """Bias on gate, up and down."""
    torch_dtype: str
    """Of the checkpoint: `float32`, `float16` or `bfloat16`."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """From generation_config.json where there is one (Llama 3 lists several), else from config.json or the GGUF."""
