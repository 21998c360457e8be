"""The simulated engine's state as Sol's own engine tells it, so that both have the same metrics."""

from __future__ import annotations

import copy

from sol.engine.types import DrafterStats, EngineInfo, EngineStats
from sol.server.metrics import Metrics
from sol.simulate.engine import SimulatedEngine, Step
from sol.simulate.laws import EngineLaws
from sol.simulate.responses import DRAFTER
from sol.simulate.vocabulary import VOCAB_SIZE


def engine_info(laws: EngineLaws, name: str) -> EngineInfo:
    return EngineInfo(
        model=name,
        device="simulated",
        dtype="none",
        vocab_size=VOCAB_SIZE,
        max_model_len=laws.max_model_len,
        max_num_seqs=laws.max_num_seqs,
        max_num_batched_tokens=laws.max_num_batched_tokens,
        block_size=laws.block_size,
        num_blocks=laws.num_blocks,
        weight_bytes=0,
        kv_cache_bytes=0,
        load_seconds=0.0,
        drafters=[DRAFTER] if laws.num_speculative_tokens else [],
        num_speculative_tokens=laws.num_speculative_tokens,
    )


class StatsReader:
    """Tells `metrics` what has changed in `engine` since it was asked last."""

    def __init__(self, engine: SimulatedEngine, metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._seen = copy.deepcopy(engine.counters)

    def observe(self, step: Step | None) -> None:
        """After a step, or between steps."""
        engine, now, seen = self._engine, self._engine.counters, self._seen
        stats = EngineStats(
            num_running=engine.num_running,
            num_waiting=engine.num_waiting,
            kv_cache_usage=engine.pool.usage,
            prefix_cache_queries=now.prefix_cache_queries - seen.prefix_cache_queries,
            prefix_cache_hits=now.prefix_cache_hits - seen.prefix_cache_hits,
            num_preemptions=now.num_preemptions - seen.num_preemptions,
            num_prompt_tokens=now.num_prompt_tokens - seen.num_prompt_tokens,
            num_generated_tokens=now.num_generated_tokens - seen.num_generated_tokens,
            iteration_tokens=0 if step is None else step.num_tokens,
        )
        if engine.laws.num_speculative_tokens:
            num_proposed = now.num_draft_tokens - seen.num_draft_tokens
            stats.drafters[DRAFTER] = DrafterStats(
                num_drafts=now.num_drafts - seen.num_drafts,
                num_draft_tokens=num_proposed,
                num_accepted_tokens=now.num_accepted_tokens - seen.num_accepted_tokens,
                num_drafted_per_position=_difference(now.drafted_per_position, seen.drafted_per_position),
                num_accepted_per_position=_difference(now.accepted_per_position, seen.accepted_per_position),
                num_proposed_tokens=num_proposed,
            )
            if step is not None and step.emissions:
                stats.drafters[DRAFTER].seconds = step.longest_draft * engine.laws.draft_token_seconds
                stats.decode_seconds = step.end - step.start
                stats.plain_seconds = self._plain_seconds(step)
        self._seen = copy.deepcopy(now) if engine.laws.num_speculative_tokens else copy.copy(now)
        self._metrics.observe_stats(stats)

    def _plain_seconds(self, step: Step) -> float:
        """What the laws say of decoding the same tokens one by one: as many steps as the mean request got tokens."""
        context = sum(request.prompt_tokens + request.num_output for request, _, _ in step.emissions)
        number = len(step.emissions)
        tokens = sum(num_tokens for _, num_tokens, _ in step.emissions)
        return tokens / number * self._engine.laws.step_duration(number, 0, context)


def _difference(now: list[int], seen: list[int]) -> list[int]:
    return [a - b for a, b in zip(now, seen, strict=True)]
