"""A model's executor without scheduler and sampler: what benchmarks of single steps and of logits drive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sol import assemble
from sol.config import EngineConfig
from sol.ops import Executor
from sol.ops.batch import RaggedBatch


@dataclass(frozen=True, slots=True)
class Direct:
    """One request on a backend; `forward` computes any tokens of it."""

    executor: Executor
    block_size: int
    max_model_len: int

    @classmethod
    def open(cls, config: EngineConfig) -> Direct:
        """As `sol.LLM` loads it: the same plan, weights, kernels and KV cache."""
        settled = assemble.plan(config, progress=False)
        torch.set_num_threads(settled.threads)
        executor, _ = assemble._build_executor(config, settled, progress=False)
        return cls(executor, config.block_size, settled.memory.max_model_len)

    def batch(self, token_ids: Sequence[int], start: int) -> RaggedBatch:
        """`token_ids` at positions from `start` on, what comes before them in the cache; logits of all of them."""
        count = len(token_ids)
        assert start + count <= self.max_model_len
        positions = torch.arange(start, start + count)
        return RaggedBatch(
            token_ids=torch.tensor(token_ids),
            positions=positions,
            slot_mapping=positions,  # blocks in order: a slot is a position
            block_table=torch.arange(-(-(start + count) // self.block_size))[None],
            query_lens=[count],
            seq_lens=[start + count],
            logits_rows=torch.arange(count),
        )

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """[tokens, vocab_size] float32, overwritten by the next call."""
        return self.executor.forward(batch)
