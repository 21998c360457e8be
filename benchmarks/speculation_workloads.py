"""Texts for the virtual clock: prompts and the answers that the model is going to give, as token ids.

`copy`: an answer is its prompt's passage again, with a token changed, left out or put in every 25 on average. `chat`:
prompt and answer are consecutive English. `adversarial`: half of the answers never continue a pair of tokens as any
earlier occurrence of it did, so that every match of a lookup is wrong; the other half are pieces of 3 to 6 tokens from
random places of the text so far, so that matches are right just long enough to be believed, and then break.

The English is the documentation that comes with Python (`pydoc_data`), cut into words, parts of long words and marks:
somewhat coarser than a tokenizer's pieces, and the same wherever it runs.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pydoc_data.topics import topics  # type: ignore[import-untyped, unused-ignore]
from typing import Final

PIECE: Final = re.compile(r"[A-Za-z_]{1,6}|\d{1,3}|\s+|[^\w\s]")
PROMPT_TOKENS: Final = (150, 300)
ANSWER_TOKENS: Final = (96, 160)
EDIT: Final = 1 / 25


@dataclass(frozen=True, slots=True)
class Exchange:
    prompt: list[int]
    answer: list[int]


@cache
def english() -> tuple[list[int], int]:
    """Token ids of all topics in order, and how many different ones there are."""
    ids: dict[str, int] = {}
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return [ids.setdefault(piece, len(ids)) for piece in PIECE.findall(text)], len(ids)


def copy(rng: random.Random) -> Exchange:
    tokens, vocabulary = english()
    length = rng.randint(*PROMPT_TOKENS)
    place = rng.randrange(len(tokens) - length)
    prompt = tokens[place : place + length]
    answer: list[int] = []
    at = 0
    wanted = min(rng.randint(*ANSWER_TOKENS), length - 20)
    while len(answer) < wanted and at < length:
        if rng.random() < EDIT:
            kind = rng.randrange(3)
            if kind < 2:
                answer.append(rng.randrange(vocabulary))
            at += kind > 0
        else:
            answer.append(prompt[at])
            at += 1
    return Exchange(prompt, answer)


def chat(rng: random.Random) -> Exchange:
    tokens, _ = english()
    count, length = rng.randint(*PROMPT_TOKENS), rng.randint(*ANSWER_TOKENS)
    place = rng.randrange(len(tokens) - count - length)
    return Exchange(tokens[place : place + count], tokens[place + count : place + count + length])


def adversarial(rng: random.Random) -> Exchange:
    count, length = rng.randint(*PROMPT_TOKENS), rng.randint(*ANSWER_TOKENS)
    text = _never_again(rng, count + length) if rng.random() < 0.5 else _pieces(rng, count, length)
    return Exchange(text[:count], text[count:])


WORKLOADS: Final[dict[str, Callable[[random.Random], Exchange]]] = {
    "copy": copy,
    "chat": chat,
    "adversarial": adversarial,
}


def exchanges(workload: str, count: int, seed: int = 0) -> list[Exchange]:
    """The same ones every time."""
    rng = random.Random(f"{workload} {seed}")
    return [WORKLOADS[workload](rng) for _ in range(count)]


def _never_again(rng: random.Random, length: int) -> list[int]:
    """Few tokens, so that each pair occurs again and again, and no triple twice."""
    alphabet = list(range(14))
    text = [rng.choice(alphabet), rng.choice(alphabet)]
    seen: dict[tuple[int, int], set[int]] = {}
    while len(text) < length:
        used = seen.setdefault((text[-2], text[-1]), set())
        left = [token for token in alphabet if token not in used]
        if not left:  # a new token takes the walk out of a dead end
            alphabet.append(len(alphabet))
            left = alphabet[-1:]
        token = rng.choice(left)
        used.add(token)
        text.append(token)
    return text


def _pieces(rng: random.Random, count: int, length: int) -> list[int]:
    tokens, _ = english()
    place = rng.randrange(len(tokens) - count)
    text = tokens[place : place + count]
    while len(text) < count + length:
        size = rng.randint(3, 6)
        place = rng.randrange(len(text) - size)
        text += text[place : place + size]
    return text[: count + length]
