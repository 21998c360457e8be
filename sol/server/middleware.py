"""What every request passes first: a request id, a last resort for unexpected errors, the API key. Raw ASGI."""

from __future__ import annotations

import hmac
import re
import uuid
from collections.abc import Sequence

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sol.errors import AuthenticationError
from sol.server.errors import error_response, report
from sol.server.generation import CHOICES, Usage
from sol.server.state import ServerState
from sol.server.usages import USAGE_KEY_HEADER

_SANE_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")
_PROTECTED = ("/v1/", "/tokenize", "/detokenize")
REQUEST_ID = "sol.request_id"
"""Where a request's ASGI scope has it."""


def is_work(scope: Scope) -> bool:
    """Whether a request costs work: those that a server finishes before it stops, and that are logged."""
    return scope["type"] == "http" and scope["method"] == "POST" and bool(scope["path"].startswith(_PROTECTED))


def needs_key(path: str) -> bool:
    """Whether a route is closed to who has none of the API keys, if there are any."""
    return path.startswith(_PROTECTED)


class RequestIdMiddleware:
    """Give every response `x-request-id`, the client's own where it sent a sane one, and turn whatever nobody caught
    into a 500 of the usual shape."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = _header(scope, b"x-request-id")
        request_id = sent.decode() if _SANE_REQUEST_ID.fullmatch(sent) else uuid.uuid4().hex
        scope[REQUEST_ID] = request_id
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            if started:  # uvicorn logs it and cuts the connection: half a body must not look whole
                raise
            report(error)
            await error_response(error)(scope, receive, send_with_id)


class WorkMiddleware:
    """Count the open requests for work, which a server that drains waits for, and keep what those came to that may be
    asked for."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if is_work(scope):
            state: ServerState = scope["app"].state.sol
            with state.open_request():
                try:
                    await self._app(scope, receive, send)
                finally:
                    key = _header(scope, USAGE_KEY_HEADER.encode())
                    if key and CHOICES in scope:
                        state.usages.keep(key.decode("latin-1"), Usage.of(scope[CHOICES]).as_dict())
        else:
            await self._app(scope, receive, send)


class ApiKeyMiddleware:
    """Ask for `Authorization: Bearer KEY` on everything that costs work or tells of the model. Health, version and
    metrics stay open: probes and scrapers have no keys."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._keys and scope["type"] == "http" and needs_key(scope["path"]):
            scheme, _, key = _header(scope, b"authorization").partition(b" ")
            if scheme.lower() != b"bearer" or not self._knows(key.strip()):
                message = "no API key" if not key else "unknown API key"
                error = AuthenticationError(f"{message}: send the header 'Authorization: Bearer KEY'")
                scope["app"].state.sol.metrics.count_error(error.status, error.code)
                response = error_response(error)
                response.headers["www-authenticate"] = "Bearer"
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _knows(self, key: bytes) -> bool:
        # Every key is compared, and each in constant time: how long it takes tells nothing about any of them.
        matches = [hmac.compare_digest(key, known) for known in self._keys]
        return any(matches)


def _header(scope: Scope, name: bytes) -> bytes:
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return b""
