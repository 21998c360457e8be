"""Logprobs in OpenAI's two shapes: chat's list of entries, and the legacy parallel lists of completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sol.engine.types import TokenLogprobs
from sol.text.tokenizer import Tokenizer

_LOWEST = -9999.0
"""What minus infinity becomes, as in vLLM: JSON has no infinity."""


def chat_entries(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> list[dict[str, Any]]:
    """`choices[].logprobs.content`: one entry a token."""
    return [
        {
            **_entry(tokenizer, token_id, entry.logprob),
            "top_logprobs": [_entry(tokenizer, other, logprob) for other, logprob in entry.top],
        }
        for token_id, entry in zip(token_ids, logprobs, strict=True)
    ]


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    # A token may be a part of a character: `bytes` is exact, and joins with its neighbours'.
    return {"token": raw.decode("utf-8", "replace"), "logprob": max(logprob, _LOWEST), "bytes": list(raw)}


def completion_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], offsets: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> dict[str, Any]:
    """The legacy schema: `tokens`, `token_logprobs`, `top_logprobs`, `text_offset`."""
    tokens = [_spelling(tokenizer, token_id) for token_id in token_ids]
    top_logprobs = []
    for token, entry in zip(tokens, logprobs, strict=True):
        # Two ids may have one spelling: the likelier one keeps it, and the sampled token is always there.
        top = {_spelling(tokenizer, other): max(logprob, _LOWEST) for other, logprob in reversed(entry.top)}
        top.setdefault(token, max(entry.logprob, _LOWEST))
        top_logprobs.append(top)
    return {
        "tokens": tokens,
        "token_logprobs": [max(entry.logprob, _LOWEST) for entry in logprobs],
        "top_logprobs": top_logprobs,
        "text_offset": list(offsets),
    }


def echoed_logprobs(
    tokenizer: Tokenizer, text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> dict[str, Any]:
    """The legacy schema of a prompt that came as `text`. Nothing is said of its first token."""
    found = completion_logprobs(tokenizer, token_ids[1:], (), logprobs)
    return {
        "tokens": [_spelling(tokenizer, token_id) for token_id in token_ids[:1]] + found["tokens"],
        "token_logprobs": [None, *found["token_logprobs"]],
        "top_logprobs": [None, *found["top_logprobs"]],
        "text_offset": _offsets(tokenizer, text, token_ids),
    }


def joined_logprobs(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """The legacy schema of a text and what follows it."""
    return {name: values + second[name] for name, values in first.items()}


def prompt_entries(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's `prompt_logprobs`: for each token of the prompt it and the likeliest ones, by their ids as text."""
    entries: list[dict[str, dict[str, Any]] | None] = [None]
    for token_id, entry in zip(token_ids[1:], logprobs, strict=True):
        found = {str(token_id): _ranked(tokenizer, token_id, entry.logprob, entry.rank)}
        for rank, (other, logprob) in enumerate(entry.top, start=1):
            found.setdefault(str(other), _ranked(tokenizer, other, logprob, rank))
        entries.append(found)
    return entries


def _ranked(tokenizer: Tokenizer, token_id: int, logprob: float, rank: int) -> dict[str, Any]:
    text = tokenizer.token_bytes(token_id).decode("utf-8", "replace")
    return {"logprob": max(logprob, _LOWEST), "rank": rank, "decoded_token": text}


def _offsets(tokenizer: Tokenizer, text: str, token_ids: Sequence[int]) -> list[int]:
    """Where each token begins in `text`, in characters. What is not in it, as a token put before it, takes no room."""
    raw = text.encode("utf-8", "replace")
    place, characters = 0, 0
    offsets = []
    for token_id in token_ids:
        offsets.append(characters)
        piece = tokenizer.token_bytes(token_id)
        if not raw.startswith(piece, place):
            piece = piece.removeprefix(b" ")  # which some tokenizers put before a text
            if not raw.startswith(piece, place):
                continue
        place += len(piece)
        characters += sum(byte & 0xC0 != 0x80 for byte in piece)
    return offsets


def _spelling(tokenizer: Tokenizer, token_id: int) -> str:
    """A token's text; for a part of a character OpenAI's `bytes:\\xe2\\x80`."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
