"""Choices through the engine: tokens in, text out, stop strings obeyed, everything counted.

A request asks for one or more choices (prompts × n). Each is an `EngineRequest` of its own; `generate` merges what
comes of them. Closing the iterator, however that happens, aborts what is still running.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Literal

from sol.engine.types import (
    TARGET,
    EngineRequest,
    FinishReason,
    RequestOutput,
    SpeculationParams,
    SpeculationUsage,
    TokenLogprobs,
)
from sol.errors import DeadlineExceededError, EngineDeadError, RequestError, SolError
from sol.grammar import GRAMMAR_FAILED
from sol.sampling_params import SamplingParams
from sol.server.metrics import Metrics, Timeline
from sol.server.scheduling import Scheduling
from sol.server.segments import Segment, Segments
from sol.server.speculation import usage_fields
from sol.server.state import ServedModel, ServerState, shutting_down
from sol.speculation.usage import add_usages, advance
from sol.text.answer_parser import AnswerParser
from sol.text.answer_parts import Part, merge
from sol.text.detokenizer import Detokenizer
from sol.text.stop_strings import StopStrings

MAX_CHOICES = 1024
"""Of one request, all its prompts together."""
CHOICES = "sol.choices"
"""Where a request's ASGI scope has them, for whoever sums them up when it has ended."""


@dataclass(slots=True, eq=False)
class Choice:
    """One choice while it is generated, and its sums."""

    index: int
    """In the response."""
    prompt_index: int
    request: EngineRequest
    detokenizer: Detokenizer
    speculation: SpeculationUsage | None
    """So far; None where the engine does not speculate."""
    parser: AnswerParser | None = None
    """Of its text, where that is more than content."""
    timeline: Timeline = field(init=False)
    num_tokens: int = 0
    num_cached_tokens: int = 0
    num_reasoning_tokens: int = 0
    """Before it is known where reasoning ends, or that there is none, these are all tokens."""
    reasoning_ended: bool = False
    segments: Segments | None = field(init=False)
    """When the client wants to know who made the tokens."""

    def __post_init__(self) -> None:
        self.timeline = Timeline(self.request.arrival_time)
        wanted = self.request.speculation
        self.segments = Segments() if wanted is not None and wanted.include_origins else None


@dataclass(slots=True)
class ChoiceOutput:
    """What arrived for one choice."""

    choice: Choice
    text: str
    """May be empty: whole characters only, and nothing that could be the beginning of a stop string."""
    token_ids: list[int]
    token_offsets: list[int]
    """Where each token's text begins, in characters from the beginning of the choice's text."""
    logprobs: list[TokenLogprobs] | None
    """One for each of `token_ids`, when asked for."""
    prompt_logprobs: list[TokenLogprobs] | None
    """One for each token of the prompt but the first, when asked for; comes with the first tokens."""
    finish_reason: FinishReason | Literal["tool_calls"] | None
    stop_reason: str | int | None
    """vLLM's: the stop string or the stop token id that ended the choice."""
    segments: list[Segment] | None = None
    """Who made `text`, when asked for; only outputs that are streamed have it."""
    parts: list[Part] | None = None
    """What became certain of the answer with `text`, of a choice that has a parser."""


