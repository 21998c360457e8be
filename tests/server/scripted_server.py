"""The page served with answers that a test writes: what no model says on demand, such as hostile text."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from sol.server.page import page

Segments = list[tuple[str, str, int]]
"""(text, origin, tokens)"""


@dataclass
class Script:
    """What the server answers with, and what it was asked. Change it between requests."""

    models: list[dict[str, Any]] = field(
        default_factory=lambda: [{"id": "m", "max_model_len": 512, "drafters": ["ngram", "suffix"]}]
    )
    chunks: Callable[[dict[str, Any]], list[Segments]] = lambda body: [[("Hello", "target", 1)]]
    """By the request's body: the chunks of the answer."""
    with_segments: bool = True
    length: float | None = None
    """The mean acceptance length so far, in each chunk."""
    delay: float = 0.0
    """Before each chunk, in seconds."""
    usage: dict[str, Any] | None = None
    """The usage's `speculation`."""
    loading: str | None = None
    """Why there are no models yet."""
    failure: tuple[int, str] | None = None
    """Status and message instead of an answer."""
    breaks: str | None = None
    """After the chunks: an error event with this message; "" just ends the connection."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    async def list_models(self, _request: Request) -> Response:
        if self.loading is not None:
            return JSONResponse({"error": {"message": self.loading}}, 503, {"retry-after": "1"})
        return JSONResponse({"object": "list", "data": self.models})

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        if self.failure is not None:
            status, message = self.failure
            return JSONResponse({"error": {"message": message}}, status)
        return StreamingResponse(self._events(body), media_type="text/event-stream")

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[str]:
        chunks = self.chunks(body)
        for segments in chunks:
            await asyncio.sleep(self.delay)
            choice: dict[str, Any] = {"index": 0, "delta": {"content": "".join(text for text, _, _ in segments)}}
            if self.with_segments:
                named = [{"text": text, "origin": origin, "tokens": tokens} for text, origin, tokens in segments]
                choice["speculation"] = {"segments": named, "mean_acceptance_length": self.length}
            yield _event({"choices": [choice]})
        if self.breaks is not None:
            if self.breaks:
                yield _event({"error": {"message": self.breaks}})
            return
        yield _event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        tokens = sum(count for segments in chunks for _, _, count in segments)
        usage: dict[str, Any] = {"completion_tokens": tokens}
        if self.usage is not None and (body.get("speculation") or {}).get("enabled") is not False:
            usage["speculation"] = self.usage
        yield _event({"choices": [], "usage": usage})
        yield "data: [DONE]\n\n"


@contextlib.contextmanager
def scripted_server() -> Iterator[Script]:
    script = Script()
    routes = [
        Route("/", page),
        Route("/v1/models", script.list_models),
        Route("/v1/chat/completions", script.chat, methods=["POST"]),
    ]
    # The same behind a path, as a proxy would have it that strips it.
    app = Starlette(routes=[*routes, Route("/some/prefix", page), Mount("/some/prefix", routes=routes)])
    app.router.redirect_slashes = False
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", ws="none"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        script.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        yield script
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def _event(data: object) -> str:
    return f"data: {json.dumps(data)}\n\n"
