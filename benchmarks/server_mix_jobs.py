"""What the clients of `server_mix.py` ask for, and how an answer is read: whole or streamed, it has to say the same."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
from tiny_server import CONFIG, NAME

SUBJECTS: Final = (
    "a river in spring", "the first computer", "bread", "a lighthouse keeper", "the moon", "a quiet library",
    "an old bicycle", "the number seven", "a train at night", "honey bees", "冬天", "un violon désaccordé",
)  # fmt: skip
GREEDY: Final[dict[str, Any]] = {"model": NAME, "temperature": 0}
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["bird", "fish", "stone"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "names": {"type": "array", "items": {"type": "string", "maxLength": 6}, "minItems": 1, "maxItems": 2},
    },
    "required": ["kind", "size", "names"],
    "additionalProperties": False,
}
TOOL: Final[dict[str, Any]] = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}


@dataclass(frozen=True)
class Job:
    kind: str
    path: str
    body: Mapping[str, Any]
    goes_on: bool = False
    """With a second turn, by `previous_response_id`."""
    is_json: bool = False
    """The text, or what it calls a tool with, has to be JSON with the fields of `SCHEMA`."""


@dataclass(frozen=True, slots=True)
class Text:
    """What one choice came to."""

    text: str
    reason: str | None
    calls: tuple[tuple[str, str], ...] = ()
    """Names and arguments of the tools it calls."""


Answer = tuple[Text, ...]


@dataclass(frozen=True)
class Wrong:
    """A request that has to be refused."""

    name: str
    status: int
    path: str
    data: bytes
    content_type: str = "application/json"
    method: str = "POST"


def say(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def make_jobs(seed: int) -> list[Job]:
    """Every request that is answered, by kind. `stop` jobs follow from answers: see `with_stop`."""
    random_ = random.Random(seed)
    jobs = []
    for number, subject in enumerate(SUBJECTS):
        messages = say(f"Tell me about {subject}.")
        seeded = {"model": NAME, "temperature": 1.0, "seed": seed + number}
        jobs += [
            Job("chat", CHAT, {**GREEDY, "messages": messages, "max_tokens": 24}),
            Job("completion", COMPLETIONS, {**GREEDY, "prompt": f"Facts about {subject}:", "max_tokens": 24}),
            Job("seeded", CHAT, {**seeded, "messages": messages, "max_tokens": 24, "top_p": 0.9, "top_k": 400}),
            Job(
                "penalties", COMPLETIONS,
                {**seeded, "prompt": subject, "max_tokens": 24, "min_tokens": 8, "frequency_penalty": 0.7,
                 "presence_penalty": 0.2, "repetition_penalty": 1.1, "logit_bias": {"28": 30, "12": -100}},
            ),
            Job("story", CHAT, {**seeded, "messages": messages, "max_tokens": 200, "ignore_eos": True}),
            Job("choices", CHAT, {**seeded, "messages": messages, "max_tokens": 16, "n": 3}),
            Job("logprobs", COMPLETIONS, {**GREEDY, "prompt": subject, "max_tokens": 12, "logprobs": 3, "echo": True}),
            Job("responses", RESPONSES, {**GREEDY, "input": f"And {subject}?", "max_output_tokens": 16}, goes_on=True),
            Job(
                "long", COMPLETIONS,
                {**GREEDY, "prompt": [random_.randrange(20, CONFIG["vocab_size"]) for _ in range(440)],
                 "max_tokens": 12},
            ),
            Job("prompts", COMPLETIONS, {**GREEDY, "prompt": [subject, f"{subject}?"], "n": 2, "max_tokens": 8}),
        ]  # fmt: skip
    return jobs


def structured_jobs(seed: int) -> list[Job]:
    """Answers in a form: JSON by a schema, and calls of tools."""
    jobs = []
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    for number, subject in enumerate(SUBJECTS[:6]):
        seeded = {"model": NAME, "temperature": 1.0, "seed": seed + number, "messages": say(f"Describe {subject}.")}
        jobs += [
            Job("schema", CHAT, {**seeded, "max_tokens": 120, "response_format": form}, is_json=True),
            Job(
                "tools", CHAT,
                {**seeded, "max_tokens": 160, "tools": [TOOL], "tool_choice": "required",
                 "parallel_tool_calls": False},
                is_json=True,
            ),
        ]  # fmt: skip
    return jobs


def with_stop(job: Job, answer: Answer) -> tuple[Job, Answer] | None:
    """The same, stopped where a word of the answer first begins; None for an answer without a word to stop at."""
    text = answer[0].text
    words = [word for word in text.split() if len(word) > 3 and text.index(word) > 8]
    if not words:
        return None
    stop = words[len(words) // 2]
    stopped = Job("stop", job.path, {**job.body, "stop": [stop, "\n\n\n\n"]})
    return stopped, (Text(text[: text.index(stop)], "stop"),)


def wrong_requests() -> list[Wrong]:
    def body(**fields: Any) -> bytes:
        return json.dumps({"model": NAME, "messages": say("Hi"), "max_tokens": 4, **fields}).encode()

    deep = b'{"messages":' + b"[" * 50_000 + b"]" * 50_000 + b"}"
    long = json.dumps({"model": NAME, "prompt": "word " * 20_000}).encode()
    return [
        Wrong("not JSON", 400, CHAT, b'{"messages": ['),
        Wrong("deep", 400, CHAT, deep),
        Wrong("no messages", 400, CHAT, body(messages=[])),
        Wrong("unknown field", 400, CHAT, body(temprature=1)),
        Wrong("wrong type", 400, CHAT, body(max_tokens="4")),
        Wrong("no choices", 400, CHAT, body(n=0)),
        Wrong("unknown token", 400, CHAT, body(logit_bias={"99999999": 1})),
        Wrong("unknown role", 400, CHAT, body(messages=[{"role": "king", "content": "Hi"}])),
        Wrong("surrogate", 400, CHAT, body(messages=say("\ud800"))),
        Wrong("bad schema", 400, CHAT, body(response_format={"type": "json_schema"})),
        Wrong("bad tool", 400, CHAT, body(tools=[{"type": "function"}], tool_choice="required")),
        Wrong("too long", 400, COMPLETIONS, long),
        Wrong("no prompt", 400, COMPLETIONS, b"{}"),
        Wrong("unknown response", 400, RESPONSES, b'{"input": "Hi", "previous_response_id": "resp_none"}'),
        Wrong("unknown model", 404, CHAT, body(model="another")),
        Wrong("unknown path", 404, "/v1/chat/completion", body()),
        Wrong("not a POST", 405, CHAT, b"", method="GET"),
        Wrong("not said to be JSON", 415, CHAT, body(), content_type="text/plain"),
    ]


class Cut(Exception):
    """A stream that ended before it said so, or with an error."""


async def read_whole(response: aiohttp.ClientResponse, job: Job) -> tuple[Answer, str | None]:
    """The answer, and its id."""
    data = await response.json()
    if job.path == RESPONSES:
        return (_of_response(data),), data["id"]
    texts = []
    for choice in data["choices"]:
        message = choice.get("message") or {}
        calls = tuple((c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or ())
        text = choice["text"] if "text" in choice else message["content"] or ""
        texts.append(Text(text, choice["finish_reason"], calls))
    return tuple(texts), data["id"]


async def read_stream(response: aiohttp.ClientResponse, job: Job, leave_after: int) -> tuple[Answer, str | None] | None:
    """The same of a stream; None if the client leaves it, after so many events. Raises `Cut`."""
    texts: dict[int, list[str]] = {}
    reasons: dict[int, str | None] = {}
    calls: dict[int, dict[int, list[str]]] = {}
    number = 0
    async for data in _events(response):
        number += 1
        if number > leave_after:
            return None
        if data.get("type") in ("response.completed", "response.incomplete"):
            return (_of_response(data["response"]),), data["response"]["id"]
        if "error" in data:
            raise Cut(json.dumps(data["error"]))
        if data.get("done"):
            missing = [index for index, reason in reasons.items() if reason is None]
            if missing or not reasons:
                raise Cut(f"choices without an end: {missing}")
            return tuple(
                Text(
                    "".join(texts[index]), reasons[index],
                    tuple((call[0], "".join(call[1:])) for _, call in sorted(calls[index].items())),
                )
                for index in sorted(texts)
            ), None  # fmt: skip
        for choice in data.get("choices", ()):
            index, delta = choice["index"], choice.get("delta") or {}
            texts.setdefault(index, []).append(choice.get("text") or delta.get("content") or "")
            reasons[index] = choice["finish_reason"] or reasons.get(index)
            for call in delta.get("tool_calls") or _NO_CALLS:
                pieces = calls.setdefault(index, {}).setdefault(call["index"], [call["function"].get("name") or ""])
                pieces.append(call["function"].get("arguments") or "")
            calls.setdefault(index, {})
    raise Cut("the stream ended without saying so")


_NO_CALLS: Final[Sequence[Any]] = ()


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in response.content:
        if line == b"data: [DONE]\n":
            yield {"done": True}
        elif line.startswith(b"data: "):
            yield json.loads(line[6:])


def _of_response(data: Mapping[str, Any]) -> Text:
    text = "".join(part["text"] for item in data["output"] for part in item.get("content") or ())
    return Text(text, data["status"])
