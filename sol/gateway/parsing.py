"""From an HTTP request to a `Call`: what stages rely on is checked here, once, and errors name the field."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from sol.errors import RequestError
from sol.gateway.call import Call

PATHS: Final = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/tokenize", "/detokenize"}
)
"""What is passed on to engines; their bodies name a model."""

COMPLETIONS: Final = frozenset({"/v1/chat/completions", "/v1/completions"})
"""Those whose streams are OpenAI's chunks, with `stream_options` and a `[DONE]` at the end."""

_ids: Final = random.Random()  # noqa: S311  (seeded by the system; an id need not be secret, and is made often)
_SANE_ID: Final = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
_SANE_NAME: Final = 512
"""Characters of a model's name: it is in messages, logs and labels."""
_BYTES_PER_TOKEN: Final = 4
"""Of a request's body: the usual estimate for English text."""
_MAX_WAIT_SECONDS: Final = 86400.0


def headers_of(raw: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """By lower-case name; of several of one name, the last."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in raw}


def request_id(headers: Mapping[str, str]) -> str:
    """The client's x-request-id if it may stand in a log and a header, else a new one."""
    sent = headers.get("x-request-id", "")
    return sent if _SANE_ID.fullmatch(sent) else f"{_ids.getrandbits(128):032x}"


def make_call(path: str, headers: Mapping[str, str], body: bytes, *, call_id: str, arrived: float) -> Call:
    """Raises `RequestError`. `arrived` is of `time.monotonic()`."""
    try:
        data = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(data, dict):
        raise RequestError("the body must be a JSON object")
    stream = data.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise RequestError(f"stream must be true or false, not {_shown(stream)}", param="stream")
    return Call(
        id=call_id,
        path=path,
        method="POST",
        headers=headers,
        body=body,
        json=data,
        model=_model(data),
        stream=bool(stream),
        arrived=arrived,
        deadline=_deadline(headers, arrived),
        input_tokens=_input_tokens(data, len(body)),
        output_tokens=_output_tokens(data),
    )


def _model(data: Mapping[str, Any]) -> str:
    model = data.get("model")
    if model is None:
        raise RequestError("model is required; GET /v1/models lists what there is", param="model")
    if not isinstance(model, str) or not 0 < len(model) <= _SANE_NAME:
        raise RequestError(f"model must be a name, a string, not {_shown(model)}", param="model")
    return model


def _output_tokens(data: Mapping[str, Any]) -> int | None:
    choices = 1
    for name in ("n", "best_of"):
        value = data.get(name)
        if value is not None:
            _require_int(name, value, 1)
            choices = max(choices, value)
    declared = None
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        value = data.get(name)
        if value is not None:
            _require_int(name, value, 0)
            declared = value
    if declared is None:
        return None
    prompt = data.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        choices *= len(prompt)
    return int(declared * choices)


def _require_int(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**31:
        raise RequestError(f"{name} must be a whole number of at least {least}, not {_shown(value)}", param=name)


def _input_tokens(data: Mapping[str, Any], size: int) -> int:
    prompt = data.get("prompt")
    if isinstance(prompt, list) and prompt and all(isinstance(item, int) for item in prompt[:8]):
        return len(prompt)
    return max(1, size // _BYTES_PER_TOKEN)


def _deadline(headers: Mapping[str, str], arrived: float) -> float | None:
    """What the client says of how long it waits: x-request-timeout (seconds), or OpenAI's client's own read timeout."""
    explicit = headers.get("x-request-timeout")
    if explicit is not None:
        seconds = _number(explicit)
        if seconds is None or seconds <= 0:
            raise RequestError(
                f"x-request-timeout must be a number of seconds above 0, not {_shown(explicit)}",
                param="x-request-timeout",
            )
        return arrived + min(seconds, _MAX_WAIT_SECONDS)
    hint = _number(headers.get("x-stainless-read-timeout", ""))
    return arrived + hint if hint is not None and 0 < hint <= _MAX_WAIT_SECONDS else None


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if abs(value) < float("inf") else None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