@dataclass(slots=True)
class Usage:
    """OpenAI's `usage`: each prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    speculation: SpeculationUsage | None = None
    """Of all choices; None where the engine does not speculate."""
    reasoning_tokens: int = 0
    """Of the completion's."""

    @classmethod
    def of(cls, choices: Sequence[Choice]) -> Usage:
        first = {choice.prompt_index: choice for choice in reversed(choices)}
        return cls(
            prompt_tokens=sum(len(choice.request.prompt_token_ids) for choice in first.values()),
            completion_tokens=sum(choice.num_tokens for choice in choices),
            cached_tokens=sum(choice.num_cached_tokens for choice in first.values()),
            speculation=add_usages(
                (choice.speculation, choice.num_tokens) for choice in choices if choice.speculation is not None
            ),
            reasoning_tokens=sum(choice.num_reasoning_tokens for choice in choices),
        )

    def as_dict(self) -> dict[str, object]:
        fields: dict[str, object] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.reasoning_tokens:
            fields["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        if self.speculation is not None:
            fields["speculation"] = usage_fields(self.speculation, self.completion_tokens)
        return fields


def check_num_choices(num_prompts: int, params: SamplingParams) -> None:
    """Raise `RequestError` for more choices than one request may have: before its prompts are tokenized, which for
    a body full of them takes seconds."""
    if num_prompts * params.n > MAX_CHOICES:
        raise RequestError(
            f"{num_prompts} prompts with n = {params.n} make more than {MAX_CHOICES} choices; send several requests",
            param="prompt",
        )


def make_choices(
    state: ServerState,
    model: ServedModel,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    speculation: SpeculationParams | None,
    scheduling: Scheduling,
    new_parser: Callable[[], AnswerParser | None] | None = None,
) -> list[Choice]:
    """`params.n` choices of each prompt; the index in the response is prompt × n + choice. `new_parser` makes what
    reads a choice's text.

    A request without a seed gets one for each prompt; the same request with a seed gives the same answer.
    """
    request_id = uuid.uuid4().hex
    stops = StopStrings(params.stop) if params.stop else None
    choices: list[Choice] = []
    for prompt_index, token_ids in enumerate(prompts):
        seed = state.seeds.next() if params.seed is None else params.seed
        for choice_index in range(params.n):
            request = EngineRequest(
                request_id=f"{request_id}-{len(choices)}",
                prompt_token_ids=token_ids,
                params=params,
                seed=seed,
                choice_index=choice_index,
                eos_token_ids=list(model.eos_token_ids),
                speculation=speculation,
                priority=scheduling.priority,
                deadline=scheduling.deadline,
                cache_salt=scheduling.cache_salt,
            )
            parser = None if new_parser is None else new_parser()
            kept_ids = frozenset[int]() if parser is None else model.answers.kept_ids
            detokenizer = Detokenizer(model.tokenizer, params, token_ids, stops=stops, kept_ids=kept_ids)
            usage = SpeculationUsage() if model.info.drafters else None
            choices.append(Choice(len(choices), prompt_index, request, detokenizer, usage, parser))
    return choices


async def generate(state: ServerState, choices: Sequence[Choice]) -> AsyncGenerator[ChoiceOutput, None]:
    """Outputs of all choices as they arrive; ends when every choice has finished.

    Raises `SolError` when one of them cannot go on; the others are aborted.
    """
    model = state.model
    if len(choices) == 1:
        async with aclosing(_run(model, state.metrics, choices[0])) as outputs:
            async for output in outputs:
                yield output
        return
    # A full queue holds the choices back, so that a slow client's outputs are merged by the engine's client.
    queue: asyncio.Queue[ChoiceOutput | Exception] = asyncio.Queue(len(choices))
    tasks = [asyncio.create_task(_pump(model, state.metrics, choice, queue)) for choice in choices]
    try:
        num_open = len(choices)
        while num_open:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item.finish_reason is not None:
                num_open -= 1
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def generate_whole(state: ServerState, choices: Sequence[Choice]) -> list[ChoiceOutput]:
    """Each choice's whole output, once all have finished. Raises as `generate` does."""
    parts: list[list[ChoiceOutput]] = [[] for _ in choices]
    async with aclosing(generate(state, choices)) as outputs:
        async for output in outputs:
            parts[output.choice.index].append(output)
    return [_join(outputs) for outputs in parts]


def _join(parts: Sequence[ChoiceOutput]) -> ChoiceOutput:
    last = parts[-1]
    return ChoiceOutput(
        choice=last.choice,
        text="".join(part.text for part in parts),
        token_ids=[token_id for part in parts for token_id in part.token_ids],
        token_offsets=[offset for part in parts for offset in part.token_offsets],
        logprobs=None if last.logprobs is None else [entry for part in parts for entry in part.logprobs or ()],
        prompt_logprobs=next((part.prompt_logprobs for part in parts if part.prompt_logprobs is not None), None),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        parts=None if last.parts is None else merge(piece for part in parts for piece in part.parts or ()),
    )


async def _pump(
    model: ServedModel, metrics: Metrics, choice: Choice, queue: asyncio.Queue[ChoiceOutput | Exception]
) -> None:
    try:
        async with aclosing(_run(model, metrics, choice)) as outputs:
            async for output in outputs:
                await queue.put(output)
    except Exception as error:
        await queue.put(error)


async def _run(model: ServedModel, metrics: Metrics, choice: Choice) -> AsyncGenerator[ChoiceOutput, None]:
    ended_by = "abort"  # which is what it is when the consumer closes this iterator
    try:
        last: ChoiceOutput | None = None
        async with aclosing(model.engine.generate(choice.request)) as outputs:
            async for output in outputs:
                result = _take(choice, output, metrics)
                if result.finish_reason is not None:
                    last = result
                    break
                yield result
        # The engine has let go of the choice before anyone hears that it ended.
        if last is None:
            raise EngineDeadError("the engine ended a request without a reason")
        ended_by = "stop" if last.finish_reason == "tool_calls" else str(last.finish_reason)
        yield last
    except Exception:
        ended_by = "error"
        raise
    finally:
        metrics.observe_finished(choice.timeline, ended_by)


def _take(choice: Choice, output: RequestOutput, metrics: Metrics) -> ChoiceOutput:
    """Raises the error that the engine ended the choice with."""
    if output.finish_reason == "error":
        if output.deadline_exceeded:
            raise DeadlineExceededError(output.error or "the request could not be answered by its deadline")
        if output.error is not None and output.error.startswith(GRAMMAR_FAILED):
            raise RequestError(output.error)
        raise SolError(output.error or "the engine could not answer this request")
    if output.finish_reason == "abort":  # not by us: we would not be listening
        raise shutting_down()
    timeline = choice.timeline
    timeline.scheduled, timeline.first_token = output.scheduled_time, output.first_token_time
    choice.num_cached_tokens = output.num_cached_tokens
    delta = choice.detokenizer.push(output.new_token_ids, ended_by_token=output.finish_reason == "stop")
    choice.speculation, num_steps = advance(choice.speculation, output, delta.num_tokens)
    if delta.num_tokens:
        metrics.observe_tokens(timeline, delta.num_tokens, num_steps)
    choice.num_tokens += delta.num_tokens
    text = delta.text
    reason: FinishReason | Literal["tool_calls"] | None = output.finish_reason
    stop_reason: str | int | None = None
    if delta.stop is not None:
        # Tokens after the one that completed the stop string do not count, nor does the way in which they ended.
        reason, stop_reason = "stop", delta.stop
    elif reason is not None:
        text += choice.detokenizer.finish().text
        stop_reason = output.stop_token_id
    parts = None
    if choice.parser is not None:
        parts = choice.parser.feed(text)
        if reason is None and choice.parser.satisfied:
            reason = "stop"  # the call is whole, and no other one is wanted
        if reason is not None:
            parts = merge([*parts, *choice.parser.finish()])
        if reason == "stop" and choice.parser.called:
            reason = "tool_calls"
        _count_reasoning(choice, choice.parser.reasoning_end, delta.token_offsets)
    segments = None
    if choice.segments is not None:
        # An engine that does not speculate names nobody: everything is the model's own.
        origins = [TARGET] * delta.num_tokens if output.origins is None else output.origins[: delta.num_tokens]
        segments = choice.segments.take(text, delta.token_offsets, origins, finished=reason is not None)
    return ChoiceOutput(
        choice=choice,
        text=text,
        token_ids=output.new_token_ids[: delta.num_tokens],
        token_offsets=delta.token_offsets,
        logprobs=None if output.logprobs is None else output.logprobs[: delta.num_tokens],
        prompt_logprobs=output.prompt_logprobs,
        finish_reason=reason,
        stop_reason=stop_reason,
        segments=segments,
        parts=parts,
    )


def _count_reasoning(choice: Choice, end: int | None, token_offsets: Sequence[int]) -> None:
    """Add new tokens, which begin at these characters, to those of reasoning, which ends at character `end`."""
    if choice.reasoning_ended:
        return
    if end is None:
        choice.num_reasoning_tokens += len(token_offsets)
        return
    choice.reasoning_ended = True
    choice.num_reasoning_tokens += sum(offset < end for offset in token_offsets)
    if not end:
        choice.num_reasoning_tokens = 0
