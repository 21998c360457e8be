"""`/v1/responses`: OpenAI's newer way to chat, in which the server may keep the conversation.

A response that is stored (as it is unless `store` is false) can be gone on from by `previous_response_id`, read and
deleted, until newer ones need its room or the server ends.
"""

from __future__ import annotations

import functools
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sol.errors import RequestError, UnknownResponseError
from sol.server.answers import answer_parsers
from sol.server.generation import CHOICES, Choice, ChoiceOutput, Usage, generate, generate_whole, make_choices
from sol.server.logprobs import chat_entries
from sol.server.parsing import parse_body, shorten
from sol.server.prompts import check_length, encode, render_chat
from sol.server.responses_input import ResponsesBody, responses_params, text_format, tool_fields
from sol.server.responses_items import OutputItems, answer_message, messages_of
from sol.server.responses_store import StoredResponse
from sol.server.scheduling import scheduling_of
from sol.server.speculation import speculation_params
from sol.server.state import ServedModel, ServerState
from sol.server.streaming import EventStream, run_until_disconnect, to_json
from sol.server.structured import grammar_of
from sol.server.tools import forced_grammar, new_call_id, tools_of
from sol.text.answer_parts import Content


async def create_response(request: Request) -> Response:
    state: ServerState = request.app.state.sol
    model = state.model
    body = await parse_body(request, ResponsesBody)
    name = state.check_model_name(body.model)
    params = responses_params(body)
    params.check_vocabulary(model.info.vocab_size)
    path = "tools[{}]"
    tools = tools_of(model.answers, body.tools or (), body.tool_choice, body.parallel_tool_calls, path=path)
    grammar = await grammar_of(model, body, body.text.format if body.text else None)
    params.grammar = await forced_grammar(model, tools, grammar, path=path)
    speculation = speculation_params(body, model.info.drafters)
    scheduling = scheduling_of(request, body, state)
    conversation = [*_history(state, body.previous_response_id), *messages_of(body.input)]
    instructions = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    text = await render_chat(
        model,
        instructions + conversation,
        add_generation_prompt=True,
        template_kwargs=body.chat_template_kwargs,
        tools=None if tools is None else tools.for_template(),
    )
    token_ids = await encode(model, text, add_special_tokens=False, param="input")
    check_length(model, len(token_ids), params, param="input")
    new_parser = await answer_parsers(model, text, params, tools)
    (choice,) = make_choices(state, model, [token_ids], params, speculation, scheduling, new_parser)
    request.scope[CHOICES] = [choice]
    answer = _Answer(state, model, choice, name, body, conversation)
    if body.stream:
        return EventStream(state, answer.events())
    return JSONResponse(await run_until_disconnect(state, request.receive, answer.complete(), scheduling.deadline))


async def retrieve_response(request: Request) -> Response:
    state: ServerState = request.app.state.sol
    response_id = request.path_params["response_id"]
    stored = state.responses.get(response_id)
    if stored is None:
        raise _unknown(response_id)
    return JSONResponse(stored.response)


async def delete_response(request: Request) -> Response:
    state: ServerState = request.app.state.sol
    response_id = request.path_params["response_id"]
    if not state.responses.delete(response_id):
        raise _unknown(response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


def _unknown(response_id: str) -> UnknownResponseError:
    return UnknownResponseError(
        f"there is no response {shorten(response_id)}: it was not stored, or has made room for newer ones"
    )


def _history(state: ServerState, response_id: str | None) -> tuple[dict[str, Any], ...]:
    if response_id is None:
        return ()
    stored = state.responses.get(response_id)
    if stored is None:
        raise RequestError(
            f"previous_response_id: there is no response {shorten(response_id)}: it was not stored, or has made room "
            "for newer ones; send the whole conversation as input",
            param="previous_response_id",
        )
    return stored.messages


class _Answer:
    """The answer to one request, whole or as events."""

    def __init__(
        self,
        state: ServerState,
        model: ServedModel,
        choice: Choice,
        name: str,
        body: ResponsesBody,
        conversation: list[dict[str, Any]],
    ) -> None:
        self._state = state
        self._tokenizer = model.tokenizer
        self._choice = choice
        self._name = name
        self._body = body
        self._conversation = conversation
        self._id = f"resp_{uuid.uuid4().hex}"
        self._items = OutputItems(functools.partial(new_call_id, model.answers))
        self._created = int(time.time())
        self._sequence = 0

    async def complete(self) -> dict[str, Any]:
        (output,) = await generate_whole(self._state, [self._choice])
        self._take(output)
        return self._finish(output.finish_reason)

    async def events(self) -> AsyncGenerator[str, None]:
        reason = None
        async with aclosing(generate(self._state, [self._choice])) as outputs:
            async for output in outputs:
                parts = []
                if self._sequence == 0:  # nothing is sent before something is there
                    started = self._response("in_progress")
                    parts = [
                        self._event("response.created", response=started),
                        self._event("response.in_progress", response=started),
                    ]
                self._take(output)
                parts += self._new_events()
                reason = output.finish_reason
                if parts:
                    yield "".join(parts)
        response = self._finish(reason)
        parts = self._new_events()
        yield "".join([*parts, self._event(f"response.{response['status']}", response=response)])

    def _take(self, output: ChoiceOutput) -> None:
        logprobs = [] if not output.logprobs else chat_entries(self._tokenizer, output.token_ids, output.logprobs)
        parts = [Content(output.text)] if output.parts is None else list(output.parts)
        # Those of tokens that show nothing yet go with the text that they are in.
        if output.parts is not None and logprobs and self._items.in_text and not parts:
            parts = [Content("")]
        for part in parts:
            if isinstance(part, Content):
                if part.text or logprobs:
                    self._items.feed(part, logprobs)
                    logprobs = []
            else:
                self._items.feed(part)

    def _new_events(self) -> list[str]:
        return [self._event(kind, **fields) for kind, fields in self._items.take_events()]

    def _finish(self, reason: str | None) -> dict[str, Any]:
        """The whole response, which is stored if it may be."""
        status = "incomplete" if reason == "length" else "completed"
        self._items.finish(status)
        response = self._response(status)
        if response["store"]:
            answer = answer_message(self._items.items)
            self._state.responses.put(StoredResponse(response, (*self._conversation, answer)))
        return response

    def _event(self, kind: str, **fields: Any) -> str:
        number, self._sequence = self._sequence, self._sequence + 1
        return f"event: {kind}\ndata: {to_json({'type': kind, 'sequence_number': number, **fields})}\n\n"

    def _response(self, status: str) -> dict[str, Any]:
        body, params = self._body, self._choice.request.params
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._name,
            "output": [] if status == "in_progress" else self._items.items,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": body.service_tier or "default",
            "store": body.store is not False and self._state.config.max_stored_responses > 0,
            "temperature": params.temperature,
            "text": {"format": text_format(body)},
            **tool_fields(body),
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": body.truncation,
            "usage": None if status == "in_progress" else _usage(Usage.of([self._choice])),
        }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
