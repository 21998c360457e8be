"""From a request's body to `SamplingParams`, and the seeds of requests that bring none.

Defaults are OpenAI's: temperature 1, top_p 1, `max_tokens` 16 for completions and the rest of the context for chat.
Sampling defaults that a model ships in `generation_config.json` are not applied: the same request means the same on
every model. (vLLM applies them; a client that wants them sends them.)
"""

from __future__ import annotations

from sol.errors import RequestError
from sol.sampling_params import MAX_CHOICES, MAX_LOGPROBS, SamplingParams
from sol.server.protocol import ChatBody, CompletionBody, GenerationBody

DEFAULT_COMPLETION_TOKENS = 16

_PLAIN_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "n", "stop_token_ids", "seed", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "prompt_logprobs", "ignore_eos", "min_tokens", "skip_special_tokens",
    "include_stop_str_in_output",
)  # fmt: skip


def chat_params(body: ChatBody) -> SamplingParams:
    """Raises `RequestError`."""
    _check_stream(body)
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise RequestError(
            f"max_tokens ({body.max_tokens}) is the old name of max_completion_tokens "
            f"({body.max_completion_tokens}); send one of them",
            param="max_tokens",
        )
    if body.top_logprobs is not None:
        if not 0 <= body.top_logprobs <= MAX_LOGPROBS:
            raise RequestError(
                f"top_logprobs must be 0 to {MAX_LOGPROBS}, not {body.top_logprobs}", param="top_logprobs"
            )
        if not body.logprobs and body.top_logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    name = "max_completion_tokens" if body.max_tokens is None else "max_tokens"
    return sampling_params(
        body,
        max_tokens=getattr(body, name),
        max_tokens_name=name,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )


def completion_params(body: CompletionBody) -> SamplingParams:
    """Of a request with `best_of`, its `n` is how many are generated, and they have logprobs, which rank them.

    Raises `RequestError`.
    """
    _check_stream(body)
    _check_best_of(body)
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if echoes_only(body):
        max_tokens = 1
    params = sampling_params(body, max_tokens=max_tokens, max_tokens_name="max_tokens", logprobs=body.logprobs)
    if body.echo and params.logprobs is not None:
        params.prompt_logprobs = max(params.logprobs, params.prompt_logprobs or 0)
    if chooses_best(body):
        assert body.best_of is not None
        params.n = body.best_of
        params.logprobs = params.logprobs or 0
    return params


def chooses_best(body: CompletionBody) -> bool:
    """Whether more choices are generated than are returned."""
    return body.best_of is not None and body.best_of != (body.n or 1)


def _check_best_of(body: CompletionBody) -> None:
    if body.best_of is None:
        return
    if not 1 <= body.best_of <= MAX_CHOICES:
        raise RequestError(f"best_of must be from 1 to {MAX_CHOICES}, not {body.best_of}", param="best_of")
    if body.best_of < (body.n or 1):
        raise RequestError(
            f"best_of ({body.best_of}) is how many choices are generated, so it must be at least n ({body.n or 1}), "
            "how many of them are returned",
            param="best_of",
        )
    if body.stream and chooses_best(body):
        raise RequestError(
            f"best_of ({body.best_of}) cannot be streamed: which {body.n or 1} are the best is known at the end; leave "
            "stream out",
            param="best_of",
        )


def echoes_only(body: CompletionBody) -> bool:
    """OpenAI's way to have a text judged: the prompt with its logprobs, and nothing after it."""
    return bool(body.echo) and body.max_tokens == 0


def sampling_params(
    body: GenerationBody, *, max_tokens: int | None, max_tokens_name: str, logprobs: int | None
) -> SamplingParams:
    """What all bodies have in common, and the rest. Raises `RequestError`."""
    given = {name: value for name in _PLAIN_FIELDS if (value := getattr(body, name)) is not None}
    try:
        return SamplingParams(
            max_tokens=max_tokens, logprobs=logprobs, stop=body.stop, logit_bias=body.logit_bias, **given
        )
    except RequestError as error:
        if error.param == "max_tokens" != max_tokens_name:
            message = error.message.replace("max_tokens", max_tokens_name, 1)
            raise RequestError(message, param=max_tokens_name) from None
        raise


def _check_stream(body: GenerationBody) -> None:
    if body.stream and body.prompt_logprobs is not None:
        raise RequestError(
            "prompt_logprobs come with whole responses: leave stream out (completions stream them with echo and "
            "logprobs)",
            param="prompt_logprobs",
        )
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream: true", param="stream_options")
    options = body.stream_options
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        raise RequestError(
            "continuous_usage_stats needs include_usage: true in stream_options",
            param="stream_options.continuous_usage_stats",
        )
