"""One request on its way through the gateway: what stages read, what they decide, how it ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import msgspec


class Principal(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks: what the key in the request stands for."""

    key_id: str
    """Names the key in logs and records; the key cannot be told from it."""
    tenant: str
    models: frozenset[str] | None = None
    """What it may ask for; None: everything."""
    classes: tuple[str, ...] = ()
    """The classes it may ask for, beside its default and those that are less urgent."""
    default_class: str | None = None
    """The class of its requests that ask for none; None: the gateway's default."""
    limits: str | None = None
    """The name of a limit policy."""
    metadata: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Of the key, for records and reports."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What a stage decided about a call, so that somebody who asks why can be told."""

    stage: str
    rule: str
    """The name of the rule, policy or signal that decided."""
    action: str
    """What was done: reject, redact, flag, degrade, route …"""
    detail: str = ""
    """For people; never holds what the client wrote."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a call. `estimated` is set where the engine did not tell: a stream that ended early."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Of the prompt's, those the engine had in its prefix cache."""
    estimated: bool = False
    speculation: Mapping[str, Any] | None = None
    """What Sol's engine says of the call's drafts, where it was asked to."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a call ended. Times are of `time.monotonic()`."""

    status: int
    """What the client was told, or would have been: 499 where it left before it was told anything."""
    error: Exception | None = None
    """Also of a stream whose status was 200 when it broke."""
    usage: Usage | None = None
    """None where no engine did any work."""
    first_byte_at: float | None = None
    """When the first bytes of the answer came from the engine."""
    ended_at: float = msgspec.field(default_factory=time.monotonic)
    client_left: bool = False


class OutputFilter(Protocol):
    """Sees an answer before the client does. A stage puts one into `Call.output_filters`.

    `feed` gets bytes of the response as they come (of a stream: whole server-sent events, of anything else: the whole
    body) and returns what may be passed on now; `finish` returns what was held back, once nothing more comes. Both
    raise a SolError to end the answer there.
    """

    def feed(self, data: bytes) -> bytes: ...

    def finish(self) -> bytes: ...


class Call(msgspec.Struct, kw_only=True, eq=False):
    """One request. Stages change it as it passes; the relay sends what it holds when it has passed them all."""

    id: str
    """What the client sent as x-request-id if it is sane, else made here."""
    path: str
    method: str
    headers: Mapping[str, str]
    """By lower-case name; the last of several of one name."""
    body: bytes
    """What goes upstream. A stage that changes `json` calls `rewrite`."""
    json: dict[str, Any]
    """The parsed body: read it freely, change it only together with `body`."""
    model: str
    """As clients name it."""
    stream: bool
    arrived: float
    """time.monotonic()."""
    deadline: float | None = None
    """time.monotonic() after which nobody waits for the answer."""
    principal: Principal | None = None
    class_name: str = "interactive"
    input_tokens: int = 0
    """An estimate until usage comes."""
    output_tokens: int | None = None
    """What the client declared as max_tokens, for all its choices together; None where it declared nothing."""
    decisions: list[Decision] = msgspec.field(default_factory=list)
    usage: Usage | None = None
    usage_so_far: Callable[[], Usage | None] | None = None
    """While an engine's stream is relayed, tells how far it is."""
    backend: str | None = None
    """The engine that answers, or answered."""
    first_byte_at: float | None = None
    """time.monotonic() when the first bytes of an answer came from an engine."""
    attempt: int = 0
    """1 for the first engine that was asked, 0 before."""
    prefix_key: int | None = None
    """A hash of the prompt's first blocks: requests that share it profit from the same engine's cache."""
    only_engines: frozenset[str] | None = None
    """Routing may choose among these only; None: all of the model's."""
    drafter: str | None = None
    """Of engines that speculate, who is to draft; None: as the engine decides."""
    task: str | None = None
    """What kind of work it is, where routing was told how to recognise one."""
    no_drafts: bool = False
    """Engines of ours are to decode it without drafts; the answer is the same."""
    ttft_target: float | None = None
    """Seconds from arrival that its class is promised for an answer's beginning; None: nothing is."""
    response_headers: list[tuple[bytes, bytes]] = msgspec.field(default_factory=list)
    """Sent with the response, whether it is an answer or an error."""
    output_filters: list[OutputFilter] = msgspec.field(default_factory=list)
    trail: list[tuple[str, float]] = msgspec.field(default_factory=list)
    """Stages that it came to, and when (time.monotonic()); the last is where it is, or where it ended: `relay` after
    them all."""
    pace: Callable[[float, int], None] | None = None
    """Told of each chunk of a stream: when it came, and how many events have come by then."""

    def decide(self, stage: str, rule: str, action: str, detail: str = "") -> None:
        self.decisions.append(Decision(stage=stage, rule=rule, action=action, detail=detail))

    def rewrite(self, changed: dict[str, Any]) -> None:
        """Take `changed` for the request's body."""
        self.json = changed
        self.body = msgspec.json.encode(changed)

    def text(self) -> Iterator[str]:
        """What the client wrote: the texts of messages, of a prompt, of a Responses API's input, in their order.

        Prompts of token ids have no text here.
        """
        data = self.json
        for name in ("system", "instructions", "prompt", "input"):
            if name in data:
                yield from _texts_of(data[name])
        messages = data.get("messages")
        if isinstance(messages, list):
            for message in messages:
                if isinstance(message, dict):
                    content = message.get("content")
                    if isinstance(content, str):  # nearly always
                        yield content
                    else:
                        yield from _texts_of(content)


def _texts_of(value: Any) -> Iterator[str]:
    """The strings in what APIs take for a text: a string, a list of them, of parts, or of messages of parts."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for part in value:
            if isinstance(part, str):
                yield part
            elif isinstance(part, dict):
                yield from _texts_of(part.get("text"))
                yield from _texts_of(part.get("content"))
