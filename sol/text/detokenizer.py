"""Token ids to text while they are being generated: whole characters only, and never a stop string by mistake."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from sol.sampling_params import SamplingParams
from sol.text.stop_strings import StopStrings
from sol.text.tokenizer import Tokenizer

_new_decoder: Final = codecs.getincrementaldecoder("utf-8")


@dataclass(slots=True, kw_only=True)
class TextDelta:
    """What some new tokens added to the text."""

    text: str = ""
    """Ready to be sent: later tokens cannot change it."""
    num_tokens: int = 0
    """How many of the new tokens belong to the output. Fewer than were pushed only after a stop string: the token that
    completed it is the last that counts."""
    token_offsets: list[int] = field(default_factory=list)
    """For each of these `num_tokens`, where its text begins: characters from the beginning of the output. A token that
    goes on in the middle of a character begins at that character; tokens of a stop string that is left out lie past
    the end of the text."""
    stop: str | None = None
    """The stop string that ended the output: the request is to be aborted, and finished with reason "stop"."""


class Detokenizer:
    """The text of one choice, piece by piece.

    The pieces add up to what `Tokenizer.decode` makes of prompt and output together, less as many characters as it
    makes of the prompt alone: a SentencePiece space at the output's beginning stays, and a character whose first bytes
    are the prompt's last belongs to the prompt. A character appears once its last byte is there; bytes that cannot be
    UTF-8 appear as U+FFFD.

    With `params.stop` the text ends before the stop string that ends first (after it, with
    `include_stop_str_in_output`), and text that may be the beginning of one is withheld until that is known. A stop
    string that is complete within the first `min_tokens` tokens does not count, as in vLLM.

    Work and memory are constant for each token, whatever the lengths of prompt and output.

    `stops` are `params.stop`, built once for all choices of a request; by default they are built here. `kept_ids` are
    special tokens that are not skipped: markers that a parser of the text has to see.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        *,
        stops: StopStrings | None = None,
        kept_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped_ids = tokenizer.special_ids - kept_ids if params.skip_special_tokens else frozenset[int]()
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        if stops is None and params.stop:
            stops = StopStrings(params.stop)
        self._stops = None if stops is None else stops.fork()
        self._decoder = _new_decoder("replace")
        self._started, incomplete = self._end_of_prompt(prompt_token_ids)
        self._decoder.decode(incomplete)
        self._prompts_character = bool(incomplete)
        self._withheld = ""
        self._length = 0
        self._num_tokens = 0
        self.finished = False
        """Nothing more is taken: a stop string was found, or `finish` was called."""

    @property
    def num_tokens(self) -> int:
        """Tokens that belong to the output so far."""
        return self._num_tokens

    def push(self, new_token_ids: Sequence[int], *, ended_by_token: bool = False) -> TextDelta:
        """Take what the engine made. `ended_by_token` says that the last of these ended the request (an end token or
        one of `stop_token_ids`): it counts, but its text is left out unless `include_stop_str_in_output`."""
        delta = TextDelta()
        parts: list[str] = []
        last = len(new_token_ids) - 1
        for index, token_id in enumerate(new_token_ids):
            if self.finished:
                break
            delta.num_tokens += 1
            delta.token_offsets.append(self._length)
            silent = ended_by_token and index == last and not self._include_stop
            delta.stop = self._take(b"" if silent else self._bytes_of(token_id), parts)
        delta.text = "".join(parts)
        return delta

    def finish(self) -> TextDelta:
        """The end of the output: gives what was withheld, and U+FFFD for a character that was never completed."""
        if self.finished:
            return TextDelta()
        self.finished = True
        return TextDelta(text=self._withheld + self._characters(b"", final=True))

    def _take(self, new: bytes, parts: list[str]) -> str | None:
        self._num_tokens += 1
        text = self._characters(new)
        if not text:
            return None
        self._length += len(text)
        if self._stops is None:
            parts.append(text)
            return None
        match = self._stops.feed(text, stopping=self._num_tokens > self._min_tokens)
        text = self._withheld + text
        if match is None:
            ready = len(text) if self._include_stop else len(text) - self._stops.pending
            self._withheld = text[ready:]
        else:
            self.finished = True
            ready = len(self._withheld) + match.end
            self._withheld = ""
            if not self._include_stop:
                ready -= len(match.stop)
        parts.append(text[:ready])
        return None if match is None else match.stop

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self._skipped_ids:
            return b""
        if self._started:
            return self._tokenizer.token_bytes(token_id)
        self._started = self._tokenizer.begins_text(token_id)
        return self._tokenizer.first_token_bytes(token_id)

    def _characters(self, new: bytes, *, final: bool = False) -> str:
        text = self._decoder.decode(new, final)
        if text and self._prompts_character:
            self._prompts_character = False
            return text[1:]
        return text

    def _end_of_prompt(self, prompt_token_ids: Sequence[int]) -> tuple[bool, bytes]:
        """Whether the prompt has any text, and the bytes of an incomplete character at its end."""
        tail = b""
        started = False
        for token_id in reversed(prompt_token_ids):
            if token_id not in self._skipped_ids:
                tail = self._tokenizer.token_bytes(token_id) + tail
                started = started or self._tokenizer.begins_text(token_id)
            if len(tail) >= _MAX_INCOMPLETE:
                break
        for length in range(1, min(_MAX_INCOMPLETE, len(tail)) + 1):
            if _is_incomplete(tail[-length:]):
                return started, tail[-length:]
        return started, b""


_MAX_INCOMPLETE: Final = 3  # a UTF-8 character has four bytes at most


def _is_incomplete(part: bytes) -> bool:
    """Whether these bytes are the beginning of one UTF-8 character."""
    try:
        return _new_decoder("strict").decode(part) == ""
    except UnicodeDecodeError:
        return False
