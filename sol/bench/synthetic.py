"""Texts of known length that mean nothing, for data whose content does not matter: what is measured is time.

Without the endpoint's tokenizer a text's length is a number of words. How many tokens those are, two short requests
tell (`calibrate`); every report shows the tokens that the endpoint counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np

from sol.bench.data import Conversation, Turn
from sol.bench.endpoint import Endpoint, probe
from sol.bench.lengths import Lengths
from sol.errors import ConfigError, EndpointError

_TEXT: Final = """
    time year people way day man thing woman life child world school state family student group country problem hand
    part place case week company system program question work government number night point home water room mother area
    money story fact month lot right study book eye job word business issue side kind head house service friend father
    power hour game line end member law car city community name president team minute idea kid body information back
    parent face others level office door health person art war history party result change morning reason research girl
    guy moment air teacher force education foot boy age policy music market sense nation plan college interest death
    experience effect use class control field development role effort rate heart drug show leader light voice wife
    police mind price report decision son view relationship town road arm difference value building action season
    society tax director position player record paper space ground form event official matter center couple site
    project activity star table need court produce eat teach oil half situation cost industry figure street image phone
    data picture practice piece land product doctor wall patient worker news test movie north love step south
    paint green river letter stone window garden summer winter bridge island forest machine engine paper silver
    simple early clear strong small large quick slow open close bright dark happy quiet young old long short high
"""
_WORDS: Final = tuple(_TEXT.split())
"""Common words, most of which are one token of most vocabularies."""

BLOCK_TOKENS: Final = 512
"""What one of Mooncake's `hash_ids` stands for."""


@dataclass(frozen=True, slots=True)
class WordLengths:
    """Tokens of a request = `fixed` (template, special tokens) + `per_word` · words."""

    fixed: float = 0.0
    per_word: float = 1.0

    def words(self, tokens: int) -> int:
        """The number of words, at least 1, that makes a request of `tokens`."""
        return max(1, round((tokens - self.fixed) / self.per_word))


async def calibrate(endpoint: Endpoint) -> WordLengths:
    """Ask how many tokens two texts have. An endpoint without usage is taken to have one a word."""
    pool = endpoint.pool()
    try:
        counted = []
        for repetitions in (1, 2):
            record = await probe(endpoint, pool, " ".join(_WORDS * repetitions), 1)
            if not record.ok:
                raise EndpointError(
                    f"{endpoint.url} refused a text of {len(_WORDS) * repetitions} words: {record.error}: "
                    f"{record.message}"
                )
            counted.append(record.prompt_tokens)
    finally:
        pool.close()
    first, second = counted
    if first is None or second is None or second <= first:
        return WordLengths()
    # All words once, and all of them twice: what the second time added is all words' tokens and nothing else.
    return WordLengths(max(0.0, 2.0 * first - second), (second - first) / len(_WORDS))


def words(rng: np.random.Generator, count: int) -> str:
    return " ".join([_WORDS[i] for i in rng.integers(len(_WORDS), size=count).tolist()])


@lru_cache(maxsize=4096)
def seeded_words(seed: tuple[int, ...], count: int) -> str:
    """Always the same `count` words for a seed: what several prompts share."""
    return words(np.random.default_rng(list(seed)), count)


