"""The target's own first layers, its final norm and its head: a drafter without weights or a KV cache of its own.

A token's keys and values in the first layers depend on these layers alone, so those of verified tokens are there
already, in the target's cache, and there is nothing to catch up. What the drafter writes beyond them is what the target
would write; verifying the drafts writes it again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sol.errors import ConfigError
from sol.ops.program import AttentionInput, Op, Program
from sol.speculation.propose.model_drafter import Candidate, ModelDrafter
from sol.speculation.propose.protocol import ProposalRow


class EarlyExitProposer(ModelDrafter):
    """Implements `Proposer`. The executor computes `first_layers(target, n)` over the target's own KV cache."""

    @property
    def name(self) -> str:
        return "early_exit"

    def forget(self, request_ids: Sequence[str], *, finished: bool) -> None:
        """There is nothing to forget."""

    def _candidate(self, index: int, row: ProposalRow, limit: int) -> Candidate | None:
        start = row.num_computed_tokens
        if start != row.num_tokens - 1:
            raise ValueError(
                f"early_exit: {start} of the {row.num_tokens} tokens of {row.request_id!r} are computed: it drafts "
                "where all but the last one are"
            )
        return Candidate(index, row, limit, start, self._read(_last_token(row)))


def default_exit_layers(num_layers: int) -> int:
    """A quarter of the target's, at least one."""
    return max(1, num_layers // 4)


def first_layers(program: Program, num_layers: int) -> Program:
    """The program with its first layers only. Weights are shared. Raises `ConfigError` unless some are left out."""
    body: list[Op] = []
    total = sum(isinstance(op, AttentionInput) for op in program.body)
    if not 1 <= num_layers < total:
        raise ConfigError(
            f"num_exit_layers is {num_layers}, but the model has {total} layers: choose 1 to {total - 1}",
            param="speculative_config",
        )
    left = num_layers
    for op in program.body:
        if isinstance(op, AttentionInput):
            if left == 0:
                break
            left -= 1
        body.append(op)
    return dataclasses.replace(program, body=tuple(body))


def _last_token(row: ProposalRow) -> Sequence[int]:
    sampling = row.sampling
    return sampling.output_token_ids[-1:] or sampling.prompt_token_ids[-1:]
