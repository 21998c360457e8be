"""Logprobs of prompts: what the model says of the tokens that it was given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sol.engine.types import StepOutput
from sol.sampling.sampler import NOT_FINITE_MESSAGE, measure_logprobs


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A stretch of one request's prompt."""

    request_id: str
    token_ids: list[int]
    """Whose logprobs are wanted, each by the row of logits after the token before it"""
    count: int
    """How many of the likeliest tokens are wanted beside each"""


def prompt_logprobs(logits: torch.Tensor, parts: Sequence[PromptPart]) -> Callable[[StepOutput], None]:
    """Raw logits [N, V], a row a wanted token, part after part → what writes them into a result, once somebody waits.

    A request of which a row is not finite gets an error in place of tokens and logprobs.
    """
    token_ids = [token_id for part in parts for token_id in part.token_ids]
    counts = [part.count for part in parts for _ in part.token_ids]
    read = measure_logprobs(logits, token_ids, counts)

    def write(output: StepOutput) -> None:
        entries = iter(read())
        for part in parts:
            found = [next(entries) for _ in part.token_ids]
            # NaN compares as false.
            if all(entry.logprob <= 0.0 for entry in found):
                output.prompt_logprobs[part.request_id] = found
                continue
            output.errors[part.request_id] = NOT_FINITE_MESSAGE
            output.sampled_token_ids.pop(part.request_id, None)
            output.logprobs.pop(part.request_id, None)

    return write
