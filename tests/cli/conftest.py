from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_models import save_llama

from sol.models.gguf import GGUFFile
from sol.models.source import ModelFiles
from sol.text.gguf_tokenizer import build_gguf_tokenizer


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
