"""The bodies clients send: OpenAI's fields, and vLLM's where OpenAI has none.

Types are strict (a number in quotes is an error) and null means "not given". Ranges that `SamplingParams` knows are
checked there. A field that is not declared here is looked up in `HARMLESS` and `UNSUPPORTED` (`sol.server.parsing`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainValidator

from sol.server.tool_fields import ChatTools, ToolChoiceField

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
"""Of each stop string: what finds them takes memory for every character."""


def _stop(value: Any) -> list[str]:
    if value is None:
        return []
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(s, str) and s for s in strings):
        raise ValueError("must be a non-empty string or a list of them")
    if len(strings) > MAX_STOP_STRINGS:
        raise ValueError(f"must be at most {MAX_STOP_STRINGS} strings, not {len(strings)}")
    longest = max(map(len, strings), default=0)
    if longest > MAX_STOP_CHARACTERS:
        raise ValueError(f"must be strings of at most {MAX_STOP_CHARACTERS} characters, not {longest}")
    return strings


def _logit_bias(value: Any) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError("must be an object of token ids and numbers from -100 to 100")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not (isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10):
            raise ValueError(f"must have token ids as keys, not {key!r}")
        if not isinstance(bias, (int, float)) or isinstance(bias, bool) or not -100 <= bias <= 100:
            raise ValueError(f"must have numbers from -100 to 100 as values, not {bias!r} (token {key})")
        biases[int(key)] = float(bias)
    return biases


def _prompts(value: Any) -> list[str | list[int]]:
    """The four forms of `prompt` as a list of prompts, each a text or token ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return list(value)
        if _are_token_ids(value):
            return [value]
        if all(isinstance(item, list) and item and _are_token_ids(item) for item in value):
            return list(value)
    raise ValueError(
        "must be a string, a list of strings, a list of token ids, or a list of lists of token ids; none of them empty"
    )


def _are_token_ids(items: list[Any]) -> bool:
    return all(type(item) is int and item >= 0 for item in items)


def _off(value: Any) -> bool | None:
    if value is None or value is False:
        return value
    raise ValueError(f"is not supported: it must be false or absent, not {value!r}")


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    model: str | None = None


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = None
    include_speculation: bool | None = None
    include_obfuscation: Annotated[bool | None, PlainValidator(_off)] = None
    continuous_usage_stats: bool | None = None


class SpeculationOptions(BaseModel):
    """Sol's own: what one request wants of speculation, which never changes its tokens."""

    model_config = ConfigDict(strict=True, extra="forbid")

    enabled: bool | None = None
    drafter: str | None = None
    tenant: str | None = None


class JsonSchemaFormat(BaseModel):
    """`response_format.json_schema`. Output is held to the schema whether `strict` is true or not."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())

    name: str
    description: str | None = None
    schema_: Any = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    type: str
    json_schema: JsonSchemaFormat | None = None


class TextFormat(BaseModel):
    """`text.format` of `/v1/responses`: the same with one level less."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())

    type: str = "text"
    name: str | None = None
    description: str | None = None
    schema_: Any = Field(default=None, alias="schema")
    strict: bool | None = None


class StructuredOutputs(BaseModel):
    """vLLM's; one of its fields. Which library does the work is Sol's own business, so there is nothing to fall back
    to and `disable_fallback` may say what it likes."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())

    json_: Any = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_fallback: bool | None = None


class GenerationBody(Body):
    """What chat and completions have in common."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    stop: Annotated[list[str], PlainValidator(_stop)] = Field(default_factory=list)
    stop_token_ids: list[int] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[int, float], PlainValidator(_logit_bias)] = Field(default_factory=dict)
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculation: SpeculationOptions | None = None
    priority: int | None = None
    service_tier: str | None = None
    cache_salt: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class CompletionBody(GenerationBody):
    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts)]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None


class ChatBody(GenerationBody):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: ChatTools | None = None
    tool_choice: ToolChoiceField = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeBody(Body):
    """vLLM's: a `prompt`, or chat `messages`."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: ChatTools | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(Body):
    tokens: list[int]


def _anything(_value: Any) -> bool:
    return True


class OneOf:
    """Whether a value is one of some, of the same type."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __call__(self, value: Any) -> bool:
        return any(value == allowed and type(value) is type(allowed) for allowed in self.values)


_NOTHING = OneOf(None, False, [], {})

HARMLESS: dict[str, Callable[[Any], bool]] = {
    "user": _anything,
    "metadata": _anything,
    "safety_identifier": _anything,
    "prompt_cache_key": _anything,
    "prompt_cache_retention": _anything,
    "parallel_tool_calls": _anything,
    "store": OneOf(None, False),
    "response_format": OneOf(None, {"type": "text"}),
    "modalities": OneOf(None, ["text"]),
    "tool_choice": OneOf(None, "none"),
    "function_call": OneOf(None, "none"),
    "length_penalty": OneOf(None, 1.0, 1),
    "suffix": OneOf(None, ""),
    "spaces_between_special_tokens": OneOf(None, True),
    "detokenize": OneOf(None, True),
}
"""Fields Sol does nothing about, and the values for which that is what the client asked for. On a route without tools
`parallel_tool_calls` says nothing."""

# fmt: off
_UNSUPPORTED = (
    "tools", "functions", "audio", "prediction", "reasoning", "reasoning_effort", "verbosity", "web_search_options",
    "moderation", "allowed_token_ids", "bad_words", "logits_processors", "truncate_prompt_tokens",
    "use_beam_search", "guided_decoding_backend", "guided_whitespace_pattern", "structural_tag", "chat_template",
    "documents", "continue_final_message", "mm_processor_kwargs", "return_tokens_as_token_ids", "return_token_ids",
    "echo", "include_reasoning", "thinking_token_budget", "kv_transfer_params", "vllm_xargs", "request_id",
    "prompt_embeds", "repetition_detection", "media_io_kwargs", "lora_request", "top_logprobs", "logprobs", "best_of",
    "max_completion_tokens", "add_generation_prompt",
)
# fmt: on
UNSUPPORTED: dict[str, Callable[[Any], bool]] = dict.fromkeys(_UNSUPPORTED, _NOTHING)
"""Fields of OpenAI's or vLLM's API that would change the answer and that Sol does not have (on this route)."""
