"""What speculation did for requests, in the field's figures: sums over steps and choices, rates and lengths."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sol.engine.types import DraftCounts, RequestOutput, SpeculationUsage


def add_counts(counts: Iterable[DraftCounts]) -> DraftCounts:
    """The sum over drafters, of which one at most drafts for a request in a step."""
    total = DraftCounts()
    for one in counts:
        total.num_drafts += one.num_drafts
        total.num_draft_tokens += one.num_draft_tokens
        total.num_accepted_tokens += one.num_accepted_tokens
    return total


def acceptance_rate(counts: DraftCounts) -> float | None:
    """Accepted drafts of those verified, 0 to 1; None where none was."""
    return counts.acceptance_rate if counts.num_draft_tokens else None


def mean_acceptance_length(counts: DraftCounts) -> float | None:
    """Tokens that a step emitted if it verified drafts: those accepted, and the target's own. None without one."""
    return 1 + counts.num_accepted_tokens / counts.num_drafts if counts.num_drafts else None


def advance(
    usage: SpeculationUsage | None, output: RequestOutput, num_tokens: int
) -> tuple[SpeculationUsage | None, int]:
    """A request's usage after an output of which `num_tokens` tokens count, and how many steps made those.

    Start with an empty `SpeculationUsage` if the engine speculates, with None if it does not. An engine says nothing
    while it decodes plainly, one token a step.
    """
    if usage is None or output.speculation is None:
        if usage is not None:
            usage.num_steps += num_tokens
        return usage, num_tokens
    steps = output.speculation.num_steps - usage.num_steps
    return output.speculation, max(1, min(steps, num_tokens)) if num_tokens else 0


def add_usages(usages: Iterable[tuple[SpeculationUsage, int]]) -> SpeculationUsage | None:
    """Of several choices together, each with its number of tokens; None where there are none.

    The speed-up is the plain time of all by the actual time of all, with the plain time of a token taken to be the
    same everywhere: the harmonic mean, weighted by tokens, of those that know theirs.
    """
    total: SpeculationUsage | None = None
    plain = actual = 0.0
    for usage, num_tokens in usages:
        total = total or SpeculationUsage()
        total.num_steps += usage.num_steps
        for name, counts in usage.drafters.items():
            total.drafters[name] = add_counts([total.drafters.get(name, DraftCounts()), counts])
        if usage.speedup:
            plain += num_tokens
            actual += num_tokens / usage.speedup
    if total is not None and actual:
        total.speedup = plain / actual
    return total


def expected_accepted(scores: Sequence[float]) -> float:
    """Tokens: the sum over the drafts of the probability that all up to this one are right."""
    total, product = 0.0, 1.0
    for score in scores:
        product *= score
        total += product
    return total
