"""`/v1/completions`: OpenAI's legacy route, which takes texts or token ids."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sol.engine.types import TokenLogprobs
from sol.sampling_params import SamplingParams
from sol.server.generation import (
    CHOICES,
    Choice,
    ChoiceOutput,
    Usage,
    check_num_choices,
    generate,
    generate_whole,
    make_choices,
)
from sol.server.logprobs import completion_logprobs, echoed_logprobs, joined_logprobs, prompt_entries
from sol.server.params import chooses_best, completion_params, echoes_only
from sol.server.parsing import parse_body
from sol.server.prompts import check_length, check_token_ids, encode
from sol.server.protocol import CompletionBody
from sol.server.scheduling import scheduling_of
from sol.server.segments import PROMPT, Segment, segments_field
from sol.server.speculation import speculation_params
from sol.server.state import ServedModel, ServerState
from sol.server.stream_usage import StreamUsage
from sol.server.streaming import DONE, EventStream, event, quote, run_until_disconnect, to_json
from sol.server.structured import grammar_of
from sol.version import __version__


async def completions(request: Request) -> Response:
    state: ServerState = request.app.state.sol
    model = state.model
    body = await parse_body(request, CompletionBody)
    name = state.check_model_name(body.model)
    params = completion_params(body)
    params.check_vocabulary(model.info.vocab_size)
    params.grammar = await grammar_of(model, body)
    speculation = speculation_params(body, model.info.drafters)
    scheduling = scheduling_of(request, body, state)
    check_num_choices(len(body.prompt), params)
    prompts = await _encode_prompts(model, body, params)
    choices = make_choices(state, model, prompts, params, speculation, scheduling)
    request.scope[CHOICES] = choices
    echoed = _echo(model, body, prompts) if body.echo else None
    completion = _Completion(state, model, choices, echoed, name, body)
    if body.stream:
        return EventStream(state, completion.events(StreamUsage(body.stream_options)))
    return JSONResponse(await run_until_disconnect(state, request.receive, completion.complete(), scheduling.deadline))


async def _encode_prompts(model: ServedModel, body: CompletionBody, params: SamplingParams) -> list[list[int]]:
    prompts = []
    for i, prompt in enumerate(body.prompt):
        await asyncio.sleep(0)  # many short texts are together as long as one that leaves the event loop
        param = "prompt" if len(body.prompt) == 1 else f"prompt[{i}]"
        if isinstance(prompt, str):
            add_special_tokens = body.add_special_tokens is not False
            token_ids = await encode(model, prompt, add_special_tokens=add_special_tokens, param=param)
        else:
            check_token_ids(model, prompt, param=param)
            token_ids = prompt
        check_length(model, len(token_ids), params, param=param)
        prompts.append(token_ids)
    return prompts


def _echo(model: ServedModel, body: CompletionBody, prompts: list[list[int]]) -> list[str]:
    """What `echo` puts before a choice's text: the prompt as it came, or what its token ids say."""
    return [
        prompt if isinstance(prompt, str) else model.tokenizer.decode(token_ids, skip_special_tokens=False)
        for prompt, token_ids in zip(body.prompt, prompts, strict=True)
    ]


def _best(outputs: Sequence[ChoiceOutput], count: int) -> list[ChoiceOutput]:
    """Of each prompt the `count` choices of the highest mean logprob of a token, the best first; of equals, those that
    were first."""

    def rank(output: ChoiceOutput) -> tuple[int, float]:
        logprobs = [entry.logprob for entry in output.logprobs or ()]
        # A choice without a token, which ended before its first, says least.
        return output.choice.prompt_index, -sum(logprobs) / len(logprobs) if logprobs else math.inf

    ranked = itertools.groupby(sorted(outputs, key=rank), key=lambda output: output.choice.prompt_index)
    return [output for _, of_prompt in ranked for output in itertools.islice(of_prompt, count)]


