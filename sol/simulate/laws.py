"""The laws of a simulated engine: what a step takes, what fits into one, and what follows from them in closed form.

A step that computes `s` sequences, `p` prompt tokens, decodes sequences with `c` tokens of context in all, and verifies
`d` drafted tokens, at most `k` of them in one sequence, takes

    step_seconds + s · sequence_seconds + p · prefill_token_seconds + c · context_token_seconds
                 + k · draft_token_seconds + d · verify_token_seconds

times the noise. Tokens come at the end of a step. Everything else (queueing, batching, preemption) follows from which
requests a step takes, which is `sol.simulate.engine`'s. The expectations below are those of a server that is otherwise
idle, without noise; they are exact where they say so.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_type_hints

from sol.config import literal_choices
from sol.errors import ConfigError

Noise = Literal["none", "lognormal"]


def option(default: Any, text: str) -> Any:
    """A field that is also a flag, with its help text."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLaws:
    """Raises `ConfigError` for values that no engine could have. Times are seconds, sizes tokens."""

    max_model_len: int = option(32768, "longest prompt plus output, in tokens")
    max_num_seqs: int = option(256, "most requests in one step")
    max_num_batched_tokens: int = option(8192, "most tokens in one step")
    enable_chunked_prefill: bool = option(True, "spread a prompt over several steps where it does not fit into one")
    enable_prefix_caching: bool = option(True, "keep the KV cache of prompts, and skip what is found there")
    block_size: int = option(16, "tokens in a block of the KV cache")
    num_blocks: int = option(25000, "blocks of the KV cache; when they run out, the latest request is preempted")
    step_seconds: float = option(0.006, "what every step takes")
    sequence_seconds: float = option(0.00001, "what a step takes for each request in it")
    prefill_token_seconds: float = option(0.00003, "what a step takes for each prompt token it computes")
    context_token_seconds: float = option(4e-8, "what a step takes for each token of context of requests that decode")
    num_speculative_tokens: int = option(0, "drafted tokens that a step verifies for a request; 0: no speculation")
    acceptance_rate: float = option(0.7, "probability that a draft is accepted if those before it were")
    draft_token_seconds: float = option(0.0004, "what drafting takes, a token of the longest draft in a step")
    verify_token_seconds: float = option(0.00001, "what verifying takes, a drafted token")
    noise: Noise = option("none", "lognormal: every step's duration is multiplied by a random factor with mean 1")
    noise_sigma: float = option(0.05, "standard deviation of the logarithm of that factor")
    seed: int = option(
        0, "of everything random: noise, acceptance, shares of faults, seeds of requests that bring none"
    )

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "num_blocks"):
            _require(self, name, getattr(self, name) >= 1, "at least 1")
        for item in dataclasses.fields(self):
            if item.name.endswith("_seconds"):
                _require(self, item.name, getattr(self, item.name) >= 0, "at least 0 seconds")
        _require(self, "step_seconds", self.step_seconds > 0, "more than 0 seconds: every step takes time")
        _require(self, "num_speculative_tokens", 0 <= self.num_speculative_tokens <= 1024, "0 to 1024")
        _require(self, "acceptance_rate", 0 <= self.acceptance_rate <= 1, "0 to 1")
        _require(self, "noise_sigma", 0 <= self.noise_sigma <= 3, "0 to 3")
        capacity = self.num_blocks * self.block_size
        if capacity < self.max_model_len:
            raise ConfigError(
                f"max_model_len is {self.max_model_len}, but the KV cache holds {capacity} tokens (num_blocks "
                f"{self.num_blocks} of block_size {self.block_size}): a longest request could never run",
                param="max_model_len",
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, less than max_model_len "
                f"({self.max_model_len}): without chunked prefill the longest prompt has to fit into one step",
                param="max_num_batched_tokens",
            )

    def step_duration(
        self,
        num_sequences: int,
        num_prefill_tokens: int,
        num_context_tokens: int,
        num_draft_tokens: int = 0,
        longest_draft: int = 0,
    ) -> float:
        """Seconds, without noise."""
        return (
            self.step_seconds
            + self.sequence_seconds * num_sequences
            + self.prefill_token_seconds * num_prefill_tokens
            + self.context_token_seconds * num_context_tokens
            + self.draft_token_seconds * longest_draft
            + self.verify_token_seconds * num_draft_tokens
        )

    def cached_tokens(self, shared_tokens: int, prompt_tokens: int) -> int:
        """How many tokens of a prompt are found in the prefix cache, if its first `shared_tokens` were computed
        before: whole blocks, and never the last token. Exact while nothing was evicted."""
        if not self.enable_prefix_caching:
            return 0
        return min(shared_tokens, prompt_tokens - 1) // self.block_size * self.block_size

    def expected_ttft(self, prompt_tokens: int, cached_tokens: int = 0) -> float:
        """Seconds from arrival to the first token. Exact."""
        computed = prompt_tokens - cached_tokens
        steps = math.ceil(computed / self.max_num_batched_tokens)
        return steps * (self.step_seconds + self.sequence_seconds) + computed * self.prefill_token_seconds

    def expected_step(self, batch: int = 1, context_tokens: float = 0) -> float:
        """Seconds of a step that decodes `batch` requests of `context_tokens` each, all with full drafts. Exact."""
        drafts = self.num_speculative_tokens
        return (
            self.step_seconds
            + batch * (self.sequence_seconds + context_tokens * self.context_token_seconds)
            + drafts * self.draft_token_seconds
            + batch * drafts * self.verify_token_seconds
        )

    def expected_acceptance_length(self) -> float:
        """Mean tokens that a step emits for a request, its own included: (1 − a^(k+1)) / (1 − a) (Leviathan et al.
        2023, "Fast Inference from Transformers via Speculative Decoding")."""
        rate, drafts = self.acceptance_rate, self.num_speculative_tokens
        return drafts + 1.0 if rate == 1 else (1 - rate ** (drafts + 1)) / (1 - rate)

    def expected_itl(self, batch: int = 1, context_tokens: float = 0) -> float:
        """Mean seconds between tokens in steady decoding: exact without speculation, with it the long-run mean."""
        return self.expected_step(batch, context_tokens) / self.expected_acceptance_length()

    def expected_e2e(self, prompt_tokens: int, output_tokens: int, cached_tokens: int = 0) -> float:
        """Seconds from arrival to the last token. Exact without speculation."""
        ttft = self.expected_ttft(prompt_tokens, cached_tokens)
        # The first token is the prefill's; token j+1 attends to the prompt and the j tokens before it.
        context = prompt_tokens + output_tokens / 2
        return ttft + (output_tokens - 1) * self.expected_itl(1, context)

    def expected_tpot(self, prompt_tokens: int, output_tokens: int) -> float:
        """Seconds a token without the first: (E2E − TTFT) / (output − 1). Exact without speculation."""
        if output_tokens < 2:
            raise ValueError(f"output_tokens must be at least 2, not {output_tokens}: the first has no time a token")
        e2e = self.expected_e2e(prompt_tokens, output_tokens)
        return (e2e - self.expected_ttft(prompt_tokens)) / (output_tokens - 1)

    def expected_throughput(self, batch: int, prompt_tokens: int, output_tokens: int) -> float:
        """Output tokens a second of a server that always has `batch` requests of this shape, none of them cached.

        Every request costs its prefill once, which all others wait for, and its share of the decoding steps; in the
        limit of many requests this is what the server gives.
        """
        context = prompt_tokens + output_tokens / 2
        decode = (output_tokens - 1) / self.expected_acceptance_length() * self.expected_step(batch, context)
        # Its chunks travel in steps that decode the others, so the step itself is paid already.
        prefill = prompt_tokens * self.prefill_token_seconds
        return batch * output_tokens / (decode + batch * prefill)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextLaws:
    """Raises `ConfigError`."""

    output_tokens_mean: float = option(200.0, "mean tokens of an answer that max_tokens does not end")
    output_tokens_sigma: float = option(0.5, "standard deviation of the logarithm of that number; 0: always the mean")
    near_tie_rate: float = option(0.0, "probability of a token to have a rival that is almost as likely")
    near_tie_flip_rate: float = option(0.5, "probability that a run takes the rival: answers then differ between runs")
    difference_rate: float = option(0.0, "probability of a token to differ from what the plain model says")
    variant: int = option(1, "which tokens differ")

    def __post_init__(self) -> None:
        check_types(self)
        if self.output_tokens_mean < 1:
            raise ConfigError(
                f"output_tokens_mean must be at least 1, not {self.output_tokens_mean}", param="output_tokens_mean"
            )
        if not 0 <= self.output_tokens_sigma <= 3:
            raise ConfigError(
                f"output_tokens_sigma must be 0 to 3, not {self.output_tokens_sigma}", param="output_tokens_sigma"
            )
        for name in ("near_tie_rate", "near_tie_flip_rate", "difference_rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} must be 0 to 1, not {getattr(self, name)}", param=name)


