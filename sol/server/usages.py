"""What requests came to, for a gateway that could not wait for their ends.

The usage stands at the end of an answer, which nobody gets whose client has left. A gateway that accounts for the work
sends a key of its own with each request (`x-sol-usage-key`), and asks once, by the key, when it has closed the
connection: `GET /v1/usage/KEY`, 404 while the request is open, and for keys that are not known any more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Final

USAGE_KEY_HEADER: Final = "x-sol-usage-key"
MAX_USAGES: Final = 10_000
"""Kept at most, the newest. Only abandoned requests are asked for, and those at once."""
_MAX_KEY: Final = 128


class Usages:
    def __init__(self) -> None:
        self._kept: OrderedDict[str, Mapping[str, object]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, key: str, usage: Mapping[str, object]) -> None:
        """`usage` as in an answer. What is no key is not kept."""
        if 0 < len(key) <= _MAX_KEY:
            self._kept[key] = usage
            if len(self._kept) > MAX_USAGES:
                self._kept.popitem(last=False)

    def take(self, key: str) -> Mapping[str, object] | None:
        return self._kept.pop(key, None)
