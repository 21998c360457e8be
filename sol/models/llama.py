"""The Llama family: pre-norm decoder layers, grouped-query attention, RoPE, SwiGLU.

Llama 1 to 3.x, SmolLM2 and their like; Mistral (windows), Qwen2 (biases on q, k and v), Qwen3 (norms of heads), Phi-3
(fused matrices in its files), Gemma 2 and 3 (post-norms, soft-caps, windows in some layers; arXiv:2408.00118,
arXiv:2503.19786), Mixtral and Qwen3-MoE (mixtures of experts). What sets them apart is in `ModelConfig`.
"""

from __future__ import annotations

from typing import Final

from sol.models.config import ExpertsConfig, ModelConfig
from sol.models.rope import build_rope
from sol.models.weight_loader import WeightLoader
from sol.ops.program import AttentionInput, MlpInput, Moe, Op, PagedAttention, Program, ProjectResidual
from sol.ops.weights import Norm

_EMBEDDING: Final = "model.embed_tokens.weight"


def build(config: ModelConfig, weights: WeightLoader, max_positions: int) -> Program:
    """Takes every weight from `weights` by its Hugging Face name and emits the model's list of ops."""
    hidden, head_dim = config.hidden_size, config.head_dim
    q_rows = config.num_attention_heads * head_dim
    kv_rows = config.num_key_value_heads * head_dim
    rope = build_rope(config, max_positions, weights.device)
    local_rope = rope
    if config.local_rope_theta is not None:
        local_rope = build_rope(config, max_positions, weights.device, local=True)

    def norm(name: str, size: int = hidden) -> Norm:
        return weights.norm(name, size, config.rms_norm_eps, config.norm_offset)

    tied = config.tie_word_embeddings
    embedding = weights.embedding(_EMBEDDING, config.vocab_size, hidden, is_head=tied)
    body: list[Op] = []
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        window = config.windows[layer] if config.windows else None
        if config.fused_projections:
            qkv = [(f"{attention}.qkv_proj", q_rows + 2 * kv_rows)]
            gate_up = [(f"{mlp}.gate_up_proj", 2 * config.intermediate_size)]
        else:
            qkv = [(f"{attention}.{name}_proj", rows) for name, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows))]
            gate_up = [(f"{mlp}.{name}_proj", config.intermediate_size) for name in ("gate", "up")]
        mlp_norm, post_norm = "post_attention_layernorm", None
        if config.post_norms:
            mlp_norm, post_norm = "pre_feedforward_layernorm", norm(f"{prefix}.post_attention_layernorm")
        body += [
            AttentionInput(
                layer=layer,
                norm=norm(f"{prefix}.input_layernorm"),
                qkv=weights.linear(qkv, hidden, bias=config.qkv_bias),
                rope=rope if window is None else local_rope,
                q_norm=norm(f"{attention}.q_norm", head_dim) if config.head_norms else None,
                k_norm=norm(f"{attention}.k_norm", head_dim) if config.head_norms else None,
            ),
            PagedAttention(
                layer=layer,
                scale=head_dim**-0.5 if config.attention_scale is None else config.attention_scale,
                window=window,
                softcap=config.attention_softcap,
            ),
            ProjectResidual(
                weights.linear([(f"{attention}.o_proj", hidden)], q_rows, bias=config.output_bias), norm=post_norm
            ),
        ]
        if config.experts is not None:
            body.append(_mixture(config, config.experts, weights, prefix, norm(f"{prefix}.{mlp_norm}")))
            continue
        body += [
            MlpInput(
                norm=norm(f"{prefix}.{mlp_norm}"),
                gate_up=weights.linear(gate_up, hidden, bias=config.mlp_bias),
                activation=config.activation,
            ),
            ProjectResidual(
                weights.linear([(f"{mlp}.down_proj", hidden)], config.intermediate_size, bias=config.mlp_bias),
                norm=norm(f"{prefix}.post_feedforward_layernorm") if config.post_norms else None,
            ),
        ]
    final_norm = norm("model.norm")
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
        embedding_scale=config.embedding_scale,
        logits_softcap=config.logits_softcap,
    )


def _mixture(config: ModelConfig, experts: ExpertsConfig, weights: WeightLoader, prefix: str, norm: Norm) -> Moe:
    hidden, intermediate = config.hidden_size, config.intermediate_size
    gate, up, down = experts.projections
    modules = [f"{prefix}.{experts.module}.experts.{index}" for index in range(experts.num_experts)]
    return Moe(
        norm=norm,
        router=weights.linear([(f"{prefix}.{experts.module}.gate", experts.num_experts)], hidden),
        gate_up=weights.experts(
            [[(f"{module}.{gate}", intermediate), (f"{module}.{up}", intermediate)] for module in modules], hidden
        ),
        down=weights.experts([[(f"{module}.{down}", hidden)] for module in modules], intermediate),
        experts_per_token=experts.num_experts_per_tok,
        normalise=experts.norm_topk_prob,
    )
