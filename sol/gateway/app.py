"""The gateway as an ASGI application: bare ASGI, since a framework would cost more than all the rest for each chunk."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, Final

import msgspec

from sol.errors import AuthenticationError, SolError, UnknownModelError
from sol.gateway.errors import (
    DrainingError,
    MethodNotAllowedError,
    NoCapacityError,
    RequestTooLargeError,
    UnknownPathError,
    error_body,
    error_headers,
    error_status,
)
from sol.gateway.gateway import Gateway
from sol.gateway.parsing import PATHS, headers_of, make_call, request_id
from sol.gateway.relay.attempt import fail_stream
from sol.gateway.reply import AsgiReply, Reply
from sol.gateway.single_flight import identify
from sol.gateway.sla.autoscaling import model_load
from sol.version import __version__

logger = logging.getLogger("sol.gateway")

Scope = dict[str, Any]
Receive = Callable[[], Coroutine[Any, None, dict[str, Any]]]
Send = Callable[[dict[str, Any]], Coroutine[Any, None, None]]
Page = Callable[[dict[str, str]], Awaitable[tuple[int, bytes, bytes]]]
"""A route that does not generate: given the headers, status, content type and body."""

_JSON: Final = b"application/json"
_MODELS: Final = "/v1/models"


class ClientLeft(Exception):
    """Before its request was whole."""


class GatewayApp:
    """`add_page` gives it more routes for GET: metrics."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._max_body_bytes = gateway.config.server.max_body_bytes
        self._created = int(time.time())
        self._open: set[asyncio.Task[Any]] = set()
        self._aborting = False
        self._none_open: asyncio.Event | None = None
        self._pages: dict[str, Page] = {
            "/live": self._live,
            "/ready": self._ready,
            "/health": self._ready,
            "/ping": self._ready,
            "/version": self._version,
            "/metrics": gateway.metrics_page,
            "/autoscaling": self._autoscaling,
            _MODELS: self._models,
        }

    @property
    def num_open(self) -> int:
        """Calls that are being answered."""
        return len(self._open)

    async def drained(self) -> None:
        """Wait until no call is open. New ones are refused from now on."""
        self._gateway.draining = True
        self._none_open = asyncio.Event()
        if self._open:
            await self._none_open.wait()

    async def abort(self) -> None:
        """End all open calls with an error."""
        self._aborting = True
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    def add_page(self, path: str, page: Page) -> None:
        self._pages[path] = page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = headers_of(scope["headers"])
        call_id = request_id(headers)
        reply = AsgiReply(send, ((b"x-request-id", call_id.encode()),))
        try:
            if scope["method"] == "POST" and scope["path"] in PATHS:
                await self._generate(scope["path"], headers, call_id, receive, reply)
            else:
                await self._page(scope["path"], scope["method"], headers, reply)
        except ClientLeft:
            return
        except Exception as error:
            if scope["path"] in PATHS:
                self._gateway.observe.refused(call_id, scope["path"], error)
            if not reply.started:
                await send_error(reply, error)
            elif isinstance(error, DrainingError):
                if not reply.finished:
                    await fail_stream(reply, error)
            else:
                raise  # the server cuts the connection: half a body must not look whole

    async def _generate(
        self, path: str, headers: dict[str, str], call_id: str, receive: Receive, reply: AsgiReply
    ) -> None:
        gateway = self._gateway
        arrived = time.monotonic()
        if gateway.draining:
            raise DrainingError("the gateway is about to stop; send this again, to another if there is one")
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            body = await self._read(headers, receive)
            call = make_call(path, headers, body, call_id=call_id, arrived=arrived)

            async def work(reply: Reply) -> None:
                # Errors are answered here, so that those who wait for the same work get the same answer.
                try:
                    await gateway.pipeline.run(call, lambda call: gateway.answer(call, reply))
                except Exception as error:
                    if reply.started:
                        raise
                    await send_error(reply, error, call.response_headers)

            identity = identify(path, headers, body)
            running = gateway.single_flight.run(identity, reply, work, stream=call.stream)
            await _until_disconnect(receive, reply, running)
        except asyncio.CancelledError:
            if not self._aborting:
                raise
            task.uncancel()
            raise DrainingError("the gateway was stopped before this was answered") from None
        finally:
            self._open.discard(task)
            if not self._open and self._none_open is not None:
                self._none_open.set()

    async def _read(self, headers: dict[str, str], receive: Receive) -> bytes:
        declared = headers.get("content-length", "")
        if declared.isdigit() and int(declared) > self._max_body_bytes:
            raise self._too_large()
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        body: bytes = message.get("body", b"")
        if not message.get("more_body", False):
            if len(body) > self._max_body_bytes:
                raise self._too_large()
            return body
        parts, size = [body], len(body)
        while message.get("more_body", False):
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._max_body_bytes:
                raise self._too_large()
        return b"".join(parts)

    def _too_large(self) -> RequestTooLargeError:
        return RequestTooLargeError(f"the body is larger than {self._max_body_bytes} bytes")

    async def _page(self, path: str, method: str, headers: dict[str, str], reply: AsgiReply) -> None:
        page = self._pages.get(path)
        if page is None and path.startswith(_MODELS + "/"):
            name = path[len(_MODELS) + 1 :]

            async def page(headers: dict[str, str]) -> tuple[int, bytes, bytes]:
                return await self._model(name, headers)

        if page is None:
            if path in PATHS:
                raise MethodNotAllowedError(f"{path} does not take {method[:20]}; use POST")
            raise UnknownPathError(f"there is no {path[:200]} here")
        if method not in ("GET", "HEAD"):
            raise MethodNotAllowedError(f"{path[:200]} does not take {method[:20]}; use GET")
        status, content_type, body = await page(headers)
        await reply.send(status, [(b"content-type", content_type)], body)

    async def _live(self, _headers: dict[str, str]) -> tuple[int, bytes, bytes]:
        """That this is answered at all says that the loop turns."""
        return 200, _JSON, b'{"status":"ok"}'

    async def _ready(self, _headers: dict[str, str]) -> tuple[int, bytes, bytes]:
        if self._gateway.draining:
            raise DrainingError("the gateway is about to stop")
        if not self._gateway.has_capacity():
            raise NoCapacityError("no engine can be asked: none answers its probes")
        return 200, _JSON, b'{"status":"ok"}'

    async def _version(self, _headers: dict[str, str]) -> tuple[int, bytes, bytes]:
        return 200, _JSON, msgspec.json.encode({"version": __version__})

    async def _autoscaling(self, _headers: dict[str, str]) -> tuple[int, bytes, bytes]:
        loads = [model_load(self._gateway, name) for name in self._gateway.fleet.pools]
        return 200, _JSON, msgspec.json.encode({"models": loads})

    async def _models(self, headers: dict[str, str]) -> tuple[int, bytes, bytes]:
        allowed = await self._allowed(headers)
        return 200, _JSON, msgspec.json.encode({"object": "list", "data": [self._card(name) for name in allowed]})

    async def _model(self, name: str, headers: dict[str, str]) -> tuple[int, bytes, bytes]:
        if name not in await self._allowed(headers):
            raise UnknownModelError(f"there is no model {name!r:.200} here", param="model")
        return 200, _JSON, msgspec.json.encode(self._card(name))

    async def _allowed(self, headers: dict[str, str]) -> Iterable[str]:
        """Names and aliases of the models that the key may use."""
        gateway = self._gateway
        principal = await gateway.authenticator.authenticate(headers)
        canonical = gateway.fleet.canonical
        return [name for name in canonical if principal.models is None or canonical[name] in principal.models]

    def _card(self, name: str) -> dict[str, object]:
        return {"id": name, "object": "model", "created": self._created, "owned_by": "sol-gateway"}


