"""The parts of an answer as OpenAI's chat API writes them: `content`, `tool_calls`, and vLLM's `reasoning`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from sol.server.streaming import quote
from sol.text.answer_parts import Answer, Arguments, CallBegin, Content, Part, Reasoning


def message(parts: Iterable[Part], new_id: Callable[[], str]) -> dict[str, Any]:
    """The message of a whole answer. `new_id` makes the calls' ids."""
    answer = Answer.of(parts)
    told: dict[str, Any] = {
        "role": "assistant",
        # An answer that is all calls or all reasoning has no content; an empty one has an empty content.
        "content": answer.content if answer.content or not (answer.calls or answer.reasoning) else None,
        "refusal": None,
    }
    if answer.reasoning:
        # The older name, which most clients and templates read, and the newer one.
        told["reasoning_content"] = told["reasoning"] = answer.reasoning
    if answer.calls:
        told["tool_calls"] = [
            {"id": new_id(), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.calls
        ]
    return told


def delta(part: Part, new_id: Callable[[], str]) -> str:
    """A chunk's `delta`, as JSON."""
    match part:
        case Content(text):
            return f'{{"content":{quote(text)}}}'
        case Reasoning(text):
            return f'{{"reasoning_content":{quote(text)},"reasoning":{quote(text)}}}'
        case CallBegin(index, name):
            return (
                f'{{"tool_calls":[{{"index":{index},"id":{quote(new_id())},"type":"function",'
                f'"function":{{"name":{quote(name)},"arguments":""}}}}]}}'
            )
        case Arguments(index, text):
            return f'{{"tool_calls":[{{"index":{index},"function":{{"arguments":{quote(text)}}}}}]}}'
