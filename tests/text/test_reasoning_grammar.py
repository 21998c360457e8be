"""Grammars behind reasoning, compiled and fed with texts."""

from __future__ import annotations

import json

import pytest

from sol.grammar import Grammar
from sol.text.grammar import GrammarCompiler
from sol.text.reasoning_grammar import after_reasoning
from sol.text.tokenizer import Tokenizer

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module")
def compiler(byte_level: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(lambda: (byte_level, (2,)), vocab_size=byte_level.vocab_size)


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (Grammar.json_schema(SCHEMA), '{"a": 12}', '{"b"'),
        (Grammar.regex("a/b\\/\n|\\\\\nc\\\n"), "\\\nc\n", "a/c"),
        (Grammar.choice(["yes", 'no "/"\n']), 'no "/"\n', "maybe"),
    ],
)
def test_an_answer_behind_reasoning(
    compiler: GrammarCompiler, byte_level: Tokenizer, grammar: Grammar, good: str, bad: str
) -> None:
    composed = after_reasoning(grammar, None)
    assert composed is not None
    for answer, accepted in ((good, True), (bad, False)):
        matcher = compiler.compile(composed)
        ids = byte_level.encode(f"Well, <b>\n{json.dumps(SCHEMA)}</think>\n\n{answer}", add_special_tokens=False)
        assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) == accepted
    matcher = compiler.compile(composed)
    assert matcher.try_consume_tokens(byte_level.encode("Well.", add_special_tokens=False)) > 0
    assert not matcher.is_accepting()


def test_a_marker_that_is_a_special_token(compiler: GrammarCompiler, byte_level: Tokenizer) -> None:
    (close_id,) = byte_level.encode("<|im_start|>", add_special_tokens=False)
    assert close_id in byte_level.special_ids
    composed = after_reasoning(Grammar.json_schema(SCHEMA), close_id)
    assert composed is not None
    matcher = compiler.compile(composed)
    ids = byte_level.encode('Well.<|im_start|>\n{"a": 1}', add_special_tokens=False)
    assert matcher.try_consume_tokens(ids) == len(ids)
    assert matcher.is_accepting()


def test_a_grammar_with_rules_of_its_own_stays_as_it_is() -> None:
    assert after_reasoning(Grammar.lark('start: "a"'), None) is None
