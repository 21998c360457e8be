"""Splits what a model thinks, `<think>…</think>`, from what it answers."""

from __future__ import annotations

from typing import ClassVar, Final, NamedTuple

from sol.text.marked_text import WHITE, LeadingWhite, TextUntil

OPEN: Final = "<think>"
CLOSE: Final = "</think>"


class Split(NamedTuple):
    reasoning: str
    content: str


class ReasoningParser:
    """Takes an answer's text in pieces of any size (`feed`, then `finish` once); how it was cut makes no difference.

    An answer that begins with `<think>`, or whose prompt ends with it, is reasoning until `</think>`, and all of it if
    that never comes. Otherwise it is content, unless the model leaves its first marker out (`always_thinks`). White
    space beside markers belongs to the form. Markers later in the answer are content.

    `prompt` is what the chat template made: its end says whether the model is thinking already, or is not to.
    """

    markers: ClassVar[tuple[str, ...]] = (OPEN, CLOSE)
    """What `skip_special_tokens` must not leave out, although it may be special tokens."""
    always_thinks: ClassVar[bool] = False

    def __init__(self, prompt: str = "") -> None:
        self._assumed = self.assumes(prompt)
        self._held: str | None = ""
        """The answer's beginning, while it may be the marker; None once that is decided."""
        self._white = LeadingWhite()
        """Before it."""
        self._until: TextUntil | None = None
        self._strip = False
        self._length = 0
        self.end: int | None = None
        """How many characters of the answer are reasoning, its markers among them; None until that is known."""

    @classmethod
    def assumes(cls, prompt: str) -> bool:
        """Whether an answer to `prompt` is reasoning even without a marker."""
        end = prompt[-64:].rstrip(WHITE)
        return end.endswith(OPEN) or (cls.always_thinks and not end.endswith(CLOSE))

    def feed(self, text: str) -> Split:
        self._length += len(text)
        if self._held is not None:
            body = self._held + text if self._held else self._white.feed(text)
            if len(body) < len(OPEN) and OPEN.startswith(body):
                self._held = body
                return Split("", "")
            text = self._decide(body)
        if self._until is None:
            return Split("", self._content(text))
        reasoning, rest, _ = self._until.feed(text)
        if rest is None:
            return Split(reasoning, "")
        self._until, self._strip = None, True
        self.end = self._length - len(rest)
        return Split(reasoning, self._content(rest))

    def finish(self) -> Split:
        text = "" if self._held is None else self._decide(self._held)
        if self._until is None:
            return Split("", text)
        self.end = self._length
        return Split(self._until.feed(text).text + self._until.finish(), "")

    def _decide(self, body: str) -> str:
        """Whether the answer begins with reasoning; returns what is left to read of its beginning."""
        self._held = None
        white = self._white.take()
        marked = body.startswith(OPEN)
        if marked or self._assumed:
            self._until = TextUntil(CLOSE, strip_leading=True)
        else:
            self.end = 0
        return body.removeprefix(OPEN) if marked else white + body

    def _content(self, text: str) -> str:
        if self._strip:
            text = text.lstrip(WHITE)
            self._strip = not text
        return text


class DeepSeekR1Parser(ReasoningParser):
    """For models that think before every answer and may leave `<think>` out, since templates wrote it for them."""

    always_thinks = True
