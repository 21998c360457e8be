"""`/tokenize` and `/detokenize`, with vLLM's bodies."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sol.errors import RequestError
from sol.server.parsing import parse_body
from sol.server.prompts import check_token_ids, encode, render_chat
from sol.server.protocol import DetokenizeBody, TokenizeBody
from sol.server.state import ServedModel, ServerState
from sol.server.tools import tools_of

_MANY_TOKENS = 1024
"""Above which turning them into text leaves the event loop."""


async def tokenize(request: Request) -> Response:
    """`{prompt}` or `{messages}` to `{count, max_model_len, tokens, token_strs}`."""
    state: ServerState = request.app.state.sol
    model = state.model
    body = await parse_body(request, TokenizeBody)
    state.check_model_name(body.model)
    if body.messages is None and body.prompt is None:
        raise RequestError("prompt is required (or messages)", param="prompt")
    if body.messages is not None:
        if body.prompt is not None:
            raise RequestError("prompt and messages exclude each other; send one of them", param="prompt")
        param = "messages"
        text = await render_chat(
            model,
            body.messages,
            add_generation_prompt=body.add_generation_prompt is not False,
            template_kwargs=body.chat_template_kwargs,
            tools=_tools(model, body),
        )
    else:
        param = "prompt"
        text = body.prompt or ""
        for name in ("add_generation_prompt", "chat_template_kwargs", "tools"):
            if getattr(body, name) is not None:
                raise RequestError(f"{name} goes with messages, not with a prompt", param=name)
    add_special_tokens = body.messages is None if body.add_special_tokens is None else body.add_special_tokens
    token_ids = await encode(model, text, add_special_tokens=add_special_tokens, param=param)
    token_strs = [model.tokenizer.id_to_token(i) for i in token_ids] if body.return_token_strs else None
    return JSONResponse(
        {
            "count": len(token_ids),
            "max_model_len": model.info.max_model_len,
            "tokens": token_ids,
            "token_strs": token_strs,
        }
    )


def _tools(model: ServedModel, body: TokenizeBody) -> list[dict[str, Any]] | None:
    functions = [tool.function for tool in body.tools or ()]
    tools = tools_of(model.answers, functions, None, None, path="tools[{}].function")
    return None if tools is None else tools.for_template()


async def detokenize(request: Request) -> Response:
    """`{tokens}` to `{prompt}`, special tokens written out."""
    state: ServerState = request.app.state.sol
    model = state.model
    body = await parse_body(request, DetokenizeBody)
    state.check_model_name(body.model)
    if len(body.tokens) <= _MANY_TOKENS:
        return _detokenize(model, body.tokens)
    return await asyncio.to_thread(_detokenize, model, body.tokens)


def _detokenize(model: ServedModel, token_ids: list[int]) -> Response:
    lowest = min(token_ids, default=0)
    if lowest < 0:
        raise RequestError(f"tokens must be token ids (at least 0), not {lowest}", param="tokens")
    check_token_ids(model, token_ids, param="tokens")
    return JSONResponse({"prompt": model.tokenizer.decode(token_ids, skip_special_tokens=False)})
