"""The Llama family: pre-norm decoder layers, grouped-query attention, RoPE, SwiGLU.

Llama 1 to 3.x, SmolLM2 and their like; Mistral (windows), Qwen2 (biases on q, k and v), Qwen3 (norms of heads). What
sets them apart is in `ModelConfig`.
"""

from __future__ import annotations

from typing import Final

from sol.models.config import ModelConfig
from sol.models.rope import build_rope
from sol.models.weight_loader import WeightLoader
from sol.ops.program import AttentionInput, MlpInput, Op, PagedAttention, Program, ProjectResidual

_EMBEDDING: Final = "model.embed_tokens.weight"


def build(config: ModelConfig, weights: WeightLoader, max_positions: int) -> Program:
    """Takes every weight from `weights` by its Hugging Face name and emits the model's list of ops."""
    hidden, head_dim = config.hidden_size, config.head_dim
    q_rows = config.num_attention_heads * head_dim
    kv_rows = config.num_key_value_heads * head_dim
    eps = config.rms_norm_eps
    rope = build_rope(config, max_positions, weights.device)
    tied = config.tie_word_embeddings
    embedding = weights.embedding(_EMBEDDING, config.vocab_size, hidden, is_head=tied)
    body: list[Op] = []
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        body += [
            AttentionInput(
                layer=layer,
                norm=weights.norm(f"{prefix}.input_layernorm", hidden, eps),
                qkv=weights.linear(
                    [
                        (f"{attention}.q_proj", q_rows),
                        (f"{attention}.k_proj", kv_rows),
                        (f"{attention}.v_proj", kv_rows),
                    ],
                    hidden,
                    bias=config.qkv_bias,
                ),
                rope=rope,
                q_norm=weights.norm(f"{attention}.q_norm", head_dim, eps) if config.head_norms else None,
                k_norm=weights.norm(f"{attention}.k_norm", head_dim, eps) if config.head_norms else None,
            ),
            PagedAttention(layer=layer, scale=head_dim**-0.5, window=config.windows[layer] if config.windows else None),
            ProjectResidual(weights.linear([(f"{attention}.o_proj", hidden)], q_rows, bias=config.output_bias)),
            MlpInput(
                norm=weights.norm(f"{prefix}.post_attention_layernorm", hidden, eps),
                gate_up=weights.linear(
                    [(f"{mlp}.gate_proj", config.intermediate_size), (f"{mlp}.up_proj", config.intermediate_size)],
                    hidden,
                    bias=config.mlp_bias,
                ),
            ),
            ProjectResidual(
                weights.linear([(f"{mlp}.down_proj", hidden)], config.intermediate_size, bias=config.mlp_bias)
            ),
        ]
    final_norm = weights.norm("model.norm", hidden, eps)
    if tied:
        head = weights.tied("lm_head.weight", _EMBEDDING, embedding)
    else:
        head = weights.linear([("lm_head", config.vocab_size)], hidden)
    return Program(
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        embedding=embedding,
        body=tuple(body),
        final_norm=final_norm,
        head=head,
    )
