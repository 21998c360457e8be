"""What the simulated model says: words that follow from the prompt, the parameters and the seed, and nothing else.

Like a language model it has a distribution of the next token that depends on all tokens before, here through a hash,
and a choice from it that depends on temperature, top_k, top_p, min_p and noise of (seed, choice, position). So texts
that differ in one token differ after it, and a greedy text does not depend on the seed.

Two models are told apart by what distinguishes them: at a near tie (`near_tie_rate`, the same places for all) two
tokens are almost equally likely, and a run takes the other one with `near_tie_flip_rate`, as batched arithmetic does;
at a real difference (`difference_rate`, by `variant`) the model means something else.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import math
import statistics
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sol.engine.types import TokenLogprobs
from sol.errors import RequestError
from sol.sampling_params import SamplingParams
from sol.simulate import vocabulary
from sol.simulate.laws import TextLaws
from sol.simulate.noise import mix, uniform
from sol.text.stop_strings import StopStrings

_NUM_CANDIDATES: Final = 20
_NUM_LEVELS: Final = 16
_TIE: Final = _NUM_LEVELS
"""The level of confidence at which two candidates are almost equal."""
_SHORTEST_SENTENCE: Final = 5

_FULL_STOP: Final = vocabulary.encode(".")[0]
_COMMA: Final = vocabulary.encode(",")[0]
# By form: within a sentence, at its beginning, and at the beginning of the text.
_WITHIN: Final = tuple(vocabulary.word_id(f" {word}") for word in vocabulary.WORDS)
_BEGIN: Final = tuple(vocabulary.word_id(f" {word.capitalize()}") for word in vocabulary.WORDS)
_FIRST: Final = tuple(vocabulary.word_id(word.capitalize()) for word in vocabulary.WORDS)
_NUM_WORDS: Final = len(vocabulary.WORDS)
_STANDARD_NORMAL: Final = statistics.NormalDist()


@dataclass(slots=True)
class Answer:
    """The whole of one choice, as it will come."""

    token_ids: list[int]
    text: str
    ends: list[int]
    """Characters of `text` that are there after each token."""
    finish_reason: str
    stop_reason: str | int | None
    logprobs: list[TokenLogprobs] | None


def check_params(params: SamplingParams) -> None:
    """Raise `RequestError` for what a model without logits cannot honour."""
    if params.penalised:
        raise RequestError(
            "presence_penalty, frequency_penalty and repetition_penalty are not simulated; remove them",
            param="repetition_penalty" if params.repetition_penalty != 1.0 else "presence_penalty",
        )
    if params.logit_bias:
        raise RequestError("logit_bias is not simulated; remove it", param="logit_bias")
    if params.prompt_logprobs is not None:
        raise RequestError(
            "logprobs of the prompt are not simulated; remove prompt_logprobs, or echo or logprobs",
            param="prompt_logprobs",
        )


def answer(
    laws: TextLaws,
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    *,
    seed: int,
    choice_index: int = 0,
    most_tokens: int,
    run: int = 0,
) -> Answer:
    """What the model says to a prompt, in at most `most_tokens` (or `params.max_tokens`) tokens.

    `run` distinguishes two times that the same is asked: near ties depend on it, nothing else does.
    """
    context = hash_tokens(prompt_token_ids)
    noise = mix(mix(seed, choice_index), 0x5EED)
    length = _natural_length(laws, context if params.greedy else mix(context, noise))
    length = max(length, params.min_tokens + 1)
    limit = most_tokens if params.max_tokens is None else min(most_tokens, params.max_tokens)
    stops = StopStrings(params.stop) if params.stop else None
    stop_ids = frozenset(params.stop_token_ids)

    token_ids: list[int] = []
    ends: list[int] = []
    logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
    parts: list[str] = []
    size = words = 0
    reason, stop_reason = "length", None
    stop_match: str | int | None = None
    for position in range(limit):
        if position + 1 == length and not params.ignore_eos:
            token_id, candidates, level = vocabulary.END, None, 0
            piece = "" if params.skip_special_tokens else vocabulary.decode([token_id])
        else:
            candidates, level = _next(laws, context, words, run, first=position == 0)
            table, cumulative = _choices(level, *_sampling(params))
            if params.greedy:
                rank = 0
            else:
                u = uniform(mix(noise, position)) * cumulative[-1]
                rank = min(bisect.bisect_right(cumulative, u), len(table) - 1)
            token_id = candidates[rank]
            piece = vocabulary.decode([token_id])
            words = 0 if token_id == _FULL_STOP else words + 1
        token_ids.append(token_id)
        context = mix(context, token_id)
        if logprobs is not None:
            logprobs.append(_logprobs(token_id, candidates, level, params.logprobs or 0))
        counts = position + 1 > params.min_tokens
        if token_id == vocabulary.END:
            reason = "stop"
        elif token_id in stop_ids and counts:
            reason, stop_match, piece = "stop", token_id, ""
        parts.append(piece)
        size += len(piece)
        ends.append(size)
        if stops is not None and (match := stops.feed(piece, stopping=counts)) is not None:
            size += match.end - len(piece)
            size -= 0 if params.include_stop_str_in_output else len(match.stop)
            reason, stop_match = "stop", match.stop
        if reason == "stop":
            stop_reason = stop_match
            break
    text = "".join(parts)[:size]
    return Answer(token_ids, text, [min(end, size) for end in ends], reason, stop_reason, logprobs)


def hash_tokens(token_ids: Sequence[int]) -> int:
    """64 bits."""
    packed = array("I", token_ids).tobytes()
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def _natural_length(laws: TextLaws, bits: int) -> int:
    sigma = laws.output_tokens_sigma
    if sigma == 0:
        return round(laws.output_tokens_mean)
    # A uniform number may be 0, whose quantile is minus infinity.
    z = _STANDARD_NORMAL.inv_cdf(max(uniform(mix(bits, 0x1E46)), 1e-12))
    return max(1, round(laws.output_tokens_mean * math.exp(sigma * z - sigma * sigma / 2)))


def _next(laws: TextLaws, context: int, words: int, run: int, *, first: bool) -> tuple[list[int], int]:
    """The candidates for the next token, likeliest first, and how sure the model is of them."""
    place = mix(context, 0x7E47)
    if laws.difference_rate and uniform(mix(place, laws.variant)) < laws.difference_rate:
        place = mix(place, laws.variant + 1)
    forms = _FIRST if first else _WITHIN if words else _BEGIN
    start = place % _NUM_WORDS
    stride = 1 + (place >> 20) % (_NUM_WORDS // _NUM_CANDIDATES)
    candidates = [forms[(start + i * stride) % _NUM_WORDS] for i in range(_NUM_CANDIDATES)]
    if words >= _SHORTEST_SENTENCE and (mark := (place >> 40) & 15) < 3:
        candidates[0] = _FULL_STOP if mark < 2 else _COMMA
    level = (place >> 50) % _NUM_LEVELS
    if laws.near_tie_rate and uniform(mix(place, 0x71E)) < laws.near_tie_rate:
        level = _TIE
        if uniform(mix(place, mix(run, 0xF11B))) < laws.near_tie_flip_rate:
            candidates[0], candidates[1] = candidates[1], candidates[0]
    return candidates, level


@functools.cache
def _probabilities(level: int) -> tuple[float, ...]:
    """Of the candidates, likeliest first; they add up to 1."""
    leading = [0.4502, 0.4498] if level == _TIE else [0.35 + 0.6 * level / (_NUM_LEVELS - 1)]
    rest = 1 - sum(leading)
    number = _NUM_CANDIDATES - len(leading)
    tail = [rest * 0.5 ** (i + 1) for i in range(number)]
    tail[-1] *= 2
    return (*leading, *tail)


def _sampling(params: SamplingParams) -> tuple[float, int, float, float]:
    return params.temperature, params.top_k, params.top_p, params.min_p


@functools.lru_cache(maxsize=4096)
def _choices(level: int, temperature: float, top_k: int, top_p: float, min_p: float) -> tuple[list[float], list[float]]:
    """Weights of the candidates that may be drawn, and their running sums."""
    if temperature < 1e-5:
        return [1.0], [1.0]
    weights = [p ** (1 / temperature) if p else 0.0 for p in _probabilities(level)]
    total = sum(weights)
    if not total:  # a temperature so low that all underflow
        return [1.0], [1.0]
    weights = [weight / total for weight in weights]
    kept: list[float] = []
    sums: list[float] = []
    for index, weight in enumerate(weights):
        before = sums[-1] if sums else 0.0
        if (top_k and index >= top_k) or before >= top_p or weight < min_p * weights[0]:
            break
        kept.append(weight)
        sums.append(before + weight)
    return kept, sums


def _logprobs(token_id: int, candidates: list[int] | None, level: int, num_top: int) -> TokenLogprobs:
    if candidates is None:  # the end, of which the model is sure
        return TokenLogprobs(logprob=0.0, rank=1, top=[(token_id, 0.0)] if num_top else [])
    values = [math.log(p) for p in _probabilities(level)]
    rank = candidates.index(token_id)
    top = list(zip(candidates, values, strict=True))[:num_top]
    return TokenLogprobs(logprob=values[rank], rank=rank + 1, top=top)
