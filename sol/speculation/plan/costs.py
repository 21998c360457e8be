"""How long things take: the target's steps by their shape, and each drafter's calls.

A step's time is a sum of what its tokens cost (a curve that never falls: flat while weights are read from memory, then
linear, with stairs where a kernel's tiles are), and of shares for each request, each row of logits, each token of
context and each token of a prompt. The sum is fitted to steps measured at start-up. Running steps then correct it by
factors: one for everything, which follows a machine that slows down or speeds up within a few steps, and slow ones for
numbers of tokens and of requests, which mend what the fit got wrong. Factors are tracked in the logarithm by scalar
Kalman filters. A step or two far off are ignored: a garbage collection or a neighbour's burst is no new price.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from sol.speculation.plan.types import StepShape

Floats = npt.NDArray[np.float64]

_TABLE: Final = 16_384
"""Numbers of tokens whose price is tabulated; larger steps (prompts alone) cost in proportion."""
_TYPICAL: Final = ((1, 1.0), (8, 1.15), (64, 4.0), (512, 30.0))
"""Tokens and relative seconds of a step where nothing was measured: memory-bound at first, then linear."""
_TYPICAL_WEIGHT: Final = 0.02
_KNOTS_PER_OCTAVE: Final = 4
_SCALE_SD, _SCALE_DRIFT = 0.1, 0.01
_SURPRISES: Final = 3
"""So many steps in a row beyond `_MAX_DEVIATIONS` are believed, fewer are not."""
_LOCAL_SD, _LOCAL_DRIFT = 0.05, 0.002
_FADING_STEPS, _LOCAL_FADING = 32, 0.938
"""What is left of the local factors after so many steps: what was wrong about a size that no step has had since must
not stay so for ever, because nobody would then go back to it."""
_NOISE_SD, _LEAST_NOISE_SD, _MOST_NOISE_SD = 0.05, 0.005, 0.3
_FEW_PROMPTS: Final = 0.1
"""Share of a step's tokens"""
_PROMPT_RATE: Final = 0.1
_MAX_DEVIATIONS: Final = 3.0
_OCTAVES: Final = 16
"""Of numbers of requests, that have a factor of their own"""


def _token_knots() -> list[int]:
    """Numbers of tokens that have a correction of their own: every one at first, then four an octave."""
    octaves = math.log2(_TABLE - 1)
    steps = [round(2 ** (i / _KNOTS_PER_OCTAVE)) for i in range(math.ceil(octaves * _KNOTS_PER_OCTAVE))]
    return sorted({*steps, *range(1, 9), 0, _TABLE - 1})


_KNOTS: Final = _token_knots()
KNOT_OF: Final = [i for i, (a, b) in enumerate(itertools.pairwise(_KNOTS)) for _ in range(a, b)] + [len(_KNOTS) - 2]
"""The last knot that is not above a number of tokens, but for the very last one …"""
SHARE_OF: Final = [(n - _KNOTS[k]) / (_KNOTS[k + 1] - _KNOTS[k]) for n, k in enumerate(KNOT_OF)]
"""… and how far the number is from there to the next knot, 0 to 1"""


