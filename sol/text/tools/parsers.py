"""Finds tool calls in what a model writes, in the forms that models were trained on.

A parser takes text in pieces of any size (`feed`, then `finish` once) and gives the answer's parts as soon as they
are certain; how the text was cut makes no difference to what they add up to. A call's name comes first, then its
arguments as they are written.

Nothing is lost and nothing fails: what is not a call of one of the tools is content, markers and all. That goes for a
call that breaks before its arguments have begun; one that breaks later ends there, and what follows is content. White
space between text and calls belongs to the form.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Container
from typing import ClassVar, Final

from sol.text.answer_parts import Arguments, CallBegin, Content, Part, merge
from sol.text.marked_text import WHITE, LeadingWhite, TextUntil
from sol.text.tools.call_scanner import CallScanner
from sol.text.tools.json_scanner import JsonScanner, Status


class ToolParser(ABC):
    """The parser of one answer. `names` are those of the tools that may be called."""

    markers: ClassVar[tuple[str, ...]] = ()
    """What `skip_special_tokens` must not leave out, although it may be special tokens."""

    def __init__(self, names: Container[str]) -> None:
        self._names = names
        self.num_calls = 0
        """That have begun."""
        self.in_call = False
        """A call has begun and not ended: the answer is cut if this is the end of it."""
        self._parts: list[Part] = []
        self._state: Callable[[str], str] = self._start
        """Takes what it can of a text and returns the rest, for the state that it has changed to."""
        self._until: TextUntil | None = None
        self._scanner: CallScanner | None = None
        self._held = ""
        """What stands before a call: content if it turns out to be none."""
        self._marker = ""
        """The marker that came last, and the white space before it."""

    def feed(self, text: str) -> list[Part]:
        while text:
            text = self._state(text)
        return self._take_parts()

    def finish(self) -> list[Part]:
        """What was withheld. Nothing may be fed any more."""
        if self._until is not None:
            self._content(self._until.finish())
        elif not self.in_call:
            scanned = "" if self._scanner is None else self._scanner.text
            self._content(self._held + scanned)
        self._until, self._scanner, self._held = None, None, ""
        return self._take_parts()

    def _take_parts(self) -> list[Part]:
        parts, self._parts = merge(self._parts), []
        return parts

    def _content(self, text: str) -> None:
        if text:
            self._parts.append(Content(text))

    @abstractmethod
    def _start(self, text: str) -> str: ...

    def _read_until(self, marker: str, found: Callable[[str], str], *, strip_leading: bool = False) -> None:
        """Go on with content, and behind `marker` with the state `found`."""
        until = self._until = TextUntil(marker, strip_leading=strip_leading)
        self._held = ""

        def state(text: str) -> str:
            piece = until.feed(text)
            self._content(piece.text)
            if piece.rest is None:
                return ""
            self._until, self._state = None, found
            self._marker = self._held = piece.white + marker
            return piece.rest

        self._state = state

    def _read_call(self, done: Callable[[str], str], broken: Callable[[bool], None]) -> None:
        """Go on with a call as a JSON object, then with the state `done`; or with what `broken` chooses, which is told
        whether the call had begun."""
        scanner = self._scanner = CallScanner(self._names, self.num_calls)

        def state(text: str) -> str:
            end = scanner.feed(text, 0, self._parts)
            if scanner.begun and not self.in_call:
                self.in_call = True
                self.num_calls += 1
            if scanner.status is Status.OPEN:
                return ""
            self._end_call(done, broken, scanner.status, scanner.text)
            return text[end:]

        self._state = state

    def _read_arguments(self, name: str, done: Callable[[str], str], broken: Callable[[bool], None]) -> None:
        """Go on with the arguments of a call whose name has been read."""
        scanner, index = JsonScanner("{"), self.num_calls
        self._parts.append(CallBegin(index, name))
        self._held, self.in_call = "", True
        self.num_calls += 1

        def state(text: str) -> str:
            end = scanner.feed(text)
            taken = scanner.take()
            if taken:
                self._parts.append(Arguments(index, taken))
            if scanner.status is Status.OPEN:
                return ""
            self._end_call(done, broken, scanner.status, "")
            return text[end:]

        self._state = state

    def _end_call(
        self, done: Callable[[str], str], broken: Callable[[bool], None], status: Status, scanned: str
    ) -> None:
        begun = self.in_call
        if not begun:
            self._content(self._held + scanned)
        self.in_call, self._scanner, self._held = False, None, ""
        if status is Status.DONE:
            self._state = done
        else:
            broken(begun)


class HermesParser(ToolParser):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as many as there are: Hermes 2 Pro, Qwen 2.5, Qwen 3."""

    markers = ("<tool_call>", "</tool_call>")

    def _start(self, text: str) -> str:
        self._go_on(after_call=False)
        return text

    def _go_on(self, after_call: bool) -> None:
        self._read_until(self.markers[0], self._open, strip_leading=after_call)

    def _open(self, text: str) -> str:
        self._read_call(self._close, self._go_on)
        return text

    def _close(self, text: str) -> str:
        """The end marker, without which a call is whole, too."""
        seen = (self._held + text).lstrip(WHITE)
        end = self.markers[1]
        if len(seen) < len(end) and end.startswith(seen):
            self._held = seen
            return ""
        self._go_on(after_call=True)
        return seen.removeprefix(end)

    def finish(self) -> list[Part]:
        if self._state == self._close:
            self._held = ""  # a marker that was cut
        return super().finish()


