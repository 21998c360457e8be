"""How many tokens a request may come to, before anybody knows: learned from what requests like it came to."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import OrderedDict, deque

import msgspec

from sol.gateway.call import Call
from sol.gateway.limits.config import OutputEstimate

_REMEMBERED = 128
"""Answers of a key and model; more would be slower to follow a change."""
_ENOUGH = 20
"""Answers after which a quantile says something."""
_PAIRS = 10_000
"""Keys and models that are remembered; those not used for longest are forgotten first."""
_TOKENS_PER_CHARACTER = 0.35
_TOKENS_OF_TEMPLATE = 12
"""A chat template's own, around a short message. Both only until a model has answered for a while."""
_INPUT_QUANTILE = 0.99


class _Recent:
    """The last values, in the order in which they came and in their own."""

    __slots__ = ("arrived", "ordered")

    def __init__(self) -> None:
        self.arrived: deque[float] = deque()
        self.ordered: list[float] = []

    def add(self, value: float) -> None:
        if len(self.arrived) == _REMEMBERED:
            del self.ordered[bisect_left(self.ordered, self.arrived.popleft())]
        self.arrived.append(value)
        insort(self.ordered, value)

    def quantile(self, share: float) -> float | None:
        """The smallest value that at least this share does not exceed; None while there are too few."""
        if len(self.ordered) < _ENOUGH:
            return None
        return self.ordered[min(len(self.ordered) - 1, math.ceil(share * len(self.ordered)) - 1)]


class Estimates:
    """Of input and of output, by model, and of output by key and model, too."""

    def __init__(self, config: OutputEstimate) -> None:
        self._config = config
        self._recent: OrderedDict[tuple[str, ...], _Recent] = OrderedDict()

    def output(self, key: str, model: str) -> int:
        """Tokens to reserve for an answer whose length nobody declared."""
        for name in (("output", key, model), ("output", model)):
            value = self._quantile(name, self._config.quantile)
            if value is not None:
                return max(1, math.ceil(value))
        return self._config.initial

    def input(self, model: str, characters: int) -> int:
        """Tokens of a prompt of so many characters."""
        rate = self._quantile(("input", model, str(characters.bit_length())), _INPUT_QUANTILE)
        if rate is not None:
            return math.ceil(rate * max(1, characters))
        return math.ceil(_TOKENS_PER_CHARACTER * characters) + _TOKENS_OF_TEMPLATE

    def learn_output(self, key: str, model: str, tokens: int) -> None:
        """Of an answer that ended by itself, and that nobody had limited: others are shorter than they would be."""
        self._add(("output", key, model), tokens)
        self._add(("output", model), tokens)

    def learn_input(self, model: str, characters: int, tokens: int) -> None:
        """Prompts of about the same length are alike: a short one is mostly template, a long one mostly text."""
        self._add(("input", model, str(characters.bit_length())), tokens / max(1, characters))

    def _add(self, name: tuple[str, ...], value: float) -> None:
        recent = self._recent.get(name)
        if recent is None:
            recent = self._recent[name] = _Recent()
            if len(self._recent) > _PAIRS:
                self._recent.popitem(last=False)
        self._recent.move_to_end(name)
        recent.add(value)

    def _quantile(self, name: tuple[str, ...], share: float) -> float | None:
        recent = self._recent.get(name)
        return None if recent is None else recent.quantile(share)


def prompt_size(call: Call) -> tuple[int, int]:
    """Characters that become part of the prompt, and token ids where it is given as ids."""
    characters = sum(map(len, call.text()))
    for name in ("tools", "functions"):  # templates write them into the prompt
        if call.json.get(name):
            characters += len(msgspec.json.encode(call.json[name]))
    ids = 0
    for name in ("prompt", "input"):
        prompt = call.json.get(name)
        if isinstance(prompt, list):
            ids += sum(len(item) if isinstance(item, list) else isinstance(item, int) for item in prompt)
    return characters, ids


def choices(call: Call) -> int:
    """Answers that the request asks for, if what it asks for makes sense."""
    numbers = (call.json.get("n"), call.json.get("best_of"))
    several = max(1, *(number for number in numbers if isinstance(number, int)), 1)
    prompt = call.json.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        several *= len(prompt)
    return several
