"""Responses that may be gone on from: the newest ones, in memory, as many as there is room for."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

MAX_CHARACTERS = 128 * 2**20
"""Of all conversations together. Conversations that share a beginning count it each."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    response: dict[str, Any]
    """As the client got it."""
    messages: tuple[dict[str, Any], ...]
    """The conversation up to and with its answer, without instructions, which hold for one response."""

    @property
    def num_characters(self) -> int:
        return sum(map(_num_characters, self.messages))


def _num_characters(message: dict[str, Any]) -> int:
    count = len(str(message["content"])) + len(message.get("reasoning_content", ""))
    return count + sum(len(str(call["function"])) for call in message.get("tool_calls", ()))


class ResponseStore:
    """Least recently used ones go first. Ids are random, so only who got one can ask for it."""

    def __init__(self, max_responses: int, max_characters: int = MAX_CHARACTERS) -> None:
        self._max_responses = max_responses
        self._max_characters = max_characters
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._num_characters = 0

    def __len__(self) -> int:
        return len(self._responses)

    def put(self, stored: StoredResponse) -> None:
        self._responses[stored.response["id"]] = stored
        self._num_characters += stored.num_characters
        while len(self._responses) > self._max_responses or self._num_characters > self._max_characters:
            _, oldest = self._responses.popitem(last=False)
            self._num_characters -= oldest.num_characters

    def get(self, response_id: str) -> StoredResponse | None:
        stored = self._responses.get(response_id)
        if stored is not None:
            self._responses.move_to_end(response_id)
        return stored

    def delete(self, response_id: str) -> bool:
        """Whether it was there."""
        stored = self._responses.pop(response_id, None)
        if stored is None:
            return False
        self._num_characters -= stored.num_characters
        return True
