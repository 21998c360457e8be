"""The law of sampled tokens against the model's own probabilities, which few tokens and a small top_k make countable.

Samples are counted by their whole token sequence, and by each token and each pair of neighbours in it, where less noise
hides what is wrong; what is expected less than five times is counted together. Two bounds hold at once: Pearson's χ² on
all of these (after Bonferroni, times their number), and the total variation distance of sequences, whose mean over
samples of size N is at most Σ √(p(1-p) / 2πN) and which exceeds its mean by √(ln(1/δ) / 2N) with probability δ at most
(McDiarmid).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from sol.engine.types import SpeculationParams
from sol.sampling_params import SamplingParams
from sol.verification.report import Law
from sol.verification.session import PLAIN, Ask, Session

Path = tuple[int, ...]

TOP_K: Final = 3
NUM_TOKENS: Final = 4
TEMPERATURE: Final = 2.0
"""The prompt repeats itself, so that drafters draft, and the model is sure of what comes; this makes it less sure."""
VIEWS: Final = (slice(None), *(slice(start, start + n) for n in (1, 2) for start in range(NUM_TOKENS + 1 - n)))
"""Parts of a sequence that are counted"""
SIGNIFICANCE: Final = 1e-6
NUM_PREFIXES: Final = sum(TOP_K**length for length in range(NUM_TOKENS))
_LEAST_EXPECTED: Final = 5.0
_BATCH: Final = 100


def check_law(
    session: Session, prompt: Sequence[int], *, verify_method: str, num_samples: int, seconds: float, seed: int
) -> Law:
    """At most `num_samples` answers of the engine as it is configured, or as many as `seconds` allow.

    Samples of plain decoding are only taken where those fail.
    """
    law = exact_law(session, prompt)
    result = Law(verify_method=verify_method, num_tokens=NUM_TOKENS, top_k=TOP_K, temperature=TEMPERATURE,
                 significance=SIGNIFICANCE)  # fmt: skip
    counts = _sample(session, prompt, None, range(seed, seed + num_samples), seconds, result)
    result.num_samples = counts.total()
    observed, expected = merged(counts, law)
    result.num_cells = len(expected)
    result.p_value = smallest_p_value(counts, law)
    result.distance, result.distance_bound = distance(observed, expected, SIGNIFICANCE)
    if not result.holds:
        # Other seeds: with the same ones, two samples of coupled sampling would be one.
        others = range(seed + num_samples, seed + num_samples + result.num_samples)
        plain = _sample(session, prompt, PLAIN, others, math.inf, None)
        result.plain_p_value = smallest_p_value(plain, law)
        result.same_p_value = min(1.0, len(VIEWS) * min(
            homogeneity(seen(counts, view), seen(plain, view)) for view in VIEWS
        ))  # fmt: skip
    return result


def exact_law(session: Session, prompt: Sequence[int]) -> dict[Path, float]:
    """The probability of every sequence, from the logprobs that plain decoding gives the tokens after each prefix."""
    law: dict[Path, float] = {(): 1.0}
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=TOP_K, ignore_eos=True, detokenize=False)
    for _ in range(NUM_TOKENS):
        asks = [Ask([*prompt, *path], params, 0, PLAIN) for path in law]
        longer: dict[Path, float] = {}
        for (path, before), answer in zip(law.items(), session.ask(asks, together=True), strict=True):
            top = answer.logprobs[0].top
            weights = [math.exp((logprob - top[0][1]) / TEMPERATURE) for _, logprob in top]
            for (token, _), weight in zip(top, weights, strict=True):
                longer[*path, token] = before * weight / sum(weights)
        law = longer
    return law


def _sample(
    session: Session,
    prompt: Sequence[int],
    wish: SpeculationParams | None,
    seeds: range,
    seconds: float,
    result: Law | None,
) -> Counter[Path]:
    params = SamplingParams(
        temperature=TEMPERATURE, top_k=TOP_K, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False
    )
    deadline = time.perf_counter() + seconds
    counts: Counter[Path] = Counter()
    for start in range(0, len(seeds), _BATCH):
        if start and time.perf_counter() > deadline:
            break
        asks = [Ask(list(prompt), params, seed, wish) for seed in seeds[start : start + _BATCH]]
        for answer in session.ask(asks, together=True):
            counts[tuple(answer.token_ids)] += 1
            if result is not None and answer.usage is not None:
                for drafted in answer.usage.drafters.values():
                    result.num_draft_tokens += drafted.num_draft_tokens
                    result.num_accepted_tokens += drafted.num_accepted_tokens
    return counts


def merged(counts: Mapping[Path, float], law: Mapping[Path, float]) -> tuple[list[float], list[float]]:
    """Observed and expected counts of the sequences that are expected often enough, and of all others together."""
    total = sum(counts.values())
    observed: list[float] = []
    expected: list[float] = []
    for path, probability in sorted(law.items(), key=lambda item: -item[1]):
        # What is left for all others must be enough, too.
        if probability * total < _LEAST_EXPECTED or total * (1.0 - probability) - sum(expected) < _LEAST_EXPECTED:
            break
        observed.append(counts.get(path, 0))
        expected.append(probability * total)
    return [*observed, total - sum(observed)], [*expected, total - sum(expected)]


def seen(counts: Mapping[Path, float], view: slice) -> dict[Path, float]:
    """Counts or probabilities by a part of the sequences."""
    parts: dict[Path, float] = {}
    for path, count in counts.items():
        parts[path[view]] = parts.get(path[view], 0) + count
    return parts


def smallest_p_value(counts: Mapping[Path, int], law: Mapping[Path, float]) -> float:
    """Of the χ² tests of all views, corrected for their number."""
    tails = [goodness_of_fit(*merged(seen(counts, view), seen(law, view))) for view in VIEWS]
    return min(1.0, len(VIEWS) * min(tails))


def goodness_of_fit(observed: Sequence[float], expected: Sequence[float]) -> float:
    """The p-value of Pearson's χ² test."""
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    return chi_square_tail(statistic, len(expected) - 1)


