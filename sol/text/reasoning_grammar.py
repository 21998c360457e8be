"""Grammars for models that think first: anything until the marker, then what was asked for."""

from __future__ import annotations

import json
from typing import Any, Final

from sol.grammar import Grammar
from sol.text.grammar import WHITESPACE
from sol.text.reasoning import CLOSE

ANSWER: Final = "start: answer\nanswer:"
"""How grammars in Lark begin that can be put behind reasoning; what follows is the rule of `answer`."""
_WHITE: Final = r"/[ \t\r\n]{0,8}/"


def after_reasoning(grammar: Grammar, close_id: int | None) -> Grammar | None:
    """`grammar` behind reasoning that the prompt has opened; None for a kind that cannot be put there: a grammar whose
    rules have names of their own.

    `close_id` is the token of `</think>` if that is a special one, which no pattern of characters matches.
    """
    match grammar.kind:
        case "json_schema":
            answer = json_rule(json.loads(grammar.text))
        case "regex":
            answer = f"/{_escaped(grammar.text)}/"
        case "choice":
            answer = " | ".join(json.dumps(text, ensure_ascii=False) for text in json.loads(grammar.text))
        case "lark" if grammar.text.startswith(ANSWER):
            answer = grammar.text.removeprefix(ANSWER)
        case _:
            return None
    if close_id is None:
        start = f'thinking {_WHITE} answer\nthinking[suffix="{CLOSE}"]: /(?s:.*)/'
    else:
        start = f"thinking <[{close_id}]> {_WHITE} answer\nthinking: /(?s:.*)/"
    return Grammar.lark(f"start: {start}\nanswer: {answer}\n")


def json_rule(schema: Any) -> str:
    """What JSON Schema allows, as part of a grammar in Lark."""
    if isinstance(schema, dict):
        schema = {"x-guidance": {"whitespace_pattern": WHITESPACE}, **schema}
    return f"%json {json.dumps(schema, ensure_ascii=False)}"


def _escaped(pattern: str) -> str:
    """A regular expression as Lark has it, between slashes on one line."""
    parts: list[str] = []
    escaped = False
    for char in pattern:
        if char == "\n":
            parts.append("n" if escaped else "\\n")
        else:
            parts.append("\\/" if char == "/" and not escaped else char)
        escaped = char == "\\" and not escaped
    return "".join(parts)
