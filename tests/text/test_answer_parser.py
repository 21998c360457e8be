"""Reasoning, content and calls in one answer, and what a template tells of their forms."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from sol.sampling_params import SamplingParams
from sol.server.tools import new_call_id
from sol.text.answer_format import AnswerFormat
from sol.text.answer_parser import AnswerParser
from sol.text.answer_parts import Answer, Call, Part, merge
from sol.text.chat_template import ChatTemplate
from sol.text.detokenizer import Detokenizer
from sol.text.reasoning import DeepSeekR1Parser, ReasoningParser
from sol.text.tokenizer import Tokenizer
from sol.text.tools.parsers import HermesParser, Llama3JsonParser, MistralParser

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def parse(parser: AnswerParser, pieces: list[str]) -> list[Part]:
    return merge([part for piece in pieces for part in parser.feed(piece)] + parser.finish())


def split(kind: type[ReasoningParser], text: str, prompt: str = "") -> tuple[str, str]:
    answer = Answer.of(parse(AnswerParser(kind(prompt), None), [text]))
    return answer.reasoning, answer.content


@pytest.mark.parametrize(
    ("text", "prompt", "reasoning", "content"),
    [
        ("\n<think>\nWell, <b>.\n</think>\n\nYes.\n", "", "Well, <b>.", "Yes.\n"),
        ("<think>\n\n</think>\n\nYes.", "", "", "Yes."),
        ("Well.</think>Yes. <think>", "…<|im_start|>assistant\n<think>\n", "Well.", "Yes. <think>"),
        ("<think>Well.</think>Yes.", "<think>\n", "Well.", "Yes."),
        ("Yes.", "<think>\n\n</think>\n\n", "", "Yes."),
        (" Yes. <think>No</think>", "", "", " Yes. <think>No</think>"),
        ("<think>Well. </thi", "", "Well. </thi", ""),
        ("<thi", "", "", "<thi"),
        ("<thi", "<think>", "<thi", ""),
        ("", "<think>", "", ""),
        (" \n", "", "", " \n"),
    ],
)
def test_reasoning_where_a_marker_opens_it(text: str, prompt: str, reasoning: str, content: str) -> None:
    assert split(ReasoningParser, text, prompt) == (reasoning, content)


@pytest.mark.parametrize(
    ("text", "prompt", "reasoning", "content"),
    [
        ("Well.\n</think>\nYes.", "", "Well.", "Yes."),
        ("<think>Well.</think>Yes.", "", "Well.", "Yes."),
        ("Well.", "", "Well.", ""),
        ("Yes.", "<think></think>", "", "Yes."),
    ],
)
def test_reasoning_of_models_that_always_think(text: str, prompt: str, reasoning: str, content: str) -> None:
    assert split(DeepSeekR1Parser, text, prompt) == (reasoning, content)


def test_calls_after_reasoning_and_none_inside_of_it() -> None:
    text = f"<think>I could {CALL}.</think>\n\nI look.\n{CALL}"
    answer = Answer.of(parse(AnswerParser(ReasoningParser(), HermesParser(["f"])), [text]))
    assert answer == Answer("I look.", f"I could {CALL}.", [Call("f", '{"a": 1}')])
    hidden = AnswerParser(ReasoningParser(), HermesParser(["f"]), show_reasoning=False)
    assert Answer.of(parse(hidden, [text])).reasoning == ""


def test_not_more_calls_than_are_wanted() -> None:
    parser = AnswerParser(None, HermesParser(["f"]), max_calls=1)
    assert Answer.of(parse(parser, [CALL + CALL + " So."])) == Answer("So.", "", [Call("f", '{"a": 1}')])
    assert parser.called
    parser = AnswerParser(None, HermesParser(["f"]), max_calls=1)
    parser.feed(CALL + CALL[:-20])
    assert parser.called, "what is cut is not wanted"


def test_an_answer_that_ends_inside_of_a_call_is_no_request_to_act() -> None:
    parser = AnswerParser(None, HermesParser(["f"]))
    parser.feed(CALL)
    assert parser.called
    parser.feed(CALL[:-20])
    parser.finish()
    assert not parser.called


WORDS = ["<think>", "</think>", "<thi", "nk>", "</th", " ", "\n", "text", CALL, "<tool_call>", '{"name": "f"}']


@given(
    words=st.lists(st.sampled_from(WORDS), max_size=10),
    kind=st.sampled_from([ReasoningParser, DeepSeekR1Parser]),
    prompt=st.sampled_from(["", "<think>\n", "</think>"]),
    size=st.integers(1, 8),
)
def test_pieces_of_any_size_give_the_same(
    words: list[str], kind: type[ReasoningParser], prompt: str, size: int
) -> None:
    text = "".join(words)

    def make() -> AnswerParser:
        return AnswerParser(kind(prompt), HermesParser(["f"]))

    assert parse(make(), [text[i : i + size] for i in range(0, len(text), size)]) == parse(make(), [text])


TEMPLATES = {
    "{%- if tools %}<tool_call></tool_call>{% endif %}": (HermesParser, None, True),
    "{{ tools }}<tool_call></tool_call>{% if enable_thinking %}<think></think>{% endif %}": (
        HermesParser, ReasoningParser, True,
    ),
    "{{ tools }}<tool_call>\n<function=f>": (None, None, True),
    "{%- if tools is defined %}<|python_tag|>{% endif %}": (Llama3JsonParser, None, True),
    '<|start_header_id|>{{ tools }} {"name": name, "parameters": dictionary of …}': (Llama3JsonParser, None, True),
    "[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS]": (MistralParser, None, True),
    "<｜Assistant｜>{{ m.split('</think>') }}": (None, DeepSeekR1Parser, False),
    "{{ messages }} with tools": (None, None, False),
}  # fmt: skip


@pytest.mark.parametrize("source", TEMPLATES)
def test_what_a_template_shows(byte_level: Tokenizer, source: str) -> None:
    tools, reasoning, shows = TEMPLATES[source]
    found = AnswerFormat.of(ChatTemplate(source, {}), byte_level)
    assert (found.tools, found.reasoning, found.shows_tools) == (tools, reasoning, shows)


def test_what_is_said_counts_more_than_what_a_template_shows(byte_level: Tokenizer) -> None:
    template = ChatTemplate("{{ tools }}[TOOL_CALLS]</think>", {})
    found = AnswerFormat.of(template, byte_level, tool_parser="hermes", reasoning_parser="deepseek_r1")
    assert (found.tools, found.reasoning) == (HermesParser, DeepSeekR1Parser)
    none = AnswerFormat.of(template, byte_level, tool_parser="none", reasoning_parser="none")
    assert (none.tools, none.reasoning) == (None, None)
    assert none.parser("") is None
    assert AnswerFormat.of(None, byte_level) == AnswerFormat()


def test_markers_that_are_special_tokens_are_seen(byte_level: Tokenizer) -> None:
    backend = tokenizers.Tokenizer.from_str(byte_level._backend.to_str())
    markers = ["[TOOL_CALLS]", "</think>", "[IMG]"]
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in markers])
    tokenizer = Tokenizer(backend)
    found = AnswerFormat.of(ChatTemplate("{{ tools }}[TOOL_CALLS]</think>", {}), tokenizer)
    calls, close, image = (backend.token_to_id(text) for text in markers)
    assert found.kept_ids == {calls, close}
    assert found.close_id == close
    ids = [close, image, calls, *tokenizer.encode("f{}", add_special_tokens=False)]
    detokenizer = Detokenizer(tokenizer, SamplingParams(), [], kept_ids=found.kept_ids)
    assert detokenizer.push(ids).text == "</think>[TOOL_CALLS]f{}"
    parser = found.parser("<think>", found.tool_parser(["f"]))
    assert parser is not None
    assert Answer.of(parse(parser, ["Hm.</think>[TOOL_CALLS]f{}"])) == Answer("", "Hm.", [Call("f", "{}")])


def test_ids_of_calls_are_of_the_form_that_templates_take() -> None:
    ids = {new_call_id(AnswerFormat(tools=MistralParser)) for _ in range(100)}
    assert len(ids) == 100
    assert all(len(one) == 9 and one.isalnum() for one in ids)
    assert new_call_id(AnswerFormat(tools=HermesParser)).startswith("call_")


@pytest.mark.parametrize("kind", [ReasoningParser, DeepSeekR1Parser])
@pytest.mark.parametrize("size", [1, 3, 100])
def test_where_reasoning_ends(kind: type[ReasoningParser], size: int) -> None:
    for text, end in (("<think>a</think> b", 16), ("<think>a", 8)):
        parser = kind()
        for i in range(0, len(text), size):
            assert parser.end in (None, end)
            parser.feed(text[i : i + size])
        parser.finish()
        assert parser.end == end
    parser = kind("</think>")
    parser.feed("abc")
    assert parser.end == 0
