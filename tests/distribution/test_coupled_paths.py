"""Coupled verification: the tokens with drafts are those without, seed by seed, and mutants of the noise are caught."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from exact_law import Chain, Prefix, joint, make_row, token_ids
from monte_carlo import Drafting, departure, generate, make_rows

from sol.sampling import sampler
from sol.sampling.batched import SamplingParameters, sample_rows
from sol.sampling.noise import choice_key, stream_key
from sol.sampling.processing import SamplingRow
from sol.speculation.verify import VerifyRow, verify

VOCABULARY, LENGTH = 4, 3
TARGET = Chain(VOCABULARY, 1, spread=1.0)


def without_drafts(rows: Sequence[SamplingRow], length: int) -> list[Prefix]:
    """Each request's first tokens, one step a token, all of a step sampled at once."""
    parameters = SamplingParameters.empty(len(rows), torch.device("cpu"))
    parameters.temperature.fill_(1.0)
    keys = [choice_key(row.seed, row.choice_index) for row in rows]
    parameters.choice_key[:] = torch.tensor([key - 2**64 if key >= 2**63 else key for key in keys])
    paths: list[Prefix] = [()] * len(rows)
    for place in range(length):
        logits = torch.stack([TARGET.logits(path) for path in paths]).float()
        tokens = sample_rows(logits, torch.arange(len(rows)), torch.full((len(rows),), place), parameters).tolist()
        paths = [(*path, token) for path, token in zip(paths, tokens, strict=True)]
    return paths


@pytest.mark.parametrize(
    "seeds", [range(20_000), pytest.param(range(20_000, 120_000), marks=pytest.mark.slow)], ids=len
)
def test_tokens_with_drafts_are_those_without(seeds: range) -> None:
    rows = make_rows(seeds)
    wanted = without_drafts(rows, LENGTH)
    batch, logits = [], []
    for index, (row, path) in enumerate(zip(rows, wanted, strict=True)):
        # One draft for most; none, or two, for some. Half of the first ones are wrong.
        count = (1, 0, 1, 2, 1, 1, 1, 0)[index % 8]
        drafts = list(path[:count])
        if drafts and index // 8 % 2:
            drafts[0] = (drafts[0] + 1) % VOCABULARY
        batch.append(VerifyRow(row, drafts))
        logits += [TARGET.logits(drafts[:place]) for place in range(count + 1)]
    for entry, path, tokens in zip(batch, wanted, verify(torch.stack(logits).float(), batch, "coupled"), strict=True):
        found = tuple(token_ids(tokens))
        right = tuple(entry.draft_token_ids) == path[: len(entry.draft_token_ids)]
        assert found == path[: len(entry.draft_token_ids) + 1 if right else 1]
    # And what all agree on has the target's law.
    assert departure(wanted, joint(TARGET.law(make_row()), LENGTH)) is None


def right_then_wrong(wanted: dict[int, Prefix], vocabulary: int) -> Drafting:
    """Drafts of which the first is right and the second is not, by request's seed."""

    def draft(row: SamplingRow, count: int) -> tuple[list[int], None]:
        done = len(row.output_token_ids)
        drafts = list(wanted[row.seed][done : done + count])
        return [token if not place else (token + 1) % vocabulary for place, token in enumerate(drafts)], None

    return draft


@pytest.mark.parametrize("mutated", [False, True])
def test_mutant_noise_keyed_by_draft_slot(mutated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, length = make_rows(range(200)), 6
    wanted = dict(enumerate(without_drafts(rows, length)))
    started = [0]
    if mutated:
        monkeypatch.setattr(
            sampler, "stream_key", lambda seed, choice, position: stream_key(seed, choice, position - started[0])
        )
    paths = generate(
        TARGET,
        right_then_wrong(wanted, VOCABULARY),
        rows,
        length=length,
        k=2,
        method="coupled",
        before_step=lambda start: started.__setitem__(0, start),
    )
    assert (paths == list(wanted.values())) is not mutated


@pytest.mark.parametrize("mutated", [False, True])
def test_choices_of_a_request_are_independent(mutated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a mutant, whose noise they share, is caught."""
    if mutated:
        monkeypatch.setattr(sampler, "stream_key", lambda seed, choice, position: stream_key(seed, 0, position))
    rows = make_rows(range(2000), choices=(0, 1))
    paths = generate(TARGET, lambda row, count: ([0] * count, None), rows, length=1, k=0, method="coupled")
    alone = joint(TARGET.law(make_row()), 1)
    both = {(a, b): p * q for a, p in alone.items() for b, q in alone.items()}
    found = departure(list(zip(paths[::2], paths[1::2], strict=True)), both)
    assert (found is not None) is mutated