class Synthetic:
    """Random words. `input_tokens` are all of a first turn's prompt, the shared prefix included; later turns add as
    many again, less the prefix."""

    def __init__(
        self,
        lengths: WordLengths,
        *,
        input_tokens: Lengths,
        output_tokens: Lengths,
        prefix_tokens: int = 0,
        num_prefixes: int = 1,
        turns: Lengths | None = None,
        turn_delay: float = 0.0,
        body: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        """`prefix_tokens` at the beginning are the same for all conversations of one of `num_prefixes` groups.

        Raises `ConfigError`.
        """
        if prefix_tokens < 0:
            raise ConfigError(f"prefix_tokens must be at least 0, not {prefix_tokens}", param="prefix_tokens")
        if num_prefixes < 1:
            raise ConfigError(f"num_prefixes must be at least 1, not {num_prefixes}", param="num_prefixes")
        if not 0 <= turn_delay < 1e6:
            raise ConfigError(f"turn_delay must be a number of seconds from 0, not {turn_delay}", param="turn_delay")
        self._lengths = lengths
        self._input_tokens = input_tokens
        self._output_tokens = output_tokens
        self._prefix_tokens = prefix_tokens
        self._num_prefixes = num_prefixes
        self._turns = turns or Lengths("constant", 1)
        self._turn_delay = turn_delay
        self._body = dict(body or {})
        self._seed = seed

    def conversation(self, index: int) -> Conversation:
        rng = np.random.default_rng([self._seed, 0x59A7, index])
        turns: list[Turn] = []
        for number in range(self._turns.draw(rng)):
            own = self._lengths if number == 0 else WordLengths(0.0, self._lengths.per_word)
            total = self._input_tokens.draw(rng)
            if number == 0 and self._prefix_tokens:
                group = int(rng.integers(self._num_prefixes))
                size = max(1, round(min(self._prefix_tokens, total) / own.per_word))
                rest = max(1, own.words(total) - size)
                text = f"{seeded_words((self._seed, 0x94EF, group), size)} {words(rng, rest)}"
            else:
                text = words(rng, own.words(max(1, total - (self._prefix_tokens if number else 0))))
            turns.append(
                Turn(
                    prompt=text,
                    max_tokens=self._output_tokens.draw(rng),
                    delay=self._turn_delay if number else 0.0,
                    body=self._body,
                )
            )
        return Conversation(key=f"synthetic-{index}", turns=turns)

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "synthetic",
            "input_tokens": self._input_tokens.text,
            "output_tokens": self._output_tokens.text,
            "prefix_tokens": self._prefix_tokens,
            "num_prefixes": self._num_prefixes if self._prefix_tokens else None,
            "turns": self._turns.text,
            "turn_delay": self._turn_delay,
            "tokens_per_word": round(self._lengths.per_word, 4),
            "tokens_of_template": round(self._lengths.fixed, 2),
            "seed": self._seed,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEntry:
    """A request of a trace, without its text."""

    timestamp: float
    """Seconds since the trace began."""
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    """Of each `BLOCK_TOKENS` of its prompt; equal ids mean equal text from the beginning on."""


class TraceData:
    """Texts for the requests of a trace, in its order: as long as they were, and with the prefixes they shared."""

    def __init__(
        self,
        entries: list[TraceEntry],
        lengths: WordLengths,
        *,
        seed: int = 0,
        body: Mapping[str, Any] | None = None,
        description: Mapping[str, Any] | None = None,
    ) -> None:
        self._entries = entries
        self._lengths = lengths
        self._seed = seed
        self._body = dict(body or {})
        self._description = dict(description or {})

    def conversation(self, index: int) -> Conversation:
        place = index % len(self._entries)
        entry = self._entries[place]
        total = self._lengths.words(entry.input_tokens)
        block = max(1, round(BLOCK_TOKENS / self._lengths.per_word))
        parts: list[str] = []
        for hash_id in entry.hash_ids:
            if total <= 0:
                break
            text = seeded_words((self._seed, 0xB10C, hash_id), block)
            parts.append(text if total >= block else " ".join(text.split(" ", total)[:total]))
            total -= block
        if total > 0:
            parts.append(words(np.random.default_rng([self._seed, 0x79AC, place]), total))
        turn = Turn(prompt=" ".join(parts), max_tokens=entry.output_tokens, body=self._body)
        return Conversation(key=f"trace-{place}", turns=[turn])

    def describe(self) -> dict[str, Any]:
        return {**self._description, "num_conversations": len(self._entries), "seed": self._seed}
