"""`/v1/chat/completions`."""

from __future__ import annotations

import functools
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sol.server.answers import answer_parsers
from sol.server.chat_parts import delta, message
from sol.server.generation import CHOICES, Choice, ChoiceOutput, Usage, generate, generate_whole, make_choices
from sol.server.logprobs import chat_entries, prompt_entries
from sol.server.params import chat_params
from sol.server.parsing import parse_body
from sol.server.prompts import check_length, encode, render_chat
from sol.server.protocol import ChatBody
from sol.server.scheduling import scheduling_of
from sol.server.segments import segments_field
from sol.server.speculation import speculation_params
from sol.server.state import ServedModel, ServerState
from sol.server.stream_usage import StreamUsage
from sol.server.streaming import DONE, EventStream, event, quote, run_until_disconnect, to_json
from sol.server.structured import grammar_of
from sol.server.tools import forced_grammar, new_call_id, tools_of
from sol.version import __version__


async def chat_completions(request: Request) -> Response:
    state: ServerState = request.app.state.sol
    model = state.model
    body = await parse_body(request, ChatBody)
    name = state.check_model_name(body.model)
    params = chat_params(body)
    params.check_vocabulary(model.info.vocab_size)
    path = "tools[{}].function"
    functions = [tool.function for tool in body.tools or ()]
    tools = tools_of(model.answers, functions, body.tool_choice, body.parallel_tool_calls, path=path)
    params.grammar = await forced_grammar(model, tools, await grammar_of(model, body), path=path)
    speculation = speculation_params(body, model.info.drafters)
    scheduling = scheduling_of(request, body, state)
    text = await render_chat(
        model,
        body.messages,
        add_generation_prompt=body.add_generation_prompt is not False,
        template_kwargs=body.chat_template_kwargs,
        tools=None if tools is None else tools.for_template(),
    )
    token_ids = await encode(model, text, add_special_tokens=bool(body.add_special_tokens), param="messages")
    check_length(model, len(token_ids), params, param="messages")
    show_reasoning = body.include_reasoning is not False
    new_parser = await answer_parsers(model, text, params, tools, show_reasoning=show_reasoning)
    choices = make_choices(state, model, [token_ids], params, speculation, scheduling, new_parser)
    request.scope[CHOICES] = choices
    chat = _Chat(state, model, choices, name)
    if body.stream:
        return EventStream(state, chat.events(StreamUsage(body.stream_options)))
    return JSONResponse(await run_until_disconnect(state, request.receive, chat.complete(), scheduling.deadline))


class _Chat:
    """The answer to one request, whole or in chunks."""

    def __init__(self, state: ServerState, model: ServedModel, choices: Sequence[Choice], name: str) -> None:
        self._state = state
        self._tokenizer = model.tokenizer
        self._new_call_id = functools.partial(new_call_id, model.answers)
        self._choices = choices
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._name = name

    async def complete(self) -> dict[str, Any]:
        outputs = await generate_whole(self._state, self._choices)
        return {
            **self._head("chat.completion"),
            "choices": [
                {
                    "index": output.choice.index,
                    "message": self._message(output),
                    "logprobs": self._logprobs(output),
                    "finish_reason": output.finish_reason,
                    "stop_reason": output.stop_reason,
                }
                for output in outputs
            ],
            **self._prompt_logprobs(outputs[0]),
            "usage": Usage.of(self._choices).as_dict(),
        }

    async def events(self, usages: StreamUsage) -> AsyncGenerator[str, None]:
        head = event(self._head("chat.completion.chunk")).rstrip()[:-1]
        before = f'{head},"choices":[{{"index":'
        started = False
        async with aclosing(generate(self._state, self._choices)) as outputs:
            async for output in outputs:
                index, usage = output.choice.index, output.choice.speculation
                num_prompt = len(output.choice.request.prompt_token_ids)
                after = usages.close(num_prompt, output.choice.num_tokens)
                parts = []
                if not started:
                    started = True
                    role = '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
                    role += segments_field(None if output.segments is None else [])
                    parts += [f"{before}{choice.index},{role}{usages.close(num_prompt, 0)}" for choice in self._choices]
                segments = output.segments
                logprobs = to_json(self._logprobs(output)) if output.logprobs else "null"
                for told in self._deltas(output):
                    parts.append(
                        f'{before}{index},"delta":{told},"logprobs":{logprobs},'
                        f'"finish_reason":null{segments_field(segments, usage)}{after}'
                    )
                    segments, logprobs = None if segments is None else [], "null"
                if output.finish_reason is not None:
                    parts.append(
                        f'{before}{index},"delta":{{}},"logprobs":null,"finish_reason":"{output.finish_reason}",'
                        f'"stop_reason":{to_json(output.stop_reason)}{segments_field(segments, usage)}{after}'
                    )
                if parts:
                    yield "".join(parts)
        last = DONE
        if usages.at_end:
            total = Usage.of(self._choices).as_dict()
            last = event({**self._head("chat.completion.chunk"), "choices": [], "usage": total}) + DONE
        yield last

    def _message(self, output: ChoiceOutput) -> dict[str, Any]:
        if output.parts is None:
            return {"role": "assistant", "content": output.text, "refusal": None}
        return message(output.parts, self._new_call_id)

    def _deltas(self, output: ChoiceOutput) -> list[str]:
        """The `delta` of each chunk that an output makes, as JSON."""
        if output.parts:
            return [delta(part, self._new_call_id) for part in output.parts]
        if output.parts is None and (output.text or output.logprobs):
            return [f'{{"content":{quote(output.text)}}}']
        # The text is not there yet, or is only a marker; what is known of its tokens is not held back.
        return ["{}"] if output.logprobs or output.segments else []

    def _prompt_logprobs(self, output: ChoiceOutput) -> dict[str, Any]:
        """vLLM's, of the one prompt that all choices have."""
        if output.prompt_logprobs is None:
            return {}
        token_ids = output.choice.request.prompt_token_ids
        return {"prompt_logprobs": prompt_entries(self._tokenizer, token_ids, output.prompt_logprobs)}

    def _logprobs(self, output: ChoiceOutput) -> dict[str, Any] | None:
        if output.logprobs is None:
            return None
        return {"content": chat_entries(self._tokenizer, output.token_ids, output.logprobs), "refusal": None}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._name,
            "system_fingerprint": f"sol-{__version__}",
        }
