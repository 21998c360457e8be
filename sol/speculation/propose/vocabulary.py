"""Drafting with a model whose token ids are not the target's.

The drafter may only propose tokens that both have: its logits are carried over to the target's ids, and what it has
alone is masked, which renormalises its distribution over the intersection. That keeps verification exact (TLI, "token-
level intersection", of arXiv:2502.05202). What the target has alone the drafter never proposes.

Reading is another matter: the drafter has to read whatever the target wrote, and one token for each of the target's,
because they share positions and blocks. A token that it does not have is read as the longest of its own that spells
that token's end; the drafter then reads a text with a few letters missing, which costs acceptance and nothing else. A
request with a token that cannot be read even so is not drafted for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from sol.errors import ConfigError
from sol.speculation.propose.model_blocks import Ints

LEAST_SHARED: Final = 0.5
"""Share of the target's tokens below which a draft model is refused: it could hardly ever propose the right one."""


@dataclass(frozen=True, slots=True)
class TokenTable:
    """A tokenizer's vocabulary, as far as drafting needs it."""

    plain: Mapping[int, bytes]
    """Ids of ordinary tokens → their bytes inside a text"""
    special: Mapping[int, str]
    """Ids of control tokens → their names, as `<|im_end|>`"""
    roles: Mapping[str, int]
    """`bos`, `eos` → ids. Control tokens of one role are the same token, whatever their names."""

    def __len__(self) -> int:
        return len(self.plain) + len(self.special)


class VocabularyMap:
    """Ids of a target's vocabulary ↔ ids of its drafter's.

    `reads` [target_size]: the drafter's id that each of the target's is read as, -1 for none. `writes` [n, 2]: pairs of
    a drafter's and a target's id that are the same token; None where the first `len(...)` ids simply are.
    """

    def __init__(self, reads: Ints, writes: Ints | None, *, target_size: int, num_shared: int) -> None:
        self.target_size = target_size
        self.num_shared = num_shared
        self.reads = reads
        self._writes = None if writes is None else torch.from_numpy(writes).T.contiguous()

    @classmethod
    def identity(cls, target_size: int, draft_size: int, num_tokens: int | None = None) -> VocabularyMap:
        """The same ids. Sizes are of the embeddings, which checkpoints round up; `num_tokens` of them stand for
        something, where that is known."""
        shared = min(target_size, draft_size, num_tokens if num_tokens is not None else target_size)
        readable = min(target_size, draft_size)
        reads = np.full(target_size, -1, dtype=np.int64)
        reads[:readable] = np.arange(readable)
        return cls(reads, None, target_size=target_size, num_shared=shared)

    def read(self, token_ids: Ints) -> Ints:
        return self.reads[token_ids]

    def to_target(self, logits: torch.Tensor) -> torch.Tensor:
        """[S, draft_size] → [S, target_size], -inf where the drafter has nothing to say. May be a view of `logits`."""
        if self._writes is not None:
            drafts, targets = self._writes.to(logits.device)
            out = logits.new_full((logits.shape[0], self.target_size), -torch.inf)
            return out.index_copy_(1, targets, logits.index_select(1, drafts))
        if self.num_shared == logits.shape[1] == self.target_size:
            return logits
        out = logits.new_full((logits.shape[0], self.target_size), -torch.inf)
        out[:, : self.num_shared] = logits[:, : self.num_shared]
        return out


def match_vocabularies(
    target: TokenTable | None, draft: TokenTable | None, *, target_size: int, draft_size: int
) -> VocabularyMap:
    """`target_size`, `draft_size`: rows of the embeddings. A table is None where a model comes without a tokenizer.

    Raises `ConfigError` where nothing says what an id stands for, or too little is shared.
    """
    if target is None or draft is None:
        if target_size != draft_size:
            raise ConfigError(
                f"the draft model has {draft_size} tokens, the target {target_size}, and there "
                + ("are no tokenizers" if target is draft else "is a tokenizer of only one of them")
                + " to tell which are the same: put the tokenizer.json beside the weights, or use a draft model of the "
                "target's own family",
                param="speculative_model",
            )
        return VocabularyMap.identity(target_size, draft_size, _num_ids(target or draft))
    if target.plain == draft.plain and target.special == draft.special:
        return VocabularyMap.identity(target_size, draft_size, _num_ids(target))
    pairs = _pairs(target, draft, target_size, draft_size)
    if len(pairs) < LEAST_SHARED * len(target):
        raise ConfigError(
            f"the draft model shares {len(pairs)} of the target's {len(target)} tokens, "
            f"{len(pairs) / max(1, len(target)):.0%}; at least {LEAST_SHARED:.0%} must be the same: use a draft model "
            "of the target's own family",
            param="speculative_model",
        )
    reads = np.full(target_size, -1, dtype=np.int64)
    spelled: dict[bytes, int] = {}
    for token_id, text in draft.plain.items():
        if text and token_id < draft_size:
            spelled.setdefault(text, token_id)
    for token_id in range(target_size):
        text = target.plain.get(token_id) or target.special.get(token_id, "").encode()
        endings = (spelled.get(text[start:]) for start in range(len(text)))
        reads[token_id] = next((found for found in endings if found is not None), -1)
    writes = np.array(sorted((ours, theirs) for theirs, ours in pairs.items()), dtype=np.int64)
    reads[writes[:, 1]] = writes[:, 0]
    return VocabularyMap(reads, writes, target_size=target_size, num_shared=len(pairs))


def _pairs(target: TokenTable, draft: TokenTable, target_size: int, draft_size: int) -> dict[int, int]:
    """The target's id → the drafter's, for tokens that are the same. No id occurs twice."""
    pairs: dict[int, int] = {}
    taken: set[int] = set()

    def add(theirs: int, ours: int | None) -> None:
        if ours is None or theirs in pairs or ours in taken or theirs >= target_size or ours >= draft_size:
            return
        pairs[theirs] = ours
        taken.add(ours)

    names = {name: token_id for token_id, name in draft.special.items()}
    for token_id, name in target.special.items():
        add(token_id, names.get(name))
    for role, token_id in target.roles.items():
        ours = draft.roles.get(role)
        if token_id in target.special and ours in draft.special:
            add(token_id, ours)
    # Two tokens of one vocabulary may have the same bytes, as `A` and SentencePiece's byte token <0x41>. The first of
    # one stands for the first of the other.
    spelled: dict[bytes, int] = {}
    for token_id, text in sorted(draft.plain.items()):
        if text:
            spelled.setdefault(text, token_id)
    for token_id, text in sorted(target.plain.items()):
        add(token_id, spelled.get(text))
    return pairs


def _num_ids(table: TokenTable | None) -> int | None:
    """One more than the highest id."""
    return None if table is None else max((*table.plain, *table.special), default=-1) + 1
