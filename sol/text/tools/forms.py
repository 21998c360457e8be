"""Grammars of required calls in the form that a model was trained on, which its own parser reads."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from sol.grammar import Grammar
from sol.text.reasoning_grammar import ANSWER, json_rule
from sol.text.tools.parsers import HermesParser, Llama3JsonParser, MistralParser, ToolParser
from sol.text.tools.schemas import arguments_schema


@dataclass(frozen=True, slots=True)
class _Form:
    """What stands around calls: before all of them, before a name, between it and the arguments, behind them, between
    calls, behind all."""

    begin: str = ""
    name: str = '{"name": "'
    arguments: str = '", "arguments": '
    end: str = "}"
    between: str = ", "
    finish: str = ""


_FORMS: Final[dict[type[ToolParser], _Form]] = {
    HermesParser: _Form(name='<tool_call>\n{"name": "', end="}\n</tool_call>", between="\n"),
    Llama3JsonParser: _Form(arguments='", "parameters": ', between="; "),
    MistralParser: _Form(begin="[TOOL_CALLS][", finish="]"),
}


def required_calls(
    parser: type[ToolParser],
    tools: Mapping[str, Mapping[str, Any] | None],
    marker_ids: Mapping[str, int],
    *,
    parallel: bool,
) -> Grammar | None:
    """One or more calls of these tools (name → parameters), or exactly one; None where the form is not known.

    `marker_ids` are the parser's markers that are special tokens, which no text matches.
    """
    form = _FORMS.get(parser)
    if form is None:
        return None
    more = f" ({_literal(form.between, marker_ids)} call)*" if parallel else ""
    parts = [_literal(form.begin, marker_ids), f"call{more}", _literal(form.finish, marker_ids)]
    calls = " | ".join(f"call{i}" for i in range(len(tools)))
    rules = [f"{ANSWER} {' '.join(part for part in parts if part)}", f"call: {calls}"]
    for i, (name, parameters) in enumerate(tools.items()):
        before = _literal(f"{form.name}{name}{form.arguments}", marker_ids)
        rules.append(f"call{i}: {before} arguments{i} {_literal(form.end, marker_ids)}")
        rules.append(f"arguments{i}: {json_rule(arguments_schema(parameters))}")
    return Grammar.lark("\n".join(rules) + "\n", param="tools")


def _literal(text: str, marker_ids: Mapping[str, int]) -> str:
    """A text as Lark has it, its special tokens by their ids."""
    if not text:
        return ""
    pieces = [text]
    if marker_ids:
        pieces = re.split(f"({'|'.join(map(re.escape, marker_ids))})", text)
    return " ".join(f"<[{marker_ids[one]}]>" if one in marker_ids else json.dumps(one) for one in pieces if one)
