"""What a request's grammar forbids next: a mask over the vocabulary for each place that a step samples.

Matchers are llguidance's (Earley over lexemes that are regular expressions), handed in compiled. One takes the tokens
of its request's output; at a step's drafts it goes forward and back again by itself.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from sol.errors import SolError
from sol.grammar import GRAMMAR_FAILED, Grammar

if TYPE_CHECKING:
    from sol.sampling.processing import SamplingRow

DEAD_END: Final = f"{GRAMMAR_FAILED}: no token can go on with a text that it allows"
_MOST_THREADS: Final = 8
_NOTHING_FORBIDDEN: Final = -1
"""32 tokens of a packed mask"""


class Matcher(Protocol):
    """llguidance's `LLMatcher`, as far as it is used here."""

    def consume_tokens(self, sampled_tokens: list[int]) -> bool: ...
    def validate_tokens(self, tokens: list[int]) -> int: ...
    def is_error(self) -> bool: ...
    def get_error(self) -> str: ...


Grammars = Callable[[Grammar], Matcher]
"""A matcher at the beginning of a grammar. Raises `SolError`."""


def grammar_state(grammar: Grammar | None, grammars: Grammars | None) -> GrammarState | None:
    if grammar is None:
        return None
    if grammars is None:
        raise RuntimeError("the plan has a grammar, and the runner was given nothing to compile it with")
    return GrammarState(functools.partial(grammars, grammar))


class GrammarState:
    """Where one request is in its grammar. It follows from the tokens of its output, so a request that was preempted
    comes back with a fresh one.

    `start` gives a matcher at the grammar's beginning; it is called when the first mask is wanted. If it raises, or the
    matcher fails later (its limits bound what a step may take), that is this request's error.
    """

    __slots__ = ("_matcher", "_num_consumed", "_start", "error")

    def __init__(self, start: Callable[[], Matcher]) -> None:
        self._start = start
        self._matcher: Matcher | None = None
        self._num_consumed = 0
        self.error: str | None = None
        """Once there is one, it stays."""

    def after(self, token_ids: Sequence[int]) -> Matcher | None:
        """The matcher, once it has taken all of the output's tokens; it has taken the first ones of them before. None
        if there is an error."""
        if self.error is None and self._matcher is None:
            try:
                self._matcher = self._start()
            except SolError as error:
                self.error = error.message
        if self.error is None and len(token_ids) > self._num_consumed:
            assert self._matcher is not None
            self._matcher.consume_tokens(list(token_ids[self._num_consumed :]))
            self._num_consumed = len(token_ids)
            self.look()
        return None if self.error is not None else self._matcher

    def look(self) -> None:
        """Take over the matcher's error, if it has come to one."""
        if self._matcher is not None and self._matcher.is_error():
            self.error = f"{GRAMMAR_FAILED}: {self._matcher.get_error().splitlines()[0]:.300}"

    def num_allowed(self, token_ids: Sequence[int], drafts: Sequence[int]) -> int:
        """How many of the drafts after the output's tokens the grammar allows, up to the first that it does not."""
        matcher = self.after(token_ids)
        return 0 if matcher is None else matcher.validate_tokens(list(drafts))


Mask = torch.Tensor | str
"""[1 + k, V] bool, True for what is forbidden after the row's tokens and after each of its k drafts; or why there is
none."""


