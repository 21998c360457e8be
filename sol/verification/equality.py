"""Token ids with speculation against token ids without, position by position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sol.engine.types import SpeculationParams
from sol.sampling_params import SamplingParams
from sol.verification.report import Cell, Difference
from sol.verification.session import PLAIN, Answer, Ask, Session

PLAIN_AGAIN = "none"


@dataclass(frozen=True, slots=True)
class Case:
    """An answer of plain decoding, alone and without a prefix cache: what all others are compared with."""

    prompt: str
    sampling: str
    turn: int
    ask: Ask
    """Without speculation."""
    expected: list[int]


@dataclass(frozen=True, slots=True)
class Open:
    """A difference that nobody has judged, and what its judge needs."""

    difference: Difference
    case: Case


def drafter_choices(drafters: Sequence[str]) -> dict[str, SpeculationParams | None]:
    """Every drafter by itself, and all of them as the engine combines them."""
    choices: dict[str, SpeculationParams | None] = {name: SpeculationParams(drafter=name) for name in drafters}
    if len(drafters) > 1:
        choices["+".join(drafters)] = None
    return choices


def plain_cases(session: Session, asks: Sequence[tuple[str, str, int, Ask]]) -> list[Case]:
    """`asks`: prompt, sampling, turn and what is asked; each is answered alone."""
    answers = session.ask([ask for *_, ask in asks], together=False)
    return [Case(*given, expected=answer.token_ids) for given, answer in zip(asks, answers, strict=True)]


def count_answers(cases: Sequence[Case], drafters: Sequence[str]) -> int:
    """How many `compare` asks for."""
    return len(cases) * (2 * len(drafter_choices(drafters)) + 1)


def compare(
    session: Session,
    cases: Sequence[Case],
    *,
    prefix_cache: bool,
    choices: Mapping[str, SpeculationParams | None] | None = None,
) -> tuple[list[Cell], list[Open]]:
    """Each case again: by every drafter alone; then all at once, by every drafter and by none.

    `choices` names the wishes for drafters; by default `drafter_choices`.
    """
    choices = drafter_choices(session.info.drafters) if choices is None else choices
    found: list[tuple[Cell, Case, Answer]] = []
    cells: dict[str, Cell] = {}

    def cell(case: Case, drafter: str, company: str) -> Cell:
        new = Cell(prefix_cache=prefix_cache, company=company, drafter=drafter, sampling=case.sampling, turn=case.turn)
        return cells.setdefault(new.name, new)

    for name, wish in choices.items():
        asks = [replace(case.ask, speculation=wish) for case in cases]
        answers = session.ask(asks, together=False)
        found += [(cell(case, name, "alone"), case, answer) for case, answer in zip(cases, answers, strict=True)]
    crowd = [(case, name, wish) for name, wish in {**choices, PLAIN_AGAIN: PLAIN}.items() for case in cases]
    answers = session.ask([replace(case.ask, speculation=wish) for case, _, wish in crowd], together=True)
    found += [
        (cell(case, name, "neighbours"), case, answer) for (case, name, _), answer in zip(crowd, answers, strict=True)
    ]
    differences = []
    for place, case, answer in found:
        add_usage(place, answer)
        difference = first_difference(case, answer.token_ids, place.name)
        if difference is not None:
            place.differences.append(difference)
            differences.append(Open(difference, case))
    return list(cells.values()), differences


def add_usage(cell: Cell, answer: Answer) -> None:
    cell.num_requests += 1
    cell.num_tokens += len(answer.token_ids)
    cell.num_cached_tokens += answer.num_cached_tokens
    if answer.usage is None:
        return
    cell.num_steps += answer.usage.num_steps
    for counts in answer.usage.drafters.values():
        cell.num_draft_tokens += counts.num_draft_tokens
        cell.num_accepted_tokens += counts.num_accepted_tokens


def first_difference(case: Case, token_ids: Sequence[int], cell: str) -> Difference | None:
    for position in range(max(len(case.expected), len(token_ids))):
        expected, found = (ids[position] if position < len(ids) else None for ids in (case.expected, token_ids))
        if expected != found:
            return Difference(prompt=case.prompt, cell=cell, position=position, expected=expected, found=found)
    return None


def judge(session: Session, differences: Sequence[Open], tolerance: float) -> None:
    """Fill in `gap` and `near_tie`. `session` is an engine that neither speculates nor has a prefix cache.

    A token's logprob comes with it when it is emitted, so each of the two is made the likeliest by a bias; logprobs are
    those of the logits before it. Parameters must be without penalties, bias and cuts (top_k, top_p, min_p).
    """
    pairs = [
        (entry, entry.difference.expected, entry.difference.found)
        for entry in differences
        if entry.difference.expected is not None and entry.difference.found is not None
    ]
    asks = []
    for entry, expected, found in pairs:
        ask = entry.case.ask
        prefix = ask.token_ids + entry.case.expected[: entry.difference.position]
        for token in (expected, found):
            params = SamplingParams(
                temperature=0.0, max_tokens=1, logprobs=0, logit_bias={token: 100.0}, ignore_eos=True, detokenize=False
            )
            asks.append(Ask(prefix, params, ask.seed, PLAIN))
    answers = iter(session.ask(asks, together=False))
    for entry, expected, found in pairs:
        theirs, ours = next(answers), next(answers)
        if theirs.token_ids != [expected] or ours.token_ids != [found]:
            continue  # so far apart that no bias brings them together
        gap = theirs.logprobs[0].logprob - ours.logprobs[0].logprob
        gap += _noise_gap(entry.case.ask, entry.difference.position, expected, found)
        entry.difference.gap = gap
        entry.difference.near_tie = abs(gap) <= tolerance


def _noise_gap(ask: Ask, position: int, expected: int, found: int) -> float:
    """What sampling's noise adds to the first token's lead over the second, in units of logits."""
    if ask.params.greedy:
        return 0.0
    import torch

    from sol.sampling.noise import gumbel, stream_key

    noise = gumbel(stream_key(ask.seed, 0, position), torch.tensor([expected, found]))
    return float(noise[0] - noise[1]) * ask.params.temperature
