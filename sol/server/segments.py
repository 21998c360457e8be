"""Who made which part of a streamed text: `stream_options.include_speculation`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sol.engine.types import SpeculationUsage
from sol.server.streaming import to_json
from sol.speculation.usage import add_counts, mean_acceptance_length

PROMPT: Final = "prompt"
"""The origin of what `echo` repeats."""


@dataclass(slots=True)
class Segment:
    """A run of tokens that came from one origin."""

    text: str
    origin: str
    """A drafter's name, `TARGET` or `PROMPT`."""
    tokens: int
    """0 where the run is the rest of a token that was counted in an earlier chunk."""


def segments_field(segments: Sequence[Segment] | None, usage: SpeculationUsage | None = None) -> str:
    """The end of a chunk's choice, as JSON; empty where segments were not asked for.

    With the choice's `usage` so far, its mean acceptance length goes along: who watches the stream cannot know it, for
    a step whose drafts were all rejected looks like one without drafts.
    """
    if segments is None:
        return ""
    items = [{"text": item.text, "origin": item.origin, "tokens": item.tokens} for item in segments]
    fields: dict[str, object] = {"segments": items}
    if usage is not None:
        length = mean_acceptance_length(add_counts(usage.drafters.values()))
        fields["mean_acceptance_length"] = None if length is None else round(length, 4)
    return f',"speculation":{to_json(fields)}'


class Segments:
    """Divides a choice's chunks by origin.

    The texts of a chunk's segments add up to the chunk's text, and the tokens of all segments of a choice to its
    tokens. A token counts in the chunk that shows its first character: what is held back (an incomplete character,
    the possible beginning of a stop string) keeps its tokens back. One that never shows any (an end token, a token of
    a stop string, the first bytes of a character whose last byte is another's) counts with the text after it, or in
    the last chunk.
    """

    def __init__(self) -> None:
        self._shown = 0
        """Characters of the text so far"""
        self._waiting: list[tuple[int, str]] = []
        """Where the text begins, and who made it: of tokens that do not count yet"""
        self._latest = ""
        """Who made the last character shown, which may not be the last of its token"""

    def take(self, text: str, token_offsets: Sequence[int], origins: Sequence[str], *, finished: bool) -> list[Segment]:
        """The segments of a chunk with this text. `token_offsets` and `origins` are those of the tokens that are new,
        shown or not; `finished` says that no chunk follows."""
        begin, end = self._shown, self._shown + len(text)
        self._shown = end
        tokens = self._waiting + list(zip(token_offsets, origins, strict=True))
        count = len(tokens) if finished else sum(offset < end for offset, _ in tokens)
        self._waiting = tokens[count:]
        segments: list[Segment] = []
        first = min(tokens[0][0], end) if tokens else end
        if first > begin:
            segments.append(Segment(text[: first - begin], self._latest, 0))
        for index, (offset, origin) in enumerate(tokens[:count]):
            stop = tokens[index + 1][0] if index + 1 < len(tokens) else end
            part = text[offset - begin : stop - begin]
            if segments and segments[-1].origin == origin:
                segments[-1].text += part
                segments[-1].tokens += 1
            else:
                segments.append(Segment(part, origin, 1))
            self._latest = origin
        return segments
