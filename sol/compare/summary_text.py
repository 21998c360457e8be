"""A comparison in words and numbers, for a terminal and for the head of the HTML report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from sol.bench.statistics import Estimate
from sol.compare.likelihoods import Likelihoods
from sol.compare.samples import Metric
from sol.compare.session import Outcome
from sol.compare.statistics import POWER
from sol.compare.texts import Equivalence
from sol.compare.verdict import Comparison, Effect, Failures, Plan

NAMES: Final[Mapping[Metric, str]] = {
    "e2e": "E2E", "ttft": "TTFT", "tpot": "TPOT", "throughput": "tokens/s",
}  # fmt: skip
_SIZES: Final = (0.01, 0.02, 0.05, 0.10)


def verdict_line(outcome: Outcome) -> str:
    """One line that says it all: `B is better: E2E 21.3% lower (20.1% to 22.4%). Texts: the same (160 of 160).`"""
    return f"{_speed(outcome.comparison)} {_texts_verdict(outcome.texts)}"


def announcement(plan: Plan, announced: int, deviation: float | None) -> str:
    """What the pilot said."""
    assert plan.effect is not None
    spread = "" if deviation is None else f" (blocks vary by {100 * deviation:.2g}%)"
    text = f"{plan.blocks} blocks say that {announced} find a difference of {_percent(plan.effect)}{spread}"
    if announced > plan.max_blocks:
        text += f"; --max-blocks ends it at {plan.max_blocks}"
    elif announced == plan.blocks:
        text += ": these are enough"
    return text


def metric_rows(comparison: Comparison) -> list[list[str]]:
    """A header and a row for each metric, the declared one first."""
    test = "Wilcoxon p" if comparison.paired else "rank-sum p"
    rows = [["", "A", "B", "B / A", "95%", "bootstrap", test, "finds"]]
    order = sorted(comparison.effects.values(), key=lambda effect: effect.metric != comparison.plan.metric)
    rows += [
        [
            NAMES[effect.metric] + (" *" if effect.metric == comparison.plan.metric else ""),
            _value(effect, effect.a), _value(effect, effect.b),
            "–" if effect.ratio is None else f"{effect.ratio:.4g}",
            _interval(effect.low, effect.high), _interval(effect.bootstrap_low, effect.bootstrap_high),
            "–" if effect.p_rank is None else f"{effect.p_rank:.2g}",
            "–" if effect.detectable is None else _detectable(effect.detectable),
        ]
        for effect in order
    ]  # fmt: skip
    return rows


def facts(outcome: Outcome) -> list[tuple[str, str]]:
    comparison = outcome.comparison
    rows = [
        ("declared", f"{NAMES[comparison.plan.metric]} has the verdict (*); the others' intervals hold each by itself")
    ]
    if comparison.blocks:
        requests = sum(len(pair.a.answers) for block in comparison.blocks for pair in block.pairs)
        rows.append(("blocks", f"{len(comparison.blocks)}, {requests:,} requests a side"))
        keys = [
            one.key for block in comparison.blocks for pair in block.pairs for one in pair.a.answers if not one.turn
        ]
        if len(set(keys)) < len(keys):
            rows.append(("prompts", f"{len(set(keys))} different ones; {len(keys) - len(set(keys))} were sent before, "
                         "and a prefix cache may know them"))  # fmt: skip
    if comparison.announced is not None:
        enough = len(comparison.blocks) >= comparison.announced
        rows.append(("announced", f"{comparison.announced} blocks for {_percent(comparison.plan.effect or 0.0)}"
                     + ("" if enough else f"; {len(comparison.blocks)} were run")))  # fmt: skip
    if comparison.paired and (sizes := _sample_sizes(comparison.primary)):
        rows.append(("sample size", f"{sizes} (found in {POWER:.0%} of cases)"))
    rows.append(("failed", _failed(comparison.failures)))
    rows += _text_facts(outcome.texts)
    rows.append(("logprobs", _likelihoods(outcome.likelihoods)))
    return rows


def difference_rows(texts: Equivalence, most: int = 20, *, reasons: bool = False) -> list[list[str]]:
    """A header and a row for each of the first differences."""
    rows = [["prompt", f"at ({texts.unit})", "kind", "gap", "A", "B", *(["why"] if reasons else [])]]
    rows += [
        [
            one.key + (f", turn {one.turn + 1}" if one.turn else ""), f"{one.position} of {one.length}", one.kind,
            "–" if one.gap is None else f"{one.gap:.3g}", repr(one.a)[1:-1], repr(one.b)[1:-1],
            *([one.reason] if reasons else []),
        ]
        for one in texts.differences[:most]
    ]  # fmt: skip
    return rows


def warnings(outcome: Outcome) -> list[str]:
    found = list(outcome.notes)
    comparison = outcome.comparison
    if outcome.interrupted:
        found.insert(0, "interrupted: the figures are of the blocks that were complete, and checks may be missing")
    if comparison.failures.worse:
        found.append("B fails more often than A; that alone makes it worse, whatever its latencies are")
    for kind, message in comparison.failures.examples.items():
        found.append(f"{kind}: {message}")
    primary = comparison.primary
    low, high = primary.bootstrap_low, primary.bootstrap_high
    if primary.differs and low is not None and high is not None and low <= 1 <= high:
        found.append(
            "the bootstrap's interval holds 1, unlike Student's: the blocks' ratios are skewed, so take the verdict "
            "with care or measure more blocks"
        )
    return found


def _speed(comparison: Comparison) -> str:
    effect, name = comparison.primary, NAMES[comparison.plan.metric]
    verdict = comparison.verdict
    if comparison.failures.worse:
        failures = comparison.failures
        if failures.num_requests_b is not None:
            return (f"B is worse: it failed {failures.failed_b} of {failures.num_requests_b} requests, A "
                    f"{failures.failed_a} of {failures.num_requests} (p = {failures.p:.2g}).")  # fmt: skip
        return (f"B is worse: it failed {failures.only_b} requests that A answered, A {failures.only_a} that B "
                f"answered (p = {failures.p:.2g}).")  # fmt: skip
    if effect.ratio is None:
        return f"Cannot tell: there is no {name} of prompts that both answered."
    change = _change(effect)
    if verdict != "cannot tell":
        return f"B is {verdict}: {name} {change}."
    text = f"Cannot tell B from A: {name} {change}"
    wanted = comparison.plan.effect
    if wanted is not None and effect.within(wanted):
        return f"{text}; any difference is smaller than {_percent(wanted)}."
    if effect.detectable is not None:
        text += f"; {effect.num_blocks} blocks find {_detectable(effect.detectable)}"
    return text + "."


def _change(effect: Effect) -> str:
    """`21.3% lower (20.1% to 22.4%)`; with an interval that holds 1 `0.3% higher (-1.2% to +1.9%)`."""
    assert effect.ratio is not None
    value = 100 * (effect.ratio - 1)
    text = f"{abs(value):.3g}% {'lower' if value < 0 else 'higher'}"
    if effect.low is None or effect.high is None:
        return text + " (no interval)"
    low, high = 100 * (effect.low - 1), 100 * (effect.high - 1)
    if high < 0:
        return f"{text} ({-high:.3g}% to {-low:.3g}%)"
    if low > 0:
        return f"{text} ({low:.3g}% to {high:.3g}%)"
    return f"{text} ({low:+.3g}% to {high:+.3g}%)"


def _texts_verdict(texts: Equivalence) -> str:
    number, total = len(texts.differences), texts.num_compared
    if texts.verdict == "not compared":
        return f"Texts: not compared ({texts.reason})."
    if texts.verdict == "same":
        return f"Texts: the same ({total} of {total})."
    if texts.verdict == "near ties":
        return f"Texts: the same but for near ties ({number} of {total} differ)."
    return f"Texts: they differ ({number} of {total})."


def _text_facts(texts: Equivalence) -> list[tuple[str, str]]:
    if not texts.num_compared:
        return [("texts", f"not compared: {texts.reason}")]
    rows = [("texts", f"{texts.num_compared} compared by {texts.unit}, {len(texts.differences)} differ")]
    if texts.differences:
        kinds = texts.num_kinds
        rows.append(
            ("differences", f"{kinds['near tie']} near ties, {kinds['real']} real, {kinds['unknown']} not known")
        )
        first = min(texts.differences, key=lambda one: one.position)
        rows.append(("earliest", f"{first.key}, at {texts.unit[:-1]} {first.position} of {first.length}"))
    if texts.own is None:
        rows.append(("A with itself", "not measured"))
    else:
        own, p = texts.own, texts.p_more_than_own
        text = f"{len(own.differences)} of {own.num_compared} differ, at {own.concurrency} at a time"
        if texts.differences and p is not None:
            text += f"; B differing no more often: p = {p:.2g}"
        rows.append(("A with itself", text))
    return rows


def _likelihoods(found: Likelihoods) -> str:
    if not found.offered:
        return f"not offered: {found.reason}"
    return (
        f"of {found.num_tokens:,} tokens: KL {_number(found.kl)} nats a token, same likeliest token "
        f"{_number(found.top1, 100, '%')}, B's logprob less A's {_number(found.logprob)}"
    )


def _failed(failures: Failures) -> str:
    if not failures.failed_a and not failures.failed_b:
        return "none"
    kinds = [", ".join(f"{count} × {kind}" for kind, count in counts.items()) or "none"
             for counts in (failures.kinds_a, failures.kinds_b)]  # fmt: skip
    text = f"A: {kinds[0]}; B: {kinds[1]}"
    if failures.num_requests_b is not None:
        return f"{text}; of {failures.num_requests:,} and {failures.num_requests_b:,} requests"
    return f"{text}; both {failures.both}, A alone {failures.only_a}, B alone {failures.only_b}"


def _sample_sizes(effect: Effect) -> str:
    found = [(size, number) for size in _SIZES if (number := effect.blocks_for(size)) is not None]
    return ", ".join(f"{_percent(size)}: {number:,} blocks" for size, number in found)


def _value(effect: Effect, value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.4g}" if effect.metric == "throughput" else f"{1000 * value:,.4g} ms"


def _interval(low: float | None, high: float | None) -> str:
    return "–" if low is None or high is None else f"{low:.4g} to {high:.4g}"


def _number(estimate: Estimate, factor: float = 1.0, unit: str = "") -> str:
    if estimate.value is None:
        return "–"
    text = f"{estimate.value * factor:.4g}{unit}"
    if estimate.low is not None and estimate.high is not None:
        text += f" ({estimate.low * factor:.4g} to {estimate.high * factor:.4g})"
    return text


def _detectable(share: float) -> str:
    return f"{100 * share:.2g}%" if share < 0.995 else f"{100 * share:.0f}%" if share < 10 else "nothing below 1000%"


def _percent(share: float) -> str:
    return f"{100 * share:.4g}%"
