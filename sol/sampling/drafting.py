"""How a drafter that computes logits picks its drafts, with the parameters of the request it drafts for.

Coupled drafts go with coupled verification, whose text they cannot change. Independent ones go with rejection and block
verification, which know by their distribution how often to keep them. With those two, whether a sampled draft of either
kind is verified must not depend on which token it is, nor on its probability: only on those before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sol.sampling.noise import Purpose, slot_key
from sol.sampling.processing import SamplingRow, continued, distribution
from sol.sampling.sampler import sample_law, sample_row


def draft_coupled(logits: torch.Tensor, row: SamplingRow, drafts: Sequence[int]) -> int:
    """The drafter's logits [V] after `drafts` → the next one, picked as the target will pick its token there.

    With the target's own noise, a drafter of distribution q agrees with a target of distribution p with probability at
    least (1 - TV(p, q)) / (1 + TV(p, q)). For greedy requests it is the likeliest token.
    """
    return sample_row(logits, continued(row, drafts))


def draft_independent(logits: torch.Tensor, row: SamplingRow, drafts: Sequence[int]) -> tuple[int, torch.Tensor | None]:
    """The drafter's logits [V] after `drafts` → the next one and q [V] float32, which it was sampled from.

    q is None for greedy requests: the draft is the likeliest token.
    """
    if row.params.greedy:
        return draft_coupled(logits, row, drafts), None
    probs = distribution(logits, continued(row, drafts)).to(torch.float32)
    key = slot_key(row.seed, row.choice_index, len(row.output_token_ids), len(drafts), Purpose.DRAFT)
    return sample_law(probs, key), probs
