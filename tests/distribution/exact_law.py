"""The joint law of what speculation emits, by enumerating every path of the verifier's own rules in float64.

A path is a sequence of drafts and of the verifier's decisions. What a step emits on it is continued with the target's
tokens to a fixed length, so that steps of all lengths can be compared: the law of the whole must be the target's.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from sol.sampling.processing import SamplingRow, continued, distribution
from sol.sampling.sampler import SampledToken
from sol.sampling_params import SamplingParams
from sol.speculation.verify.rules import Accept, Rule

TOLERANCE = 1e-12

T = TypeVar("T")

Prefix = tuple[int, ...]
Law = dict[Prefix, float]
Model = Callable[[Prefix], torch.Tensor]
"""From the tokens so far to the probabilities [V] of the next one."""

Continues = Callable[[Prefix], bool]
"""Whether another draft is made after these."""


def make_row(output: Sequence[int] = (), *, seed: int = 0, choice: int = 0, **params: Any) -> SamplingRow:
    return SamplingRow(
        params=SamplingParams(**params),
        seed=seed,
        choice_index=choice,
        prompt_token_ids=[0],
        output_token_ids=list(output),
        eos_token_ids=[1],
    )


class Chain:
    """Random logits after every prefix, each of its own; `spread` is how far from uniform they are."""

    def __init__(self, vocabulary: int, seed: int, spread: float = 1.5, near: Chain | None = None) -> None:
        self.vocabulary, self._seed, self._spread, self._near = vocabulary, seed, spread, near
        self._seen: dict[Prefix, torch.Tensor] = {}

    def logits(self, prefix: Sequence[int]) -> torch.Tensor:
        """[V] float64. With `near`, that chain's logits and so much noise on them."""
        key = tuple(prefix)
        if key not in self._seen:
            generator = torch.Generator().manual_seed(hash((self._seed, key)) % 2**31)
            noise = torch.randn(self.vocabulary, generator=generator, dtype=torch.float64) * self._spread
            self._seen[key] = noise if self._near is None else noise + self._near.logits(key)
        return self._seen[key]

    def law(self, row: SamplingRow, forbid: Callable[[Prefix], Sequence[int]] = lambda prefix: ()) -> Model:
        """Its probabilities after processing, as sampling has them; `forbid` is a grammar's mask after a prefix."""
        seen: dict[Prefix, torch.Tensor] = {}

        def probs(prefix: Prefix) -> torch.Tensor:
            if prefix not in seen:
                logits = self.logits(prefix).clone()
                logits[list(forbid(prefix))] = -torch.inf
                seen[prefix] = distribution(logits, continued(row, prefix))
            return seen[prefix].clone()

        return probs


class Fixed(Chain):
    """The same probabilities after every prefix."""

    def __init__(self, probs: Sequence[float]) -> None:
        super().__init__(len(probs), seed=0)
        self._logits = torch.tensor(probs, dtype=torch.float64).log()

    def logits(self, prefix: Sequence[int]) -> torch.Tensor:
        return self._logits


def joint(model: Model, length: int, start: Law | None = None) -> Law:
    """Every sequence of `length` tokens with its probability, continuing what `start` has of shorter ones."""
    law: Law = defaultdict(float)
    for prefix, mass in (start or {(): 1.0}).items():
        law[prefix] += mass
    for size in range(length):
        for prefix in [p for p in law if len(p) == size]:
            mass = law.pop(prefix)
            for token, probability in enumerate(model(prefix).tolist()):
                if probability > 0.0:
                    law[(*prefix, token)] += mass * probability
    return dict(law)


def total_variation(left: Law, right: Law) -> float:
    return sum(abs(left.get(path, 0.0) - right.get(path, 0.0)) for path in {*left, *right}) / 2


class _Scripted:
    """Answers by `script`, then True wherever it can; `others` are the scripts that leave it on the way."""

    def __init__(self, script: tuple[bool, ...]) -> None:
        self._script, self._answers = script, list[bool]()
        self.weight = 1.0
        self.others: list[tuple[bool, ...]] = []

    def accept(self, slot: int, probability: float) -> bool:
        assert 0.0 <= probability <= 1.0
        place = len(self._answers)
        answer = self._script[place] if place < len(self._script) else probability > 0.0
        if place >= len(self._script) and 0.0 < probability < 1.0:
            self.others.append((*self._answers, False))
        self._answers.append(answer)
        self.weight *= probability if answer else 1.0 - probability
        return answer


def branches(run: Callable[[Accept], T]) -> Iterator[tuple[float, T]]:
    """Every way in which `run(accept)` can go, with its probability."""
    scripts: list[tuple[bool, ...]] = [()]
    while scripts:
        scripted = _Scripted(scripts.pop())
        result = run(scripted.accept)
        scripts += scripted.others
        yield scripted.weight, result


def step_law(
    rule: Rule, target: Model, drafts: Sequence[int], draft_probs: torch.Tensor | None, after: Prefix = ()
) -> Law:
    """What one step emits, given its drafts."""
    law: Law = defaultdict(float)

    def run(accept: Accept) -> tuple[int, torch.Tensor]:
        accepted, recovered = rule(lambda place: target((*after, *drafts[:place])), drafts, draft_probs, accept)
        if recovered is None:
            assert accepted == len(drafts)
            recovered = target((*after, *drafts))
        return accepted, recovered / recovered.sum()

    for weight, (accepted, last) in branches(run):
        for token, probability in enumerate(last.tolist()):
            law[(*after, *drafts[:accepted], token)] += weight * probability
    return law


def speculative_law(
    rule: Rule, target: Model, drafter: Model, k: int, continues: Continues = lambda prefix: True, shown: Any = None
) -> Law:
    """The law of the first k + 1 tokens where up to k drafts are sampled from `drafter`.

    `shown(prefix)` are the probabilities that the verifier is told; those of `drafter` if None.
    """
    law: Law = defaultdict(float)
    ways: Law = {(): 1.0}
    for size in range(k + 1):
        longer: Law = {}
        for drafts, mass in ways.items():
            if size < k and continues(drafts):
                for token, probability in enumerate(drafter(drafts).tolist()):
                    if probability > 0.0:
                        longer[(*drafts, token)] = mass * probability
                continue
            told = [(shown or drafter)(drafts[:place]) for place in range(size)]
            for path, probability in step_law(rule, target, drafts, torch.stack(told) if told else None).items():
                law[path] += mass * probability
        ways = longer
    return joint(target, k + 1, law)


def all_drafts(vocabulary: int, k: int) -> Iterator[Prefix]:
    return itertools.product(range(vocabulary), repeat=k)


def token_ids(tokens: Sequence[SampledToken]) -> list[int]:
    assert all(token.error is None for token in tokens)
    return [token.token_id for token in tokens]
