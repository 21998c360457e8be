"""What a drafter is: it is asked for a whole batch at once, after a step, for the tokens that may come next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from sol.sampling.processing import SamplingRow


@dataclass(slots=True, kw_only=True)
class ProposalRow:
    """A request that a drafter is asked to continue. Everything in it is read, not kept and not changed."""

    request_id: str
    sampling: SamplingRow
    """Its prompt, what it has generated so far (the last token was just emitted), parameters and seed."""
    max_tokens: int
    """At most so many drafts, at least 1."""
    block_ids: npt.NDArray[np.int64]
    """Its block table. There are slots for the positions up to num_tokens + max_tokens - 1: a drafter that shares
    block ids with the target may write its own KV cache there."""
    num_computed_tokens: int
    """The target's KV cache of so many leading tokens is computed: all but the last one."""
    tenant: str | None = None
    """Whose past outputs it may be continued from, and is remembered for; None for nobody's."""
    hidden: Any = None
    """What a drafter that asked for the target's hidden states gets (EAGLE); None for all others."""

    @property
    def num_tokens(self) -> int:
        """Prompt and output together."""
        return len(self.sampling.prompt_token_ids) + len(self.sampling.output_token_ids)


@dataclass(slots=True, kw_only=True)
class Proposal:
    """Drafts for one request; none at all where the drafter sees nothing to go by."""

    token_ids: list[int]
    scores: list[float] | None = None
    """Of each draft, how probable the drafter holds it that it is right given that those before it are; from 0 to 1."""
    probs: torch.Tensor | None = None
    """[k, vocab_size] float32: the distributions that the drafts were *sampled* from with noise of their own. None
    where the drafts are a function of what came before (lookup, greedy, coupled sampling)."""


class Proposer(Protocol):
    """A drafter. Not thread-safe; raises what it likes: whoever calls it puts it aside then.

    State that it keeps for a request must follow from the request's tokens, because a request may vanish (preemption)
    and come back longer, and its blocks may hold a KV cache that other requests computed (prefix hits).
    """

    @property
    def name(self) -> str:
        """`ngram`, `suffix`, `draft_model`, `early_exit` …"""
        ...

    def propose(self, rows: Sequence[ProposalRow]) -> list[Proposal]:
        """One proposal a row, in order; each of at most the row's `max_tokens` drafts, perhaps of none."""
        ...

    def forget(self, request_ids: Sequence[str], *, finished: bool) -> None:
        """These requests left the runner: for good, or (finished=False) preempted. Unknown ids are ignored."""
        ...
