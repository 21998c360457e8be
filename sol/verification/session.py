"""An engine that is asked for whole answers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sol.engine.client import EngineClient
from sol.engine.types import EngineRequest, RequestOutput, SpeculationParams, SpeculationUsage, TokenLogprobs
from sol.errors import SolError
from sol.sampling_params import SamplingParams

PLAIN = SpeculationParams(enabled=False)


@dataclass(frozen=True, slots=True)
class Ask:
    token_ids: list[int]
    params: SamplingParams
    seed: int
    speculation: SpeculationParams | None = None
    """None: as the engine is configured."""


@dataclass(slots=True)
class Answer:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    usage: SpeculationUsage | None = None
    num_cached_tokens: int = 0
    num_decoded_tokens: int = 0
    """Those of all outputs but the first, whose time is the prompt's."""
    decode_seconds: float = 0.0
    """From the first output to the last."""


class Session:
    """`advance` is called with 1 for each answer that is complete."""

    def __init__(
        self, client: EngineClient, eos_token_ids: Sequence[int], advance: Callable[[int], None] = lambda count: None
    ) -> None:
        self.info = client.info
        self.num_failures: dict[str, int] = {}
        """By drafter: how often it failed"""
        self.num_cache_hits = 0
        """Prompt tokens found in the prefix cache"""
        self._client = client
        self._eos_token_ids = list(eos_token_ids)
        self.advance = advance
        self._numbers = itertools.count()

    def ask(self, asks: Sequence[Ask], *, together: bool) -> list[Answer]:
        """All answers, in order: computed at once or one after the other.

        Raises `EngineDeadError` where the engine has failed, `SolError` where it refuses one of them.
        """
        if not together:
            return [answer for ask in asks for answer in self.ask([ask], together=True)]
        requests = [
            EngineRequest(
                request_id=f"verify-{next(self._numbers)}",
                prompt_token_ids=ask.token_ids,
                params=ask.params,
                seed=ask.seed,
                eos_token_ids=self._eos_token_ids,
                speculation=ask.speculation,
            )
            for ask in asks
        ]
        answers = {request.request_id: Answer() for request in requests}
        began: dict[str, float] = {}
        unfinished = set(answers)
        self._client.add(requests)
        while unfinished:
            message = self._client.receive()
            now = time.perf_counter()
            self.num_cache_hits += message.stats.prefix_cache_hits
            for name, stats in message.stats.drafters.items():
                if stats.num_failures:
                    self.num_failures[name] = self.num_failures.get(name, 0) + stats.num_failures
            for output in message.outputs:
                _take(answers[output.request_id], output, began, now)
                if output.finish_reason is not None:
                    unfinished.remove(output.request_id)
                    self.advance(1)
        return [answers[request.request_id] for request in requests]


def _take(answer: Answer, output: RequestOutput, began: dict[str, float], now: float) -> None:
    if output.finish_reason == "error":
        raise SolError(output.error or "the engine refused a request")
    answer.token_ids += output.new_token_ids
    answer.logprobs += output.logprobs or []
    answer.usage = output.speculation or answer.usage
    if output.request_id in began:
        answer.num_decoded_tokens += len(output.new_token_ids)
        answer.decode_seconds = now - began[output.request_id]
    else:
        answer.num_cached_tokens = output.num_cached_tokens
        began[output.request_id] = now
