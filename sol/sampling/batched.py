"""Sampling of many rows at once that never asks the device for an answer: what a GPU runs inside a step.

It does what `sol.sampling.sampler` does for rows whose logits need no adjustment (bias, penalties, forbidden ends) and
that want no logprobs. A cut is a threshold here: of tokens with exactly equal logits at the edge of top_k all stay,
where `topk` keeps an arbitrary choice of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sol.sampling.noise import choice_key, gumbel, stream_keys
from sol.sampling.processing import SamplingRow

NOT_FINITE = -1
"""In place of a token id: the row's logits are not numbers."""


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """One entry a row of the runner, on the device. What is not asked for has its neutral value."""

    temperature: torch.Tensor
    """float32; 0 for greedy"""
    top_k: torch.Tensor
    """int32; 0 for all"""
    top_p: torch.Tensor
    """float32; 1 for all"""
    log_min_p: torch.Tensor
    """float32: log(min_p), -inf for all"""
    choice_key: torch.Tensor
    """int64: `noise.choice_key`, as the int64 with the same bits"""
    num_prompt_tokens: torch.Tensor
    """int64"""

    @classmethod
    def empty(cls, num_rows: int, device: torch.device) -> SamplingParameters:
        """All rows greedy."""
        return cls(
            temperature=torch.zeros(num_rows, dtype=torch.float32, device=device),
            top_k=torch.zeros(num_rows, dtype=torch.int32, device=device),
            top_p=torch.ones(num_rows, dtype=torch.float32, device=device),
            log_min_p=torch.full((num_rows,), -math.inf, dtype=torch.float32, device=device),
            choice_key=torch.zeros(num_rows, dtype=torch.int64, device=device),
            num_prompt_tokens=torch.zeros(num_rows, dtype=torch.int64, device=device),
        )

    def fill(self, index: int, row: SamplingRow) -> None:
        """Set one entry. For the host: on a device it would be one tiny copy after the other."""
        params = row.params
        self.temperature[index] = 0.0 if params.greedy else params.temperature
        self.top_k[index] = min(params.top_k, 2**31 - 1)  # more than any vocabulary
        self.top_p[index] = params.top_p
        # As the sampler's threshold does: the logarithm of the float32, in float32.
        self.log_min_p[index] = torch.log(torch.tensor(params.min_p))
        key = choice_key(row.seed, row.choice_index)
        self.choice_key[index] = key - (1 << 64) if key >= 1 << 63 else key
        self.num_prompt_tokens[index] = len(row.prompt_token_ids)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (
            self.temperature,
            self.top_k,
            self.top_p,
            self.log_min_p,
            self.choice_key,
            self.num_prompt_tokens,
        )


def needs_host(row: SamplingRow, num_output_tokens: int) -> bool:
    """Whether a token after `num_output_tokens` others depends on more than `SamplingParameters` holds."""
    params = row.params
    return (
        params.logprobs is not None
        or num_output_tokens < params.min_tokens
        or bool(params.logit_bias)
        or params.penalised
        or params.grammar is not None
    )


def sample_rows(
    logits: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, parameters: SamplingParameters
) -> torch.Tensor:
    """logits [S, V] float32 → token ids [S] int64, `NOT_FINITE` where a row is not to be sampled from.

    `rows` [S] int64 says which entry of `parameters` is whose, `seq_lens` [S] how many tokens a request has already.
    """
    best, best_ids = logits.max(dim=-1)  # a NaN anywhere in a row is its maximum
    temperature = parameters.temperature[rows].unsqueeze(1)
    greedy = temperature == 0.0
    scaled = logits / torch.where(greedy, 1.0, temperature)
    kept = scaled >= _thresholds(scaled, rows, parameters).unsqueeze(1)
    keys = stream_keys(parameters.choice_key[rows], seq_lens.long() - parameters.num_prompt_tokens[rows])
    noise = gumbel(keys.unsqueeze(1), torch.arange(logits.shape[1], device=logits.device))
    noisy = torch.where(kept, scaled + noise, -math.inf).argmax(dim=-1)
    token_ids = torch.where(greedy.squeeze(1), best_ids, noisy)
    return torch.where(best.isfinite(), token_ids, NOT_FINITE)


def _thresholds(scaled: torch.Tensor, rows: torch.Tensor, parameters: SamplingParameters) -> torch.Tensor:
    """[S]: the least scaled logit of each row that may be sampled."""
    vocabulary = scaled.shape[1]
    ordered = scaled.sort(dim=-1, descending=True).values
    top_k = parameters.top_k[rows].long()
    limit = torch.where(top_k == 0, vocabulary, top_k.clamp(max=vocabulary))
    threshold = ordered.gather(1, (limit - 1).unsqueeze(1))
    threshold = torch.maximum(threshold, ordered[:, :1] + parameters.log_min_p[rows].unsqueeze(1))
    left = torch.where(ordered >= threshold, ordered, -math.inf)
    mass = (left - left[:, :1]).exp()
    before = mass.cumsum(dim=-1) - mass
    top_p = parameters.top_p[rows].unsqueeze(1)
    inside = (before < top_p * mass.sum(dim=-1, keepdim=True)) & (left > -math.inf)
    inside[:, 0] = True
    last = inside.long().cumsum(dim=-1).argmax(dim=-1, keepdim=True)  # a tie goes to the first: the last one inside
    cut = ordered.gather(1, last)
    return torch.where(top_p < 1.0, torch.maximum(threshold, cut), threshold).squeeze(1)
