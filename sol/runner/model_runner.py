"""Carries out plans: batch, forward pass, sampling or verification, drafting."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sol.engine.types import NewRequestData, SchedulerOutput, StepOutput
from sol.ops import Executor
from sol.runner.drafters import Drafters, as_draft
from sol.runner.input_batch import InputBatch
from sol.sampling.grammar import Grammars
from sol.sampling.prompt import prompt_logprobs
from sol.sampling.sampler import SampledToken, sample
from sol.sampling_params import SamplingParams
from sol.speculation.config import VerifyMethod
from sol.speculation.verify import verify


class ModelRunner:
    """Implements `sol.engine.core.Runner` for one model on one device, each step to its end before the next."""

    def __init__(
        self,
        executor: Executor,
        *,
        block_size: int,
        num_blocks: int,
        device: torch.device,
        drafters: Drafters | None = None,
        verify_method: VerifyMethod = "coupled",
        grammars: Grammars | None = None,
    ) -> None:
        """`grammars` compiles those of requests; without it requests must not have any."""
        self._executor = executor
        self._drafters = drafters
        self._verify_method: VerifyMethod = verify_method
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._batch = InputBatch(block_size, device, grammars)

    def submit(self, plan: SchedulerOutput) -> Callable[[], StepOutput]:
        result = self.execute(plan)
        return lambda: result

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> StepOutput:
        if self._drafters is not None:
            self._drafters.leave(plan)
        self._batch.apply(plan)
        batch, sampled = self._batch.build(plan)
        logits = self._executor.forward(batch)
        result = StepOutput(sampled_token_ids={}, logprobs={}, errors={})
        write = None
        if plan.num_prompt_logprobs:
            count = sum(plan.num_prompt_logprobs.values())
            write = prompt_logprobs(logits[-count:], self._batch.prompt_parts(plan))
            logits = logits[:-count]
        chosen = self._choose(plan, logits, sampled) if sampled else []
        for request_id, tokens in zip(sampled, chosen, strict=True):
            if tokens[0].error is not None:
                result.errors[request_id] = tokens[0].error
                continue
            token_ids = [token.token_id for token in tokens]
            self._batch.append(request_id, token_ids)
            result.sampled_token_ids[request_id] = token_ids
            if tokens[0].logprobs is not None:
                result.logprobs[request_id] = [token.logprobs for token in tokens if token.logprobs is not None]
        if write is not None:
            write(result)
        if plan.proposals and self._drafters is not None:
            self._draft(plan, result, self._drafters)
        return result

    def _choose(self, plan: SchedulerOutput, logits: torch.Tensor, sampled: list[str]) -> list[list[SampledToken]]:
        if plan.draft_token_ids:
            rows = self._batch.verify_rows(sampled, plan.draft_token_ids)
            return verify(logits, rows, self._verify_method)
        self._batch.drop_draft_probs(sampled)
        return [[token] for token in sample(logits, self._batch.sampling_rows(sampled))]

    def _draft(self, plan: SchedulerOutput, result: StepOutput, drafters: Drafters) -> None:
        wanted = {name: one for name, one in plan.proposals.items() if name in result.sampled_token_ids}
        answer = drafters.propose(wanted, self._batch.proposal_rows(wanted))
        result.draftings = answer.draftings
        for request_id, (name, proposal) in answer.proposals.items():
            self._batch.set_draft_probs(request_id, proposal.probs)
            result.drafts[request_id] = as_draft(name, proposal)

    def run_worst_case(self, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int) -> None:
        """The largest step there can be, once, before anybody waits: it must fit, and first calls are slow."""
        capacity = min(max_model_len, self._num_blocks * self._block_size)
        plan = worst_case(max_num_seqs, max_num_batched_tokens, capacity, self._block_size)
        self.execute(plan)
        self.remove([new.request_id for new in plan.new_requests])

    def remove(self, request_ids: Sequence[str]) -> None:
        """Requests of plans that no scheduler made."""
        self._batch.remove(request_ids)


def worst_case(max_num_seqs: int, max_num_batched_tokens: int, capacity: int, block_size: int) -> SchedulerOutput:
    """A step as large as there can be, of requests of at most `capacity` tokens.

    They are of equal lengths, share the cache's first blocks (what they compute is not used), and every one of them
    is sampled from the whole vocabulary with logprobs.
    """
    length = max(1, min(max_num_batched_tokens // max_num_seqs, capacity))
    first = min(max_num_batched_tokens - length * (max_num_seqs - 1), capacity)
    params = SamplingParams(logprobs=0)
    requests = []
    for index in range(max_num_seqs):
        count = first if index == 0 else length
        requests.append(
            NewRequestData(
                request_id=f"worst-case-{index}",
                token_ids=[0] * count,
                num_prompt_tokens=count,
                num_computed_tokens=0,
                block_ids=list(range(-(-count // block_size))),
                params=params,
                seed=0,
                choice_index=0,
                eos_token_ids=[],
            )
        )
    return SchedulerOutput(
        num_scheduled_tokens={r.request_id: len(r.token_ids) for r in requests},
        new_requests=requests,
        cached_requests=[],
        removed_request_ids=[],
    )


def worst_drafts(max_num_seqs: int, max_num_logits_rows: int, capacity: int, block_size: int) -> SchedulerOutput:
    """A step with as many rows of logits as there can be, of requests of at most `capacity` tokens.

    They have one token each and verify drafts, in the cache's first blocks.
    """
    each, more = divmod(max_num_logits_rows, max_num_seqs)
    counts = {f"worst-drafts-{i}": min(each + (i < more), capacity) for i in range(max_num_seqs)}
    requests = [
        NewRequestData(
            request_id=name,
            token_ids=[0],
            num_prompt_tokens=1,
            num_computed_tokens=0,
            block_ids=list(range(-(-count // block_size))),
            params=SamplingParams(),
            seed=0,
            choice_index=0,
            eos_token_ids=[],
        )
        for name, count in counts.items()
    ]
    return SchedulerOutput(
        num_scheduled_tokens=counts,
        new_requests=requests,
        cached_requests=[],
        removed_request_ids=[],
        draft_token_ids={name: [0] * (count - 1) for name, count in counts.items() if count > 1},
    )
