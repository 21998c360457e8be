"""Texts and rows for the drafters that look up, and what a proposal must be, checked without an index."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from sol.sampling.processing import SamplingRow
from sol.sampling_params import SamplingParams
from sol.speculation.propose import Proposal, ProposalRow, Proposer

small_texts = st.lists(st.integers(0, 3), max_size=120)
"""Few kinds of tokens: nearly everything occurred before."""
repetitive_texts = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=12), min_size=1, max_size=4).flatmap(
    lambda pieces: st.lists(st.sampled_from(pieces), max_size=12).map(
        lambda chosen: [t for piece in chosen for t in piece]
    )
)
texts = st.one_of(small_texts, repetitive_texts)
edits = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 4), st.lists(st.integers(100, 104), max_size=4)), min_size=1, max_size=8
)
"""Copy so many tokens, leave out so many, put in these: applied in turn by `edited`."""


def edited(source: Sequence[int], changes: Sequence[tuple[int, int, list[int]]]) -> list[int]:
    """A copy of the source, each change in turn, over and over."""
    copy: list[int] = []
    at = turn = 0
    while at < len(source):
        kept, left_out, put_in = changes[turn % len(changes)]
        copy += [*source[at : at + kept], *put_in]
        at += max(1, kept + left_out)
        turn += 1
    return copy


def lookup_row(
    prompt: Sequence[int],
    output: Sequence[int] = (),
    *,
    max_tokens: int = 8,
    request_id: str = "a",
    tenant: str | None = None,
    params: SamplingParams | None = None,
    eos: Sequence[int] = (),
) -> ProposalRow:
    return ProposalRow(
        request_id=request_id,
        sampling=SamplingRow(params or SamplingParams(), 0, 0, list(prompt), list(output), list(eos)),
        max_tokens=max_tokens,
        block_ids=np.empty(0, dtype=np.int64),
        num_computed_tokens=len(prompt) + len(output) - 1,
        tenant=tenant,
    )


def propose_one(proposer: Proposer, row: ProposalRow) -> Proposal:
    [proposal] = proposer.propose([row])
    return proposal


def proposals_along(
    proposer: Proposer, prompt: Sequence[int], output: Sequence[int], *, steps: Sequence[int] = (1,), **options: object
) -> list[Proposal]:
    """As an engine asks: after the first token, then after so many more, over and over, in one list that grows."""
    row = lookup_row(prompt, **options)  # type: ignore[arg-type]
    emitted = row.sampling.output_token_ids
    assert isinstance(emitted, list)
    found, turn = [], 0
    while len(emitted) < len(output):
        emitted += output[len(emitted) : len(emitted) + steps[turn % len(steps)]]
        turn += 1
        found.append(propose_one(proposer, row))
    return found


def continues_from(text: Sequence[int], place: int, drafts: Sequence[int]) -> bool:
    """The drafts are what stands behind `place`, and behind the text's end the drafts themselves."""
    whole = [*text, *drafts]
    return all(whole[place + offset] == draft for offset, draft in enumerate(drafts))


def places(text: Sequence[int], order: int, within: Sequence[int] | None = None) -> list[int]:
    """Where an earlier occurrence of the last `order` tokens ends (in another text: any occurrence), latest first."""
    other = text if within is None else within
    if order > len(text):
        return []
    tail = list(text[len(text) - order :])
    last = len(other) - 1 if within is None else len(other)
    return [place for place in range(last, order - 1, -1) if list(other[place - order : place]) == tail]


def source_texts(count: int) -> list[list[int]]:
    """Modules of Python's standard library, a number for each word, space or sign: text as it repeats in earnest."""
    numbers: dict[str, int] = {}
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    read = (file.read_text("utf-8", errors="ignore")[:12_000] for file in files[2::6])
    split = (re.findall(r"\w+|\s+|[^\w\s]", text) for text in read)
    found = [[numbers.setdefault(word, len(numbers)) for word in words] for words in split if len(words) > 2000]
    return found[:count]
