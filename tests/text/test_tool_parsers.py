"""Tool calls in scripted text: the forms, what is no call, and that pieces of any size give the same."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sol.text.answer_parts import Answer, CallBegin, Part, merge
from sol.text.tools.parsers import (
    ForcedArgumentsParser,
    ForcedCallsParser,
    HermesParser,
    Llama3JsonParser,
    MistralParser,
    ToolParser,
)

NAMES = frozenset({"weather", "get_time"})
MADE: dict[str, Callable[[], ToolParser]] = {
    "hermes": lambda: HermesParser(NAMES),
    "llama3_json": lambda: Llama3JsonParser(NAMES),
    "mistral": lambda: MistralParser(NAMES),
    "required": lambda: ForcedCallsParser(NAMES),
    "named": lambda: ForcedArgumentsParser("weather"),
}
PARIS = '{"city": "Paris", "days": [1, 2.5e-3, {"a": null}], "b": "\\"}\\u00e9é"}'


def parse(kind: str, pieces: list[str]) -> list[Part]:
    parser = MADE[kind]()
    return merge([part for piece in pieces for part in parser.feed(piece)] + parser.finish())


def answer(kind: str, text: str) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls."""
    found = Answer.of(parse(kind, [text]))
    assert found.reasoning == ""
    return found.content, [(call.name, call.arguments) for call in found.calls]


CALLS = [("weather", PARIS), ("get_time", "{}")]


@pytest.mark.parametrize(
    ("kind", "text", "content"),
    [
        ("hermes", f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>\n'
                   '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>', ""),
        ("hermes", f'I look.\n<tool_call>{{"arguments": {PARIS}, "name": "weather"}}</tool_call> Then\n\n'
                   '<tool_call>{"name": "get_time"}', "I look.Then"),
        ("hermes", f'<tool_call>{{"name": "weather", "arguments": {PARIS}}}'
                   '<tool_call>{"name": "get_time"}</tool_', ""),
        ("llama3_json", f'<|python_tag|>{{"name": "weather", "parameters": {PARIS}}}; '
                        '{"type": "function", "name": "get_time", "parameters": {}}', ""),
        ("llama3_json", f'\n{{"name": "weather", "arguments": {PARIS}}}\n{{"name": "get_time"}}\n', ""),
        ("llama3_json", f'I look. <|python_tag|>{{"name": "weather", "parameters": {PARIS}}} '
                        '<|python_tag|>{"name": "get_time", "parameters": {}};', "I look."),
        ("mistral", f'[TOOL_CALLS][{{"name": "weather", "arguments": {PARIS}, "id": "abcdefghi"}}, '
                    '{"name": "get_time", "arguments": {}}]', ""),
        ("mistral", f'I look. [TOOL_CALLS] [ {{"name": "weather", "arguments": {PARIS}}} ,'
                    '{"name": "get_time"} ]\nSo.', "I look.So."),
        ("mistral", f"[TOOL_CALLS]weather[ARGS]{PARIS}[TOOL_CALLS]get_time[CALL_ID]abc123DEF[ARGS]{{}}", ""),
        ("mistral", f'One [TOOL_CALLS] weather {PARIS} two [TOOL_CALLS]{{"name": "get_time"}}', "Onetwo"),
        ("required", f' [{{"name": "weather", "parameters": {PARIS}}},\n'
                     '{"name": "get_time", "parameters": {}}] ', ""),
    ],
)  # fmt: skip
def test_calls(kind: str, text: str, content: str) -> None:
    assert answer(kind, text) == (content, CALLS)


def test_arguments_alone() -> None:
    assert answer("named", f"\n{PARIS}\n") == ("", [("weather", PARIS)])


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("hermes", "A plain answer with <tool and </tool_call>, {\"name\": \"weather\"}.\n"),
        ("hermes", "<tool_call>weather</tool_call>"),
        ("hermes", "So:\n <tool_call>\n{} \n<tool_call> <tool_call>"),
        ("mistral", "So:\n [TOOL_CALLS] weather \n[TOOL_CALLS] [{}] [TOOL_CALLS]"),
        ("llama3_json", "So:\n <|python_tag|> 5 <|python_tag|>{}"),
        ("hermes", '<tool_call> {"name": "rain", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "weather", "arguments": "Paris"}'),
        ("hermes", '<tool_call>{"name": "weather", "name": "weather", "arguments": {}}'),
        ("hermes", '<tool_call>{"name": "weather", "arguments"'),
        ("hermes", '<tool_call>{"colour": "red"}'),
        ("hermes", "<tool_call>{}"),
        ("hermes", "  "),
        ("llama3_json", '{"colour": "red"}'),
        ("llama3_json", ' {"name": "rain", "parameters": {}} and so on '),
        ("llama3_json", 'Like {"name": "weather", "parameters": {}}'),
        ("llama3_json", '<|python_tag|>print("weather")'),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS][]"),
        ("mistral", '[TOOL_CALLS] [{"name": "rain", "arguments": {}}]'),
        ("mistral", "[TOOL_CALLS]rain[ARGS]{}"),
        ("mistral", "[TOOL_CALLS]weather[ARGS]"),
        ("mistral", "[TOOL_CALLS]" + "a" * 600 + "{}"),
        ("required", '{"name": "weather"}'),
        ("required", '[{"name": "rain"'),
        ("named", "Paris"),
    ],
)  # fmt: skip
def test_what_is_no_call_is_content(kind: str, text: str) -> None:
    assert answer(kind, text) == (text, [])