class Llama3JsonParser(ToolParser):
    """`{"name": …, "parameters": {…}}` as the whole answer or behind `<|python_tag|>`: Llama 3.1 and later. Several
    follow one another, with semicolons between them or without."""

    markers = ("<|python_tag|>",)

    def __init__(self, names: Container[str]) -> None:
        super().__init__(names)
        self._white = LeadingWhite()

    def _start(self, text: str) -> str:
        """A call, if that is what comes; content otherwise."""
        body = self._white.feed(text)
        if not body:
            return ""
        held = self._white.take()
        if body[0] == "{":
            self._held = held
            return self._open(body)
        self._go_on(after_call=self.num_calls > 0)
        return held + body

    def _between(self, text: str) -> str:
        """Behind a call: separators, then what `_start` takes."""
        self._white = LeadingWhite(WHITE + ";")
        self._state = self._start
        return text

    def _open(self, text: str) -> str:
        self._read_call(self._between, self._go_on)
        return text

    def _go_on(self, after_call: bool) -> None:
        self._read_until(self.markers[0], self._open, strip_leading=after_call)

    def finish(self) -> list[Part]:
        white = self._white.take()
        if not self.num_calls:  # behind a call separators separate nothing
            self._held += white
        return super().finish()


class _ArrayParser(ToolParser):
    """Calls in a JSON array."""

    def __init__(self, names: Container[str]) -> None:
        super().__init__(names)
        self._white = LeadingWhite()

    def _element(self, text: str) -> str:
        """Behind the bracket that opens the array, or a comma."""
        body = self._white.feed(text)
        if not body:
            return ""
        self._held += self._white.take()
        self._read_call(self._after_element, self._go_on)
        return body

    def _after_element(self, text: str) -> str:
        text = self._held + text
        body = text.lstrip(WHITE)
        self._held = ""
        if not body:
            return ""
        if body[0] == ",":
            self._held, self._state = ",", self._element
            return body[1:]
        self._go_on(after_call=True)
        return body.removeprefix("]")

    @abstractmethod
    def _go_on(self, after_call: bool) -> None:
        """Choose the state for what follows, directly behind a call or behind what was none."""

    def finish(self) -> list[Part]:
        white = self._white.take()
        if self._state == self._element and self.num_calls:
            self._held = ""  # a comma that separates nothing
        else:
            self._held += white
        return super().finish()


_MISTRAL_NAME: Final = re.compile(
    r"\s*([A-Za-z0-9_.\-]{1,128})\s*(?:\[CALL_ID\]\s*[A-Za-z0-9_\-]+\s*)?(?:\[ARGS\]\s*)?"
)
_NOT_IN_HEAD: Final = re.compile(r"[^A-Za-z0-9_.\-\[\]\s]")
_LONGEST_HEAD: Final = 512


class MistralParser(_ArrayParser):
    """`[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, and the newer `[TOOL_CALLS]name[ARGS]{…}`, also without
    `[ARGS]` or with `[CALL_ID]…` before it."""

    markers = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

    def _start(self, text: str) -> str:
        self._go_on(after_call=False)
        return text

    def _go_on(self, after_call: bool) -> None:
        self._read_until(self.markers[0], self._head, strip_leading=after_call)

    def _head(self, text: str) -> str:
        """Behind the marker: an array, an object, or a name and what precedes its arguments."""
        marker = self._marker
        head = self._held[len(marker) :] + text
        body = head.lstrip(WHITE)
        white = len(head) - len(body)
        if body[:1] == "[" and white <= _LONGEST_HEAD:
            self._held, self._state = marker + head[: white + 1], self._element
            return body[1:]
        brace = head.find("{")
        before = head if brace < 0 else head[:brace]
        possible = len(before) <= _LONGEST_HEAD and _NOT_IN_HEAD.search(before) is None
        if possible and brace < 0:
            self._held = marker + head
            return ""
        if possible and body[:1] == "{":
            self._held = marker + before
            self._read_call(self._after_call, self._go_on)
            return body
        name = _MISTRAL_NAME.fullmatch(before) if possible else None
        if name is not None and name[1] in self._names:
            self._read_arguments(name[1], self._after_call, self._go_on)
            return head[brace:]
        self._content(marker)
        self._go_on(after_call=False)
        return head

    def _after_call(self, text: str) -> str:
        self._go_on(after_call=True)
        return text


class _ForcedParser(ToolParser):
    """Of text that a grammar made: nothing but white space may follow the calls, and if it does it is content."""

    first: ClassVar[str]

    def __init__(self, names: Container[str]) -> None:
        super().__init__(names)
        self._white = LeadingWhite()

    def _start(self, text: str) -> str:
        body = self._white.feed(text)
        if not body:
            return ""
        self._held = self._white.take()
        if body[0] == self.first:
            return self._open(body)
        self._content(self._held)
        self._go_on(after_call=False)
        return body

    @abstractmethod
    def _open(self, text: str) -> str: ...

    def finish(self) -> list[Part]:
        self._held += self._white.take() if self._state == self._start else ""
        return super().finish()

    def _go_on(self, after_call: bool) -> None:
        self._held, self._state = "", self._trailing if after_call else self._rest

    def _trailing(self, text: str) -> str:
        body = text.lstrip(WHITE)
        if body:
            self._state = self._rest
        return body

    def _rest(self, text: str) -> str:
        self._content(text)
        return ""


class ForcedCallsParser(_ForcedParser, _ArrayParser):
    """An array of calls, `[{"name": …, "parameters": {…}}, …]`: what a grammar makes of a required call."""

    first = "["

    def _open(self, text: str) -> str:
        self._held, self._state = self._held + "[", self._element
        return text[1:]


class ForcedArgumentsParser(_ForcedParser):
    """The arguments of one call: what a grammar makes of a call whose tool has been named."""

    first = "{"

    def __init__(self, name: str) -> None:
        super().__init__((name,))
        self._name = name

    def _open(self, text: str) -> str:
        self._read_arguments(self._name, self._trailing, self._go_on)
        return text