class _Completion:
    """The answer to one request, whole or in chunks. `echoed` holds one text a prompt, where they are repeated."""

    def __init__(
        self,
        state: ServerState,
        model: ServedModel,
        choices: Sequence[Choice],
        echoed: Sequence[str] | None,
        name: str,
        body: CompletionBody,
    ) -> None:
        self._state = state
        self._choices = choices
        self._echoed = ["" if echoed is None else echoed[choice.prompt_index] for choice in choices]
        self._echoes = echoed is not None
        self._echoes_only = echoes_only(body)
        """What is generated is left out."""
        self._hides_logprobs = body.logprobs is None
        self._num_returned = (body.n or 1) if chooses_best(body) else None
        """Of each prompt; None: all, as they were made."""
        self._wants_prompt_logprobs = body.prompt_logprobs is not None
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._name = name
        self._tokenizer = model.tokenizer

    async def complete(self) -> dict[str, Any]:
        outputs = await generate_whole(self._state, self._choices)
        if self._num_returned is not None:
            outputs = _best(outputs, self._num_returned)
        return {
            **self._head(),
            "choices": [
                {
                    "index": index,
                    "text": self._echoed[output.choice.index] + output.text,
                    "logprobs": self._all_logprobs(output),
                    **self._prompt_logprobs(output),
                    "finish_reason": output.finish_reason,
                    "stop_reason": output.stop_reason,
                }
                for index, output in enumerate(map(self._shown, outputs))
            ],
            "usage": self._usage(),
        }

    async def events(self, usages: StreamUsage) -> AsyncGenerator[str, None]:
        head = event(self._head()).rstrip()[:-1]
        before = f'{head},"choices":[{{"index":'
        started = False
        async with aclosing(generate(self._state, self._choices)) as outputs:
            async for whole in outputs:
                output = self._shown(whole)
                parts = []
                if output.prompt_logprobs is not None and self._echoes:
                    judged = self._judged_chunk(output)
                    parts = [f"{before}{output.choice.index},{judged}{self._close(usages, output.choice, begun=False)}"]
                elif not started and self._choices[0].request.params.prompt_logprobs is None:
                    parts = [
                        f"{before}{i},{self._echo_chunk(choice, text)}{self._close(usages, choice, begun=False)}"
                        for i, (choice, text) in enumerate(zip(self._choices, self._echoed, strict=True))
                        if text
                    ]
                started = True
                if output.text or output.logprobs or output.finish_reason is not None:
                    after = self._close(usages, output.choice, begun=not self._echoes_only)
                    parts.append(f"{before}{output.choice.index},{self._chunk(output)}{after}")
                if parts:
                    yield "".join(parts)
        last = DONE
        if usages.at_end:
            last = event({**self._head(), "choices": [], "usage": self._usage()}) + DONE
        yield last

    def _close(self, usages: StreamUsage, choice: Choice, *, begun: bool) -> str:
        """The end of a chunk's event; `begun` is whether it counts what the choice has generated."""
        return usages.close(len(choice.request.prompt_token_ids), choice.num_tokens if begun else 0)

    def _echo_chunk(self, choice: Choice, text: str) -> str:
        segments = None
        if choice.segments is not None:
            segments = [Segment(text, PROMPT, len(choice.request.prompt_token_ids))]
        return f'"text":{quote(text)},"logprobs":null,"finish_reason":null,"stop_reason":null{segments_field(segments)}'

    def _judged_chunk(self, output: ChoiceOutput) -> str:
        """What `echo` repeats, with its logprobs."""
        choice, text = output.choice, self._echoed[output.choice.index]
        logprobs = to_json(self._echoed_logprobs(output))
        return self._echo_chunk(choice, text).replace('"logprobs":null', f'"logprobs":{logprobs}', 1)

    def _chunk(self, output: ChoiceOutput) -> str:
        logprobs = to_json(self._logprobs(output)) if output.logprobs else "null"
        return (
            f'"text":{quote(output.text)},"logprobs":{logprobs},"finish_reason":'
            f'{to_json(output.finish_reason)},"stop_reason":{to_json(output.stop_reason)}'
            f"{segments_field(output.segments, output.choice.speculation)}"
        )

    def _logprobs(self, output: ChoiceOutput) -> dict[str, Any] | None:
        if output.logprobs is None or self._hides_logprobs:
            return None
        shift = len(self._echoed[output.choice.index])
        offsets = [shift + offset for offset in output.token_offsets]
        return completion_logprobs(self._tokenizer, output.token_ids, offsets, output.logprobs)

    def _echoed_logprobs(self, output: ChoiceOutput) -> dict[str, Any]:
        text, token_ids = self._echoed[output.choice.index], output.choice.request.prompt_token_ids
        return echoed_logprobs(self._tokenizer, text, token_ids, output.prompt_logprobs or ())

    def _all_logprobs(self, output: ChoiceOutput) -> dict[str, Any] | None:
        found = self._logprobs(output)
        return joined_logprobs(self._echoed_logprobs(output), found) if found is not None and self._echoes else found

    def _prompt_logprobs(self, output: ChoiceOutput) -> dict[str, Any]:
        if not self._wants_prompt_logprobs:
            return {}
        token_ids = output.choice.request.prompt_token_ids
        return {"prompt_logprobs": prompt_entries(self._tokenizer, token_ids, output.prompt_logprobs or ())}

    def _shown(self, output: ChoiceOutput) -> ChoiceOutput:
        if not self._echoes_only:
            return output
        none: list[TokenLogprobs] | None = None if output.logprobs is None else []
        return replace(output, text="", token_ids=[], token_offsets=[], logprobs=none, segments=None, stop_reason=None,
                       finish_reason=output.finish_reason and "length")  # fmt: skip

    def _usage(self) -> dict[str, object]:
        usage = Usage.of(self._choices)
        return (replace(usage, completion_tokens=0) if self._echoes_only else usage).as_dict()

    def _head(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._name,
            "system_fingerprint": f"sol-{__version__}",
        }
