"""What the tests of `sol.text` share: llama.cpp's record, and one tokenizer of each kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from data.record_tokenizer_fixture import sentencepiece_metadata
from text_files import tokenizer_of

from sol.models.gguf import GGUFFile
from sol.models.source import ModelFiles
from sol.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def llama_cpp() -> dict[str, Any]:
    """See data/record_tokenizer_fixture.py."""
    record: dict[str, Any] = json.loads(
        (Path(__file__).parents[1] / "data/tokenizer_llama_cpp.json").read_text("utf-8")
    )
    return record


@pytest.fixture(scope="session")
def smollm2_metadata(smollm2: ModelFiles) -> dict[str, Any]:
    assert smollm2.gguf is not None
    return GGUFFile(smollm2.gguf).metadata


@pytest.fixture(scope="session")
def byte_level(smollm2: ModelFiles) -> Tokenizer:
    """SmolLM2's: byte-level, no space at the beginning."""
    return Tokenizer.from_files(smollm2)


@pytest.fixture(scope="session")
def sentencepiece(llama_cpp: dict[str, Any]) -> Tokenizer:
    """A small SentencePiece one: byte fallback, a space before the first word that decoding takes away."""
    return tokenizer_of(sentencepiece_metadata(llama_cpp["sentencepiece"]["vocabulary"]))


@pytest.fixture(params=["byte_level", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found: Tokenizer = request.getfixturevalue(request.param)
    return found
