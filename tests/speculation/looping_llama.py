"""A tiny random model whose text repeats itself, so that whoever looks it up is often right."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
from tiny_models import make_llama

VOCAB: Final = 24
EOS: Final = 2


def save_looping_llama(directory: Path, *, max_position_embeddings: int = 256) -> Path:
    """The next token depends on the latest more than on all others: greedy text falls into loops, and so few kinds of
    tokens repeat themselves by chance."""
    llama = make_llama(vocab_size=VOCAB, num_hidden_layers=3, max_position_embeddings=max_position_embeddings)
    with torch.no_grad():
        for name, parameter in llama.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter *= 0.3
            if "lm_head" in name:
                parameter *= 2.0
    llama.save_pretrained(directory)
    return directory
