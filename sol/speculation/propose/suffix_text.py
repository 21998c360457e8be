"""The text of a request as a lookup drafter follows it: fed in slices, and begun anew where the request is another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

from sol.sampling.processing import SamplingRow
from sol.speculation.propose.protocol import Proposal, ProposalRow
from sol.speculation.propose.suffix_index import NgramIndex

TOKENS_PER_CALL: Final = 16384
"""How much prompt a call of `propose` takes in, over all rows: a few milliseconds, whatever arrives."""
_OUTPUT_COST: Final = 32
"""An output token, which is followed one by one, costs as much time as so many of a prompt, which go in together."""


class FollowedText(ABC):
    """Prompt and output of one request, indexed. All of it follows from the tokens alone, however they were fed."""

    __slots__ = ("_num_prompt", "_output", "_prompt", "index", "tenant")

    def __init__(self, orders: Sequence[int]) -> None:
        self.index = NgramIndex(orders)
        self.tenant: str | None = None
        self._num_prompt = 0
        # Kept to tell, without comparing tokens, that a row is still the same request. Never read later.
        self._prompt: Sequence[int] = ()
        self._output: Sequence[int] = ()

    @property
    def output(self) -> array[int]:
        """As far as it was fed."""
        return self.index.tokens[self._num_prompt :]

    def belongs_to(self, sampling: SamplingRow) -> bool:
        """What was fed is how this request begins: false where a request id came back with another text."""
        prompt, output, tokens = sampling.prompt_token_ids, sampling.output_token_ids, self.index.tokens
        fed = len(tokens)
        if fed > len(prompt) + len(output):
            return False
        if prompt is not self._prompt or output is not self._output or len(prompt) != self._num_prompt:
            begun = array("i", prompt[:fed])
            begun.extend(output[: max(0, fed - len(prompt))])
            if fed and (len(prompt) != self._num_prompt or begun != tokens):
                return False
            self._prompt, self._output, self._num_prompt = prompt, output, len(prompt)
        return fed <= len(prompt) or output[fed - len(prompt) - 1] == tokens[-1]

    def feed(self, sampling: SamplingRow, budget: int) -> int:
        """Take in what is new, at most `budget` worth of it → what is left of the budget.

        The request has been caught up with once `len(index)` is the length of its prompt and output.
        """
        prompt, output, index = sampling.prompt_token_ids, sampling.output_token_ids, self.index
        fed = len(index.tokens)
        if fed < len(prompt):
            if not fed:
                index.reserve(len(prompt) + len(output) + len(prompt) // 4)
            piece = prompt[fed : fed + budget]
            index.extend(piece)
            budget -= len(piece)
            fed = len(index.tokens)
            if fed < len(prompt):
                return 0
            self.look()
        begin = fed - len(prompt)
        most = -(-budget // _OUTPUT_COST)
        if most > 0:
            for token in output[begin : begin + most]:
                self.follow(token)
                budget -= _OUTPUT_COST
        return max(0, budget)

    @abstractmethod
    def look(self) -> None:
        """The prompt is complete: find what it may continue as."""

    @abstractmethod
    def follow(self, token: int) -> None:
        """An output token came: note whether it was foreseen, take it in, find what may come next."""


Text = TypeVar("Text", bound=FollowedText)


class FollowedTexts(Generic[Text]):
    """Those of all requests that a drafter was asked for and that have not been forgotten since."""

    def __init__(self, begin: Callable[[], Text]) -> None:
        self._begin = begin
        self._texts: dict[str, Text] = {}

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def num_bytes(self) -> int:
        return sum(text.index.num_bytes for text in self._texts.values())

    def catch_up(self, rows: Sequence[ProposalRow]) -> list[Text | None]:
        """Feed what is new → each row's text; None where more is new than one call takes in, for the calls to come."""
        budget = TOKENS_PER_CALL
        found: list[Text | None] = []
        for row in rows:
            sampling = row.sampling
            text = self._texts.get(row.request_id)
            if text is None or not text.belongs_to(sampling):
                text = self._texts[row.request_id] = self._begin()
                text.belongs_to(sampling)
            text.tenant = row.tenant
            if budget > 0:
                try:
                    budget = text.feed(sampling, budget)
                except BaseException:  # half a token may be in: it is begun anew if the drafter is asked again
                    del self._texts[row.request_id]
                    raise
            found.append(text if len(text.index.tokens) == row.num_tokens else None)
        return found

    def pop(self, request_id: str) -> Text | None:
        return self._texts.pop(request_id, None)


def until_end(sampling: SamplingRow, token_ids: list[int], scores: list[float]) -> Proposal:
    """The drafts up to the first that ends the request: nothing behind it can be accepted."""
    params = sampling.params
    ends = params.stop_token_ids if params.ignore_eos else (*sampling.eos_token_ids, *params.stop_token_ids)
    for end in ends:
        if end in token_ids:
            count = token_ids.index(end) + 1
            del token_ids[count:], scores[count:]
    return Proposal(token_ids=token_ids, scores=scores)
