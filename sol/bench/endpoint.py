"""The endpoint under measurement: its address, what a request to it looks like, and what it can say of tokens."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import msgspec

from sol.bench.http import Pool, fetch, request_head
from sol.bench.records import RequestRecord, TokenCounting
from sol.bench.stream import ResponseSink
from sol.errors import ConfigError, EndpointError
from sol.version import __version__

Route = Literal["chat", "completions"]

PATHS: Final[Mapping[Route, str]] = {"chat": "/chat/completions", "completions": "/completions"}

_PROBE_SECONDS: Final = 120.0
"""A server that loads or compiles on its first request may take that long."""

_OPTIONS: Final[tuple[tuple[TokenCounting, dict[str, Any]], ...]] = (
    ("segments", {"stream_options": {"include_usage": True, "include_speculation": True}}),
    ("usage", {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    ("token_ids", {"stream_options": {"include_usage": True}, "return_token_ids": True}),
    ("estimated", {"stream_options": {"include_usage": True}}),
    ("chunks", {}),
)
"""How to ask for token counts, the best first. An endpoint refuses what it does not know, or ignores it: the answer to
a short request tells."""

_ENCODER: Final = msgspec.json.Encoder()


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """An OpenAI-compatible server and how to ask it.

    `url` is its root or its `/v1`. Raises `ConfigError` for what is no such address.
    """

    url: str
    model: str = ""
    """Empty: the first that `/v1/models` lists; `prepare` fills it in."""
    route: Route = "chat"
    stream: bool = True
    api_key: str | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Further ones. They may hold secrets, so no report shows them."""
    body: Mapping[str, Any] = field(default_factory=dict)
    """Fields of every request: temperature, seed, what the endpoint knows beyond OpenAI's."""
    counting: TokenCounting | None = None
    """None: the best that the endpoint offers; `prepare` fills it in."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or parts.query or parts.fragment:
            raise ConfigError(f"url must be like http://127.0.0.1:8000, not {self.url!r}", param="url")
        if parts.username is not None:
            raise ConfigError("url must hold no user name: give the key with api_key", param="url")
        if self.route not in PATHS:
            raise ConfigError(f"route must be chat or completions, not {self.route!r}", param="route")
        for name, value in self._all_headers().items():
            if not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", name) or not re.fullmatch(r"[\t\x20-\x7e]*", value):
                raise ConfigError(f"the header {name!r} is not one of printable ASCII characters", param="headers")

    @property
    def base_path(self) -> str:
        """The path of the `/v1`."""
        path = urlsplit(self.url).path.rstrip("/")
        return path if path.endswith("/v1") else f"{path}/v1"

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    @property
    def is_local(self) -> bool:
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    def pool(self) -> Pool:
        parts = urlsplit(self.url)
        tls = parts.scheme == "https"
        return Pool(self.host, parts.port or (443 if tls else 80), tls=tls, clock=time.perf_counter)

    def get(self, path: str) -> bytes:
        """A whole GET request."""
        headers = {name: value for name, value in self._all_headers().items() if name != "Content-Type"}
        return request_head("GET", path, host=urlsplit(self.url).netloc, headers=headers)

    def post(self, body: Mapping[str, Any]) -> bytes:
        """A whole request for a completion."""
        content = _ENCODER.encode(body)
        path = self.base_path + PATHS[self.route]
        head = request_head(
            "POST", path, host=urlsplit(self.url).netloc, headers=self._all_headers(), content_length=len(content)
        )
        return head + content

    def completion_body(
        self, prompt: str | list[dict[str, Any]], max_tokens: int | None, extra: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """`prompt` is a text or a chat's messages. A text becomes the user's message on the chat route, and messages
        become a text on the other one."""
        body: dict[str, Any] = {"model": self.model}
        if self.route == "chat":
            body["messages"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        else:
            body["prompt"] = prompt if isinstance(prompt, str) else as_text(prompt)
        if max_tokens is not None:
            body["max_tokens"] = max_tokens
        if self.stream:
            body["stream"] = True
            body.update(dict(_OPTIONS)[self.counting or "chunks"])
        return {**body, **self.body, **(extra or {})}

    def describe(self) -> dict[str, Any]:
        """For reports: no secrets."""
        return {
            "url": self.url,
            "model": self.model,
            "route": self.route,
            "stream": self.stream,
            "body": dict(self.body),
            "counting": self.counting,
        }

    def _all_headers(self) -> dict[str, str]:
        headers = {
            "User-Agent": f"sol-bench/{__version__}",
            "Accept": "text/event-stream, application/json" if self.stream else "application/json",
            "Content-Type": "application/json",
        }
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        return {**headers, **self.headers}


def as_text(messages: list[dict[str, Any]]) -> str:
    """A chat as plain text, for an endpoint that only completes."""
    return "\n\n".join(f"{message.get('role', 'user')}: {message.get('content', '')}" for message in messages)


async def prepare(endpoint: Endpoint) -> Endpoint:
    """Find out the model and how tokens can be counted, by asking. Raises `EndpointError` if the endpoint is away or
    refuses a plain request."""
    pool = endpoint.pool()
    try:
        if not endpoint.model:
            endpoint = replace(endpoint, model=await _first_model(endpoint, pool))
        if not endpoint.stream:
            if endpoint.counting not in (None, "chunks"):
                raise ConfigError(
                    f"counting is {endpoint.counting}, but without streaming there are no chunks to count",
                    param="counting",
                )
            endpoint = replace(endpoint, counting="chunks")
            record = await probe(endpoint, pool)
            if not record.ok:
                raise _refused(endpoint, record)
            return endpoint
        wanted = endpoint.counting
        record = RequestRecord(0, "", 0, 0.0)
        for counting, _ in _OPTIONS:
            if wanted is not None and counting != wanted:
                continue
            candidate = replace(endpoint, counting=counting)
            record = await probe(candidate, pool)
            if record.ok and _delivers(record, counting):
                return candidate
            if record.error not in (None, "http_400", "http_422"):
                break  # not about the options
        if record.ok:
            raise ConfigError(
                f"counting is {wanted}, but {endpoint.url} does not send such counts; leave it out to use what "
                "it sends",
                param="counting",
            )
        raise _refused(endpoint, record)
    finally:
        pool.close()


async def probe(
    endpoint: Endpoint, pool: Pool, prompt: str = "Count from one to ten.", max_tokens: int = 8
) -> RequestRecord:
    """One request outside of the measurement. Raises `EndpointError` if there is nobody."""
    record = RequestRecord(0, "probe", 0, 0.0)
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    origin = pool.clock()
    sink = ResponseSink(record, done, origin, stream=endpoint.stream, keep_text=True)
    try:
        connection = pool.take() or await pool.connect()
    except (OSError, TimeoutError) as error:
        raise _away(endpoint, error) from None
    connection.send(endpoint.post(endpoint.completion_body(prompt, max_tokens)), sink)
    try:
        async with asyncio.timeout(_PROBE_SECONDS):
            await done
    except TimeoutError:
        connection.abort()
        raise EndpointError(f"{endpoint.url} did not answer a short request in {_PROBE_SECONDS:.0f} s") from None
    return record


def replace(endpoint: Endpoint, **changes: Any) -> Endpoint:
    fields = {name: getattr(endpoint, name) for name in Endpoint.__dataclass_fields__}
    return Endpoint(**{**fields, **changes})


def _delivers(record: RequestRecord, counting: TokenCounting) -> bool:
    if counting == "chunks":
        return True
    if record.completion_tokens is None:
        return False
    # Exact counts add up to the total. A server that tells its usage in the last chunk alone looks like one that tells
    # it in each, with all tokens in one place: there must be a count where the first text is. (Not in every chunk: one
    # may hold the rest of a character whose token counted before.)
    first = next((count for count, size in zip(record.counts, record.characters, strict=True) if size), 0)
    return counting == "estimated" or (sum(record.counts) == record.completion_tokens and first > 0)


async def _first_model(endpoint: Endpoint, pool: Pool) -> str:
    try:
        status, content = await fetch(pool, endpoint.get(f"{endpoint.base_path}/models"), seconds=30)
    except (OSError, TimeoutError) as error:
        raise _away(endpoint, error) from None
    try:
        listed = [str(item["id"]) for item in msgspec.json.decode(content)["data"]] if status == 200 else []
    except (msgspec.DecodeError, KeyError, TypeError):
        listed = []
    if not listed:
        raise EndpointError(
            f"{endpoint.url} lists no models ({endpoint.base_path}/models answers {status}); name one with --model",
            param="model",
        )
    return listed[0]


def _away(endpoint: Endpoint, error: BaseException) -> EndpointError:
    return EndpointError(f"{endpoint.url} cannot be reached ({error or type(error).__name__}); is the server up?")


def _refused(endpoint: Endpoint, record: RequestRecord) -> EndpointError:
    return EndpointError(
        f"{endpoint.url} does not complete a short request to {PATHS[endpoint.route]}: {record.error}: {record.message}"
    )
