"""One stream on the CPU in float32: Sol against a bare torch loop and against transformers' generate.

The three run the same weights (SmolLM2-135M-Instruct, read through Sol's checkpoint readers), the same prompt,
greedy, with the same number of threads, in turns: the host's speed drifts, so what counts is the ratio within a
round, and the bar is on the median of those. Tokens are compared too: a faster wrong answer is no answer.

    python benchmarks/cpu.py [--quick] [--tokens N] [--rounds N] [--threads N] [--json FILE]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from common import Report, arguments

from sol import LLM, SamplingParams
from sol.config import DEFAULT_MODEL
from sol.models.checkpoint import Checkpoint, open_checkpoint
from sol.models.config import ModelConfig, load_model_config
from sol.models.source import resolve

PROMPT = list(range(1000, 1064))
"""64 token ids; speed does not depend on which."""


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


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--tokens", type=int, help="tokens to generate in a run (default: 128; 32 with --quick)")
    parser.add_argument("--rounds", type=int, help="runs of each (default: 7; 3 with --quick)")
    parser.add_argument("--threads", type=int, help="default: what torch chooses")
    args = parser.parse_args()
    tokens, rounds = args.tokens or (32 if args.quick else 128), args.rounds or (3 if args.quick else 7)
    if args.threads:
        torch.set_num_threads(args.threads)

    files = resolve(DEFAULT_MODEL)
    config, checkpoint = load_model_config(files), open_checkpoint(files)
    length = len(PROMPT) + tokens
    llm = LLM(model=DEFAULT_MODEL, dtype="float32", device="cpu", max_model_len=length, enable_prefix_caching=False)
    bare = BareLoop(config, checkpoint, length)
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=tokens, detokenize=False)

    def sol_generate(prompt: Sequence[int], _count: int) -> list[int]:
        outputs = llm.generate([{"prompt_token_ids": list(prompt)}], params, use_tqdm=False)
        return list(outputs[0].outputs[0].token_ids)

    contenders = {"sol": sol_generate, "bare": bare.generate, "transformers": transformers_model(config, checkpoint)}
    threads = torch.get_num_threads()
    made = {name: generate(PROMPT, tokens) for name, generate in contenders.items()}  # warms up, too
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    order = list(contenders)
    for _ in range(rounds):
        for name in order:
            begin = time.perf_counter()
            made[name] = contenders[name](PROMPT, tokens)
            seconds[name].append(time.perf_counter() - begin)
        order = order[1:] + order[:1]

    report = Report("cpu", args.quick)
    for name, times in seconds.items():
        middle = statistics.median(times)
        same = next((i for i, (a, b) in enumerate(zip(made[name], made["bare"], strict=True)) if a != b), tokens)
        report.row(
            engine=name, threads=threads, prompt=len(PROMPT), tokens=tokens, rounds=rounds,
            tokens_per_s=round(tokens / middle, 2), slowest=round(tokens / max(times), 2),
            fastest=round(tokens / min(times), 2), same_tokens_as_bare=same,
        )  # fmt: skip

    def ratio(rival: str) -> float:
        return statistics.median(r / s for r, s in zip(seconds[rival], seconds["sol"], strict=True))

    report.at_least("sol_over_bare_loop", ratio("bare"), 1.0)
    report.more_than("sol_over_transformers", ratio("transformers"), 1.0)
    return report.finish(args.json)


if __name__ == "__main__":
    sys.exit(main())
