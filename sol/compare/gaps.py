"""How sure was A of its token where B took another? Found out by asking A again, with logprobs.

An answer's text is walked token by token in bytes, because that is what two servers have in common: their vocabularies
may name a token differently, and a token may hold a part of a character.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from sol.bench.data import Turn
from sol.bench.endpoint import Endpoint, replace
from sol.bench.http import Pool, fetch
from sol.compare.texts import Kind, common_prefix

_TRIES: Final = 4
"""An answer that A does not repeat says nothing of what comes after; it may the next time."""
_TOP: Final = 5
"""As many as OpenAI's completions allow."""
_END: Final = re.compile(rb"<[^<>\s]{1,40}>")
"""What end tokens look like in the lists that servers send; `</s>`, `<|im_end|>`."""

Judgement = tuple[Kind, float | None, str]


@dataclass(frozen=True, slots=True)
class Token:
    """One position of an answer, as its server saw it."""

    content: bytes
    logprob: float
    top: Sequence[tuple[bytes, float]]
    """The likeliest tokens."""


async def ask_gap(
    endpoint: Endpoint, pool: Pool, turn: Turn, a: str, b: str, near_tie: float, seconds: float
) -> Judgement:
    """What kind of difference there is between the answers `a` (this endpoint's) and `b` to a first turn.

    `near_tie` is the largest gap of one. "unknown" where the endpoint sends no logprobs.
    """
    for _ in range(_TRIES):
        tokens = await ask_tokens(endpoint, pool, turn, seconds)
        if isinstance(tokens, str):
            return "unknown", None, tokens
        judgement = judge_gap(tokens, a, b, near_tie)
        if judgement is not None:
            return judgement
    return "unknown", None, f"asked again {_TRIES} times, A parted from its own answer before that place"


def judge_gap(tokens: Sequence[Token], a: str, b: str, near_tie: float) -> Judgement | None:
    """`tokens` are those of A's answer when it was asked again; None if they do not get as far as the difference."""
    ours, theirs = a.encode(), b.encode()
    at = common_prefix(ours, theirs)
    if at is None:
        return "near tie", 0.0, "the texts are the same; only tokens differ"
    again = b"".join(token.content for token in tokens)
    parted = common_prefix(ours, again)
    if parted is not None and parted <= at and not _is_end(again[parted:]):
        if parted < at:
            return None
        return "near tie", None, "A itself took another token there when it was asked again"
    offset, gap, least = 0, None, None
    for token in tokens:
        if offset > at:
            break
        rest = theirs[offset:]
        leaves = not rest.startswith(token.content) or not token.content
        for content, logprob in token.top:
            reaches = offset + len(content) > at and rest.startswith(content)
            ends = not rest and leaves and (not content or _is_end(content))
            if content != token.content and (reaches or ends):
                gap = min(token.logprob - logprob, gap if gap is not None else token.logprob - logprob)
        if leaves:
            least = token.logprob - min((logprob for _, logprob in token.top), default=token.logprob)
            break
        offset += len(token.content)
    if gap is not None:
        kind: Kind = "near tie" if gap <= near_tie else "real"
        return kind, gap, f"to A its own token was likelier by {gap:.3g} in logits"
    if least is not None and least > near_tie:
        said = f"B's token is not among the {_TOP} likeliest to A, the last of which is {least:.3g} below A's own token"
        return "real", None, said
    return "unknown", None, "B's token is not among those whose logprobs A sent"


async def ask_tokens(endpoint: Endpoint, pool: Pool, turn: Turn, seconds: float) -> list[Token] | str:
    """The answer to a first turn, token by token; or why there is none."""
    whole = replace(endpoint, stream=False, counting="chunks")
    wanted = {"logprobs": True, "top_logprobs": _TOP} if endpoint.route == "chat" else {"logprobs": _TOP}
    body = whole.completion_body(turn.prompt, turn.max_tokens, {**turn.body, **wanted})
    try:
        status, content = await fetch(pool, whole.post(body), seconds=seconds)
    except (OSError, TimeoutError) as error:
        return f"A did not answer when it was asked for logprobs ({error or type(error).__name__})"
    if status != 200:
        return f"A sends no logprobs (it answers {status})"
    try:
        choice = msgspec.json.decode(content)["choices"][0]
        found = choice.get("logprobs")
        tokens = _of_chat(found) if endpoint.route == "chat" else _of_completions(found)
    except (msgspec.DecodeError, LookupError, TypeError, AttributeError, ValueError):
        tokens = []
    return tokens or "A sends no logprobs"


def _of_chat(found: Mapping[str, Any]) -> list[Token]:
    return [
        Token(
            _bytes(item), float(item["logprob"]), [(_bytes(top), float(top["logprob"])) for top in item["top_logprobs"]]
        )
        for item in found["content"]
    ]


def _of_completions(found: Mapping[str, Any]) -> list[Token]:
    tops = found.get("top_logprobs") or [{}] * len(found["tokens"])
    return [
        Token(
            str(text).encode(), float(logprob), [(name.encode(), float(value)) for name, value in (top or {}).items()]
        )
        for text, logprob, top in zip(found["tokens"], found["token_logprobs"], tops, strict=True)
    ]


def _bytes(item: Mapping[str, Any]) -> bytes:
    return bytes(item["bytes"]) if item.get("bytes") is not None else str(item["token"]).encode()


def _is_end(content: bytes) -> bool:
    return _END.fullmatch(content) is not None
