"""What requests take, learned from those that ended: seconds of a prompt, seconds of a token, tokens of an answer."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Final

_ALPHA: Final = 0.05
_FORGET: Final = 0.98
_UNKNOWN_OUTPUT: Final = 256
_PRIOR_PROMPT: Final = 1e-4
_PRIOR_TOKEN: Final = 0.02
_REMEMBERED: Final = 10_000
_TAU: Final = 15.0


class PromptLaw:
    """Seconds to first token as a line over the prompt's tokens: least squares, older samples weighing less."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        self._n = _FORGET * self._n + 1
        self._x = _FORGET * self._x + tokens
        self._y = _FORGET * self._y + seconds
        self._xx = _FORGET * self._xx + tokens * tokens
        self._xy = _FORGET * self._xy + tokens * seconds

    def expect(self, tokens: int) -> float:
        if not self._n:
            return _PRIOR_PROMPT * tokens
        mean_x, mean_y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - mean_x * mean_x
        if spread <= 1e-6 * max(1.0, mean_x * mean_x):  # all were of one length: all of the time may be the prompt's
            return mean_y * max(tokens, 1) / max(mean_x, 1.0)
        slope = max(0.0, (self._xy / self._n - mean_x * mean_y) / spread)
        return max(0.0, mean_y + slope * (tokens - mean_x))


class ServiceLaw:
    """Of one model."""

    def __init__(self) -> None:
        self.prompt = PromptLaw()
        self.token_seconds = _PRIOR_TOKEN
        self._known = False
        self._outputs: OrderedDict[tuple[str, str], float] = OrderedDict()

    def observe_stream(self, prompt_tokens: int, first_seconds: float, output_tokens: int, rest_seconds: float) -> None:
        """A stream whose first token came after `first_seconds`, and the last one `rest_seconds` later."""
        self.prompt.observe(prompt_tokens, first_seconds)
        if output_tokens > 1:
            seconds = rest_seconds / (output_tokens - 1)
            self.token_seconds += (_ALPHA if self._known else 1.0) * (seconds - self.token_seconds)
            self._known = True

    def observe_output(self, class_name: str, tenant: str, tokens: int) -> None:
        place = class_name, tenant
        old = self._outputs.get(place)
        self._outputs[place] = tokens if old is None else old + _ALPHA * (tokens - old)
        self._outputs.move_to_end(place)
        if len(self._outputs) > _REMEMBERED:
            self._outputs.popitem(last=False)

    def output_tokens(self, class_name: str, tenant: str, declared: int | None) -> float:
        """What its answers have on average, and never more than is declared."""
        expected = self._outputs.get((class_name, tenant), _UNKNOWN_OUTPUT)
        return expected if declared is None else min(expected, declared)

    def seconds(self, prompt_tokens: int, output_tokens: float) -> float:
        return self.prompt.expect(prompt_tokens) + self.token_seconds * output_tokens


class DrainRate:
    """Tokens a second that leave the queue while there is one: a mean with a memory of `_TAU` seconds."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._since: float | None = None

    def backlog(self, now: float, waiting: bool) -> None:
        """Say at every change, before it happens, whether anybody waits."""
        if self._since is not None:
            elapsed = max(0.0, now - self._since)
            keep = math.exp(-elapsed / _TAU)
            self._tokens *= keep
            self._seconds = self._seconds * keep + elapsed
        self._since = now if waiting else None

    def left(self, tokens: float) -> None:
        if self._since is not None:
            self._tokens += tokens

    def per_second(self) -> float | None:
        """None: it was seen for too short a time."""
        return self._tokens / self._seconds if self._seconds > 1.0 and self._tokens > 0 else None
