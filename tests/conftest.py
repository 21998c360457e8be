"""Fixtures that several parts of the tests share."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

# Before anything imports Triton, whose own functions are made for the interpreter or for a GPU when it is imported. It
# is not only the tests of its kernels that do: compressed-tensors does.
os.environ["TRITON_INTERPRET"] = "1"

import pytest
from tiny_models import TinyLlama, save_llama

from sol.config import DEFAULT_MODEL
from sol.models.source import ModelFiles, resolve


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
