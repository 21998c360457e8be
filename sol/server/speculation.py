"""Speculation in requests and responses: the field `speculation`, and `usage.speculation`."""

from __future__ import annotations

from collections.abc import Sequence

from sol.engine.types import DraftCounts, SpeculationParams, SpeculationUsage
from sol.server.protocol import GenerationBody
from sol.speculation.request import check_speculation
from sol.speculation.usage import acceptance_rate, add_counts, mean_acceptance_length

_DIGITS = 4


def speculation_params(body: GenerationBody, drafters: Sequence[str]) -> SpeculationParams | None:
    """None: as the engine does it. Raises `RequestError`."""
    asked = body.speculation
    include_origins = wants_segments(body)
    if asked is None and not include_origins:
        return None
    wanted = SpeculationParams(include_origins=include_origins)
    if asked is not None:
        wanted.enabled = asked.enabled is not False
        wanted.drafter, wanted.tenant = asked.drafter, asked.tenant
    check_speculation(wanted, drafters)
    return wanted


def wants_segments(body: GenerationBody) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_speculation)


def usage_fields(usage: SpeculationUsage, num_tokens: int) -> dict[str, object]:
    """`usage.speculation` of a request that got `num_tokens` tokens."""
    total = add_counts(usage.drafters.values())
    return {
        "steps": usage.num_steps,
        **_counts(total),
        "tokens_per_step": _rounded(num_tokens / usage.num_steps if usage.num_steps else None),
        "speedup": _rounded(usage.speedup),
        "drafters": {name: _counts(counts) for name, counts in usage.drafters.items()},
    }


def _counts(counts: DraftCounts) -> dict[str, object]:
    return {
        "drafts": counts.num_drafts,
        "draft_tokens": counts.num_draft_tokens,
        "accepted_tokens": counts.num_accepted_tokens,
        "acceptance_rate": _rounded(acceptance_rate(counts)),
        "mean_acceptance_length": _rounded(mean_acceptance_length(counts)),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, _DIGITS)
