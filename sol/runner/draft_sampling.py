"""Drafts of many requests that sample, picked at once on a device.

The kernel, or its twin on a CPU, is the one that samples the target's tokens: with the same noise and the same cuts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sol.runner.device_rows import pack_parameters
from sol.sampling import batched
from sol.sampling.batched import SamplingParameters
from sol.sampling.processing import SamplingRow


def sample_drafts(logits: torch.Tensor, rows: Sequence[SamplingRow], num_tokens: Sequence[int]) -> list[int]:
    """[S, V] float32, contiguous → a token for each row, -1 where its logits are not numbers.

    `num_tokens`: how many tokens each request has by now, drafts included. Of requests that adjust their logits what
    is sampled is not what they would get.
    """
    device = logits.device
    packed = np.concatenate([pack_parameters(rows), np.array([num_tokens], dtype=np.int64)])
    temperature, top_k, top_p, log_min_p, keys, prompts, lengths = torch.from_numpy(packed).to(device)
    # In memory of their own: Triton compiles a kernel again for pointers that are not aligned.
    parameters = SamplingParameters(
        temperature=temperature.view(torch.float64).float(),
        top_k=top_k.int(),
        top_p=top_p.view(torch.float64).float(),
        log_min_p=log_min_p.view(torch.float64).float(),
        choice_key=keys.clone(),
        num_prompt_tokens=prompts.clone(),
    )
    entries, seq_lens = torch.arange(len(rows), device=device), lengths.int()
    if device.type == "cuda":
        from sol.ops.gpu.sampling import sample_rows

        token_ids = torch.empty_like(entries)
        sample_rows(logits, entries, seq_lens, parameters.tensors(), token_ids, torch.empty_like(entries))
    else:
        token_ids = batched.sample_rows(logits, entries, seq_lens, parameters)
    found: list[int] = token_ids.tolist()
    return found
