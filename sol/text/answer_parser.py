"""An answer's text as its parts: reasoning, content and tool calls, whichever of them the model was asked for."""

from __future__ import annotations

from sol.text.answer_parts import Arguments, CallBegin, Content, Part, Reasoning, merge
from sol.text.reasoning import ReasoningParser, Split
from sol.text.tools.parsers import ToolParser


class AnswerParser:
    """The parser of one answer: `feed` takes text in pieces of any size, then `finish` once; how the text was cut makes
    no difference to what the parts add up to.

    What is no reasoning goes through `tools`. Of its calls the first `max_calls` are given. With `show_reasoning` false
    reasoning is left out.
    """

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tools: ToolParser | None,
        *,
        max_calls: int | None = None,
        show_reasoning: bool = True,
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._max_calls = max_calls
        self._show_reasoning = show_reasoning

    @property
    def called(self) -> bool:
        """The answer so far ends with a call, or text behind one, that is whole: it is for whoever asked to act."""
        return self._tools is not None and self._tools.num_calls > 0 and not self._cut

    @property
    def satisfied(self) -> bool:
        """As many calls as are wanted are whole."""
        return self._max_calls is not None and self.called and self._tools.num_calls >= self._max_calls  # type: ignore[union-attr]

    @property
    def reasoning_end(self) -> int | None:
        """How many characters of the text are reasoning, its markers among them; None until that is known."""
        return 0 if self._reasoning is None else self._reasoning.end

    @property
    def _cut(self) -> bool:
        """The last call that is given is not whole."""
        tools = self._tools
        if tools is None or not tools.in_call:
            return False
        return self._max_calls is None or tools.num_calls <= self._max_calls

    def feed(self, text: str) -> list[Part]:
        split = Split("", text) if self._reasoning is None else self._reasoning.feed(text)
        return merge([*self._thought(split), *self._said(split.content)])

    def finish(self) -> list[Part]:
        split = Split("", "") if self._reasoning is None else self._reasoning.finish()
        rest = [] if self._tools is None else self._limited(self._tools.finish())
        return merge([*self._thought(split), *self._said(split.content), *rest])

    def _thought(self, split: Split) -> list[Part]:
        return [Reasoning(split.reasoning)] if split.reasoning and self._show_reasoning else []

    def _said(self, text: str) -> list[Part]:
        if not text:
            return []
        return [Content(text)] if self._tools is None else self._limited(self._tools.feed(text))

    def _limited(self, parts: list[Part]) -> list[Part]:
        most = self._max_calls
        if most is None:
            return parts
        return [part for part in parts if not isinstance(part, (CallBegin, Arguments)) or part.index < most]
