"""The hand-over types at the engine's borders.

    server ── EngineRequest ──▶ engine          scheduler ── SchedulerOutput ──▶ runner
    server ◀── EngineOutput ─── engine          scheduler ◀── StepOutput ────── runner

Plain dataclasses of ints, floats, strings and lists: msgspec writes them to the wire unchanged, and nothing here
knows a tensor, a socket or a text.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Final, Literal

from sol.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]

TARGET: Final = "target"
"""In place of a drafter's name: the model itself."""


@dataclass(slots=True, kw_only=True)
class SpeculationParams:
    """What one request wants of speculation; it never changes the request's tokens."""

    enabled: bool = True
    drafter: str | None = None
    """The only one that may draft for it; None: whichever pays."""
    tenant: str | None = None
    """Whose past outputs it may be drafted from, and into whose its own goes. None: nobody's."""
    include_origins: bool = False
    """Say of each token who made it (`RequestOutput.origins`)."""


@dataclass(slots=True, kw_only=True)
class EngineRequest:
    """One choice of one request: a request with n = 3 becomes three of these with the same `seed`."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    """Always settled here; `params.seed` may be None."""
    choice_index: int = 0
    eos_token_ids: list[int] = field(default_factory=list)
    """The model's own end tokens. `params.ignore_eos` and `params.min_tokens` apply to them."""
    arrival_time: float = field(default_factory=time.monotonic)
    """Seconds on this machine's monotonic clock, which all its processes share."""
    speculation: SpeculationParams | None = None
    """None: as the engine is configured."""
    priority: int = 0
    """Lower ones first; only where the engine's scheduling policy is "priority"."""
    deadline: float | None = None
    """Monotonic second by which its first token is worth something; None: it may wait for ever."""
    cache_salt: str | None = None
    """It shares the KV cache of equal beginnings with requests of the same salt only; None is one of its own."""


@dataclass(slots=True, kw_only=True)
class TokenLogprobs:
    """Of one token of the output or the prompt, from the model's raw logits."""

    logprob: float
    rank: int
    """1 for the likeliest token."""
    top: list[tuple[int, float]]
    """(token id, logprob) of the likeliest tokens, likeliest first; as many as were asked for."""


@dataclass(slots=True, kw_only=True)
class DraftCounts:
    """Of one drafter: for a request, or for an engine since the last message. Only verified drafts count."""

    num_drafts: int = 0
    """Steps that verified at least one of its drafts."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Of those, the ones that came out"""

    @property
    def acceptance_rate(self) -> float:
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0


@dataclass(slots=True, kw_only=True)
class SpeculationUsage:
    """What speculation did for one request so far."""

    num_steps: int = 0
    """Target passes that emitted its tokens."""
    drafters: dict[str, DraftCounts] = field(default_factory=dict)
    speedup: float | None = None
    """How many times faster than plain decoding the engine believes it was; None while it cannot tell."""


@dataclass(slots=True, kw_only=True)
class DrafterStats(DraftCounts):
    """What happened to one drafter since the last message."""

    num_drafted_per_position: list[int] = field(default_factory=list)
    """Verified drafts at position 1, 2 … of their steps."""
    num_accepted_per_position: list[int] = field(default_factory=list)
    num_proposed_tokens: int = 0
    """Drafts made, verified or not."""
    seconds: float = 0.0
    """Spent drafting."""
    num_failures: int = 0


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """What one step gave one request. The last output of a request carries `finish_reason`."""

    request_id: str
    new_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    """One entry for each new token, when asked for."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """One entry for each prompt token but the first, when asked for; comes with the first new token."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The member of `stop_token_ids` that ended the request (it is the last new token); None for an end token."""
    error: str | None = None
    """Why, when `finish_reason` is "error"."""
    deadline_exceeded: bool = False
    """That is why: it could not have been answered in time."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV cache was found rather than computed; settled when the first token arrives."""
    scheduled_time: float = 0.0
    """Monotonic second at which the request was first given a place in a step; 0 before that."""
    first_token_time: float = 0.0
    """Monotonic second at which the first token was sampled; 0 before that."""
    origins: list[str] | None = None
    """Of each new token, when asked for: the drafter that proposed it, or `TARGET`."""
    speculation: SpeculationUsage | None = None
    """Up to now; None where the engine does not speculate."""


@dataclass(slots=True, kw_only=True)
class EngineStats:
    """State after a step, and what has been counted since the previous message."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    """Share of the blocks that running requests hold, 0 to 1."""
    prefix_cache_queries: int = 0
    """Prompt tokens looked up."""
    prefix_cache_hits: int = 0
    """Of those, tokens found."""
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    """Prompt tokens computed or found, counted when a request's first token is sampled."""
    num_generated_tokens: int = 0
    iteration_tokens: int = 0
    """Tokens that the step computed; 0 if no step was run."""
    drafters: dict[str, DrafterStats] = field(default_factory=dict)
    """By drafter, where there is something to say."""
    decode_seconds: float = 0.0
    """Of steps that emitted tokens, drafting included …"""
    plain_seconds: float = 0.0
    """… and what plain decoding would have taken for the same tokens, as the engine believes."""


