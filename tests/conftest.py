"""Fixtures that several parts of the tests share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before anything imports Triton, whose own functions are made for the interpreter or for a GPU when it is imported. It
# is not only the tests of its kernels that do: compressed-tensors does.
os.environ["TRITON_INTERPRET"] = "1"

import pytest
from tiny_models import TinyLlama, save_llama

from sol.config import DEFAULT_MODEL
from sol.models.gguf import GGUFFile
from sol.models.source import ModelFiles, resolve
from sol.text.gguf_tokenizer import build_gguf_tokenizer


@pytest.fixture(scope="session", autouse=True)
def base_temp(tmp_path_factory: pytest.TempPathFactory) -> None:
    """pytest chooses its directory when it is first asked: not while a test has changed where temporary files go."""
    tmp_path_factory.getbasetemp()


@pytest.fixture(scope="session")
def smollm2() -> ModelFiles:
    """The default model, fetched once and kept in Sol's cache."""
    return resolve(DEFAULT_MODEL, progress=False)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TinyLlama]:
    """`tiny_llama(**options)`: see `tiny_models.save_llama`. Equal options share one checkpoint: do not change it."""
    made: dict[str, TinyLlama] = {}

    def make(**options: Any) -> TinyLlama:
        key = repr(sorted(options.items()))
        if key not in made:
            made[key] = save_llama(tmp_path_factory.mktemp("tiny_llama"), **options)
        return made[key]

    return make


@pytest.fixture(scope="session")
def talking_llama(smollm2: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with SmolLM2's tokenizer and chat template: it loads at once and talks nonsense."""
    assert smollm2.gguf is not None
    metadata = GGUFFile(smollm2.gguf).metadata
    directory = tmp_path_factory.mktemp("talking_llama")
    save_llama(directory, vocab_size=49152, eos_token_id=2)
    build_gguf_tokenizer(metadata, smollm2.gguf.name).backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": metadata["tokenizer.chat_template"], "eos_token": "<|im_end|>"})
    )
    return directory
