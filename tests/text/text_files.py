"""Tokenizers and model directories for the tests of `sol.text`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sol.models.source import ModelFiles
from sol.text.gguf_tokenizer import build_gguf_tokenizer
from sol.text.tokenizer import Tokenizer


def tokenizer_of(metadata: dict[str, Any]) -> Tokenizer:
    """What a GGUF file with this metadata gives."""
    parts = build_gguf_tokenizer(metadata, "test.gguf")
    return Tokenizer(parts.backend, special_tokens=parts.special_tokens, eos_token_ids=parts.eos_token_ids)


def files_in(directory: Path) -> ModelFiles:
    """The text files of a Hugging Face directory that need not have weights."""

    def existing(name: str) -> Path | None:
        path = directory / name
        return path if path.exists() else None

    return ModelFiles(
        name="test",
        root=directory,
        load_format="safetensors",
        tokenizer_json=existing("tokenizer.json"),
        tokenizer_config=existing("tokenizer_config.json"),
        special_tokens_map=existing("special_tokens_map.json"),
        generation_config=existing("generation_config.json"),
        chat_template=existing("chat_template.jinja"),
    )