def masks(logits: torch.Tensor, rows: Sequence[SamplingRow], drafts: Sequence[Sequence[int]]) -> list[Mask | None]:
    """One a row, on the device of `logits` [S, V]; None for rows without a grammar. `drafts` has a list a row.

    Behind a draft that is forbidden itself nothing is forbidden: nothing can be sampled there.
    """
    places: dict[int, slice] = {}
    found: list[Mask | None] = [None] * len(rows)
    plain: list[tuple[Matcher, int]] = []
    drafted: list[tuple[Matcher, int, list[int]]] = []
    count = 0
    for index, row in enumerate(rows):
        if row.grammar is None:
            continue
        matcher = row.grammar.after(row.output_token_ids)
        if matcher is None:
            found[index] = row.grammar.error
        elif drafts[index]:
            drafted.append((matcher, count, list(drafts[index])))
        else:
            plain.append((matcher, count))
        places[index] = slice(count, count + 1 + len(drafts[index]))
        count = places[index].stop
    if not count:
        return found
    vocab_size = logits.shape[1]
    packed = np.full((count, -(-vocab_size // 32)), _NOTHING_FORBIDDEN, dtype=np.int32)
    _fill(packed, plain, drafted)
    for index, place in places.items():
        row = rows[index]
        assert row.grammar is not None
        row.grammar.look()
        if row.grammar.error is None and not packed[place.start].any():
            row.grammar.error = DEAD_END
        if row.grammar.error is not None:
            found[index] = row.grammar.error
        elif row.params.ignore_eos or row.below_min_tokens:
            _put_ends_off(packed[place], row)
    forbidden = _unpacked(~packed, logits)
    return [forbidden[places[i]] if mask is None and i in places else mask for i, mask in enumerate(found)]


def _fill(
    packed: npt.NDArray[np.int32],
    plain: Sequence[tuple[Matcher, int]],
    drafted: Sequence[tuple[Matcher, int, list[int]]],
) -> None:
    """Of each matcher its mask at its place in `packed`, behind it those after its drafts: as many threads as there are
    cores work on it, without the interpreter's lock."""
    executor = _executor()
    width, address = packed.shape[1] * packed.itemsize, packed.ctypes.data
    if plain:
        executor.unsafe_compute_mask_ptr(plain, address, width, len(packed))
    if drafted:
        executor.unsafe_compute_mask_ptr_with_draft_token(drafted, address, width, len(packed))


class _Executor(Protocol):
    """llguidance's `LLExecutor`."""

    def unsafe_compute_mask_ptr(
        self, interpreters: Sequence[tuple[Matcher, int]], trg_pointer: int, one_mask_bytes: int, trg_batch_size: int, /
    ) -> None: ...

    def unsafe_compute_mask_ptr_with_draft_token(
        self,
        interpreters: Sequence[tuple[Matcher, int, list[int]]],
        trg_pointer: int,
        one_mask_bytes: int,
        trg_batch_size: int,
        /,
    ) -> None: ...


_made: list[_Executor] = []


def _executor() -> _Executor:
    """One for the process: it is nothing but a pool of threads."""
    if not _made:
        from llguidance import LLExecutor  # whoever has a matcher has it

        executor: _Executor = LLExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0))))  # type: ignore[assignment]
        _made.append(executor)
    return _made[0]


def _put_ends_off(packed: npt.NDArray[np.int32], row: SamplingRow) -> None:
    """What would end the output too early is forbidden, unless nothing else is left."""
    num_output = len(row.output_token_ids)
    for offset, mask in enumerate(packed):
        early = num_output + offset < row.params.min_tokens
        if not (early or row.params.ignore_eos):
            continue
        without = mask.copy()
        for token_id in {*row.eos_token_ids, *(row.params.stop_token_ids if early else ())}:
            without[token_id >> 5] &= ~np.int32(1 << (token_id & 31)) if token_id & 31 != 31 else np.int32(0x7FFFFFFF)
        if without.any():
            mask[:] = without


def _unpacked(packed: npt.NDArray[np.int32], logits: torch.Tensor) -> torch.Tensor:
    """A bit a token, the lowest first → [places, V] bool, where `logits` are."""
    vocab_size = logits.shape[1]
    if logits.device.type == "cpu":
        bits = np.unpackbits(packed.view(np.uint8), axis=1, count=vocab_size, bitorder="little")
        return torch.from_numpy(bits).view(torch.bool)
    # The bits are copied, which are an eighth of the bytes that the bools are.
    return unpack_bits(torch.from_numpy(packed.view(np.uint8)).to(logits.device), vocab_size)


def unpack_bits(packed: torch.Tensor, count: int) -> torch.Tensor:
    """[S, bytes] uint8, the lowest bit first → [S, count] bool."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & 1).flatten(1)[:, :count].bool()
