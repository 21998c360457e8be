"""The ragged batch of a drafter's forward pass."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from sol.ops.batch import RaggedBatch
from sol.speculation.propose.model_blocks import Ints

_WIDTHS: Final = 16
"""A block table's width is a multiple of it."""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of one request that are computed next to each other."""

    block_ids: Ints
    start: int
    """The first one's position"""
    token_ids: Ints
    """At least one"""
    wants_logits: bool
    """Of the last one"""

    @property
    def stop(self) -> int:
        return self.start + len(self.token_ids)


def ragged_batch(spans: Sequence[Span], block_size: int, device: torch.device) -> RaggedBatch:
    """Logits come in the order of the spans that want them."""
    positions, slots, ends = [], [], []
    widest = max(-(-span.stop // block_size) for span in spans)
    # Triton compiles a kernel again for a stride of 1, and for one that is a multiple of 16: here it is always one.
    table = np.zeros((len(spans), -(-widest // _WIDTHS) * _WIDTHS), dtype=np.int64)
    num_tokens = 0
    for row, span in enumerate(spans):
        place = np.arange(span.start, span.stop, dtype=np.int64)
        positions.append(place)
        slots.append(span.block_ids[place // block_size] * block_size + place % block_size)
        held = span.block_ids[:widest]
        table[row, : len(held)] = held
        num_tokens += len(span.token_ids)
        if span.wants_logits:
            ends.append(num_tokens - 1)

    parts = _send(
        np.concatenate([span.token_ids for span in spans]),
        np.concatenate(positions),
        np.concatenate(slots),
        table,
        np.array(ends, dtype=np.int64),
        device=device,
    )
    return RaggedBatch(
        token_ids=parts[0],
        positions=parts[1],
        slot_mapping=parts[2],
        block_table=parts[3],
        query_lens=[len(span.token_ids) for span in spans],
        seq_lens=[span.stop for span in spans],
        logits_rows=parts[4],
    )


def _send(*arrays: Ints, device: torch.device) -> list[torch.Tensor]:
    """To the device, in one copy, which the host does not wait for. Each begins at a multiple of 16 bytes: Triton
    compiles a kernel again for pointers that do not."""
    starts = [0, *itertools.accumulate(array.size + array.size % 2 for array in arrays)]
    packed = np.zeros(starts[-1], dtype=np.int64)
    for start, array in zip(starts, arrays, strict=False):
        packed[start : start + array.size] = array.ravel()
    sent = torch.from_numpy(packed)
    if device.type == "cuda":  # torch keeps pinned memory from being used again until the copy is done
        sent = sent.pin_memory()
    sent = sent.to(device, non_blocking=True)
    return [sent[start : start + array.size].view(array.shape) for start, array in zip(starts, arrays, strict=False)]
