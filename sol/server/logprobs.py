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


def _spelling(tokenizer: Tokenizer, token_id: int) -> str:
    """A token's text; for a part of a character OpenAI's `bytes:\\xe2\\x80`."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
