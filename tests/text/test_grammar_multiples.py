"""multipleOf, for which llguidance makes a state for each remainder before it looks at any of its limits."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers

from sol.errors import RequestError
from sol.text.grammar import Grammar, GrammarCompiler
from sol.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    """Of single characters."""
    vocabulary = {"</s>": 0, **{chr(code): code for code in range(1, 128)}}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="</s>"))
    backend.decoder = tokenizers.decoders.Metaspace()
    tokenizer = Tokenizer(backend, special_tokens={"eos_token": "</s>"})
    return GrammarCompiler(lambda: (tokenizer, (0,)), vocab_size=128)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 999_999_937},
        {"type": "number", "multipleOf": 123_456.789},
        {"type": "number", "multipleOf": 1e300},
        {"type": "integer", "allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]},
    ],
)
def test_large_ones_are_refused_at_once(compiler: GrammarCompiler, schema: Any) -> None:
    for grammar in (
        Grammar.json_schema(schema),
        Grammar.lark(f"start: %json {json.dumps(schema)}"),
        Grammar.lark(f"start: %json {json.dumps(schema).replace('multipleOf', chr(92) + 'u006dultipleOf')}"),
    ):
        with pytest.raises(RequestError, match="multipleOf"):
            compiler.compile(grammar)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 1000},
        {"type": "number", "multipleOf": 0.01},
        {"type": "object", "properties": {"a": {"multipleOf": 0.05}, "b": {"multipleOf": 60}, "multipleOf": {}}},
        {"const": '"multipleOf": 999999937'},
    ],
)
def test_usual_ones_are_taken(compiler: GrammarCompiler, schema: Any) -> None:
    assert not compiler.compile(Grammar.json_schema(schema)).is_error()
