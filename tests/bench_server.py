"""A server that sends what a test tells it to, byte for byte, and remembers what it was asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, Self

Reply = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]

STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text_event(text: str, **choice: Any) -> bytes:
    return event(choices=[{"index": 0, "delta": {"content": text}, "finish_reason": None, **choice}])


def whole(status: int, body: object, *headers: str) -> bytes:
    content = json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} X", "content-type: application/json", f"content-length: {len(content)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


def answer(*events: bytes) -> bytes:
    """A whole stream."""
    return STREAM + b"".join(chunked(one) for one in events) + chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n"


FINISH = event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])


def usage(prompt: int, completion: int) -> bytes:
    return event(choices=[], usage={"prompt_tokens": prompt, "completion_tokens": completion})


class ScriptedServer:
    """Calls `reply(body, writer)` for each POST; answers `/v1/models` itself."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self.bodies: list[dict[str, Any]] = []
        self.num_connections = 0
        self.num_open = 0
        self.most_open = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_exception: object) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.num_connections += 1
        try:
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET /v1/models"):
                    writer.write(whole(200, {"data": [{"id": "scripted"}]}))
                    continue
                if head.startswith(b"GET"):
                    writer.write(whole(404, {}))
                    continue
                (size,) = (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
                body = json.loads(await reader.readexactly(size))
                self.bodies.append(body)
                self.num_open += 1
                self.most_open = max(self.most_open, self.num_open)
                try:
                    await self._reply(body, writer)
                finally:
                    self.num_open -= 1
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            self._tasks.discard(task)
