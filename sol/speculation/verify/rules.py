"""How many drafts stay, and by which law the next token is then sampled: rules that keep the target's law exactly.

They are written over distributions and know no noise. `target(j)` is p, the target's distribution [V] after j drafts;
`draft_probs` [k, V] is q, what each draft was sampled from, or None for drafts that are a function of what came before
(all of q lies on the draft). `accept(slot, h)` draws: True with probability h. Each gives the number of accepted
drafts, and the distribution of the recovered token, not normalised: None where all were accepted and the bonus token is
the target's own.

Both are exact for whatever drafts, on two conditions: a draft was sampled from its q, and whether there is a draft does
not depend on which token it is. It may depend on the drafts before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Target = Callable[[int], torch.Tensor]
Accept = Callable[[int, float], bool]
Rule = Callable[[Target, Sequence[int], torch.Tensor | None, Accept], tuple[int, torch.Tensor | None]]


def rejection(
    target: Target, drafts: Sequence[int], draft_probs: torch.Tensor | None, accept: Accept
) -> tuple[int, torch.Tensor | None]:
    """Speculative sampling (Leviathan, Kalman and Matias, arXiv 2211.17192; Chen et al., arXiv 2302.01318).

    A draft x stays with probability min(1, p(x) / q(x)); the first that does not is replaced by a sample of
    max(0, p - q). The target is not asked for more than that.
    """
    for slot, draft in enumerate(drafts):
        p = target(slot)
        q = None if draft_probs is None else draft_probs[slot].to(p)
        if not accept(slot, min(1.0, _ratio(p, q, draft))):
            return slot, _or_else(residual(p, q, draft, 1.0), p)
    return len(drafts), None


def block(
    target: Target, drafts: Sequence[int], draft_probs: torch.Tensor | None, accept: Accept
) -> tuple[int, torch.Tensor | None]:
    """Block verification (Sun et al., "Block Verification Accelerates Speculative Decoding", arXiv 2403.10444).

    The drafts stay up to the last that is accepted, so one that would fail alone can stay for the sake of those after
    it: never fewer than by `rejection` on average. The target is asked for all but what follows the last draft.
    """
    accepted, recovered = 0, None
    weight = 1.0  # how probable it is that the drafts so far stay, all of them: the paper's p_i
    for slot, draft in enumerate(drafts):
        p = target(slot)
        q = None if draft_probs is None else draft_probs[slot].to(p)
        left = residual(p, q, draft, weight)
        if slot:
            mass, lost = float(left.sum()), 1.0 - weight
            # Both are 0 where no draft can have failed so far, nor can the next one.
            if accept(slot - 1, mass / (mass + lost) if mass + lost > 0.0 else 1.0):
                accepted, recovered = slot, _or_else(left, p)
        else:
            recovered = _or_else(left, p)
        weight = min(1.0, weight * _ratio(p, q, draft))
    if not drafts or accept(len(drafts) - 1, weight):
        return len(drafts), None
    return accepted, recovered


def residual(p: torch.Tensor, q: torch.Tensor | None, draft: int, weight: float) -> torch.Tensor:
    """max(0, weight · p - q), of which the token in place of a draft is a sample."""
    if q is not None:
        return (weight * p - q).clamp_(min=0.0)
    left = weight * p
    left[draft] = 0.0  # q is 1 there, and weight · p no more
    return left


def _ratio(p: torch.Tensor, q: torch.Tensor | None, draft: int) -> float:
    if q is None:
        return float(p[draft])
    probability = float(q[draft])
    if not probability > 0.0:
        raise ValueError(f"draft_probs: {probability} for token {draft}, which was drafted; nothing samples it so")
    return float(p[draft]) / probability


def _or_else(left: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """`left`; where p equals q, rounding alone can have rejected a draft, and p is what is missing."""
    return left if bool(left.any()) else p
