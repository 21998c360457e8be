from __future__ import annotations

import pickle
import sys
import threading
from typing import Any

import pytest
from tiny_grammar import EOS, NUMBER, RECORD, VOCAB, WORDS, character_tokenizer, compiler, ids

from sol.engine import wire
from sol.engine.types import EngineRequest
from sol.errors import RequestError
from sol.grammar import MAX_GRAMMAR_BYTES, Grammar
from sol.sampling_params import SamplingParams
from sol.text import grammar as module
from sol.text.grammar import GrammarCompiler
from sol.text.tokenizer import Tokenizer


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether the text is one of the grammar's, whole."""
    matcher = compiler().compile(grammar)
    tokens = ids(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (Grammar.json_object(), ['{"a": [1, null]}', "{}"], ["[]", "1", '{"a"}', "{} {}"]),
        (Grammar.json_schema({"type": "integer", "minimum": 5}), ["5", "17"], ["4", "-17", "5.5"]),
        (Grammar.json_schema('{"enum": ["a b", null]}'), ['"a b"', "null"], ['"a"', "true"]),
        (Grammar.json_schema(True), ["1", "{}", '"x"'], ["x"]),
        (Grammar.regex("a+(b|c)"), ["ab", "aaac"], ["b", "a", "abb"]),
        (Grammar.choice(["yes", 'a "no"', "1 | 2"]), ["yes", 'a "no"', "1 | 2"], ["no", "1", "ye"]),
        (Grammar.lark('start: "a" rest\nrest: /[0-9]/ | "-"'), ["a5", "a-"], ["a", "5"]),
        (Grammar.ebnf('root ::= "x" [0-9]+ ("," [0-9]+)*'), ["x1", "x12,3"], ["x", "x1,"]),
        (Grammar.ebnf('start: "a"'), ["a"], ["b"]),
    ],
    ids=lambda value: value.kind if isinstance(value, Grammar) else None,
)
def test_what_a_grammar_allows(grammar: Grammar, right: list[str], wrong: list[str]) -> None:
    assert [text for text in right if not accepts(grammar, text)] == []
    assert [text for text in wrong if accepts(grammar, text)] == []


