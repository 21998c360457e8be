"""Grammars of required calls, compiled and fed with calls, which the model's parser then reads."""

from __future__ import annotations

import json

import pytest
import tokenizers

from sol.grammar import Grammar
from sol.text.answer_parser import AnswerParser
from sol.text.answer_parts import Answer
from sol.text.grammar import GrammarCompiler
from sol.text.reasoning import CLOSE, ReasoningParser
from sol.text.reasoning_grammar import after_reasoning
from sol.text.tokenizer import Tokenizer
from sol.text.tools.forms import required_calls
from sol.text.tools.parsers import ForcedCallsParser, HermesParser, Llama3JsonParser, MistralParser, ToolParser

WORD = {"type": "object", "properties": {"a": {"$ref": "#/$defs/w"}}, "required": ["a"], "additionalProperties": False}
TOOLS = {"f": {**WORD, "$defs": {"w": {"enum": ["x", "y"]}}}, "g.h": None}
ONE = {
    HermesParser: '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>',
    Llama3JsonParser: '{"name": "f", "parameters": {"a": "x"}}',
    MistralParser: '[TOOL_CALLS][{"name": "f", "arguments": {"a": "x"}}]',
}
TWO = {
    HermesParser: ONE[HermesParser] + '\n<tool_call>\n{"name": "g.h", "arguments": {}}\n</tool_call>',
    Llama3JsonParser: ONE[Llama3JsonParser] + '; {"name": "g.h", "parameters": {}}',
    MistralParser: ONE[MistralParser][:-1] + ', {"name": "g.h", "arguments": {}}]',
}


class Marked:
    def __init__(self, tokenizer: Tokenizer, ids: dict[str, int]) -> None:
        self.ids = ids
        self._tokenizer = tokenizer
        self._compiler = GrammarCompiler(lambda: (tokenizer, (2,)), vocab_size=tokenizer.vocab_size)

    def accepts(self, grammar: Grammar, text: str) -> bool:
        matcher = self._compiler.compile(grammar)
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.fixture(scope="module", params=[False, True], ids=["text", "special tokens"])
def marked(request: pytest.FixtureRequest, byte_level: Tokenizer) -> Marked:
    """A tokenizer, and those of the markers that are its special tokens."""
    if not request.param:
        return Marked(byte_level, {})
    backend = tokenizers.Tokenizer.from_str(byte_level._backend.to_str())
    markers = [*HermesParser.markers, *MistralParser.markers, CLOSE]
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in markers])
    return Marked(Tokenizer(backend), {text: backend.token_to_id(text) for text in markers})


@pytest.mark.parametrize("parser", ONE)
def test_calls_in_the_models_own_form(marked: Marked, parser: type[ToolParser]) -> None:
    several = required_calls(parser, TOOLS, marked.ids, parallel=True)
    one = required_calls(parser, TOOLS, marked.ids, parallel=False)
    assert several is not None
    assert one is not None
    for grammar, text, good in (
        (several, ONE[parser], True),
        (several, TWO[parser], True),
        (one, ONE[parser], True),
        (one, TWO[parser], False),
        (several, ONE[parser].replace('"x"', '"z"'), False),
        (several, ONE[parser].replace('"f"', '"e"'), False),
        (several, "", False),
    ):
        assert marked.accepts(grammar, text) == good, text
    composed = after_reasoning(several, marked.ids.get(CLOSE))
    assert composed is not None
    text = f"I could {json.dumps(WORD)}.</think>\n{TWO[parser]}"
    assert marked.accepts(composed, text)
    assert not marked.accepts(composed, TWO[parser])
    reader = AnswerParser(ReasoningParser("<think>"), parser(TOOLS))
    answer = Answer.of([*reader.feed(text), *reader.finish()])
    assert answer.content == ""
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == [("f", {"a": "x"}), ("g.h", {})]


def test_a_form_that_is_not_known() -> None:
    assert required_calls(ForcedCallsParser, TOOLS, {}, parallel=True) is None
