"""A model in float32 without an engine: a bare torch loop, and transformers' generate.

What benchmarks/cpu.py compares Sol's float32 with. Both have a checkpoint's weights through Sol's readers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from sol.models.checkpoint import Checkpoint
from sol.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Layer:
    attention_norm: torch.Tensor
    qkv: torch.Tensor
    o: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class BareLoop:
    """A Llama in plain torch as one would write it for a single stream and nothing else: joined projections,
    contiguous KV cache allocated once, scaled_dot_product_attention, no paging, no batching, no sampling."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, capacity: int) -> None:
        def load(*names: str) -> torch.Tensor:
            return torch.cat([checkpoint.load(f"model.{name}.weight", torch.float32) for name in names]).contiguous()

        self.config = config
        self.embedding = load("embed_tokens")
        self.final_norm = load("norm")
        tied = config.tie_word_embeddings
        self.head = self.embedding if tied else checkpoint.load("lm_head.weight", torch.float32)
        self.layers = [
            Layer(
                load(f"layers.{i}.input_layernorm"),
                load(*(f"layers.{i}.self_attn.{part}_proj" for part in "qkv")),
                load(f"layers.{i}.self_attn.o_proj"),
                load(f"layers.{i}.post_attention_layernorm"),
                load(f"layers.{i}.mlp.gate_proj", f"layers.{i}.mlp.up_proj"),
                load(f"layers.{i}.mlp.down_proj"),
            )
            for i in range(config.num_hidden_layers)
        ]
        frequencies = config.rope_theta ** (-torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim)
        angles = torch.outer(torch.arange(capacity, dtype=torch.float64), frequencies).repeat(1, 2)
        self.cos, self.sin = angles.cos().float(), angles.sin().float()
        shape = (config.num_hidden_layers, 1, config.num_key_value_heads, capacity, config.head_dim)
        self.keys, self.values = torch.zeros(shape), torch.zeros(shape)

    def normalise(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        # Faster on a CPU than F.rms_norm, for few tokens.
        return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.config.rms_norm_eps) * weight

    @torch.inference_mode()
    def forward(self, ids: torch.Tensor, start: int) -> torch.Tensor:
        """ids [tokens] at positions from `start` on; returns the last token's logits [vocabulary]."""
        config, tokens = self.config, ids.shape[0]
        end = start + tokens
        query_heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        cos, sin = self.cos[start:end, None], self.sin[start:end, None]
        hidden = F.embedding(ids, self.embedding)
        for index, layer in enumerate(self.layers):
            normed = self.normalise(hidden, layer.attention_norm)
            qkv = F.linear(normed, layer.qkv).view(tokens, query_heads + 2 * kv_heads, dim)
            rotated = qkv[:, : query_heads + kv_heads]
            half = torch.cat((-rotated[..., dim // 2 :], rotated[..., : dim // 2]), dim=-1)
            rotated = rotated * cos + half * sin
            self.keys[index, 0, :, start:end] = rotated[:, query_heads:].transpose(0, 1)
            self.values[index, 0, :, start:end] = qkv[:, query_heads + kv_heads :].transpose(0, 1)
            keys, values = self.keys[index, :, :, :end], self.values[index, :, :, :end]
            queries = rotated[None, :, :query_heads].transpose(1, 2)
            if tokens == 1:
                # The query heads that share a key head as rows of one query: faster than enable_gqa.
                grouped = queries.reshape(1, kv_heads, query_heads // kv_heads, dim)
                attended = F.scaled_dot_product_attention(grouped, keys, values)
            else:
                attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
                attended = attended.transpose(1, 2)
            hidden = hidden + F.linear(attended.reshape(tokens, query_heads * dim), layer.o)
            normed = self.normalise(hidden, layer.mlp_norm)
            gate, up = F.linear(normed, layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + F.linear(F.silu(gate) * up, layer.down)
        last = self.normalise(hidden[-1], self.final_norm)
        return F.linear(last, self.head)

    def generate(self, prompt: Sequence[int], count: int) -> list[int]:
        token = int(self.forward(torch.tensor(prompt), 0).argmax())
        made = [token]
        while len(made) < count:
            token = int(self.forward(torch.tensor([token]), len(prompt) + len(made) - 1).argmax())
            made.append(token)
        return made


def transformers_model(config: ModelConfig, checkpoint: Checkpoint) -> Callable[[Sequence[int], int], list[int]]:
    """transformers' Llama with the checkpoint's weights, as a function (prompt, count) -> tokens."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            max_position_embeddings=config.max_position_embeddings,
            tie_word_embeddings=config.tie_word_embeddings,
        )
    )
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    state = {name: checkpoint.load(name, torch.float32) for name in checkpoint.names()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert set(missing) <= tied, missing
    assert not unexpected, unexpected
    model.eval()

    @torch.inference_mode()
    def generate(prompt: Sequence[int], count: int) -> list[int]:
        ids = torch.tensor([prompt])
        settings = GenerationConfig(
            max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        tokens: list[int] = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)[
            0, len(prompt) :
        ].tolist()
        return tokens

    return generate
