"""The ragged batch of a drafter's forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sol.ops.batch import RaggedBatch
from sol.speculation.propose.model_blocks import Ints


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
    table = np.zeros((len(spans), widest), dtype=np.int64)
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

    def tensor(values: Ints) -> torch.Tensor:
        return torch.from_numpy(values).to(device)

    return RaggedBatch(
        token_ids=tensor(np.concatenate([span.token_ids for span in spans])),
        positions=tensor(np.concatenate(positions)),
        slot_mapping=tensor(np.concatenate(slots)),
        block_table=tensor(table),
        query_lens=[len(span.token_ids) for span in spans],
        seq_lens=[span.stop for span in spans],
        logits_rows=tensor(np.array(ends, dtype=np.int64)),
    )
