"""A request as the engine sees it: its tokens, how far their KV cache is computed, and when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from sol.engine.types import Draft, EngineRequest, SpeculationParams, SpeculationUsage, TokenLogprobs
from sol.errors import ContextLengthError, RequestError
from sol.sampling_params import SamplingParams


@dataclass(slots=True, eq=False)
class Request:
    """State of one request between `add` and its last output. Only the scheduler changes it."""

    request_id: str
    token_ids: list[int]
    """The prompt, then everything generated."""
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    choice_index: int
    eos_token_ids: list[int]
    max_num_tokens: int
    """Prompt and output together, by `max_tokens` and by the model's length."""
    sequence: int
    """Place in the order of arrival; a smaller one is older."""
    num_computed_tokens: int = 0
    """The KV cache of so many leading tokens is computed once the steps planned so far have run."""
    num_pending_tokens: int = 0
    """Tokens after `token_ids` that planned steps sample and whose results have not been read."""
    num_verifying: int = 0
    """Drafts that a planned step verifies; not 0 means that nothing more can be planned before it is read."""
    draft: Draft | None = None
    """What somebody proposes to come after the tokens that are known."""
    num_draftings: int = 0
    """Planned steps at whose end somebody drafts for it and writes ahead into its blocks: it waits for them."""
    speculation: SpeculationParams | None = None
    priority: int = 0
    arrival_time: float = 0.0
    """Monotonic second."""
    deadline: float | None = None
    cache_salt: str | None = None
    usage: SpeculationUsage = field(default_factory=SpeculationUsage)
    prefilling: bool = True
    """No step since it was given its place reaches its last token, so none samples it."""
    block_ids: list[int] = field(default_factory=list)
    """The block table. Empty while it waits."""
    block_hashes: list[bytes] = field(default_factory=list)
    """Of the leading full blocks, as far as anyone asked; they belong to the tokens and outlive a preemption."""
    num_published_blocks: int = 0
    """So many leading blocks of the table have been offered to the prefix cache, or came from there."""
    num_cached_tokens: int | None = None
    """Prompt tokens found when it was first given a place; None before that."""
    scheduled_time: float = 0.0
    first_token_time: float = 0.0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of its prompt's second token and those after it, as far as they have been read. They outlive a preemption."""

    @property
    def lacks_prompt_logprobs(self) -> bool:
        wanted = self.params.prompt_logprobs is not None
        return wanted and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    def take_prompt_logprobs(self, start: int, entries: Sequence[TokenLogprobs]) -> None:
        """Those of the prompt's tokens from `start` + 1 on. What is there already is from before a preemption."""
        assert start <= len(self.prompt_logprobs), "logprobs of a prompt have a gap"
        self.prompt_logprobs += entries[len(self.prompt_logprobs) - start :]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_planned_tokens(self) -> int:
        """Its tokens once the steps planned so far have been read; fewer if one of them ends it."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_unplanned_tokens(self) -> int:
        """How many more it may get after those."""
        return self.max_num_tokens - self.num_planned_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Left to plan. The KV cache of a request's last possible token is never needed."""
        return min(self.num_planned_tokens, self.max_num_tokens - 1) - self.num_computed_tokens

    def append(self, token_id: int) -> Literal["stop", "length"] | None:
        """Add a sampled token; the reason if it is the last one.

        End and stop tokens count once `min_tokens` tokens are out (the sampler masks them before that).
        """
        self.token_ids.append(token_id)
        self.draft = None
        return self._ends_with(token_id, len(self.token_ids))

    def num_kept(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens it would take: those after the one that ends it are too many."""
        for count, token_id in enumerate(token_ids[:-1], start=1):
            if self._ends_with(token_id, len(self.token_ids) + count) is not None:
                return count
        return len(token_ids)

    def stop_token(self) -> int | None:
        """The member of `stop_token_ids` that the request ended with; None if it was one of the model's end tokens."""
        last = self.token_ids[-1]
        return None if self._is_end(last) else last

    def _ends_with(self, token_id: int, num_tokens: int) -> Literal["stop", "length"] | None:
        """Whether `token_id` as the last one of so many tokens ends it, and why."""
        ends = self._is_end(token_id)
        if ends and self.params.grammar is not None:
            return "stop"  # its mask has seen to `min_tokens`, as far as the grammar lets it
        ends = ends or token_id in self.params.stop_token_ids
        if ends and num_tokens - self.num_prompt_tokens >= self.params.min_tokens:
            return "stop"
        return "length" if num_tokens >= self.max_num_tokens else None

    def _is_end(self, token_id: int) -> bool:
        return token_id in self.eos_token_ids and (not self.params.ignore_eos or self.params.grammar is not None)


def make_request(wanted: EngineRequest, *, max_model_len: int, sequence: int) -> Request:
    """Check what the scheduler relies on. Raises `RequestError` for a prompt that can never be answered."""
    length = len(wanted.prompt_token_ids)
    if length == 0:
        raise RequestError("prompt is empty: give at least one token", param="prompt")
    if length >= max_model_len:
        raise ContextLengthError(
            f"prompt has {length} tokens, but this model's length is {max_model_len} and at least one token is for "
            f"the output: shorten the prompt to {max_model_len - 1} tokens or start the engine with a larger "
            "max_model_len",
            param="prompt",
        )
    limit = max_model_len
    if wanted.params.max_tokens is not None:
        limit = min(limit, length + wanted.params.max_tokens)
    return Request(
        request_id=wanted.request_id,
        token_ids=list(wanted.prompt_token_ids),
        num_prompt_tokens=length,
        params=wanted.params,
        seed=wanted.seed,
        choice_index=wanted.choice_index,
        eos_token_ids=wanted.eos_token_ids,
        max_num_tokens=limit,
        sequence=sequence,
        speculation=wanted.speculation,
        priority=wanted.priority,
        arrival_time=wanted.arrival_time,
        deadline=wanted.deadline,
        cache_salt=wanted.cache_salt,
    )