def shapes_to_measure(
    *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, num_speculative_tokens: int
) -> list[StepShape]:
    """Steps whose times a `CostModel` is made from, most telling first.

    Whoever measures them stops when time is up: the first three already give a plain step and what drafts cost for one
    request. Every request of a shape has the same context, which `num_context_tokens` is the sum of; the first shape
    should run once unmeasured.
    """
    shapes: dict[tuple[int, int, int], StepShape] = {}
    most = num_speculative_tokens + 1

    def want(requests: int, tokens_each: int, context_each: int) -> None:
        requests = min(requests, max_num_seqs)
        # A shape runs three times, and its drafts may all be accepted.
        tokens_each = min(tokens_each, (max_model_len - 1) // 3, max_num_batched_tokens // requests)
        context_each = min(context_each, max_model_len - 2 * tokens_each - 1)
        if tokens_each >= 1:
            tokens = requests * tokens_each
            shapes[requests, tokens_each, context_each] = StepShape(
                num_tokens=tokens,
                num_requests=requests,
                num_logits_rows=tokens,
                num_context_tokens=requests * context_each,
            )

    for tokens in (1, most, 2, 5, 9):
        if tokens <= most:
            want(1, tokens, 128)
    for requests, tokens in ((8, 1), (8, 4), (1, 3), (32, 1), (32, 2), (4, 1), (4, most), (16, 1)):
        if tokens <= most:
            want(requests, tokens, 128)
    want(4, 1, 1024)
    for requests in (64, 128, 256, max_num_seqs, max_num_seqs // 2):
        for tokens in (1, 2, 3, 4, 6, 8, most):
            if requests >= 1 and tokens <= most:
                want(requests, tokens, 128)
    return list(shapes.values())


class CostModel:
    """Seconds of a step of the target."""

    def __init__(self, measured: Sequence[tuple[StepShape, float]] = ()) -> None:
        """`measured`: steps and their seconds. Without any, shapes compare as is typical, and the first observation
        sets the scale."""
        measured = [(shape, seconds) for shape, seconds in measured if seconds > 0 and math.isfinite(seconds)]
        table, self._per_request, self._per_row, self._per_context = _fit(measured)
        self._per_token: list[float] = table.tolist()
        self.per_token = array("d", self._per_token)
        """The same for those who compute with arrays"""
        self._local = [0.0] * len(_KNOTS)
        """Logarithms of the factors at `_KNOTS`, numbers of tokens …"""
        self.factors = array("d", [1.0] * len(_KNOTS))
        """… and the factors themselves"""
        self._until_fading = _FADING_STEPS
        self._local_variance = [_LOCAL_SD**2] * len(_KNOTS)
        self._by_requests = [0.0] * _OCTAVES
        self._request_factors = [1.0] * _OCTAVES
        self._by_requests_variance = [_LOCAL_SD**2] * _OCTAVES
        self._scale = 0.0
        self._scale_factor = 1.0
        self._scale_variance = _SCALE_SD**2 if measured else 100.0
        self._noise_variance = _NOISE_SD**2
        largest = max((shape.num_tokens for shape, _ in measured), default=_TYPICAL[-1][0])
        # Never 0, as where all measured steps took the same time: experience moves it by factors.
        slope = (self._per_token[largest] - self._per_token[0]) / largest
        self._per_prompt_token: float = max(slope, 1e-3 * self._per_token[largest] / largest, 1e-12)
        self._prompts_seen = 0
        self._surprises = 0
        """Steps in a row that took far longer or shorter than expected"""

    def seconds(self, shape: StepShape) -> float:
        rows, prompts = _split(shape)
        index = min(rows, _TABLE - 1)
        token_cost = self._per_token[index] * (rows / index if rows > index else 1.0)
        factor = self._common_factor(shape.num_requests)
        decoding: float = (token_cost + self._shares(shape)) * self._factor(index) * factor
        return decoding + prompts * self._per_prompt_token * factor

    def curve(self, shape: StepShape, num_drafts: int, stride: int = 1) -> list[float]:
        """Seconds of the step with 0, `stride`, 2 · `stride` … drafts more than `shape` has, as long as those are not
        more than `num_drafts`. Never falls. Prompts are left out: they take their time either way."""
        rows, shares, each, common = self.parts(shape)
        per_token, factors = self._per_token, self.factors
        result = []
        longest = 0.0
        for more in range(0, num_drafts + 1, stride):
            index = rows + more
            if index < _TABLE:
                tokens = per_token[index]
            else:
                tokens = per_token[-1] * index / (_TABLE - 1)
                index = _TABLE - 1
            knot = KNOT_OF[index]
            factor = factors[knot]
            factor += SHARE_OF[index] * (factors[knot + 1] - factor)
            seconds = (tokens + shares + more * each) * factor * common
            if seconds > longest:
                longest = seconds
            result.append(longest)
        return result

    def parts(self, shape: StepShape) -> tuple[int, float, float, float]:
        """What `curve` makes its sums of: tokens of the step that have a row of logits, seconds that all of them share,
        seconds of each more beside `per_token`, and the factor of all that beside `factors`."""
        rows, _ = _split(shape)
        return rows, self._shares(shape), self._per_row + self._per_context, self._common_factor(shape.num_requests)

    def observe(self, shape: StepShape, seconds: float) -> None:
        """A step of this shape took so long."""
        if not (seconds > 0 and math.isfinite(seconds)) or shape.num_tokens < 1:
            return
        rows, prompts = _split(shape)
        expected = self.seconds(shape)
        if prompts > _FEW_PROMPTS * shape.num_tokens:
            self._observe_prompts(prompts, seconds - expected)
            return
        error = math.log(seconds / expected)
        index = min(rows, _TABLE - 1)
        knot, there = KNOT_OF[index], SHARE_OF[index]
        here = 1.0 - there
        requests = _octave(shape.num_requests)
        local, by_requests = self._local_variance, self._by_requests_variance
        self._scale_variance += _SCALE_DRIFT**2
        local[knot] = min(local[knot] + _LOCAL_DRIFT**2, _LOCAL_SD**2)
        local[knot + 1] = min(local[knot + 1] + _LOCAL_DRIFT**2, _LOCAL_SD**2)
        by_requests[requests] = min(by_requests[requests] + _LOCAL_DRIFT**2, _LOCAL_SD**2)
        total = (
            self._scale_variance
            + here * here * local[knot]
            + there * there * local[knot + 1]
            + by_requests[requests]
            + self._noise_variance
        )
        limit = _MAX_DEVIATIONS * math.sqrt(total)
        if abs(error) > limit:
            self._surprises += 1
            if self._surprises < _SURPRISES:
                return
            # No pause, then: the machine is another one.
            self._scale_variance += error * error / 4
            total += error * error / 4
            limit = _MAX_DEVIATIONS * math.sqrt(total)
        self._surprises = 0
        error = min(max(error, -limit), limit)
        scale_gain = self._scale_variance / total
        gains = (here * local[knot] / total, there * local[knot + 1] / total)
        requests_gain = by_requests[requests] / total
        self._fade()
        self._scale += scale_gain * error
        self._scale_factor = math.exp(self._scale)
        self._scale_variance *= 1.0 - scale_gain
        self._by_requests[requests] += requests_gain * error
        self._request_factors[requests] = math.exp(self._by_requests[requests])
        by_requests[requests] *= 1.0 - requests_gain
        local[knot] *= 1.0 - gains[0] * here
        local[knot + 1] *= 1.0 - gains[1] * there
        for place, gain in ((knot, gains[0]), (knot + 1, gains[1])):
            self._local[place] += gain * error
            self.factors[place] = math.exp(self._local[place])
        # What is left over after the move is mostly noise; a drift that the filter follows must not count as such.
        left = error * (1.0 - scale_gain)
        noise = self._noise_variance + 0.05 * (left * left - self._noise_variance)
        self._noise_variance = min(max(noise, _LEAST_NOISE_SD**2), _MOST_NOISE_SD**2)

    def _factor(self, index: int) -> float:
        """For a step of `index` tokens, below `_TABLE`."""
        knot = KNOT_OF[index]
        factor = self.factors[knot]
        return factor + SHARE_OF[index] * (self.factors[knot + 1] - factor)

    def _fade(self) -> None:
        self._until_fading -= 1
        if not self._until_fading:
            self._until_fading = _FADING_STEPS
            self._local = [_LOCAL_FADING * value for value in self._local]
            self.factors[:] = array("d", map(math.exp, self._local))

    def _shares(self, shape: StepShape) -> float:
        return (
            self._per_request * shape.num_requests
            + self._per_row * shape.num_logits_rows
            + self._per_context * shape.num_context_tokens
        )

    def _common_factor(self, requests: int) -> float:
        return self._scale_factor * self._request_factors[_octave(requests)]

    def _observe_prompts(self, prompts: int, late: float) -> None:
        """A step with so many tokens of prompts took so much longer than expected; it says nothing of those without."""
        self._prompts_seen += 1
        relative = late / (prompts * self._per_prompt_token)
        gain = max(_PROMPT_RATE, 1.0 / (1 + self._prompts_seen))
        self._per_prompt_token *= 1.0 + gain * min(max(relative, -0.5), 1.0)


class DraftingCost:
    """Seconds of a drafter's call: base + per request + per draft + per token that it has to read first (a prompt, what
    was emitted since it was last asked). None of them is negative."""

    def __init__(self, base: float, per_request: float, per_token: float, per_unread: float) -> None:
        """As far as is known before the first call."""
        self._parts = [base, per_request, per_token, per_unread]
        self._variances = [(3.0 * part) ** 2 for part in self._parts]
        self._floor = [1e-3 * part for part in self._parts]

    @property
    def base(self) -> float:
        return self._parts[0]

    @property
    def per_request(self) -> float:
        return self._parts[1]

    @property
    def per_token(self) -> float:
        return self._parts[2]

    @property
    def per_unread(self) -> float:
        return self._parts[3]

    def observe(self, num_requests: int, num_tokens: int, num_unread: int, seconds: float) -> None:
        if not (seconds >= 0 and math.isfinite(seconds)) or num_requests < 1:
            return
        counts = (1, num_requests, num_tokens, num_unread)
        parts, variances, floor = self._parts, self._variances, self._floor
        expected = parts[0] + num_requests * parts[1] + num_tokens * parts[2] + num_unread * parts[3]
        total = (0.2 * (expected if expected > seconds else seconds)) ** 2
        for count, variance in zip(counts, variances, strict=True):
            total += count * count * variance
        limit = _MAX_DEVIATIONS * math.sqrt(total)
        error = min(max(seconds - expected, -limit), limit)
        for i, count in enumerate(counts):
            if count:
                gain = count * variances[i] / total
                part = parts[i] + gain * error
                part = parts[i] = part if part > floor[i] else floor[i]
                # Never quite sure: the variance keeps a tenth of the part itself.
                variance, least = variances[i] * (1.0 - gain * count), 0.01 * part * part
                variances[i] = variance if variance > least else least


def _split(shape: StepShape) -> tuple[int, int]:
    """Tokens that have a row of logits (those that decode, and drafts), and tokens of prompts, which have none."""
    rows, tokens = shape.num_logits_rows, shape.num_tokens
    if rows < 1:
        rows = 1
    return (rows, tokens - rows) if rows < tokens else (tokens if tokens > 1 else 1, 0)


def _octave(requests: int) -> int:
    """0 for one request, 1 for two and three …, of `_OCTAVES`"""
    octave = requests.bit_length() - 1 if requests > 1 else 0
    return octave if octave < _OCTAVES else _OCTAVES - 1


def _fit(measured: Sequence[tuple[StepShape, float]]) -> tuple[Floats, float, float, float]:
    """([tokens] seconds, seconds a request, a row of logits, a token of context) that explain the measured steps.

    Least squares of relative errors under the constraint that nothing is negative, by coordinate descent. Beyond
    the largest measured step, tokens go on costing what they cost there. Where fewer than two numbers of tokens were
    measured, the typical curve is taken, brought to their scale.
    """
    rows = [(shape, seconds, 1.0) for shape, seconds in measured]
    if len({shape.num_tokens for shape, _ in measured}) < 2:
        tokens, relative = ([float(value) for value in column] for column in zip(*_TYPICAL, strict=True))
        scale = 1.0
        if measured:
            shape, seconds = measured[0]
            scale = seconds / float(np.interp(shape.num_tokens, tokens, relative))
        for n, t in _TYPICAL:
            like = StepShape(num_tokens=n, num_requests=1, num_logits_rows=n, num_context_tokens=0)
            rows.append((like, scale * t, _TYPICAL_WEIGHT))
    knots = sorted({shape.num_tokens for shape, _, _ in rows})
    features = np.array(
        [
            [1.0, *_segments(s.num_tokens, knots), s.num_requests, s.num_logits_rows, s.num_context_tokens]
            for s, _, _ in rows
        ]
    )
    wanted = np.array([t for _, t, _ in rows])
    weights = np.array([w for _, _, w in rows]) / wanted
    solution = _nonnegative_least_squares(features * weights[:, None], wanted * weights)
    curve = solution[0] + np.concatenate([[0.0], np.cumsum(solution[1 : len(knots)])])
    table = np.interp(np.arange(_TABLE), knots, curve)
    slope = (curve[-1] - curve[-2]) / (knots[-1] - knots[-2])
    beyond = np.arange(knots[-1], _TABLE)
    table[knots[-1] :] = curve[-1] + slope * (beyond - knots[-1])
    return table, float(solution[-3]), float(solution[-2]), float(solution[-1])


def _segments(tokens: int, knots: Sequence[int]) -> list[float]:
    """How much of each stretch between knots lies below `tokens`; the last stretch goes on for ever."""
    shares = [min(max((tokens - a) / (b - a), 0.0), 1.0) for a, b in itertools.pairwise(knots)]
    if tokens > knots[-1]:
        shares[-1] = (tokens - knots[-2]) / (knots[-1] - knots[-2])
    return shares


def _nonnegative_least_squares(features: Floats, wanted: Floats, sweeps: int = 300) -> Floats:
    """x ≥ 0 that minimises |features · x - wanted|² (Lawson and Hanson's problem, solved by coordinate descent)."""
    gram, target = features.T @ features, features.T @ wanted
    solution = np.zeros(len(target))
    for _ in range(sweeps):
        before = solution.copy()
        for i in range(len(target)):
            if gram[i, i] > 0:
                step = (target[i] - gram[i] @ solution) / gram[i, i]
                solution[i] = max(solution[i] + step, 0.0)
        if np.abs((solution - before) * np.sqrt(np.diag(gram))).max() < 1e-9:
            break
    return solution
