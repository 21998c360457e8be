"""What a scheduler and a controller tell each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sol.engine.types import Draft, DrafterStats, Drafting, ProposalPlan, SpeculationParams


@dataclass(slots=True, kw_only=True)
class StepShape:
    """What decides how long the target takes for a step."""

    num_tokens: int
    """Of all its rows: last tokens, drafts, chunks of prompts"""
    num_requests: int
    num_logits_rows: int
    num_context_tokens: int
    """Over its requests: tokens of each up to and including this step's last"""


@dataclass(slots=True, kw_only=True)
class Candidate:
    """A request that decodes in the step that is being planned, and has drafts at hand."""

    request_id: str
    draft: Draft
    max_tokens: int
    """So many drafts may be verified: what is at hand, as far as blocks and the request's length allow; at least 1"""
    num_tokens: int
    """That it has"""


@dataclass(slots=True, kw_only=True)
class Drafter:
    """A request that the step being planned samples: somebody may draft for it afterwards."""

    request_id: str
    max_tokens: int
    """As many drafts as the next step could verify for it; at least 1"""
    num_tokens: int
    """That it has"""
    num_draft_tokens: int
    """Drafts that the step being planned verifies for it"""


@dataclass(slots=True, kw_only=True)
class Emission:
    """What a step gave a request that decodes."""

    request_id: str
    drafter: str | None
    """Whose drafts were verified; None for none"""
    num_draft_tokens: int
    num_accepted_tokens: int
    """Before an end token or `max_tokens` cut the rest off"""
    num_new_tokens: int
    """After that: what the request got"""
    draft: Draft | None = None
    """The drafts that were at hand for the place where its new tokens came, verified or not. What was not verified is
    compared with `new_token_ids`: it costs nothing, and drafting comes back when drafts become right."""
    new_token_ids: Sequence[int] = ()
    """All that the target sampled, before the cut"""


class Controller(Protocol):
    """Decides who drafts, and how many drafts are verified. Knows no tensor and no clock.

    It is told what took how long. One scheduler asks it and tells it, from one thread. Whatever it decides, tokens stay
    the same.
    """

    def add(self, request_id: str, wish: SpeculationParams | None) -> None:
        """A request that may be drafted for."""
        ...

    def remove(self, request_id: str) -> None: ...

    def choose_drafts(self, shape: StepShape, candidates: Sequence[Candidate], *, max_tokens: int) -> list[int]:
        """How many drafts are verified for each candidate, 0 to its `max_tokens`, at most `max_tokens` in all.

        `shape` is the step without any draft. Candidates whose `draft.sampled` is set are not among them: how many of
        those are verified must not depend on their values.
        """
        ...

    def choose_proposals(self, shape: StepShape, rows: Sequence[Drafter]) -> list[ProposalPlan | None]:
        """Who drafts for each row after the step of this shape, to be verified in the next one; None: nobody."""
        ...

    def observe_step(self, shape: StepShape, seconds: float, emissions: Sequence[Emission]) -> None:
        """A step took so long on the target (host work in, drafting out). `emissions` has every request that decoded
        in it (not those that computed prompt tokens)."""
        ...

    def observe_drafting(self, drafting: Drafting) -> None:
        """One call of one drafter; with `error` set it is put aside, and its plans come to nothing until it is tried
        again."""
        ...

    def speedup(self, request_id: str) -> float | None:
        """How many times faster than plain decoding the request has been, as it believes; None while it cannot tell."""
        ...

    def take_stats(self) -> tuple[dict[str, DrafterStats], float, float]:
        """Since the last call: by drafter; seconds of steps that decoded, with drafting; seconds that plain decoding
        would have taken for the same tokens, as it believes."""
        ...
