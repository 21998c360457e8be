"""From the bytes of a request to a checked body: what is too large, not JSON, unknown or of a wrong type is refused."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import pydantic_core
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request

from sol.errors import RequestError
from sol.server.protocol import HARMLESS, UNSUPPORTED, Body

BodyT = TypeVar("BodyT", bound=Body)

_LARGE_BODY = 64 * 1024
"""Bytes above which parsing leaves the event loop: it takes a millisecond or more."""

_EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "float_type": "a number",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "list_type": "a list",
    "model_type": "an object",
    "string_type": "a string",
}


async def parse_body(request: Request, body_type: type[BodyT]) -> BodyT:
    """Raises `RequestError` naming the field, HTTP 413 or 415, `EngineNotReadyError` if the server stops meanwhile."""
    _check_content_type(request)
    state = request.app.state.sol
    with state.reading_body():
        data = await _read(request, state.config.max_body_bytes)
    if len(data) <= _LARGE_BODY:
        return parse(data, body_type)
    return await asyncio.to_thread(parse, data, body_type)


def parse(data: bytes, body_type: type[BodyT]) -> BodyT:
    try:
        fields = pydantic_core.from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise RequestError("the body must be a JSON object")
    _check_names(fields, body_type)
    try:
        return body_type.model_validate(fields)
    except ValidationError as error:
        raise _as_request_error(error) from None


def _check_content_type(request: Request) -> None:
    # A page of any origin can make a browser post other types without asking first; vLLM is as strict.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(
            415, f"the body must be JSON and say so: send the header 'Content-Type: application/json', not {kind!r:.80}"
        )


async def _read(request: Request, limit: int) -> bytes:
    declared = request.headers.get("content-length", "")
    too_large = HTTPException(413, f"the body is larger than {limit} bytes", {"connection": "close"})
    if declared.isdecimal() and int(declared) > limit:
        raise too_large
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise too_large
        chunks.append(chunk)
    return b"".join(chunks)


def _check_names(fields: dict[str, Any], body_type: type[Body]) -> None:
    for name, value in fields.items():
        if name in body_type.model_fields:
            continue
        harmless = HARMLESS.get(name) or UNSUPPORTED.get(name)
        if harmless is None:
            raise RequestError(f"unknown field {shorten(name)}: remove it, or correct its name", param=name[:100])
        if not harmless(value):
            raise RequestError(f"{name} is not supported here; remove it (its value is {shorten(value)})", param=name)


def _as_request_error(error: ValidationError) -> RequestError:
    """The first thing that is wrong, in our words."""
    first = error.errors(include_url=False)[0]
    param = _path(first["loc"])
    kind = first["type"]
    if kind == "missing":
        return RequestError(f"{param} is required", param=param)
    if kind == "extra_forbidden":
        return RequestError(f"unknown field {param}: remove it, or correct its name", param=param)
    if kind == "value_error":
        return RequestError(f"{param} {first['ctx']['error']}", param=param)
    expected = _EXPECTED.get(kind)
    if expected is None:
        return RequestError(f"{param}: {first['msg']}", param=param)
    return RequestError(f"{param} must be {expected}, not {shorten(first['input'])}", param=param)


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for item in location:
        path += f"[{item}]" if isinstance(item, int) else f".{item}" if path else item
    return path


def shorten(value: object, limit: int = 80) -> str:
    """A value as a message may quote it."""
    text = repr(value[:limit] if isinstance(value, (str, list)) else value)
    return text if len(text) <= limit + 2 else text[:limit] + "…"
