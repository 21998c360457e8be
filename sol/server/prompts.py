"""From a request's words to prompt token ids: chat templates, tokenization, and whether the result fits."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

from sol.errors import ContextLengthError, RequestError
from sol.sampling_params import SamplingParams
from sol.server.state import ServedModel
from sol.text.messages import flatten_messages

_LONG_TEXT = 2048
"""Characters above which tokenization leaves the event loop."""

_MANY_MESSAGES = 64
"""Messages above which the template does."""

_RESERVED_TEMPLATE_NAMES = (
    "messages", "add_generation_prompt", "tools", "documents", "bos_token", "eos_token", "self",
)  # fmt: skip


async def encode(model: ServedModel, text: str, *, add_special_tokens: bool, param: str) -> list[int]:
    """Token ids of a text. Raises `ContextLengthError` for one that is too long whatever its tokens are."""
    if len(text) > model.max_prompt_chars:
        raise ContextLengthError(
            f"{param} has {len(text)} characters, more than the model's context of {model.info.max_model_len} tokens "
            "can hold; shorten it",
            param=param,
        )
    if len(text) <= _LONG_TEXT:
        token_ids = model.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    else:
        token_ids = await asyncio.to_thread(model.tokenizer.encode, text, add_special_tokens=add_special_tokens)
    check_token_ids(model, token_ids, param=param)  # some tokenizers know more tokens than their model
    return token_ids


async def render_chat(
    model: ServedModel,
    messages: list[dict[str, Any]],
    *,
    add_generation_prompt: bool,
    template_kwargs: dict[str, Any] | None,
    tools: list[dict[str, Any]] | None = None,
) -> str:
    """The text a chat becomes by the model's template, which is told of `tools`. Raises `RequestError`."""
    if model.chat_template is None:
        raise RequestError(
            f"the model {model.info.model!r} has no chat template; use /v1/completions", param="messages"
        )
    kwargs = template_kwargs or {}
    for name in _RESERVED_TEMPLATE_NAMES:
        if name in kwargs:
            raise RequestError(f"chat_template_kwargs must not contain {name}", param="chat_template_kwargs")
    render = functools.partial(
        model.chat_template.render,
        flatten_messages(messages),
        add_generation_prompt=add_generation_prompt,
        tools=tools,
        **kwargs,
    )
    return render() if len(messages) <= _MANY_MESSAGES else await asyncio.to_thread(render)


def check_length(model: ServedModel, num_prompt_tokens: int, params: SamplingParams, *, param: str) -> None:
    """Raise `RequestError` for an empty prompt, `ContextLengthError` for one that leaves too little room."""
    limit = model.info.max_model_len
    room = limit - num_prompt_tokens
    if num_prompt_tokens == 0:
        raise RequestError(f"{param} has no tokens; send at least one", param=param)
    if room < 1:
        raise ContextLengthError(
            f"{param} has {_tokens(num_prompt_tokens)}, but the model's context is {_tokens(limit)}, prompt and output "
            "together; shorten it",
            param=param,
        )
    if params.max_tokens is not None and params.max_tokens > room:
        raise ContextLengthError(
            f"{param} has {_tokens(num_prompt_tokens)} and {_tokens(params.max_tokens)} are asked for, together more "
            f"than the model's context of {_tokens(limit)}; shorten the prompt or ask for at most {room}",
            param=param,
        )
    if params.min_tokens > room:
        raise ContextLengthError(
            f"min_tokens is {params.min_tokens}, but a prompt of {_tokens(num_prompt_tokens)} leaves room for {room}",
            param="min_tokens",
        )


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"


def check_token_ids(model: ServedModel, token_ids: list[int], *, param: str) -> None:
    """Raise `RequestError` for an id outside of the vocabulary."""
    highest = max(token_ids, default=0)
    if highest >= model.info.vocab_size:
        raise RequestError(
            f"{param}: token id {highest} is not in the vocabulary of {model.info.vocab_size} tokens", param=param
        )