def check_types(options: Any) -> None:
    """Raise `ConfigError` for the first field of a dataclass whose value has not the declared type."""
    hints = get_type_hints(type(options))
    for item in dataclasses.fields(options):
        value, hint = getattr(options, item.name), hints[item.name]
        choices = literal_choices(hint)
        if choices:
            _require(options, item.name, value in choices, f"one of {', '.join(choices)}")
        elif hint is bool:
            _require(options, item.name, isinstance(value, bool), "true or false")
        elif hint is int:
            _require(options, item.name, isinstance(value, int) and not isinstance(value, bool), "a whole number")
        elif hint is float:
            number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            _require(options, item.name, number, "a finite number")
        elif hint is str:
            _require(options, item.name, isinstance(value, str) and bool(value), "a string that is not empty")


def _require(options: Any, name: str, holds: bool, allowed: str) -> None:
    if not holds:
        raise ConfigError(f"{name} must be {allowed}, not {getattr(options, name)!r}", param=name)


PROFILES: Final[Mapping[str, Mapping[str, Any]]] = {
    "h100-8b": {},
    "h100-70b-tp8": {
        "num_blocks": 60000, "step_seconds": 0.014, "sequence_seconds": 0.00002, "prefill_token_seconds": 0.00005,
        "context_token_seconds": 3e-8, "draft_token_seconds": 0.001, "verify_token_seconds": 0.00002,
    },
    "l4-8b-int4": {
        "max_num_seqs": 64, "max_num_batched_tokens": 2048, "num_blocks": 5000, "step_seconds": 0.025,
        "sequence_seconds": 0.0001, "prefill_token_seconds": 0.0004, "context_token_seconds": 4.5e-7,
        "draft_token_seconds": 0.0015, "verify_token_seconds": 0.0001,
    },
    "cpu-small": {
        "max_model_len": 8192, "max_num_seqs": 128, "max_num_batched_tokens": 512, "num_blocks": 2000,
        "step_seconds": 0.012, "sequence_seconds": 0.0008, "prefill_token_seconds": 0.001,
        "context_token_seconds": 2e-6, "draft_token_seconds": 0.0002, "verify_token_seconds": 0.0008,
    },
    "fast": {
        "max_num_seqs": 4096, "max_num_batched_tokens": 65536, "num_blocks": 1000000, "step_seconds": 0.001,
        "sequence_seconds": 0.0, "prefill_token_seconds": 0.0, "context_token_seconds": 0.0,
        "draft_token_seconds": 0.0, "verify_token_seconds": 0.0,
    },
}  # fmt: skip
"""Round figures of the size that such machines have, chosen for their proportions; nobody measured them. `fast` costs a
client nothing to wait for: it is for testing what stands in front."""

DEFAULT_PROFILE: Final = "h100-8b"


def profile(name: str, **changes: Any) -> EngineLaws:
    """A named profile with some values changed. Raises `ConfigError`."""
    if name not in PROFILES:
        raise ConfigError(f"profile must be one of {', '.join(PROFILES)}, not {name!r}", param="profile")
    return EngineLaws(**{**PROFILES[name], **changes})
