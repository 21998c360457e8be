"""How one request wants its tokens chosen. Names, defaults and meanings are vLLM's."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from sol.errors import RequestError
from sol.grammar import Grammar

MAX_LOGPROBS = 20
"""The most alternatives a token can be asked for: OpenAI's limit, and what the sampler keeps."""

MAX_CHOICES = 128
GREEDY_BELOW = 1e-5
"""A temperature below this is greedy, as in vLLM: dividing by it would only overflow."""


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """`stop` strings belong to the text layer (`sol.text`), everything else to the engine.

    Raises `RequestError` naming the field when a value cannot be honoured.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: every token."""
    min_p: float = 0.0
    seed: int | None = None
    """None or -1: one is chosen."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    """None: until the model's length is reached."""
    ignore_eos: bool = False
    logprobs: int | None = None
    """None: no logprobs. k: of the sampled token and the k likeliest (0 gives the sampled one alone)."""
    prompt_logprobs: int | None = None
    """The same of the prompt's tokens, each given those before it. Its KV cache is then computed, not looked up."""
    detokenize: bool = True
    skip_special_tokens: bool = True
    grammar: Grammar | None = None
    """What the output has to match. It ends where the grammar does: with an end token as soon as nothing else can
    follow, which `ignore_eos` and `min_tokens` do not change."""

    def __post_init__(self) -> None:
        stop: object = self.stop  # vLLM and OpenAI also take one string, or null
        if stop is None:
            self.stop = []
        elif isinstance(stop, str):
            self.stop = [stop]
        token_ids: object = self.stop_token_ids
        bias: object = self.logit_bias
        if token_ids is None:  # as in vLLM, also below
            self.stop_token_ids = []
        if bias is None:
            self.logit_bias = {}
        if self.seed == -1:
            self.seed = None
        if self.top_k == -1:
            self.top_k = 0
        self._require_ints(("n", "top_k", "min_tokens"), optional=("seed", "max_tokens", "logprobs", "prompt_logprobs"))
        self._require_floats(
            ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
        )
        self._require("n", 1 <= self.n <= MAX_CHOICES, f"from 1 to {MAX_CHOICES}")
        self._require("temperature", 0.0 <= self.temperature <= 100.0, "0 (greedy) to 100")
        self._require("top_p", 0.0 < self.top_p <= 1.0, "greater than 0 and at most 1")
        self._require("top_k", 0 <= self.top_k < 2**63, "0 or -1 (off), or 1 to 2**63 - 1")
        self._require("min_p", 0.0 <= self.min_p <= 1.0, "0 to 1")
        self._require("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "-2 to 2")
        self._require("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "-2 to 2")
        # A logit divided by less could be more than float32 holds.
        self._require("repetition_penalty", 0.01 <= self.repetition_penalty <= 100.0, "0.01 to 100 (1 is off)")
        self._require("seed", self.seed is None or -(2**63) <= self.seed < 2**63, "a 64-bit integer")
        self._require("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1")
        limit = math.inf if self.max_tokens is None else self.max_tokens
        self._require("min_tokens", 0 <= self.min_tokens <= limit, "0 to max_tokens")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            self._require(name, value is None or 0 <= value <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}, or null")
        self._require(
            "stop",
            isinstance(self.stop, list) and all(isinstance(s, str) and s for s in self.stop),
            "a non-empty string or a list of them",
        )
        self._require(
            "stop_token_ids",
            isinstance(self.stop_token_ids, (list, tuple)) and _are_ints(self.stop_token_ids),
            "a list of token ids (at least 0)",
        )
        self._require(
            "logit_bias",
            isinstance(self.logit_bias, dict)
            and _are_ints(self.logit_bias)
            and all(_is_number(v) and -100 <= v <= 100 for v in self.logit_bias.values()),
            "a map of token ids to numbers from -100 to 100",
        )
        self._require("grammar", self.grammar is None or isinstance(self.grammar, Grammar), "a Grammar, or null")
        self._require(
            "stop", not self.stop or self.detokenize, "empty when detokenize is false: stop strings are found in text"
        )

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def penalised(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `RequestError` if a token id in `logit_bias` or `stop_token_ids` is not in the vocabulary."""
        for name in ("logit_bias", "stop_token_ids"):
            for token in getattr(self, name):
                if token >= vocab_size:
                    raise RequestError(
                        f"{name}: token id {token} is not in the vocabulary of {vocab_size} tokens", param=name
                    )

    def _require(self, name: str, holds: bool, allowed: str) -> None:
        if not holds:
            raise RequestError(f"{name} must be {allowed}, not {getattr(self, name)!r}", param=name)

    def _require_ints(self, names: tuple[str, ...], optional: tuple[str, ...]) -> None:
        for name in names + optional:
            value = getattr(self, name)
            if value is None and name in optional:
                continue
            self._require(name, isinstance(value, int) and not isinstance(value, bool), "an integer")

    def _require_floats(self, names: tuple[str, ...]) -> None:
        for name in names:
            value = getattr(self, name)
            self._require(name, _is_number(value) and math.isfinite(value), "a finite number")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _are_ints(values: Iterable[object]) -> bool:
    return all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values)
