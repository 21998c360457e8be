"""What is asked: conversations of one or more turns, by number, the same for the same number and seed.

A `Data` never runs out. A file's or a trace's items begin again after the last one, and their keys repeat, so that a
report can say how often the same prompt was sent (a prefix cache finds it the second time).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Final, Protocol

import numpy as np

from sol.bench.lengths import Lengths
from sol.errors import ConfigError

TASKS: Final = ("chat", "code", "extraction", "summary")
LANGUAGES: Final = ("en", "zh")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    prompt: str | list[dict[str, Any]]
    """A text, or messages that go on from those of the turns before."""
    max_tokens: int | None
    """None: as long as the endpoint lets it become."""
    delay: float = 0.0
    """Seconds after the end of the turn before."""
    body: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of this request."""

    def messages(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": self.prompt}] if isinstance(self.prompt, str) else self.prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    key: str
    turns: Sequence[Turn]


class Data(Protocol):
    def conversation(self, index: int) -> Conversation:
        """The one with this number, from 0."""
        ...

    def describe(self) -> dict[str, Any]:
        """For reports: what it is, and what repeats it."""
        ...


class Listed:
    """Conversations of a list, in an order that depends on the seed; each is used once before any is used again."""

    def __init__(
        self,
        conversations: Sequence[Conversation],
        *,
        seed: int = 0,
        shuffle: bool = True,
        output_tokens: Lengths | None = None,
        body: Mapping[str, Any] | None = None,
        description: Mapping[str, Any] | None = None,
    ) -> None:
        """`output_tokens` gives every turn a `max_tokens`, in place of its own. `body` goes into every request."""
        if not conversations:
            raise ConfigError("the data has no prompts", param="dataset")
        self._conversations = conversations
        self._seed = seed
        self._shuffle = shuffle
        self._output_tokens = output_tokens
        self._body = dict(body or {})
        self._description = dict(description or {})
        self._order: tuple[int, list[int]] = (-1, list(range(len(conversations))))

    def conversation(self, index: int) -> Conversation:
        size = len(self._conversations)
        found = self._conversations[self._ordered(index // size)[index % size]]
        if self._output_tokens is None and not self._body:
            return found
        rng = np.random.default_rng([self._seed, 0x0D7A, index])
        turns = [
            Turn(
                prompt=turn.prompt,
                max_tokens=turn.max_tokens if self._output_tokens is None else self._output_tokens.draw(rng),
                delay=turn.delay,
                body={**self._body, **turn.body},
            )
            for turn in found.turns
        ]
        return Conversation(key=found.key, turns=turns)

    def describe(self) -> dict[str, Any]:
        return {
            **self._description,
            "num_conversations": len(self._conversations),
            "output_tokens": None if self._output_tokens is None else self._output_tokens.text,
            "seed": self._seed,
            "shuffled": self._shuffle,
        }

    def _ordered(self, lap: int) -> list[int]:
        if self._shuffle and self._order[0] != lap:
            rng = np.random.default_rng([self._seed, 0x5EED, lap])
            self._order = lap, rng.permutation(len(self._conversations)).tolist()
        return self._order[1]


def built_in(
    *,
    tasks: Sequence[str] = TASKS,
    languages: Sequence[str] = LANGUAGES,
    output_tokens: Lengths | None = None,
    body: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Listed:
    """The prompts that come with Sol: chat, code, extraction and summaries, in English and Chinese."""
    for name, given, known in (("tasks", tasks, TASKS), ("languages", languages, LANGUAGES)):
        unknown = [item for item in given if item not in known]
        if unknown or not given:
            raise ConfigError(
                f"{name} must be some of {', '.join(known)}, not {', '.join(given) or 'none'}", param=name
            )
    content = resources.files("sol.bench").joinpath("prompts.jsonl").read_text(encoding="utf-8")
    conversations = []
    for line in content.splitlines():
        item = json.loads(line)
        if item["task"] in tasks and item["language"] in languages:
            turn = Turn(prompt=item["prompt"], max_tokens=item["max_tokens"])
            conversations.append(Conversation(key=item["id"], turns=[turn]))
    return Listed(
        conversations,
        seed=seed,
        output_tokens=output_tokens,
        body=body,
        description={"kind": "built-in", "tasks": list(tasks), "languages": list(languages)},
    )
