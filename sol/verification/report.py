"""What was found: plain data, ready for JSON."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Difference:
    """The first token at which an answer left the one of plain decoding."""

    prompt: str
    cell: str
    position: int
    """Output index, 0 for the first token."""
    expected: int | None
    """Plain decoding's token; None where its answer ends there."""
    found: int | None
    gap: float | None = None
    """By how much plain decoding prefers its own token, in units of logits, sampling's noise included. None where
    either answer ends, or an engine could not say."""
    near_tie: bool = False
    """The gap is within the tolerance: arithmetic in another order may decide either way."""


@dataclass(slots=True, kw_only=True)
class Cell:
    """One way to generate the prompts' answers, each of which must be plain decoding's."""

    prefix_cache: bool
    company: str
    """`alone` or `neighbours`"""
    drafter: str
    """Who drafts; `none` for plain decoding again, whose differences speculation has no part in."""
    sampling: str
    """`greedy` or `seeded`"""
    turn: int = 1
    """2: the prompt is a first turn's prompt and answer, which the prefix cache holds if there is one."""
    num_requests: int = 0
    num_tokens: int = 0
    num_steps: int = 0
    """Target passes that emitted them"""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache"""
    differences: list[Difference] = field(default_factory=list)

    @property
    def name(self) -> str:
        cache = "prefix cache" if self.prefix_cache else "no prefix cache"
        turn = ", second turn" if self.turn == 2 else ""
        return f"{self.drafter}, {self.sampling}, {cache}, {self.company}{turn}"

    @property
    def num_errors(self) -> int:
        """Differences that are no near ties."""
        return sum(not difference.near_tie for difference in self.differences)

    @property
    def num_near_ties(self) -> int:
        return len(self.differences) - self.num_errors


@dataclass(slots=True, kw_only=True)
class Law:
    """The tokens after one prompt under many seeds, against the probabilities that the model gives them."""

    verify_method: str
    num_tokens: int
    """Of each answer; its first is the prompt's, the others may have been drafted."""
    top_k: int
    temperature: float
    num_samples: int = 0
    num_cells: int = 0
    """Token sequences that are expected at least five times, and all others together"""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    p_value: float = 1.0
    """Of the χ² tests of sequences, tokens and pairs: how probable one as bad is if the law is the model's"""
    significance: float = 0.0
    """Below it the test fails."""
    distance: float = 0.0
    """Total variation between the samples and the law"""
    distance_bound: float = 0.0
    """What it exceeds by chance with probability `significance` at most"""
    plain_p_value: float | None = None
    """The same of plain decoding, run where speculation fails it …"""
    same_p_value: float | None = None
    """… and of both against each other: a device whose arithmetic differs from step to step fails the first two."""

    @property
    def holds(self) -> bool:
        within = self.p_value >= self.significance and self.distance <= self.distance_bound
        if within or self.plain_p_value is None or self.same_p_value is None:
            return within
        return self.plain_p_value < self.significance <= self.same_p_value


@dataclass(slots=True, kw_only=True)
class Speed:
    """Decoding one prompt alone, greedily, with the engine as it is configured; prompts' own time is left out."""

    prompt: str
    plain_tokens_per_second: float
    tokens_per_second: float
    num_steps: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int

    @property
    def speedup(self) -> float:
        return self.tokens_per_second / self.plain_tokens_per_second


@dataclass(slots=True, kw_only=True)
class Report:
    model: str
    device: str
    dtype: str
    drafters: list[str]
    verify_method: str
    controller: str
    num_speculative_tokens: int
    tolerance: float
    """Logits closer than this are a near tie."""
    quick: bool
    cells: list[Cell] = field(default_factory=list)
    law: Law | None = None
    speeds: list[Speed] = field(default_factory=list)
    drafter_failures: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    """Why the verdict is what it is; empty where everything holds"""
    seconds: float = 0.0

    @property
    def holds(self) -> bool:
        return not self.problems

    @property
    def num_tokens(self) -> int:
        """Compared with plain decoding's"""
        return sum(cell.num_tokens for cell in self.cells)

    @property
    def num_near_ties(self) -> int:
        return sum(cell.num_near_ties for cell in self.cells)

    @property
    def num_errors(self) -> int:
        return sum(cell.num_errors for cell in self.cells)

    def conclude(self) -> None:
        """Fill in `problems`."""
        if self.num_errors:
            total = sum(cell.num_requests for cell in self.cells)
            self.problems.append(
                f"of {total:,} answers {self.num_errors:,} differ from plain decoding's, and not by a near tie"
            )
        for name in self.drafters:
            if not any(cell.num_draft_tokens for cell in self.cells if cell.drafter == name):
                self.problems.append(
                    f"{name} drafted nothing for these prompts, so nothing is known of it: give prompts it can draft "
                    "for with --prompts"
                )
            if failures := self.drafter_failures.get(name):
                self.problems.append(
                    f"{name} failed while it drafted (failures: {failures}); the engine's log says why"
                )
        if self.law is not None and not self.law.holds:
            self.problems.append(
                f"sampled tokens do not follow the model's probabilities (χ² p = {self.law.p_value:.2g}, distance "
                f"{self.law.distance:.4f} where {self.law.distance_bound:.4f} is allowed)"
            )