def test_whitespace_in_json_is_free_up_to_a_limit() -> None:
    assert accepts(RECORD, '{\n  "a": "x",\n  "b": [ true, false ]\n}'.replace("\n", " "))
    assert accepts(RECORD, '{"a":"x","b":[]}')
    assert not accepts(RECORD, '{"a":"x",' + 21 * " " + '"b":[]}')


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        (Grammar.json_schema({"type": "array", "uniqueItems": True}), 'JSON Schema is not supported: .*"uniqueItems"'),
        (Grammar.json_schema({"not": {"type": "string"}}), '"not"'),
        (Grammar.json_schema({"$ref": "https://example.org/x.json"}), "https://example.org/x.json"),
        (Grammar.json_schema({"type": "string", "format": "shoe size"}), "shoe size"),
        (Grammar.json_schema({"type": "strin"}), "strin"),
        (Grammar.json_schema({"type": "integer", "minimum": 3, "maximum": 1}), "minimum"),
        (Grammar.json_schema({"oneOf": [{"type": "integer"}, {"type": "number"}]}), "oneOf"),
        (Grammar.json_schema({"x-guidance": {"lenient": True}, "not": {}}), '"not"'),
        (Grammar.regex("(?=a)b"), "regular expression is not supported: look-around"),
        (Grammar.regex("(a"), "regular expression"),
        (Grammar.regex(r"(.)\1"), "backreferences"),
        (Grammar.lark("start: nothing"), "nothing"),
        (Grammar.lark('start: x "."\nx[max_tokens=3]: /[a-z]*/'), "max_tokens="),
        (Grammar.lark('start: x "."\nx[capture, stop="]"]: /[a-z]*/'), "stop="),
        (Grammar.ebnf('root ::= ("a"'), "grammar is not supported"),
        (Grammar.ebnf("::="), "grammar is not supported"),
    ],
)
def test_what_cannot_be_compiled_is_named(grammar: Grammar, says: str) -> None:
    with pytest.raises(RequestError, match=says) as error:
        compiler().compile(grammar)
    assert (error.value.status, "\n" in error.value.message) == (400, False)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Grammar.json_schema("{", param="f"), "f is not JSON"),
        (lambda: Grammar.json_schema(False, param="f"), "f is false"),
        (lambda: Grammar.json_schema("3", param="f"), "f must be a JSON Schema"),
        (lambda: Grammar.json_schema([1], param="f"), "f must be a JSON Schema"),  # type: ignore[arg-type]
        (lambda: Grammar.json_schema({"enum": {1, 2}}, param="f"), "f cannot be written as JSON"),
        (lambda: Grammar.regex("", param="f"), "f must be a string that is not empty"),
        (lambda: Grammar.regex(7, param="f"), "f must be a string"),  # type: ignore[arg-type]
        (lambda: Grammar.regex("\ud83d", param="f"), "half of a surrogate pair"),
        (lambda: Grammar.choice([], param="f"), "f must be a list of strings"),
        (lambda: Grammar.choice("abc", param="f"), "f must be a list of strings"),
        (lambda: Grammar.choice(["a", ""], param="f"), "f must be a list of strings"),
        (lambda: Grammar.lark("  ", param="f"), "f must be a string that is not empty"),
        (lambda: Grammar.ebnf("x" * (MAX_GRAMMAR_BYTES + 1), param="f"), f"at most {MAX_GRAMMAR_BYTES}"),
    ],
)
def test_what_is_no_grammar_is_refused_where_it_is_made(make: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says) as error:
        make()
    assert error.value.param == "f"


def test_a_grammar_travels() -> None:
    assert pickle.loads(pickle.dumps(RECORD)) == RECORD
    assert len({RECORD, Grammar.json_schema(RECORD.text), NUMBER}) == 2
    request = EngineRequest(request_id="a", prompt_token_ids=[1], params=SamplingParams(grammar=RECORD), seed=0)
    message = wire.decode_to_engine(wire.encode_requests([request]))
    assert isinstance(message, wire.AddRequests)
    assert wire.decode_request(message.requests[0]) == request


def test_sampling_params_take_grammars_only() -> None:
    with pytest.raises(RequestError, match="grammar must be a Grammar"):
        SamplingParams(grammar={"type": "object"})  # type: ignore[arg-type]


def test_the_end_may_come_only_where_the_text_is_whole() -> None:
    matcher = compiler().compile(Grammar.regex("ab?"))
    assert matcher.validate_tokens([EOS]) == 0
    matcher.consume_tokens(ids("a"))
    assert matcher.validate_tokens([EOS]) == 1
    matcher.consume_tokens(ids("b"))
    assert matcher.is_stopped()


def test_what_is_compiled_is_kept_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_COMPILED", 2)
    grammars = compiler()
    first, second, third = NUMBER, RECORD, WORDS
    grammars.compile(first)
    grammars.compile(second)
    grammars.compile(first)
    grammars.compile(third)
    assert [grammars.is_compiled(one) for one in (first, second, third)] == [True, False, True]
    assert grammars.compile(second).validate_tokens(ids('{"a"')) == 4


def test_matchers_are_their_owners() -> None:
    grammars = compiler()
    first, second = grammars.compile(NUMBER), grammars.compile(NUMBER)
    first.consume_tokens(ids("-12"))
    assert second.validate_tokens(ids("-1")) == 2


