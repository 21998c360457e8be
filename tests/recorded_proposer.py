"""A drafter that knows the answers, and is wrong where it is told to be."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from sol.speculation.propose import Proposal, ProposalRow


class RecordedProposer:
    """`answers`: by request, what it will say. About `right` of the drafts are that; there may be none at all."""

    name = "suffix"

    def __init__(self, answers: Mapping[str, Sequence[int]], vocab_size: int, *, right: float, seed: int) -> None:
        self._answers, self._vocab_size, self._right = answers, vocab_size, right
        self._random = random.Random(seed)
        self.forgotten: list[tuple[str, bool]] = []

    def propose(self, rows: Sequence[ProposalRow]) -> list[Proposal]:
        return [Proposal(token_ids=self._draft(row)) for row in rows]

    def forget(self, request_ids: Sequence[str], *, finished: bool) -> None:
        self.forgotten += [(request_id, finished) for request_id in request_ids]

    def _draft(self, row: ProposalRow) -> list[int]:
        start = len(row.sampling.output_token_ids)
        answer = self._answers[row.request_id][start : start + self._random.randint(0, row.max_tokens)]
        return [
            token if self._random.random() < self._right else self._random.randrange(self._vocab_size)
            for token in answer
        ]
