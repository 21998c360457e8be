"""Answers before clients see them: whole ones, and server-sent events on their way.

A rule that rejects ends the choice it found something in: what came before stays, and its `finish_reason` becomes
`content_filter`, as it is on the services that clients know. Other choices go on, and usage is passed on as the engine
counted it. Chunks in which nothing changes pass as the bytes they came in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from sol.gateway.filters.chunks import data_of, decode, decode_plain, is_empty, to_json, with_choices
from sol.gateway.filters.fields import CONTENT, TEXT, Channel, choice_fields
from sol.gateway.filters.rules import Failed, Hit, RuleSet
from sol.gateway.filters.window import Window, apply, redactions

Report = Callable[[Hit, str], None]
"""Told of what is found, and in which field."""


_EVENT_END: Final = re.compile(rb"\r\n\r\n|\n\n|\r\r")
CONTENT_FILTER: Final = "content_filter"
MAX_EVENT_BYTES: Final = 8 * 2**20
"""Of one server-sent event; what has no end must not fill the memory."""


class OutputRules:
    """The rules for one answer. `holding` can change it; `watching` only look, so nothing waits for them."""

    def __init__(
        self,
        holding: tuple[RuleSet, frozenset[int]] | None,
        watching: tuple[RuleSet, frozenset[int]] | None,
        report: Report,
        failed: Failed,
    ) -> None:
        self.holding = holding
        self.watching = watching
        self.report = report
        self.failed = failed

    def unreadable(self, what: str) -> None:
        """Called for what cannot be looked at. Raises `FilterFailedError` if a rule must see everything."""
        for rules in (self.holding, self.watching):
            for number in rules[1] if rules else ():
                self.failed(rules[0].rules[number], ValueError(what))  # type: ignore[index]


class AnswerFilter:
    """A `sol.gateway.call.OutputFilter` for an answer that is not a stream."""

    def __init__(self, rules: OutputRules) -> None:
        self._rules = rules

    def feed(self, data: bytes) -> bytes:
        """The body, whole. Raises `FilterFailedError`."""
        if not data.strip():
            return data
        try:
            body = decode(data)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            self._rules.unreadable("the answer is not JSON")
            return data
        choices = body.get("choices") if isinstance(body, dict) else None
        if not isinstance(choices, list):
            return data
        changed = False
        for place, choice in enumerate(choices):
            if isinstance(choice, dict):
                changed |= self._choice(choice, f"choices[{choice.get('index', place)}]")
        return to_json(body) if changed else data

    def finish(self) -> bytes:
        return b""

    def _choice(self, choice: dict[str, Any], where: str) -> bool:
        changed = ended = False
        for channel, container, key in choice_fields(choice):
            text = container[key]
            if ended:  # what a stream would not have sent any more
                container[key] = ""
                continue
            place = f"{where}.{_name(channel)}"
            if self._rules.watching:
                rules, numbers = self._rules.watching
                for hit in rules.find(text, self._rules.failed, numbers):
                    self._rules.report(hit, place)
            if not self._rules.holding:
                continue
            rules, numbers = self._rules.holding
            hits = rules.find(text, self._rules.failed, numbers)
            for index, hit in enumerate(hits):
                if hit.rule.config.action == "reject":
                    hits = hits[: index + 1]
                    ended = True
                    break
            for hit in hits:
                self._rules.report(hit, place)
            if hits:
                end = hits[-1].start if ended else len(text)
                edits = [edit for edit in redactions(hits) if edit.start < end or not ended]
                covered = max((edit.end for edit in edits), default=0)
                container[key] = apply(text[: max(end, covered)], edits)
                changed = True
        if ended:
            choice["finish_reason"] = CONTENT_FILTER
            message = choice.get("message")
            if isinstance(message, dict) and isinstance(message.get("tool_calls"), list):
                # Half of the arguments is no call that anybody should make.
                message["tool_calls"] = [call for call in message["tool_calls"] if not _cut_short(call)] or None
        return changed


def _cut_short(call: Any) -> bool:
    try:
        decode(call["function"]["arguments"].encode())
    except (msgspec.DecodeError, LookupError, TypeError, AttributeError):
        return True
    return False


class _Choice:
    """The windows of one choice of a stream."""

    __slots__ = ("ended", "holding", "kind", "last", "watching")

    def __init__(self) -> None:
        self.holding: dict[Channel, Window] = {}
        self.watching: dict[Channel, Window] = {}
        self.last: Channel | None = None
        self.ended = False


class StreamFilter:
    """The same for a stream of server-sent events. `feed` takes any pieces of it, `finish` says that it has ended."""

    def __init__(self, rules: OutputRules) -> None:
        self._rules = rules
        self._rest = b""
        self._choices: dict[int, _Choice] = {}
        self._last_chunk: bytes | dict[str, Any] = {}
        """The envelope of chunks made here (id, object, model …) is that of the last one that came."""
        self._chat = True

    def feed(self, data: bytes) -> bytes:
        """Raises `FilterFailedError` where a rule failed that must see everything."""
        if self._rest:
            data = self._rest + data
            self._rest = b""
        if data.endswith(b"\n\n") and data.count(b"\n\n") == 1 and b"\r" not in data:
            return self._event(data)  # what relays hand over nearly always
        out = []
        start = 0
        for end in _EVENT_END.finditer(data):
            if end.group() == b"\r\r" and end.end() == len(data):
                break  # it may go on with a line feed
            out.append(self._event(data[start : end.end()]))
            start = end.end()
        self._rest = data[start:]
        if len(self._rest) > MAX_EVENT_BYTES:
            self._rules.unreadable(f"an event of the answer has more than {MAX_EVENT_BYTES} bytes")
            out.append(self._rest)
            self._rest = b""
        return b"".join(out)

    def finish(self) -> bytes:
        """What was held back, once nothing more comes: also of a stream that broke off."""
        rest, self._rest = self._rest, b""
        return (self._event(rest) if rest else b"") + self._flush()

    def _event(self, event: bytes) -> bytes:
        data = data_of(event)
        if data is None:
            return event
        if data == b"[DONE]":
            return self._flush() + event
        passed = self._plain(event, data)
        if passed is not None:
            return passed
        try:
            chunk = decode(data)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            self._rules.unreadable("a chunk of the answer is not JSON")
            return event
        if not isinstance(chunk, dict):
            return event
        choices = chunk.get("choices")
        if not isinstance(choices, list):
            return self._flush() + event if "error" in chunk else event
        if not choices:
            return event
        before: list[bytes] = []
        kept = []
        changed = False
        self._last_chunk = chunk
        for choice in choices:
            if not isinstance(choice, dict):
                kept.append(choice)
                continue
            index = choice.get("index")
            index = index if isinstance(index, int) else 0
            state = self._choices.setdefault(index, _Choice())
            if state.ended:
                changed = True
            elif self._pass(index, state, choice, before):
                changed = True
                if not is_empty(choice):
                    kept.append(choice)
            else:
                kept.append(choice)
        if changed:
            event = with_choices(event, chunk, kept)
        return b"".join([*before, event])

    def _plain(self, event: bytes, data: bytes) -> bytes | None:
        """What becomes of a chunk with one text that goes on where the one before ended; None: it is another one, and
        nothing was done."""
        try:
            choice = decode_plain(data).choices[0]
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return None
        delta = choice.delta
        channel, text = (TEXT, choice.text) if delta is None else (CONTENT, delta.content)
        state = self._choices.get(choice.index)
        if not text or choice.finish_reason is not None or (delta is not None and choice.text is not None):
            return None
        if state is None:
            state = self._choices[choice.index] = _Choice()
        if state.ended or (state.last is not None and state.last != channel):
            return None
        self._last_chunk = data
        self._chat = delta is not None
        state.last = channel
        released, rejected = self._release(choice.index, state, channel, text, final=False)
        if released == text and not rejected:
            return event
        chunk = decode(data)
        whole = chunk["choices"][0]
        (whole if delta is None else whole["delta"])[channel.name] = released
        if rejected:
            self._cut(whole, keep=channel)
        return with_choices(event, chunk, [] if is_empty(whole) else [whole])

    def _pass(self, index: int, state: _Choice, choice: dict[str, Any], before: list[bytes]) -> bool:
        """Takes the choice's texts through their windows; whether it changed. `before`: gets chunks to send first."""
        changed = False
        finishes = choice.get("finish_reason") is not None
        for channel, container, key in choice_fields(choice):
            text = container[key]
            if not text:
                continue
            self._chat = channel.name != "text"
            if state.last is not None and state.last != channel and not finishes:
                # The text before has ended: what was held back of it comes before what follows it.
                before += self._drain(index, state, keep=channel)
                if state.ended:
                    return self._cut(choice)
            state.last = channel
            released, rejected = self._release(index, state, channel, text, final=finishes)
            if rejected:
                container[key] = released
                return self._cut(choice, keep=channel)
            if released != text:
                container[key] = released
                changed = True
        if finishes:
            before += self._drain(index, state)
            if state.ended:
                return self._cut(choice)
        return changed

    def _release(self, index: int, state: _Choice, channel: Channel, text: str, *, final: bool) -> tuple[str, bool]:
        if self._rules.watching:
            window = state.watching.get(channel)
            if window is None:
                window = state.watching[channel] = Window(*self._rules.watching, self._rules.failed)
            watched = window.feed(text, final=final)
            if watched.hits:
                self._report(index, channel, watched.hits)
        if not self._rules.holding:
            return text, False
        window = state.holding.get(channel)
        if window is None:
            window = state.holding[channel] = Window(*self._rules.holding, self._rules.failed)
        released = window.feed(text, final=final)
        if released.hits:
            self._report(index, channel, released.hits)
        if final:
            del state.holding[channel]
        if released.rejected:
            state.ended = True
            state.holding.clear()
            state.watching.clear()
        return released.text, state.ended

    def _report(self, index: int, channel: Channel, hits: tuple[Hit, ...]) -> None:
        for hit in hits:
            self._rules.report(hit, f"choices[{index}].{_name(channel)}")

    def _drain(self, index: int, state: _Choice, keep: Channel | None = None) -> Iterator[bytes]:
        """Chunks with what the choice's windows, all but that of `keep`, hold back."""
        for channel in {**state.holding, **state.watching}:
            if channel != keep and not state.ended:
                text, _ = self._release(index, state, channel, "", final=True)
                state.watching.pop(channel, None)
                if text:
                    yield self._chunk(index, channel, text, None)

    def _flush(self) -> bytes:
        parts: list[bytes] = []
        for index, state in self._choices.items():
            was_open = not state.ended
            parts += self._drain(index, state)
            if was_open and state.ended:
                parts.append(self._chunk(index, None, "", CONTENT_FILTER))
        return b"".join(parts)

    def _cut(self, choice: dict[str, Any], keep: Channel | None = None) -> bool:
        """Make the choice its own end; of its texts only those up to `keep`, which has been cut already, stay."""
        seen = keep is None
        for channel, container, key in choice_fields(choice):
            if seen:
                container[key] = ""
            seen = seen or channel == keep
        delta = choice.get("delta")
        if isinstance(delta, dict) and (keep is None or keep.tool < 0):
            delta.pop("tool_calls", None)
        choice["finish_reason"] = CONTENT_FILTER
        return True

    def _chunk(self, index: int, channel: Channel | None, text: str, finish_reason: str | None) -> bytes:
        choice: dict[str, Any] = {"index": index}
        if not self._chat:
            choice["text"] = text
        elif channel is None:
            choice["delta"] = {}
        elif channel.name == "arguments":
            choice["delta"] = {"tool_calls": [{"index": channel.tool, "function": {"arguments": text}}]}
        elif channel.name == "function_call":
            choice["delta"] = {"function_call": {"arguments": text}}
        else:
            choice["delta"] = {channel.name: text}
        choice["finish_reason"] = finish_reason
        last = self._last_chunk
        envelope = {
            name: value
            for name, value in (decode(last) if isinstance(last, bytes) else last).items()
            if name != "usage"
        }
        return b"data: %b\n\n" % to_json({**envelope, "choices": [choice]})


def _name(channel: Channel) -> str:
    return channel.name if channel.tool < 0 else f"tool_calls[{channel.tool}].arguments"