def test_those_who_want_the_same_share_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = compiler()
    go, made = threading.Event(), []
    make = GrammarCompiler._make

    def slow(self: GrammarCompiler, grammar: Grammar) -> Any:
        go.wait(60)
        made.append(grammar)
        return make(self, grammar)

    monkeypatch.setattr(GrammarCompiler, "_make", slow)
    futures = [grammars.submit(NUMBER) for _ in range(5)]
    assert not grammars.is_compiled(NUMBER)
    go.set()
    for future in futures:
        future.result(60)
    assert made == [NUMBER]
    assert grammars.is_compiled(NUMBER)


def test_a_failure_is_not_kept() -> None:
    loads = []

    def load() -> tuple[Tokenizer, list[int]]:
        loads.append(1)
        if len(loads) == 1:
            raise RequestError("not yet")
        return character_tokenizer(), [EOS]

    grammars = GrammarCompiler(load, vocab_size=VOCAB)
    with pytest.raises(RequestError, match="not yet"):
        grammars.compile(NUMBER)
    grammars.compile(NUMBER)
    grammars.compile(RECORD)
    assert len(loads) == 2


def test_a_model_without_an_end_has_no_grammars() -> None:
    grammars = GrammarCompiler(lambda: (character_tokenizer(), ()), vocab_size=VOCAB)
    with pytest.raises(RequestError, match="no token that ends a text"):
        grammars.compile(NUMBER)


def test_tokens_that_only_the_embedding_has_are_never_allowed() -> None:
    grammars = GrammarCompiler(lambda: (character_tokenizer(), [EOS]), vocab_size=VOCAB + 30)
    matcher = grammars.compile(Grammar.regex(r"(?s:.)*"))
    assert [token for token in range(VOCAB + 30) if matcher.validate_tokens([token])] == list(range(1, VOCAB))


def chain(count: int) -> dict[str, Any]:
    links: dict[str, Any] = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(count)}
    return {"$defs": links | {f"d{count}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.json_schema(chain(1500)),
        Grammar.lark("start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(7000)) + 'r7000: "a"'),
        Grammar.lark("start: T0\n" + "".join(f"T{i}: T{i + 1}\n" for i in range(7000)) + 'T7000: "a"'),
    ],
    ids=["schema", "rules", "terminals"],
)
def test_long_chains_of_references_do_not_overflow_the_stack(grammar: Grammar, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would end the process, and everybody's requests."""
    monkeypatch.setattr(module, "MAX_SECONDS", 60.0)
    matcher = compiler().compile(grammar)
    assert matcher.validate_tokens(ids("a" if grammar.kind == "lark" else "[")) == 1


@pytest.mark.parametrize("grammar", [RECORD, NUMBER, WORDS], ids=["record", "number", "words"])
def test_what_takes_too_much_work_is_refused(grammar: Grammar, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SECONDS", 0.0)
    with pytest.raises(RequestError, match="make it simpler"):
        compiler().compile(grammar)


def test_work_that_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KEPT_SECONDS", 0.0)
    grammars = compiler()
    grammars.compile(NUMBER)
    grammars.compile(RECORD)
    assert (grammars.is_compiled(NUMBER), grammars.is_compiled(RECORD)) == (False, True)


def test_gbnf_is_short_and_its_blank_lines_cost_nothing() -> None:
    assert accepts(Grammar.ebnf("\r\n" * 20_000 + 'root ::= "a"' + "\n \n" * 20_000), "a")
    with pytest.raises(RequestError, match="GBNF may have"):
        compiler().compile(Grammar.ebnf('root ::= "a"' + ' | "b"' * 4000))


def test_a_compiler_that_is_closed_lets_go_of_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = compiler()
    go = threading.Event()
    monkeypatch.setattr(GrammarCompiler, "_make", lambda *_: go.wait(60))
    futures = [grammars.submit(Grammar.regex(f"a{i}")) for i in range(5)]
    assert grammars.num_waiting == 5
    grammars.close()
    assert [future.cancelled() for future in futures[2:]] == [True] * 3
    go.set()


def test_without_llguidance_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"pip install 'sol-inference\[serve\]'"):
        compiler().compile(NUMBER)
