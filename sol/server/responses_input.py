"""What `/v1/responses` takes."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainValidator

from sol.errors import RequestError
from sol.sampling_params import MAX_LOGPROBS, SamplingParams
from sol.server.params import sampling_params
from sol.server.parsing import shorten
from sol.server.protocol import GenerationBody, TextFormat
from sol.server.tool_fields import ResponsesTools, ToolChoiceField

LOGPROBS = "message.output_text.logprobs"

_NOT_HERE = {
    "n": "",
    "max_tokens": "; use max_output_tokens",
    "prompt_logprobs": "",
    "response_format": "; use text.format",
}


def _items(value: Any) -> list[Any]:
    if isinstance(value, str) and value:
        return [{"role": "user", "content": value}]
    if isinstance(value, list) and value:
        return value
    raise ValueError("must be a string or a list of items, and not empty")


def _includes(value: Any) -> list[str]:
    for item in value or []:
        if item != LOGPROBS:
            raise ValueError(f"may contain {LOGPROBS!r} only, not {shorten(item)}")
    return list(value or [])


def _truncation(value: Any) -> str:
    if value not in (None, "disabled"):
        raise ValueError(f"must be 'disabled': a conversation that is too long is an error, not {shorten(value)}")
    return "disabled"


def _background(value: Any) -> bool:
    if value not in (None, False):
        raise ValueError("is not supported: it must be false or absent")
    return False


class TextOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    format: TextFormat | None = None


class ResponsesBody(GenerationBody):
    input: Annotated[list[Any], PlainValidator(_items)]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    include: Annotated[list[str], PlainValidator(_includes)] = Field(default_factory=list)
    truncation: Annotated[str, PlainValidator(_truncation)] = "disabled"
    tools: ResponsesTools | None = None
    tool_choice: ToolChoiceField = None
    parallel_tool_calls: bool | None = None
    background: Annotated[bool, PlainValidator(_background)] = False
    text: TextOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def responses_params(body: ResponsesBody) -> SamplingParams:
    """Raises `RequestError`."""
    for name, instead in _NOT_HERE.items():
        if getattr(body, name) is not None:
            raise RequestError(f"{name} is not supported here; remove it{instead}", param=name)
    if body.stream_options is not None and body.stream_options.model_fields_set - {"include_obfuscation"}:
        raise RequestError(
            "stream_options is not supported here: the last event has the usage; remove it", param="stream_options"
        )
    top = body.top_logprobs
    if top is not None and not 0 <= top <= MAX_LOGPROBS:
        raise RequestError(f"top_logprobs must be 0 to {MAX_LOGPROBS}, not {top}", param="top_logprobs")
    if top and LOGPROBS not in body.include:
        raise RequestError(f"top_logprobs needs include: [{LOGPROBS!r}]", param="top_logprobs")
    return sampling_params(
        body,
        max_tokens=body.max_output_tokens,
        max_tokens_name="max_output_tokens",
        logprobs=(top or 0) if LOGPROBS in body.include else None,
    )


def text_format(body: ResponsesBody) -> dict[str, Any]:
    """`text.format` as the response repeats it."""
    wanted = body.text.format if body.text is not None else None
    return {"type": "text"} if wanted is None else wanted.model_dump(by_alias=True, exclude_none=True)


def tool_fields(body: ResponsesBody) -> dict[str, Any]:
    """What was asked of tools, as the response repeats it."""
    choice = body.tool_choice
    named = {"type": "function", "name": choice.name} if choice is not None and choice.mode == "named" else None
    return {
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "tool_choice": named or ("auto" if choice is None else choice.mode),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
    }
