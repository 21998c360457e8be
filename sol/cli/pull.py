"""Example: sol pull meta-llama/Meta-Llama-3-8B-Instruct"""

from __future__ import annotations

import argparse

from sol.cli.arguments import add_engine_arguments, add_model_argument, engine_config
from sol.cli.units import size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    add_engine_arguments(parser, only=("revision", "hf_token", "offline", "load_format"))


def run(args: argparse.Namespace) -> int:
    from sol.models.source import resolve_configured

    files = resolve_configured(engine_config(args))
    weights = list(files.safetensors) if files.gguf is None else [files.gguf]
    others = (files.config, files.generation_config, files.tokenizer_json, files.tokenizer_config, files.chat_template,
              files.special_tokens_map)  # fmt: skip
    for path in (*weights, *(path for path in others if path is not None)):
        print(f"{size(path.stat().st_size):>10}  {path}")
    return 0