def homogeneity(one: Mapping[Path, float], other: Mapping[Path, float]) -> float:
    """The p-value of the χ² test that two samples have one law."""
    totals = [sum(sample.values()) for sample in (one, other)]
    shares = [total / sum(totals) for total in totals]
    rows = [[sample.get(path, 0.0) for sample in (one, other)] for path in one.keys() | other.keys()]
    kept = [row for row in rows if sum(row) * min(shares) >= _LEAST_EXPECTED]
    rest = [total - sum(row[side] for row in kept) for side, total in enumerate(totals)]
    if sum(rest):
        kept.append(rest)
    statistic = sum(
        (count - share * sum(row)) ** 2 / (share * sum(row))
        for row in kept
        for count, share in zip(row, shares, strict=True)
    )
    return chi_square_tail(statistic, len(kept) - 1)


def distance(observed: Sequence[float], expected: Sequence[float], significance: float) -> tuple[float, float]:
    """Total variation between samples and law, and its bound."""
    total = sum(observed)
    found = 0.5 * sum(abs(o - e) for o, e in zip(observed, expected, strict=True)) / total
    mean = sum(math.sqrt(e / total * max(0.0, 1.0 - e / total) / (2 * math.pi * total)) for e in expected)
    return found, mean + math.sqrt(math.log(1.0 / significance) / (2 * total))


def chi_square_tail(statistic: float, degrees: int) -> float:
    """P(χ² ≥ statistic), from the series and the continued fraction of the incomplete gamma function."""
    if degrees < 1 or statistic <= 0.0:
        return 1.0
    a, x = degrees / 2, statistic / 2
    scale = math.exp(a * math.log(x) - x - math.lgamma(a))
    if x < a + 1:
        term = total = 1.0 / a
        n = a
        while term > total * 1e-15:
            n += 1
            term *= x / n
            total += term
        return max(0.0, 1.0 - scale * total)
    # Lentz's method; the fraction converges fast where the series does not.
    tiny = 1e-300
    b = x + 1 - a
    c, d = 1 / tiny, 1 / b
    fraction = d
    for i in range(1, 1000):
        step = -i * (i - a)
        b += 2
        d = 1 / (step * d + b or tiny)
        c = b + step / c or tiny
        fraction *= d * c
        if abs(d * c - 1) < 1e-15:
            break
    return scale * fraction
