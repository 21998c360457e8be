"""A comparison of two endpoints from beginning to end: find out what they offer, warm up, measure, compare texts."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from sol.bench.data import Turn
from sol.bench.endpoint import Endpoint, as_text, probe, replace
from sol.bench.run import Limits, Stop
from sol.compare.gaps import Judgement, ask_gap
from sol.compare.http import HttpSampler, client_limits
from sol.compare.likelihoods import Likelihoods, compare_likelihoods
from sol.compare.run import Progress, compare
from sol.compare.samples import Block, Round
from sol.compare.texts import Equivalence, compare_texts, compare_with_own, judged
from sol.compare.verdict import Comparison, Plan
from sol.errors import ConfigError

T = TypeVar("T")

DEFAULT_NEAR_TIE: Final = 0.3
"""In units of logits: what adding up in another order changes in bfloat16, with room to spare."""
_MOST_GAPS: Final = 50
"""Differences that are judged by asking again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks:
    """What is asked beside the load. Raises `ConfigError`."""

    self_prompts: int = 16
    """Prompts that A is asked again at another concurrency; 0: none."""
    likelihood_prompts: int = 8
    """Answers of A whose logprobs both are asked for; 0: none."""
    near_tie: float = DEFAULT_NEAR_TIE

    def __post_init__(self) -> None:
        for name in ("self_prompts", "likelihood_prompts"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be at least 0, not {getattr(self, name)}", param=name)
        if not 0 <= self.near_tie <= 100:
            raise ConfigError(f"near_tie must be 0 to 100, not {self.near_tie:g}", param="near_tie")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """All that a report shows."""

    comparison: Comparison
    texts: Equivalence
    likelihoods: Likelihoods
    notes: Sequence[str] = field(default_factory=tuple)
    """What a reader must know before believing the figures."""
    interrupted: bool = False
    a_ended: bool = False
    """A's server died meanwhile: what it did not answer cannot be held against B, and nothing can be held for it."""

    @property
    def exit_code(self) -> int:
        """For CI: 130 interrupted; 1 B is worse; 2 nothing could be compared; 3 B is not worse, but texts differ; 0."""
        if self.interrupted:
            return 130
        if self.comparison.verdict == "worse":
            return 1
        if self.comparison.primary.ratio is None or self.a_ended:
            return 2
        return 3 if self.texts.verdict == "differ" else 0


async def compare_endpoints(
    sampler: HttpSampler,
    plan: Plan,
    checks: Checks,
    *,
    limits: Limits | None = None,
    stop: Stop | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """`say` takes a line whenever something else begins. After `stop`, what there is so far."""
    seconds = (limits or Limits()).request_seconds
    stop = stop or Stop()
    await sampler.warm_up()
    comparison = await compare(sampler, plan, stop=stop, on_progress=on_progress)
    texts = compare_texts(comparison.blocks)
    likelihoods = Likelihoods(offered=False, reason="it was not asked for")
    if texts.num_compared and not stop.is_set:
        if checks.self_prompts:
            say("A against itself, at another concurrency")
            texts = await _with_own(sampler, comparison.blocks, texts, checks.self_prompts)
        if texts.differences and not stop.is_set:
            say(f"asking A how sure it was of {min(len(texts.differences), _MOST_GAPS)} tokens")
            found = await _unless(stop, _gaps(sampler, comparison.blocks, texts, checks.near_tie, seconds))
            texts = judged(texts, found or {})
        if checks.likelihood_prompts and not stop.is_set:
            say("logprobs of the same texts, from both")
            shown = _answered(sampler, comparison.blocks, checks.likelihood_prompts)
            a, b = sampler.endpoints["a"], sampler.endpoints["b"]
            likelihoods = await _unless(stop, compare_likelihoods(a, b, shown, seconds)) or Likelihoods(
                offered=False, reason="it was interrupted"
            )
    return Outcome(
        comparison=comparison,
        texts=texts,
        likelihoods=likelihoods,
        notes=_notes(sampler, comparison, texts),
        interrupted=stop.is_set,
    )


async def _unless(stop: Stop, work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` comes to, or None as soon as `stop` is set: a server may take minutes to answer the last request."""
    task, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.event.wait())
    try:
        await asyncio.wait((task, stopping), return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        task.cancel()
        stopping.cancel()
        await asyncio.gather(task, stopping, return_exceptions=True)


async def with_token_ids(a: Endpoint, b: Endpoint) -> tuple[Endpoint, Endpoint]:
    """Both asking for token ids in their streams (vLLM's `return_token_ids`), if both send them: ids differ where
    texts may not. Otherwise as they were."""
    asked = [replace(one, body={**one.body, "return_token_ids": True}) for one in (a, b)]
    for endpoint in asked:
        pool = endpoint.pool()
        try:
            if not (await probe(endpoint, pool)).token_ids:
                return a, b
        finally:
            pool.close()
    return asked[0], asked[1]


async def _with_own(sampler: HttpSampler, blocks: Sequence[Block], texts: Equivalence, number: int) -> Equivalence:
    """A's first rounds once more: alone if they were together, and the other way round."""
    load = sampler.load
    concurrency = 1 if load.rate is not None or load.concurrency > 1 else min(8, load.prompts)
    places = [(2 * block.number + half) * load.prompts for block in blocks for half in (0, 1)]
    rounds: list[Round] = []
    for place in places[: -(-number // load.prompts)]:
        found = await sampler.again("a", place, concurrency)
        if found is None:
            break
        rounds.append(found)
    return dataclasses.replace(texts, own=compare_with_own(blocks, rounds, concurrency))


async def _gaps(
    sampler: HttpSampler, blocks: Sequence[Block], texts: Equivalence, near_tie: float, seconds: float
) -> dict[tuple[int, int], Judgement]:
    """Of the first differences; those in later turns, after answers of their own, are left unknown."""
    said = {
        (ours.place, ours.turn): (ours.text or "", theirs.text or "")
        for block in blocks for pair in block.pairs for ours, theirs in pair.matched()
    }  # fmt: skip
    endpoint = sampler.endpoints["a"]
    if endpoint.body.get("temperature") != 0:
        reason = "answers are sampled: how likely a token was does not say whether it had to be taken"
        return {(one.place, one.turn): ("unknown", None, reason) for one in texts.differences}
    found: dict[tuple[int, int], Judgement] = {}
    pool = endpoint.pool()
    try:
        for difference in texts.differences[:_MOST_GAPS]:
            place = difference.place, difference.turn
            if difference.turn:
                found[place] = "unknown", None, "it is in a later turn of a conversation"
                continue
            turn = _first_turn(sampler, difference.place)
            found[place] = await ask_gap(endpoint, pool, turn, *said[place], near_tie, seconds)
    finally:
        pool.close()
    return found


def _answered(sampler: HttpSampler, blocks: Sequence[Block], number: int) -> list[str]:
    """Prompts with A's answers, as plain text."""
    texts: dict[str, str] = {}
    for answer in (answer for block in blocks for pair in block.pairs for answer in pair.a.answers):
        if len(texts) == number:
            break
        if answer.text and not answer.turn and answer.key not in texts:
            turn = _first_turn(sampler, answer.place)
            prompt = turn.prompt if isinstance(turn.prompt, str) else as_text(turn.prompt)
            texts[answer.key] = f"{prompt}\n\n{answer.text}"
    return list(texts.values())


def _first_turn(sampler: HttpSampler, place: int) -> Turn:
    return sampler.data.conversation(place).turns[0]


def _notes(sampler: HttpSampler, comparison: Comparison, texts: Equivalence) -> list[str]:
    notes = []
    a, b = sampler.endpoints["a"], sampler.endpoints["b"]
    rounds = sum(2 * len(block.pairs) for block in comparison.blocks)
    if limits := client_limits(comparison.blocks):
        notes.append(f"client_limited: in {len(limits)} of {rounds} rounds the client was a bottleneck, for instance: "
                     f"{limits[0]}")  # fmt: skip
    if (a.url, a.model) == (b.url, b.model):
        notes.append(
            "A and B are one server, so the second of each pair may find prompts in its prefix cache; each side is "
            "second in half of the pairs, which takes it out of the ratios and not out of each side's own latencies"
        )
    if a.counting != b.counting:
        notes.append(f"tokens are counted by {a.counting} at A and by {b.counting} at B")
    sizes = _mean_tokens(comparison.blocks)
    if sizes is not None and abs(sizes[1] / sizes[0] - 1) > 0.02 and comparison.plan.metric == "e2e":
        notes.append(
            f"answers are {sizes[0]:.1f} tokens long at A and {sizes[1]:.1f} at B, so E2E compares unequal work: TPOT "
            "(--metric tpot) does not depend on it, and --ignore-eos makes lengths equal"
        )
    if texts.unit == "characters" and a.body.get("temperature") != 0:
        notes.append("answers are sampled: two servers agree on them only if their noise does, too")
    return notes


def _mean_tokens(blocks: Sequence[Block]) -> tuple[float, float] | None:
    pairs = [
        (ours.output_tokens, theirs.output_tokens)
        for block in blocks for pair in block.pairs for ours, theirs in pair.matched() if ours.ok and theirs.ok
    ]  # fmt: skip
    if not pairs or not sum(ours for ours, _ in pairs):
        return None
    return sum(ours for ours, _ in pairs) / len(pairs), sum(theirs for _, theirs in pairs) / len(pairs)
