"""Errors as clients see them: `{"error": {"message", "type", "param", "code"}}` with the right status."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sol.errors import SolError

logger = logging.getLogger("sol.server")

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that left; nobody reads it."""

_HTTP_ERRORS = {
    404: ("not_found_error", "unknown_url"),
    405: ("invalid_request_error", "method_not_allowed"),
    413: ("invalid_request_error", "request_too_large"),
    415: ("invalid_request_error", "unsupported_media_type"),
}


def error_body(error: Exception) -> dict[str, Any]:
    """The JSON body for any exception; one that Sol did not raise on purpose tells the client nothing of its inside."""
    if isinstance(error, SolError):
        return _body(error.message, error.type, error.param, error.code)
    if isinstance(error, HTTPException):
        kind, code = _HTTP_ERRORS.get(error.status_code, ("invalid_request_error", None))
        return _body(error.detail, kind, None, code)
    return _body("the server failed to handle this request; its log says why", "internal_server_error", None, None)


def error_status(error: Exception) -> int:
    if isinstance(error, SolError):
        return error.status
    return error.status_code if isinstance(error, HTTPException) else 500


def error_event(error: Exception) -> str:
    """A whole server-sent event that says why a stream ends early."""
    return f"data: {json.dumps(error_body(error))}\n\n"


def error_response(error: Exception) -> Response:
    headers: dict[str, str] = {}
    if isinstance(error, SolError) and error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    if isinstance(error, SolError) and error.should_retry is not None:
        headers["x-should-retry"] = str(error.should_retry).lower()
    if isinstance(error, HTTPException):
        headers.update(error.headers or {})
    return JSONResponse(error_body(error), error_status(error), headers)


def report(error: Exception) -> None:
    """Log what is the server's own fault; what clients do wrong is told to them alone."""
    if not isinstance(error, (SolError, HTTPException)):
        logger.error("unexpected error", exc_info=error)


async def handle_error(request: Request, error: Exception) -> Response:
    """The exception handler of every route."""
    report(error)
    request.app.state.sol.metrics.count_error(error_status(error), error_code(error))
    return error_response(error)


async def handle_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path
    if error.status_code == 404:
        error = HTTPException(404, f"there is no {path} here", error.headers)
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        error = HTTPException(405, f"{path} does not take {method}; use {allowed}", error.headers)
    return await handle_error(request, error)


async def handle_disconnect(_request: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


def error_code(error: Exception) -> str:
    """A label for metrics: the error's code, or its type where it has none. Never a client's own words."""
    inner = error_body(error)["error"]
    return str(inner["code"] or inner["type"])


def _body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Mapping[str, str | None]]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
