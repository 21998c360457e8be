"""What an answer's text consists of, in the order in which it was written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Content:
    """Text for who asked."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What the model thought before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A tool is called; its arguments follow. `index` counts the answer's calls from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the JSON object that call `index` passes, as the model wrote it."""

    index: int
    text: str


Part = Content | Reasoning | CallBegin | Arguments


def merge(parts: Iterable[Part]) -> list[Part]:
    """The same with neighbouring pieces of one text joined."""
    merged: list[Part] = []
    if isinstance(parts, list) and len(parts) < 2:
        return parts
    for part in parts:
        last = merged[-1] if merged else None
        match last, part:
            case Content(before), Content(text):
                merged[-1] = Content(before + text)
            case Reasoning(before), Reasoning(text):
                merged[-1] = Reasoning(before + text)
            case Arguments(index, before), Arguments(same, text) if index == same:
                merged[-1] = Arguments(index, before + text)
            case _:
                merged.append(part)
    return merged


@dataclass(slots=True)
class Call:
    name: str
    arguments: str = ""
    """A JSON object, unless the answer was cut or the model made a mistake in the middle of it."""


@dataclass(slots=True)
class Answer:
    """The parts of a whole answer, put together."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    @classmethod
    def of(cls, parts: Iterable[Part]) -> Answer:
        answer = cls()
        for part in merge(parts):
            match part:
                case Content(text):
                    answer.content += text
                case Reasoning(text):
                    answer.reasoning += text
                case CallBegin(_, name):
                    answer.calls.append(Call(name))
                case Arguments(index, text):
                    answer.calls[index].arguments += text
        return answer
