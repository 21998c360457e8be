"""What a request's output has to match: the description that travels with the request, and nothing compiled.

`sol.text.grammar` compiles it against a tokenizer; `sol.sampling` is handed what comes of that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from sol.errors import RequestError

GrammarKind = Literal["json_schema", "regex", "choice", "lark", "ebnf"]

MAX_GRAMMAR_BYTES: Final = 128 * 1024
"""Of a description: what it takes to compile one grows faster than its length."""

GRAMMAR_FAILED: Final = "the grammar cannot be followed any further"
"""How the error begins of a request that was given up for its grammar: the request's own fault, not the server's."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """Immutable and hashable: equal ones are compiled once. Made by the constructors below, which check form and size
    (`RequestError`, `param` is the field to name); whether it can be compiled only `sol.text.grammar` knows.
    """

    kind: GrammarKind
    text: str
    """The schema and the list of choices as JSON, everything else as it came."""

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls("json_schema", '{"type": "object"}')

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str, *, param: str = "grammar") -> Grammar:
        """JSON that a JSON Schema allows. `schema` may be written out as JSON; True allows everything."""
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise RequestError(f"{param} is not JSON: {error}", param=param) from None
        if schema is False:
            raise RequestError(f"{param} is false, and nothing is as that schema wants it", param=param)
        if schema is True:
            schema = {}
        if not isinstance(schema, Mapping):
            raise RequestError(f"{param} must be a JSON Schema, an object, not {_kind_of(schema)}", param=param)
        try:
            text = json.dumps(schema, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"{param} cannot be written as JSON: {error}", param=param) from None
        return cls("json_schema", _checked(text, param))

    @classmethod
    def regex(cls, pattern: str, *, param: str = "grammar") -> Grammar:
        """A text that a regular expression matches as a whole (the syntax of Rust's `regex`, which has no
        look-around and no back-references)."""
        return cls("regex", _checked(pattern, param))

    @classmethod
    def choice(cls, texts: Sequence[str], *, param: str = "grammar") -> Grammar:
        """One of these texts."""
        is_list = isinstance(texts, Sequence) and not isinstance(texts, (str, bytes))
        if not is_list or not texts or not all(isinstance(text, str) and text for text in texts):
            raise RequestError(f"{param} must be a list of strings, and neither it nor they may be empty", param=param)
        return cls("choice", _checked(json.dumps(list(texts), ensure_ascii=False), param))

    @classmethod
    def lark(cls, text: str, *, param: str = "grammar") -> Grammar:
        """A context-free grammar in llguidance's dialect of Lark; its first rule is `start`. A special token is written
        as `<|im_end|>`, without quotes."""
        return cls("lark", _checked(text, param))

    @classmethod
    def ebnf(cls, text: str, *, param: str = "grammar") -> Grammar:
        """The same, or llama.cpp's GBNF (`root ::= …`), whichever it is."""
        return cls("ebnf", _checked(text, param))


def _checked(text: object, param: str) -> str:
    if not isinstance(text, str) or not text.strip():
        raise RequestError(f"{param} must be a string that is not empty, not {_kind_of(text)}", param=param)
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{param}: character {error.start} is half of a surrogate pair; send whole characters", param=param
        ) from None
    if size > MAX_GRAMMAR_BYTES:
        raise RequestError(
            f"{param} has {size} bytes, and at most {MAX_GRAMMAR_BYTES} are compiled: make it smaller", param=param
        )
    return text


def _kind_of(value: object) -> str:
    return "an empty one" if value == "" else f"{value!r:.80}"