def test_a_name_comes_before_its_arguments_and_they_come_as_they_are_written() -> None:
    parser = HermesParser(NAMES)
    assert parser.feed('<tool_call>{"name": "weather"') == []
    assert parser.feed(', "arguments": ') == []
    begin, first = parser.feed('{"city"')
    assert begin == CallBegin(0, "weather")
    assert parser.in_call
    assert [first, *parser.feed(': "Par'), *parser.feed('is"}')] == [
        *parse_arguments('{"city"', ': "Par', 'is"}'),
    ]  # fmt: skip
    assert parser.feed("}</tool_call>") == []
    assert not parser.in_call


def parse_arguments(*texts: str) -> list[Part]:
    from sol.text.answer_parts import Arguments

    return [Arguments(0, text) for text in texts]


def test_a_call_that_breaks_after_it_began_ends_there() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"city": oh}}</tool_call>'
    assert answer("hermes", text) == ("oh}}</tool_call>", [("weather", '{"city": ')])
    text = '[TOOL_CALLS]weather[ARGS]{"city" oh}[TOOL_CALLS]get_time{}'
    assert answer("mistral", text) == ("oh}", [("weather", '{"city" '), ("get_time", "{}")])


def test_line_breaks_inside_of_strings_are_escaped() -> None:
    _, [(_, arguments)] = answer("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "a\nb\tc"}}')
    assert json.loads(arguments) == {"city": "a\nb\tc"}


@pytest.mark.parametrize("end", range(len(PARIS)))
def test_an_answer_that_is_cut(end: int) -> None:
    parser = HermesParser(NAMES)
    parts = [*parser.feed('<tool_call>{"name": "weather", "arguments": ' + PARIS[:end]), *parser.finish()]
    if end:
        assert Answer.of(parts).calls[0].arguments == PARIS[:end]
    assert parser.in_call == (end > 0)


WORDS = [
    "<tool_call>", "</tool_call>", "<tool", "_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]",
    "weather", "get_time", "rain", '"name"', '"arguments"', '"parameters"', '"weather"', '"get_time"',
    '{"name": "weather", ',
    '"arguments": {', '{"name": "weather", "arguments": {"a": 1}}', '{"name": "get_time"}', "{", "}", "[", "]",
    ",", ":", ";", " ", "\n", '"', "\\", "\\u12", "0", "-1.5e+3", "1e", "tru", "true", "null", "[]", "{}", "text",
    "é", "\x00", "\u2028",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(WORDS) | st.text(max_size=3), max_size=24).map("".join)


@pytest.mark.parametrize("kind", sorted(MADE))
@settings(max_examples=60)
@given(data=st.data(), text=TEXTS)
def test_pieces_of_any_size_give_the_same(kind: str, data: st.DataObject, text: str) -> None:
    if data.draw(st.booleans()):
        text = data.draw(st.sampled_from(["<tool_call>", "[TOOL_CALLS]", "[TOOL_CALLS][", "["])) + text
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parse(kind, [text])
    assert parse(kind, pieces) == whole
    assert parse(kind, list(text)) == whole
    calls = Answer.of(whole).calls
    if not calls:
        # Nothing is lost.
        assert Answer.of(whole).content == text
    for call in calls[:-1]:
        assert call.name in NAMES
    # Whoever sees the parts one by one never gets an argument before its call.
    begun = [part.index for part in whole if isinstance(part, CallBegin)]
    assert begun == list(range(len(calls)))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
CALL_LISTS = st.lists(
    st.tuples(st.sampled_from(sorted(NAMES)), st.dictionaries(st.text(max_size=5), JSON, max_size=3)),
    min_size=1,
    max_size=3,
)


@pytest.mark.parametrize("kind", ["hermes", "llama3_json", "mistral", "mistral 11", "required"])
@settings(max_examples=40)
@given(calls=CALL_LISTS, ascii_only=st.booleans(), indent=st.none() | st.just(2), size=st.integers(1, 9))
def test_whatever_a_model_passes_arrives(
    kind: str, calls: list, ascii_only: bool, indent: int | None, size: int
) -> None:  # type: ignore[type-arg]
    passed = [(name, json.dumps(value, ensure_ascii=ascii_only, indent=indent)) for name, value in calls]
    objects = [f'{{"name": "{name}", "arguments": {value}}}' for name, value in passed]
    text = {
        "hermes": "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects),
        "llama3_json": "; ".join(objects),
        "mistral": "[TOOL_CALLS][" + ", ".join(objects) + "]",
        "mistral 11": "".join(f"[TOOL_CALLS]{name}[ARGS]{value}" for name, value in passed),
        "required": "[" + ", ".join(objects) + "]",
    }[kind]
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    found = Answer.of(parse(kind.split()[0], pieces))
    assert found.content == ""
    assert [(call.name, call.arguments) for call in found.calls] == passed