@dataclass(slots=True, kw_only=True)
class EngineOutput:
    """One message a step, for all its requests."""

    outputs: list[RequestOutput]
    stats: EngineStats


@dataclass(slots=True, kw_only=True)
class EngineInfo:
    """What an engine says of itself once it is ready."""

    model: str
    device: str
    dtype: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    weight_bytes: int
    kv_cache_bytes: int
    load_seconds: float
    drafters: list[str] = field(default_factory=list)
    """Names of those that may be used; none where the engine does not speculate."""
    num_speculative_tokens: int = 0
    """The most drafts that one step verifies for one request."""
    gpu_uuid: str | None = None
    """Of the GPU that it computes on, as CUDA says it."""


@dataclass(slots=True, kw_only=True)
class NewRequestData:
    """A request that the runner does not hold (first time, or again after a preemption)."""

    request_id: str
    token_ids: list[int]
    """The prompt, then what was generated before a preemption."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """The KV cache of so many leading tokens is in the blocks already."""
    block_ids: list[int]
    params: SamplingParams
    seed: int
    choice_index: int
    eos_token_ids: list[int]
    tenant: str | None = None
    """See `SpeculationParams`."""


@dataclass(slots=True, kw_only=True)
class CachedRequestData:
    """A request that the runner holds: only what changed. It knows the tokens it sampled itself."""

    request_id: str
    num_computed_tokens: int
    new_block_ids: list[int]


@dataclass(slots=True, kw_only=True)
class ProposalPlan:
    """Who is to draft for a request once a step has emitted its tokens, and how many tokens at most."""

    drafter: str
    max_tokens: int
    fallback: str | None = None
    """Who is asked instead where the first one's drafts are not worth `trust`."""
    fallback_max_tokens: int = 0
    trust: float = 0.0
    """Accepted tokens that the first one has to expect of its own drafts (the sum of the running products of its
    scores)."""


@dataclass(slots=True, kw_only=True)
class SchedulerOutput:
    """The plan of one step."""

    num_scheduled_tokens: dict[str, int]
    """How many tokens each request computes, from its `num_computed_tokens` on; the order is the batch's.
    A request whose last known token is among them is sampled."""
    new_requests: list[NewRequestData]
    cached_requests: list[CachedRequestData]
    removed_request_ids: list[str]
    """Finished, aborted or preempted since the previous plan; dropped before the new ones are added."""
    preempted_request_ids: set[str] = field(default_factory=set)
    """Of those, the ones that will come back."""
    draft_token_ids: dict[str, list[int]] = field(default_factory=dict)
    """Drafts to verify: the tokens that a request computes after its last known one. Part of its scheduled tokens."""
    proposals: dict[str, ProposalPlan] = field(default_factory=dict)
    """Who drafts for whom at the end of the step; requests that are sampled in it, not all of them."""
    num_prompt_logprobs: dict[str, int] = field(default_factory=dict)
    """After so many of a request's scheduled tokens, the leading ones, the logprobs of its prompt's next token are
    wanted."""


@dataclass(slots=True, kw_only=True)
class Draft:
    """What a drafter proposes to come after a request's last token."""

    drafter: str
    token_ids: list[int]
    scores: list[float] | None
    """`sol.speculation.propose.Proposal.scores`"""
    sampled: bool = False
    """Drawn with noise of their own: how many are verified must not depend on which they are."""


@dataclass(slots=True, kw_only=True)
class Drafting:
    """One call of one drafter."""

    drafter: str
    num_requests: int
    num_tokens: int
    """Proposed, over all requests"""
    seconds: float
    error: str | None = None
    """Why there is nothing: the drafter failed, and is put aside for a while."""
    request_ids: list[str] = field(default_factory=list)
    """Who it was asked for …"""
    num_request_tokens: list[int] = field(default_factory=list)
    """… and how many tokens each of them had"""


@dataclass(slots=True, kw_only=True)
class StepOutput:
    """What the runner made of a plan."""

    sampled_token_ids: dict[str, list[int]]
    """By request: accepted drafts, then the target's own token. Requests still in their prompt are absent."""
    logprobs: dict[str, list[TokenLogprobs]]
    """By request, one entry a sampled token; requests that did not ask are absent."""
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    """By request, as many entries as the plan wants."""
    errors: dict[str, str] = field(default_factory=dict)
    """Why a request that was to be sampled, or its prompt's logprobs, could not be; it ends, its neighbours go on."""
    drafts: dict[str, Draft] = field(default_factory=dict)
    """By request, for the next step; those of whom nobody proposed anything are absent."""
    draftings: list[Drafting] = field(default_factory=list)