async def send_error(reply: Reply, error: Exception, more: Iterable[tuple[bytes, bytes]] = ()) -> None:
    if not isinstance(error, SolError):
        logger.error("unexpected error", exc_info=error)
    headers = [(b"content-type", _JSON), *error_headers(error), *more]
    if isinstance(error, AuthenticationError):
        headers.append((b"www-authenticate", b"Bearer"))
    await reply.send(error_status(error), headers, error_body(error))


async def _until_disconnect(receive: Receive, reply: AsgiReply, work: Awaitable[None]) -> None:
    """Do `work`, which is cancelled as soon as the client has left. The request's body must have been read."""
    task = asyncio.current_task()
    assert task is not None
    watch = _Watch(receive, reply, task)
    try:
        await work
    except asyncio.CancelledError:
        if not watch.has_left:
            raise
        task.uncancel()
    finally:
        watch.stop()


class _Watch:
    """Waits for the client to leave, and cancels the task then, unless all was given to the server before.

    It is no task of its own, as that would be made for every call, and costs more than all that it has to do: a
    coroutine that waits is taken on by what it waits for.
    """

    __slots__ = ("_receive", "_receiving", "_reply", "_stopped", "_task", "has_left")

    def __init__(self, receive: Receive, reply: AsgiReply, task: asyncio.Task[Any]) -> None:
        self._receive = receive
        self._reply = reply
        self._task = task
        self._stopped = False
        self.has_left = False
        self._receiving = receive()
        self._go_on()

    def _go_on(self, _waited_for: object = None) -> None:
        while not self._stopped:
            try:
                waits_for = self._receiving.send(None)
            except StopIteration as end:
                if end.value["type"] == "http.disconnect":
                    self._left()
                    return
                self._receiving = self._receive()
            else:
                waits_for.add_done_callback(self._go_on)
                return

    def _left(self) -> None:
        if not self._reply.finished:
            self.has_left = True
            self._task.cancel()

    def stop(self) -> None:
        self._stopped = True
        self._receiving.close()
