"""Data from files: ShareGPT's JSON, lines of JSON of your own, and traces in Mooncake's and BurstGPT's forms."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from sol.bench.data import Conversation, Turn
from sol.bench.lengths import MAX_LENGTH
from sol.bench.synthetic import TraceEntry
from sol.errors import ConfigError

_ROLES: Final = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant",
                 "bard": "assistant", "assistant": "assistant", "system": "system"}  # fmt: skip

_LINE: Final = (
    '{"prompt": text}, {"messages": [...]} or {"turns": [text, ...]}, with "max_tokens", "id" and "body" as options'
)


def read_conversations(path: Path, max_tokens: int, *, multi_turn: bool) -> list[Conversation]:
    """A file of prompts. ShareGPT's form is one JSON array of `{"conversations": [{"from", "value"}, …]}`; anything
    else is one JSON value a line: a string, `{"prompt"}`, `{"messages"}` or `{"turns"}`.

    `max_tokens` is for turns that give none. With `multi_turn` all of a conversation's user turns are asked, each after
    the endpoint's own answer to the one before; otherwise the first alone. Raises `ConfigError`.
    """
    text = _read(path)
    if text.lstrip().startswith("["):
        return list(_sharegpt(path, text, max_tokens, multi_turn))
    conversations = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            where = f"{path}, line {number}"
            try:
                value = json.loads(line)
            except ValueError as error:
                raise _wrong(f"{where} is not JSON ({error})") from None
            conversations.append(_conversation(value, where, number, max_tokens, multi_turn))
    if not conversations:
        raise _wrong(f"{path} has no prompts")
    return conversations


def _sharegpt(path: Path, text: str, max_tokens: int, multi_turn: bool) -> Iterator[Conversation]:
    try:
        items = json.loads(text)
    except ValueError as error:
        raise _wrong(f"{path} begins like a JSON array, but is not JSON ({error})") from None
    found = False
    for number, item in enumerate(items):
        where = f"{path}, item {number}"
        said = item.get("conversations", item.get("conversation")) if isinstance(item, dict) else None
        if not isinstance(said, list):
            raise _wrong(f'{where} has no list of "conversations", as ShareGPT\'s form has')
        messages = []
        for part in said:
            if not isinstance(part, dict) or not isinstance(part.get("value"), str):
                raise _wrong(f'{where}: each part of a conversation must be {{"from": who, "value": text}}')
            role = _ROLES.get(str(part.get("from", "")).lower())
            if role is None:
                raise _wrong(f'{where}: "from" must be one of {", ".join(_ROLES)}, not {part.get("from")!r}')
            messages.append({"role": role, "content": part["value"]})
        turns = _turns_of(messages, max_tokens, multi_turn)
        if turns:  # the well-known file holds conversations that nobody began
            found = True
            yield Conversation(key=str(item.get("id", number)), turns=turns)
    if not found:
        raise _wrong(f"{path} has no conversation in which a person says something")


def _turns_of(messages: list[dict[str, Any]], max_tokens: int, multi_turn: bool) -> list[Turn]:
    """One for each user message; what the file has as answers is left out, for the endpoint gives its own."""
    turns: list[Turn] = []
    waiting: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "assistant" or (message["role"] == "user" and not message["content"].strip()):
            continue
        waiting.append(message)
        if message["role"] == "user":
            turns.append(Turn(prompt=waiting, max_tokens=max_tokens))
            waiting = []
            if not multi_turn:
                break
    return turns


def _conversation(value: Any, where: str, number: int, max_tokens: int, multi_turn: bool) -> Conversation:
    item = {"prompt": value} if isinstance(value, str) else value
    if not isinstance(item, dict):
        raise _wrong(f"{where} must be a text or {_LINE}")
    unknown = item.keys() - {"prompt", "messages", "turns", "max_tokens", "id", "body"}
    if unknown or sum(name in item for name in ("prompt", "messages", "turns")) != 1:
        raise _wrong(f"{where} must be {_LINE}; it has {', '.join(sorted(item)) or 'nothing'}")
    limit = item.get("max_tokens", max_tokens)
    if not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit <= MAX_LENGTH:
        raise _wrong(f"{where}: max_tokens must be a whole number from 1, not {limit!r}")
    body = item.get("body", {})
    if not isinstance(body, dict):
        raise _wrong(f"{where}: body must be an object of request fields, not {body!r}")
    prompts: list[Any] = item["turns"] if "turns" in item else [item.get("prompt", item.get("messages"))]
    if not isinstance(prompts, list) or not prompts:
        raise _wrong(f"{where}: turns must be a list of texts, not {prompts!r}")
    for prompt in prompts:
        messages = isinstance(prompt, list) and prompt and all(isinstance(message, dict) for message in prompt)
        if not messages and not (isinstance(prompt, str) and prompt):
            raise _wrong(f"{where}: a prompt must be a text that is not empty, or a list of messages, not {prompt!r}")
    turns = [Turn(prompt=prompt, max_tokens=limit, body=body) for prompt in prompts]
    return Conversation(key=str(item.get("id", f"line {number}")), turns=turns if multi_turn else turns[:1])


def read_trace(path: Path) -> list[TraceEntry]:
    """A trace of arrivals and lengths, sorted by time, its first request at 0. Raises `ConfigError`.

    *Mooncake* (Qin et al. 2024), lines of `{"timestamp": milliseconds, "input_length", "output_length", "hash_ids"}`,
    where an id stands for 512 tokens and everything before them. *BurstGPT* (Wang et al. 2024), CSV with `Timestamp`
    in seconds, `Request tokens` and `Response tokens`; requests with a response of 0 tokens failed then, and are left
    out.
    """
    text = _read(path)
    entries = _mooncake(path, text) if text.lstrip().startswith("{") else _burstgpt(path, text)
    if not entries:
        raise _wrong(f"{path} has no requests")
    entries.sort(key=lambda entry: entry.timestamp)
    begin = entries[0].timestamp
    return [
        TraceEntry(
            timestamp=entry.timestamp - begin,
            input_tokens=entry.input_tokens,
            output_tokens=entry.output_tokens,
            hash_ids=entry.hash_ids,
        )
        for entry in entries
    ]


def _mooncake(path: Path, text: str) -> list[TraceEntry]:
    entries = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            entry = _entry(item["timestamp"] / 1000, item["input_length"], item["output_length"])
            hash_ids = tuple(int(hash_id) for hash_id in item.get("hash_ids", ()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _wrong(
                f"{path}, line {number} is no line of Mooncake's form ({type(error).__name__}: {error}): it has a "
                "timestamp in milliseconds, input_length, output_length and hash_ids"
            ) from None
        entries.append(
            TraceEntry(
                timestamp=entry[0],
                input_tokens=entry[1],
                output_tokens=entry[2],
                hash_ids=tuple(hash_id & (2**63 - 1) for hash_id in hash_ids),
            )
        )
    return entries


def _burstgpt(path: Path, text: str) -> list[TraceEntry]:
    rows = csv.DictReader(text.splitlines())
    names = {name.strip().lower(): name for name in rows.fieldnames or ()}
    missing = [name for name in ("timestamp", "request tokens", "response tokens") if name not in names]
    if missing:
        raise _wrong(
            f"{path} is no trace: it is neither lines of JSON (Mooncake) nor CSV with the columns Timestamp, Request "
            f"tokens and Response tokens (BurstGPT); {', '.join(missing)} is missing"
        )
    entries = []
    for row in rows:
        try:
            values = [row[names[name]] for name in ("timestamp", "request tokens", "response tokens")]
            if float(values[2]) == 0:
                continue
            time, input_tokens, output_tokens = _entry(*(float(value) for value in values))
        except (ValueError, TypeError) as error:
            raise _wrong(f"{path}, line {rows.line_num}: {error}") from None
        entries.append(TraceEntry(timestamp=time, input_tokens=input_tokens, output_tokens=output_tokens))
    return entries


def _entry(timestamp: float, input_tokens: float, output_tokens: float) -> tuple[float, int, int]:
    if not (0 <= timestamp < 1e12 and 1 <= input_tokens <= MAX_LENGTH and 1 <= output_tokens <= MAX_LENGTH):
        raise ValueError(
            f"a time of {timestamp:g} s with {input_tokens:g} input and {output_tokens:g} output tokens is out of range"
        )
    return float(timestamp), int(input_tokens), int(output_tokens)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error})", param="dataset") from None


def _wrong(message: str) -> ConfigError:
    return ConfigError(message, param="dataset")
